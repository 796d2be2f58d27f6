import io
import json
import shutil
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

import tenuto

from .conftest import flip

NEWEST = "runs/gpt/a0002/step-00000007"
PACK = f"{NEWEST}/rank-00000.safetensors"


@pytest.fixture
def backup(place, tmp_path):
    """A plain copy of the directory, as a backup tool makes one."""
    return shutil.copytree(place, tmp_path / "backup")


def test_a_dry_run_says_what_would_come_from_where_and_changes_nothing(cli, place, backup):
    (place / PACK).unlink()
    status, out, _ = cli("repair", place, "--from", backup, "--dry-run")
    assert status == 12
    assert f"repair  {PACK}\n        is missing (in /ckpts)\n        from the copy " in out
    assert not (place / PACK).exists()


def test_a_backup_repairs_a_file_of_other_bytes(cli, place, backup):
    whole = (place / PACK).read_bytes()
    flip(place / PACK, 4096 + 10)
    assert cli("verify", place, "--run", "gpt", "--note")[0] == 12
    status, out, _ = cli("repair", place, "a0002/7", "--run", "gpt", "--from", backup, "--yes")
    assert status == 0
    assert out.splitlines()[-1].startswith("1 object repaired, ")
    assert (place / PACK).read_bytes() == whole
    assert "  verified" in cli("ls", place, "--run", "gpt")[1]
    assert cli("repair", place)[1] == "7 checkpoints: nothing to repair\n"


def test_it_asks_before_it_replaces_anything(cli, place, backup):
    flip(place / PACK, 4096 + 10)
    before = (place / PACK).read_bytes()
    status, _, err = cli("repair", place, "--from", backup)
    assert status == 2 and "--yes" in err
    assert (place / PACK).read_bytes() == before


def test_what_nobody_has_is_noted_and_the_way_out_is_named(cli, place, tmp_path):
    for path in place.rglob("rank-00000.safetensors"):
        flip(path, path.stat().st_size - 5)
    status, out, err = cli("repair", place, "a0002/7", "--run", "gpt", "--yes")
    assert status == 12
    assert "DAMAGED  gpt/a0002/7 stays damaged, and is noted so: optimizer/state/w/exp_avg" in out
    assert "--salvage whole.safetensors" in err
    assert "SUSPECT" in cli("ls", place, "--run", "gpt")[1]
    status, out, _ = cli("repair", place, "gpt/a0002/7", "--salvage", tmp_path / "whole.safetensors")
    assert status == 12
    assert "1 lost" in out
    found = load_file(tmp_path / "whole.safetensors")
    assert np.array_equal(found["model/layers.0.bias"], np.ones(256))
    assert sorted(found) == ["model/layers.0.bias", "model/layers.0.weight"]


def test_a_manifest_that_nobody_has_is_all_leaves_of_an_older_checkpoint(cli, place, tmp_path):
    flip(place / NEWEST / "manifest.json", 40)
    status, out, err = cli("repair", place, "--json")
    assert status == 12
    (lost,) = json.loads(out)["done"]["quarantined"]
    assert (lost["lost"], lost["lost_words"]) == ([], "all of its leaves")
    assert lost["instead"] == {"run": "gpt", "attempt": 2, "step": 5}
    status, out, err = cli("repair", place)
    assert status == 12
    assert "DAMAGED  gpt/a0002/7 stays damaged, and is noted so: all of its leaves" in out
    (older,) = [line for line in err.splitlines() if line.startswith("more: ")]
    assert " --step gpt/a0002/5 --include '*' writes these" in older
    out = tmp_path / "lost.safetensors"
    assert cli("export", place, out, "--step", "gpt/a0002/5", "--include", "*")[0] == 0
    assert len(load_file(out)) == 3


def test_what_stays_as_it_is_has_its_status(cli, place, backup, monkeypatch):
    flip(place / "runs/small/a0001/attempt.json", 20)
    status, out, _ = cli("repair", place)
    assert status == 12 and "LOST    runs/small/a0001/attempt.json" in out
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    status, _, err = cli("repair", place, "--from", backup)
    assert status == 12 and "nothing was done" in err
    assert cli("repair", place, "--from", backup, "--yes")[0] == 0
    assert cli("repair", place)[0] == 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_json_tells_the_plan_and_what_was_done(cli, place, backup):
    flip(place / PACK, 4096 + 10)
    status, out, _ = cli("repair", place, "--from", backup, "--yes", "--json")
    found = json.loads(out)
    assert (status, found["schema"], found["done"]["ok"]) == (0, "tenuto.repair/1", True)
    (one,) = found["plan"]
    assert (one["object"], one["kind"], one["repairable"]) == (PACK, "pack", True)
    assert sum(source["bytes"] for source in one["sources"]) == one["bytes"]


def test_unknown_checkpoints_and_sources_are_refused(cli, place, tmp_path):
    assert cli("repair", place, "gpt/a0002/99")[0] == 11
    assert cli("repair", place, "--from", tmp_path / "nothing")[0] == 10
    tenuto.save({"x": np.ones(3)}, tmp_path / "other")
    status, _, err = cli("repair", place, "--from", tmp_path / "other")
    assert status == 2 and "another repository" in err
    assert cli("repair", place, "--salvage", tmp_path / "x.safetensors")[0] == 2
    assert cli("repair", place, "gpt/a0002/7", "--salvage", tmp_path / "x.pt")[0] == 2


def test_a_copy_is_repaired_from_its_primary(cli, place, tmp_path):
    copy = tmp_path / "copy"
    tenuto.Repository(place).replicate(copy)
    status, _, err = cli("repair", copy)
    assert status == 10
    assert "replicate" in err and "--read" in err


def test_a_registered_copy_is_found_by_itself(cli, place, tmp_path):
    whole = (place / NEWEST / "manifest.json").read_bytes()
    tenuto.Repository(place).replicate(tmp_path / "copy")
    (place / NEWEST / "manifest.json").write_bytes(b"?")
    (place / NEWEST / "rank-00000.index").unlink()
    assert cli("repair", place, "--yes")[0] == 0
    assert (place / NEWEST / "manifest.json").read_bytes() == whole
    assert cli("verify", place)[0] == 0


def test_an_empty_repository_has_nothing_to_repair(cli, tmp_path):
    tenuto.Checkpointer(tmp_path / "new", {"x": np.ones(3)}).close()
    assert cli("repair", tmp_path / "new")[:2] == (0, "0 checkpoints: nothing to repair\n")


def test_a_scrub_ends_in_one_line_and_the_next_has_nothing_to_do(cli, place):
    status, out, _ = cli("scrub", place, "--every", "1s")
    assert status == 0
    assert len(out.splitlines()) == 1 and "7 checkpoints read: 7 whole" in out
    status, out, _ = cli("scrub", place)
    assert (status, out) == (0, "0 checkpoints read: 0 whole (0 B read in 1 ms)\n")


def test_a_scrub_notes_damage_and_names_the_repair(cli, place, monkeypatch):
    flip(place / PACK, 4096 + 10)
    later = time.time() + 40 * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    status, out, err = cli("scrub", place, "--json")
    assert status == 12
    assert json.loads(out)["damaged"] == [{"run": "gpt", "attempt": 2, "step": 7}]
    assert "tenuto repair" in err
    assert "SUSPECT" in cli("ls", place, "--run", "gpt")[1]


def test_verify_in_parts(cli, place):
    status, out, err = cli("verify", place, "--read", "20%", "--note")
    assert status == 0
    assert "what was read is whole" in out and "not begun" in out
    assert "what was longest not read" in err
    for _ in range(8):
        cli("verify", place, "--read", "20%", "--note")
    assert cli("ls", place)[1].count("verified") == 7
    assert cli("verify", place, "--read", "20%", "--structure")[0] == 2
    assert cli("verify", place, "--read", "x")[0] == 2
    assert cli("verify", place, "--limit", "100")[0] == 2
    assert cli("verify", place, "--resume", "--limit", "100MB/s")[0] == 0


def test_as_a_library(place, backup, tmp_path):
    flip(place / PACK, 4096 + 10)
    there = tenuto.Repository(place)
    assert not there.verify(run="gpt").ok
    assert there.plan_repair(run="gpt", sources=[backup]).repairs
    done = there.salvage(tmp_path / "some.safetensors", run="gpt", step=7)
    assert [path for path, _ in done.lost] == ["model/layers.0.bias"]
    assert there.repair(run="gpt", steps=[7], sources=[backup]).ok
    assert there.scrub(every="1s").ok
