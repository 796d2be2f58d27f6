"""Every later version reads what format 1 wrote, and refuses what is damaged in it."""

from __future__ import annotations

import base64
import json
import math
import shutil
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

import tenuto
from tenuto import errors
from tenuto.maintenance import undelete
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.repo.lineage import latest, walk
from tenuto.repo.notes import notes
from tenuto.repo.refs import list_refs
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

HERE = Path(__file__).parent / "1"
PLACE = HERE / "repository"
VARIANTS = sorted(path.stem for path in HERE.glob("*.json"))


def check(state, step):
    """Compares with values spelt out here, types included."""
    plain = state["plain"]
    assert list(plain) == [
        "none", "true", "int", "big", "float", "negative zero", "nan", "inf", "text", "bytes", "complex", "list",
        "tuple", "set", 7, "moment",
    ]  # fmt: skip
    assert plain["none"] is None
    assert plain["true"] is True
    assert (plain["int"], type(plain["int"])) == (step, int)
    assert plain["big"] == 1208925819614629174706176
    assert plain["float"] == 0.1
    assert math.copysign(1, plain["negative zero"]) == -1
    assert math.isnan(plain["nan"])
    assert plain["inf"] == -math.inf
    assert plain["text"] == "Gr\u00fc\u00dfe, \U0001f600 and a \x00"
    assert plain["bytes"] == b"\x00\xff"
    assert plain["complex"] == 1 - 2j
    assert plain["list"] == [1, 2.0, "three", [None]]
    assert [type(one) for one in plain["list"]] == [int, float, str, list]
    assert plain["tuple"] == (1, (2,))
    assert plain["set"] == {1, 2, 3}
    assert plain[7] == "a key that is no string"
    assert plain["moment"] == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    check_arrays(state["numpy"], step)
    check_tensors(state["torch"], step)
    assert state["odd/~@# path"].tolist() == [step]


def check_arrays(arrays, step):
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        assert (arrays[name].dtype.name, arrays[name].tolist()) == (name, [0, 1, 2, 100])
    for name in ("float16", "float32", "float64"):
        assert (arrays[name].dtype.name, arrays[name].tolist()) == (name, [0.0, -1.5, 2.25])
    assert (arrays["complex64"].dtype.name, arrays["complex64"].tolist()) == ("complex64", [1 + 2j])
    assert (arrays["bool"].dtype.name, arrays["bool"].tolist()) == ("bool", [True, False])
    assert (arrays["no dimension"].shape, arrays["no dimension"].item()) == ((), 3.5)
    assert (arrays["no element"].shape, arrays["no element"].dtype.name) == ((0, 4), "float32")
    assert arrays["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert arrays["shared"].tolist() == [[step, step + 1, step + 2], [step + 3, step + 4, step + 5]]
    assert np.shares_memory(arrays["shared"], arrays["shared too"])


def check_tensors(tensors, step):
    weight = tensors["weight"]
    assert (weight.dtype, tuple(weight.shape)) == (torch.float32, (20, 30))
    assert weight.flatten().tolist() == [number * 0.5 + step for number in range(600)]
    assert tensors["tied"].data_ptr() == weight.data_ptr()
    assert (tensors["bfloat16"].dtype, tensors["bfloat16"].tolist()) == (torch.bfloat16, [1.0, -2.0, 3.5])
    assert tensors["float8"].dtype == torch.float8_e4m3fn
    assert tensors["float8"].view(torch.uint8).tolist() == [0x38, 0xC0]
    assert (tensors["flags"].dtype, tensors["flags"].tolist()) == (torch.bool, [[True], [False]])
    assert (tensors["scalar"].dtype, tensors["scalar"].item()) == (torch.int64, 7)


def test_it_is_whole():
    report = assert_whole(Repo.open(open_store(PLACE)))
    assert len(report.checked) == 4
    assert {finding.message.partition(" (")[0] for finding in report.findings} == {
        "removed; `undelete` can bring it back"
    }


@pytest.mark.parametrize(("run", "step"), [("main", 10), ("main", 15), ("main", 20), ("fork", 21), ("FORK", "latest")])
def test_every_checkpoint_is_restored_exactly(run, step):
    restored = tenuto.load(PLACE, run=run, step=step)
    step = 21 if step == "latest" else step
    check(restored.state, step)
    assert restored.progress == {"step": step, "epoch": 1, "batch": 3}
    assert restored.certificate == {"exact": True}
    assert restored.checkpoint.metrics["loss"] == {10: 2.0, 15: 1.5, 20: 1.0, 21: 0.5}[step]
    assert math.isnan(restored.checkpoint.metrics["odd"])


def test_it_is_restored_into_what_exists():
    weight = torch.zeros(20, 30)
    target = {"torch": {"weight": weight}}
    tenuto.load(PLACE, target, step=10, include="torch/weight")
    assert weight[0, :3].tolist() == [10.0, 10.5, 11.0]


def test_what_its_names_mean():
    repo = Repo.open(open_store(PLACE))
    assert repo.chunk_bytes == 1024
    assert repo.runs() == ["fork", "main"]
    ten, twenty = CheckpointId("main", 1, 10), CheckpointId("main", 1, 20)
    assert list(walk(repo, "main")) == [CheckpointId("main", 2, 15), ten]
    assert list(walk(repo, "fork")) == [CheckpointId("fork", 1, 21), twenty, ten]
    assert latest(repo, "main") == CheckpointId("main", 2, 15)
    assert repo.attempt("main", 2).parent == ten
    assert [(note.kind, note.body) for note in notes(repo, ten)] == [
        ("metric", {"val_loss": 0.25}),
        ("verified", {"every_byte": True}),
    ]
    assert [(ref.kind, ref.name, ref.id) for ref in list_refs(repo)] == [("pin", "paper", ten)]
    assert not repo.exists(CheckpointId("main", 1, 25)), "its save was aborted"


def test_what_was_removed_comes_back(tmp_path):
    shutil.copytree(PLACE, tmp_path / "copy")
    repo = Repo.open(open_store(tmp_path / "copy"))
    undelete.execute(repo, undelete.plan_undelete(repo, CheckpointId("main", 1, 5)))
    check(tenuto.load(tmp_path / "copy", step=CheckpointId("main", 1, 5)).state, 5)
    assert repo.committed("main", 1)[-1] == 5


def test_reading_changes_nothing():
    before = {path: path.stat().st_mtime_ns for path in PLACE.rglob("*")}
    tenuto.load(PLACE, step=10)
    assert_whole(Repo.open(open_store(PLACE)))
    assert {path: path.stat().st_mtime_ns for path in PLACE.rglob("*")} == before


@pytest.mark.parametrize("name", VARIANTS)
def test_damage_is_refused_and_oddity_is_not(name, tmp_path):
    recipe = json.loads((HERE / f"{name}.json").read_text())
    place = tmp_path / "copy"
    shutil.copytree(PLACE, place)
    for change in recipe["changes"]:
        apply(place / change.pop("object"), change)
    if name.startswith("benign_"):
        check(tenuto.load(place, step=CheckpointId("main", 1, 10)).state, 10)
        return
    assert name.startswith("critical_")
    with pytest.raises(getattr(errors, recipe["error"])) as raised:
        tenuto.load(place, step=CheckpointId("main", 1, 10))
    assert type(raised.value).__name__ == recipe["error"]
    with pytest.raises(errors.TenutoError):
        assert_whole(Repo.open(open_store(place)))


def apply(path, change):
    ((how, value),) = change.items()
    if how == "delete":
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    data = bytearray(path.read_bytes() if path.exists() else b"")
    if how == "flip":
        data[value[0]] ^= 1 << value[1]
    elif how == "cut":
        del data[value:]
    elif how == "append":
        data += base64.b64decode(value)
    else:
        assert how == "put"
        data[:] = base64.b64decode(value)
    path.write_bytes(bytes(data))


def test_both_kinds_of_variants_are_there():
    assert sum(name.startswith("critical_") for name in VARIANTS) >= 10
    assert sum(name.startswith("benign_") for name in VARIANTS) >= 5
