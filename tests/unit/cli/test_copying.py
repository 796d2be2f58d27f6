"""`tenuto replicate WHERE TO`, `tenuto promote` and `tenuto status`: words, JSON and exit statuses."""

import json
import shutil

import numpy as np
import pytest

import tenuto
from support.tiny_training import flip

PACK = "runs/main/a0001/step-00000001/rank-00000.safetensors"


@pytest.fixture
def source(tmp_path):
    for number in range(2):
        tenuto.save({"w": np.full(50_000, float(number))}, tmp_path / "source")
    return tmp_path / "source"


def test_a_plan_a_copy_and_nothing_left_to_do(cli, source, tmp_path):
    to = tmp_path / "copy"
    status, out, err = cli("replicate", source, to, "--dry-run")
    assert (status, err) == (0, "") and not to.exists()
    assert out.splitlines()[0] == f"to {to}" and "2 checkpoints to copy" in out
    status, out, _ = cli("replicate", source, to)
    assert status == 0 and out.splitlines()[1].split()[:4] == ["2", "0", "0", "0"]
    found = json.loads(cli("replicate", source, to, "--json")[1])
    assert (found["schema"], found["copied"], found["skipped"]) == ("tenuto.replicate/1", [], 2)
    for words in (["verify", to], ["ls", to], ["show", to], ["restore", to, tmp_path / "out.safetensors"]):
        status, _, err = cli(*words)
        assert status == 0, err


def test_only_some_checkpoints(cli, source, tmp_path):
    to = tmp_path / "copy"
    assert cli("replicate", source, to, "--step", "0", "--json")[0] == 0
    assert [id.step for id in tenuto.Repository(to).checkpoints()] == [0]
    assert cli("replicate", source, to, "1")[0] == 0
    assert [id.step for id in tenuto.Repository(to).checkpoints()] == [1, 0]


def test_the_statuses_of_a_check(cli, source, tmp_path):
    to = tmp_path / "copy"
    assert cli("replicate", source, to, "--check")[0] == 10  # there is none yet
    cli("replicate", source, to)
    assert cli("replicate", source, to, "--check")[0] == 0
    tenuto.save({"w": np.full(50_000, 9.0)}, source)
    status, out, err = cli("replicate", source, to, "--check")
    assert status == 24 and "behind: main/a0001/2" in out and f"tenuto replicate {source} {to}" in err
    flip(to, PACK, -9)
    assert cli("replicate", source, to, "--check")[0] == 24
    status, out, err = cli("replicate", source, to, "--check", "--read", "--json")
    found = json.loads(out)
    assert status == 12 and (found["ok"], found["behind"]) == (False, 1)
    assert {"kind": "damaged", "object": PACK}.items() <= found["problems"][1].items()
    assert cli("replicate", source, to, "--read")[0] == 0
    assert cli("replicate", source, to, "--check", "--read")[0] == 0


def test_a_copy_of_what_went_on_differently(cli, source, tmp_path):
    to, backup = tmp_path / "copy", tmp_path / "backup"
    shutil.copytree(source, backup)
    cli("replicate", source, to)
    tenuto.save({"w": np.full(50_000, 2.0)}, source)
    cli("replicate", source, to)
    manifest = next((backup / "runs/main/a0001").glob("*1/manifest.json"))
    shutil.copy(to / "runs/main/a0001/attempt.json", tmp_path / "kept")
    flip(backup, "tenuto.json", -3)
    assert manifest.exists()
    shutil.rmtree(source)
    backup.rename(source)
    status, out, _ = cli("replicate", source, to, "--check")
    assert status == 25 and "was set back, or the copy was changed" in " ".join(out.split())


@pytest.mark.parametrize(
    "words",
    [
        ["--check"],
        ["--follow"],
        ["--read"],
        ["--prune"],
        ["T", "--check", "--follow"],
        ["T", "--follow", "--every", "x"],
    ],
)
def test_words_that_make_no_sense(cli, source, tmp_path, words):
    status, _, err = cli("replicate", source, *(tmp_path / "to" if word == "T" else word for word in words))
    assert status == 2 and "hint:" in err


def test_promoting(cli, source, tmp_path):
    to = tmp_path / "copy"
    cli("replicate", source, to)
    assert cli("promote", to, "--yes")[0] == 16
    shutil.rmtree(source)
    status, out, _ = cli("promote", to, "--dry-run")
    assert status == 0 and f"primary so far: {source}" in out and "main/a0001/1" in out
    assert cli("promote", to)[0] == 2, "without a terminal it wants --yes"
    assert cli("promote", to, "--yes", "--json")[0] == 0
    assert cli("tag", to, "good")[0] == 0
    assert cli("promote", to, "--yes")[0] == 2


def test_a_place_without_all_data_files_is_not_promoted(cli, tmp_path):
    home, disk = tmp_path / "home", tmp_path / "disk"
    tenuto.save({"w": np.zeros(50_000)}, tenuto.PerNode(disk, home=home))
    shutil.rmtree(home)
    next(disk.rglob("*.safetensors")).unlink()
    status, _, err = cli("promote", disk, "--yes")
    assert status == 12 and "no checkpoint is complete" in err


def test_status_fits_a_screen(cli, source, tmp_path):
    cli("replicate", source, tmp_path / "copy")
    status, out, err = cli("status", source)
    lines = out.splitlines()
    assert (
        status == 0
        and err.startswith("hint: tenuto probe ")
        and err.count("\n") == 1
        and len(lines) <= 24
        and max(map(len, lines[2:])) <= 80
    )
    assert f"2  {tmp_path / 'copy'} (copy, on this node)" in lines
    assert "a0001/1" in out and "in step" in out
    found = json.loads(cli("status", source, "--json")[1])
    assert found["schema"] == "tenuto.status/1" and found["runs"][0]["behind"] == [0, 0]
    tenuto.save({"w": np.zeros(3)}, source, run="other")
    status, out, err = cli("status", source)
    assert "RUN" in out and "other" in out and "--run main" in err


def test_a_plain_name_is_a_place_unless_it_names_a_checkpoint(cli, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("tag", source, "good", "--step", "0")[0] == 0
    assert cli("replicate", "source", "copy", "0")[0] == 0
    assert [id.step for id in tenuto.Repository("copy").checkpoints()] == [0]
    assert cli("replicate", "source", "copy", "--check")[0] == 24
    assert cli("replicate", "source", "below/copy")[0] == 0 and (tmp_path / "below/copy/tenuto.json").is_file()
    monkeypatch.setenv("TENUTO_WHERE", "source")
    assert cli("replicate", "another")[0] == 0 and (tmp_path / "another/tenuto.json").is_file()
    monkeypatch.delenv("TENUTO_WHERE")
    for words in (["good"], ["1"], ["a0001/1"], ["latest"]):  # checkpoints, for the repository's own locations
        assert "nothing to copy" in cli("replicate", "source", *words)[1]
    assert cli("cp", "source", "good", "elsewhere")[0] == 0
    assert [id.step for id in tenuto.Repository("elsewhere").checkpoints()] == [0]
    status, _, err = cli("cp", "source", "good")
    assert status == 2 and "where shall the copies go?" in err
    assert not (tmp_path / "good").exists()
