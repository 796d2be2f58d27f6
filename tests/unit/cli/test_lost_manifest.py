"""A checkpoint whose manifest is missing is damaged, not garbage, as long as anything knows of it."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import tenuto
from tenuto import every, keep
from tenuto.errors import CheckpointNotFound
from tenuto.model.ids import CheckpointId

KILLED = """
import os, sys
import numpy as np
import tenuto
from tenuto import every, keep
from tenuto.crashpoints import armed

seen = []


def die():
    seen.append(1)
    if len(seen) == 3:
        os.kill(os.getpid(), 9)


with tenuto.Checkpointer(sys.argv[1], {"w": np.arange(4096)}, save=every(steps=1), keep=keep.all()) as ckpt:
    with armed(sys.argv[2], die):
        for step in ckpt.steps(9):
            pass
"""


def train(place, steps, **more):
    with tenuto.Checkpointer(place, {"w": np.arange(4096)}, save=every(steps=1), keep=keep.all(), **more) as ckpt:
        for _ in ckpt.steps(steps):
            pass


def manifest(place, step, attempt=1):
    return place / CheckpointId("main", attempt, step).manifest


def packs(place):
    return sorted(path.parent.name for path in place.glob("runs/main/*/*/*.safetensors"))


@pytest.fixture
def place(tmp_path):
    place = tmp_path / "ckpts"
    train(place, 3)
    return place


@pytest.mark.parametrize("step", [1, 3])
def test_it_is_damaged_and_gc_leaves_it(cli, place, step):
    manifest(place, step).unlink()
    before = packs(place)
    assert cli("gc", place, "--now", "--yes")[0] == 0
    assert packs(place) == before
    status, out, err = cli("verify", place)
    assert status == 12 and "is missing" in out and "tenuto repair" in err
    assert re.search(rf"a0001 +{step} .*DAMAGED", cli("ls", place)[1])
    attention = cli("report", place, "--json")[1]
    assert "damaged" in attention and "gc" not in re.findall(r'"command": "([^"]*)"', attention)


@pytest.mark.parametrize("step", [1, 3])
def test_repair_brings_it_back_from_a_backup(cli, place, tmp_path, step):
    backup = shutil.copytree(place, tmp_path / "backup")
    manifest(place, step).unlink()
    status, out, _ = cli("repair", place, "--yes")
    assert status == 12 and "nothing has any of it" in out
    with pytest.raises(CheckpointNotFound, match="its manifest is missing") as caught:
        tenuto.load(place, step=step)
    assert "--from BACKUP" in str(caught.value)
    status, out, _ = cli("repair", place, "--from", backup, "--yes")
    assert status == 0 and "1 object repaired" in out
    assert tenuto.load(place, step=step).step == step
    assert cli("verify", place)[0] == 0


def test_training_that_goes_on_leaves_it_and_says_so(cli, place, tmp_path, caplog):
    backup = shutil.copytree(place, tmp_path / "backup")
    manifest(place, 3).unlink()
    train(place, 4)
    assert "main/a0001/3 has lost its manifest" in caplog.text and "--from BACKUP" in caplog.text
    assert cli("gc", place, "--now", "--yes")[0] == 0
    assert cli("repair", place, "--from", backup, "--yes")[0] == 0
    np.testing.assert_array_equal(tenuto.load(place, step="a0001/3").state["w"], np.arange(4096))


@pytest.mark.parametrize("witness", ["note", "tag", "begun from"])
def test_what_a_killed_training_has_left_is_known_by_what_speaks_of_it(cli, tmp_path, witness):
    """Nothing else says that the newest of a process that was killed at once had been committed."""
    place = tmp_path / "ckpts"
    killed(place, "save begun")
    if witness == "note":
        tenuto.Repository(place).add_metrics(2, {"val_loss": 1.0})
    elif witness == "tag":
        tenuto.Repository(place).tag("good", 2)
    else:
        train(place, 1, run="other", resume_from="main/a0001/2")
    manifest(place, 2).unlink()
    assert cli("gc", place, "--now", "--force" if witness == "tag" else "--yes", "--yes")[0] == 0
    assert "step-00000002" in packs(place)


def killed(place, point):
    done = subprocess.run([sys.executable, "-c", KILLED, place, point], check=False, timeout=120)
    assert done.returncode == -9


def test_what_a_killed_save_has_left_is_still_collected(cli, tmp_path):
    place = tmp_path / "ckpts"
    killed(place, "pack durable, index not yet")
    assert len(packs(place)) == 3
    assert cli("gc", place, "--now", "--yes")[0] == 0
    assert packs(place) == ["step-00000001", "step-00000002"]


def test_a_save_that_was_killed_right_before_its_manifest_has_its_grace(cli, tmp_path):
    place = tmp_path / "ckpts"
    killed(place, "packs and indexes durable, manifest not yet")
    status, out, _ = cli("gc", place, "--now", "--yes")
    assert status == 0 and "--force" in out and len(packs(place)) == 3
    assert cli("gc", place, "--grace", "0", "--yes")[0] == 0
    assert cli("gc", place, "--grace", "0", "--yes")[0] == 0
    assert packs(place) == ["step-00000001", "step-00000002"]


def test_a_training_that_starts_again_frees_what_was_killed(tmp_path):
    place = tmp_path / "ckpts"
    killed(place, "packs and indexes durable, manifest not yet")
    train(place, 3)
    assert packs(place) == ["step-00000001", "step-00000002", "step-00000003"]


def test_only_an_explicit_word_frees_it(cli, place):
    manifest(place, 1).unlink()
    assert cli("gc", place, "--now", "--force", "--yes")[0] == 0
    assert packs(place) == ["step-00000002", "step-00000003"]
    assert cli("verify", place)[0] == 0


def test_a_single_save_says_that_it_was_committed(cli, tmp_path):
    place = tmp_path / "ckpts"
    tenuto.save({"w": np.arange(4096)}, place, step=1)
    manifest(place, 1).unlink()
    assert cli("gc", place, "--now", "--yes")[0] == 0 and packs(place) == ["step-00000001"]
    tenuto.save({"w": np.arange(4096)}, place, step=2)
    assert "step-00000001" in packs(place)
    assert cli("verify", place)[0] == 12
