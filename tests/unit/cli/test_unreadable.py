"""What cannot be read is not judged: it stays, it is named once, and the rest goes on."""

import json
import shutil

import numpy as np
import pytest

import tenuto
from tenuto import every, keep
from tenuto.model.ids import CheckpointId

STATE = {"w": np.arange(4096, dtype=np.float32)}
BEST = keep.latest(1) | keep.best(1, "val_loss")


def train(place, steps, kept=BEST, **more):
    with tenuto.Checkpointer(place, dict(STATE), save=every(steps=1), keep=kept, **more) as ckpt:
        for _ in ckpt.steps(steps):
            ckpt.log(val_loss=9.0)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def note_of(place, step, number=1):
    return place / f"{CheckpointId('main', 1, step).directory}/notes/{number}.json"


def there(place):
    return sorted({row.id.step for row in tenuto.Repository(place).query("attempt > 0")})


@pytest.fixture
def place(tmp_path):
    """Four checkpoints, of which step 2 is the best by what was measured later."""
    place = tmp_path / "ckpts"
    train(place, 4, keep.all())
    repository = tenuto.Repository(place)
    for step, loss in ((1, 2.0), (2, 0.5), (3, 3.0), (4, 4.0)):
        repository.add_metrics(step, {"val_loss": loss})
    return place


def test_training_keeps_what_a_damaged_note_may_have_called_the_best(place, caplog):
    flip(note_of(place, 2))
    train(place, 7)
    assert there(place) == [1, 2, 7], "step 1 is the best of what could be judged"
    said = [line for line in caplog.text.splitlines() if "kept without a decision" in line]
    assert len(said) == 1 and "notes/1.json cannot be read" in said[0] and "`tenuto repair " in said[0]


def test_training_keeps_one_whose_note_is_missing(place):
    tenuto.Repository(place).add_metrics(2, {"other": 1.0})
    note_of(place, 2).unlink()
    train(place, 6)
    assert there(place) == [1, 2, 6]


def test_keep_and_best_go_on_without_what_cannot_be_judged(cli, place, caplog):
    flip(note_of(place, 2))
    status, _, err = cli("keep", place, "--best", "1:val_loss:min", "--yes")
    assert status == 0 and "warning: kept without a decision: main/a0001/2" in err
    assert there(place) == [1, 2, 4]
    assert tenuto.Repository(place).best("val_loss", mode="min").step == 1
    assert "best:val_loss: not compared: main/a0001/2" in caplog.text
    _, out, err = cli("ls", place)
    assert "A NOTE CANNOT BE READ" in " ".join(out.split()) and "not among the best: main/a0001/2" in " ".join(
        err.split()
    )


def test_a_damaged_manifest_is_not_judged_either(place, caplog):
    flip(place / CheckpointId("main", 1, 2).manifest)
    train(place, 5)
    assert there(place) == [1, 2, 5]
    assert tenuto.Repository(place).best("val_loss", mode="min").step == 1
    assert "manifest.json cannot be read" in caplog.text


def test_repair_brings_a_note_back_from_a_copy(cli, place, tmp_path):
    copy = shutil.copytree(place, tmp_path / "backup")
    flip(note_of(place, 2))
    assert cli("verify", place)[0] == 12
    assert cli("repair", place, "--from", copy, "--yes")[0] == 0
    assert cli("verify", place)[0] == 0
    assert tenuto.Repository(place).best("val_loss", mode="min").step == 2


def test_a_note_that_nobody_has_is_given_up_by_name(cli, place, caplog):
    flip(note_of(place, 2))
    status, _, err = cli("repair", place, "--yes")
    assert status == 12 and "--forget gives it up" in err
    assert cli("verify", place)[0] == 12, "repair has changed nothing"
    status, out, _ = cli("repair", place, "--forget", "--yes")
    assert status == 0 and "it says that it is forgotten" in out
    assert cli("verify", place)[0] == 0
    train(place, 5)
    assert "kept without a decision" not in caplog.text, "it is judged again, by what is left"


def test_a_damaged_tag_keeps_everything_until_it_is_repaired(cli, place, tmp_path, caplog):
    tenuto.Repository(place).tag("good", 3)
    tenuto.Repository(place).tag("other", 4)
    copy = shutil.copytree(place, tmp_path / "backup")
    flip(place / "refs/tag/good/1.json")
    train(place, 7)
    assert there(place) == [1, 2, 3, 4, 5, 6, 7]
    said = [line for line in caplog.text.splitlines() if "tag 'good' cannot be read" in line]
    assert len(said) == 1, "once, however many saves there are"
    _, out, err = cli("ls", place)
    assert "tagged other" in out and "tag 'good' cannot be read" in err
    assert cli("verify", place)[0] == 12
    assert cli("repair", place, "--from", copy, "--yes")[0] == 0
    train(place, 8)
    assert there(place) == [2, 3, 4, 8]


def test_a_tag_that_nobody_has_is_given_up_by_name(cli, place):
    tenuto.Repository(place).tag("good", 3)
    flip(place / "refs/tag/good/1.json")
    assert cli("repair", place, "--yes")[0] == 12
    assert cli("repair", place, "--forget", "--yes")[0] == 0
    assert cli("verify", place)[0] == 0
    train(place, 5)
    assert there(place) == [2, 5]


def test_a_damaged_record_may_be_that_of_a_rollback(cli, place):
    assert cli("rollback", place, "2")[0] == 0
    train(place, 4, keep.all())
    flip(place / "runs/main/a0002/attempt.json")
    train(place, 6, keep.latest(1) | keep.after("rollback"))
    assert (place / CheckpointId("main", 3, 3).manifest).exists()


def test_damage_in_the_trash_is_said_and_is_no_damage(cli, place):
    assert cli("rm", place, "2", "--yes")[0] == 0
    pack = place / f"{CheckpointId('main', 1, 2).directory}/rank-00000.safetensors"
    flip(pack)
    status, out, _ = cli("verify", place)
    assert status == 0 and "in the trash, and cannot be brought back: " in " ".join(out.split())
    found = json.loads(cli("verify", place, "--json")[1])
    assert found["ok"] and [one["in_trash"] for one in found["findings"] if one["severity"] == "error"] == [True]
    assert cli("repair", place, "--yes")[0] == 0
    assert cli("undelete", place, "2")[0] == 12
    flip(place / CheckpointId("main", 1, 4).manifest)
    assert cli("verify", place)[0] == 12
