"""`tenuto.torch.save` and `load` in place of torch's, and DCP's storage in one process."""

from __future__ import annotations

import io
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import tenuto
import tenuto.torch
from tenuto import keep
from tenuto.errors import CorruptionError, StateError, TenutoWarning, Unserialisable, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def plain() -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "epoch": 3, "lr": [0.1, 0.2]}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool((one == other).all()) if isinstance(one, np.ndarray) else bool(one == other)


def test_plain_states_come_back_as_they_are_and_nothing_is_said(tmp_path: Path) -> None:
    state = plain()
    with warnings.catch_warnings(action="error"):
        saved = tenuto.torch.save(state, tmp_path / "model.pt")
        assert same(tenuto.torch.load(tmp_path / "model.pt"), state)
    assert saved.step == 0 and same(tenuto.load(tmp_path / "model.pt").state, state)
    state["epoch"] = 4
    assert tenuto.torch.save(state, str(tmp_path / "model.pt"), keep=keep.latest(1)).step == 1
    assert [one.step for one in tenuto.Repository(tmp_path / "model.pt").checkpoints()] == [1]
    assert tenuto.torch.load(tmp_path / "model.pt", map_location="cpu")["epoch"] == 4


def test_what_is_saved_as_its_values_is_named_once(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with pytest.warns(TenutoWarning) as said:
        tenuto.torch.save({"a": {"model": model}, "o": torch.optim.SGD(model.parameters())}, tmp_path / "x")
    assert len(said) == 1 and said[0].filename == __file__
    assert "a/model (Linear), o (SGD) are saved as the values in them, not pickled" in str(said[0].message)
    assert same(tenuto.torch.load(tmp_path / "x")["a"]["model"], dict(model.state_dict()))


def test_other_objects_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unserialisable, match="loss"):
        tenuto.torch.save({"loss": nn.functional.mse_loss}, tmp_path / "x")
    with pytest.raises(UsageError, match="not a path"):
        tenuto.torch.save({}, io.BytesIO())  # type: ignore[arg-type]
    torch.save({"w": 1}, tmp_path / "theirs.pt")
    with pytest.raises(UsageError, match="is a file"):
        tenuto.torch.save({}, tmp_path / "theirs.pt")
    for wrong in ({"weights_only": False}, {"map_location": {"cuda:0": "cpu"}}):
        with pytest.raises(UsageError):
            tenuto.torch.load(tmp_path / "theirs.pt", **wrong)


def test_what_holds_itself_or_is_nested_too_deeply_is_refused_by_path(tmp_path: Path) -> None:
    inside: dict[str, Any] = {"n": 1}
    inside["x"] = {"me": [inside]}
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for save in (tenuto.torch.save, tenuto.save):
        with pytest.raises(StateError, match=r"^x/me/0: the state contains itself here"):
            save(inside, tmp_path / "x")
        with pytest.raises(StateError, match=r"^deep/0.*: more than 90 containers"):
            save({"deep": deep}, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_dcp_says_that_it_leaves_a_new_optimizer_empty(tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        model = nn.Linear(3, 2)
        return {"model": model, "optim": torch.optim.AdamW(model.parameters())}

    trained = made()
    trained["model"](torch.ones(3)).sum().backward()
    trained["optim"].step()
    dcp.save(
        {name: one.state_dict() for name, one in trained.items()},
        storage_writer=tenuto.torch.StorageWriter(tmp_path / "dcp"),
        checkpoint_id="step-1",
    )
    tenuto.save(trained, tmp_path / "own")
    for where in ("dcp", "own"):
        empty = {name: one.state_dict() for name, one in made().items()}
        with pytest.warns(tenuto.TenutoWarning, match=r"has optim\.state, and .* begins without its state") as said:
            dcp.load(empty, storage_reader=tenuto.torch.StorageReader(tmp_path / where))
        assert sum(issubclass(one.category, tenuto.TenutoWarning) for one in said) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", tenuto.TenutoWarning)
            dcp.load(
                {"model": made()["model"].state_dict()}, storage_reader=tenuto.torch.StorageReader(tmp_path / where)
            )
    full = {name: one.state_dict() for name, one in trained.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", tenuto.TenutoWarning)
        dcp.load(full, storage_reader=tenuto.torch.StorageReader(tmp_path / "dcp"))


def test_files_of_torch_and_of_dcp_are_loaded_too(tmp_path: Path) -> None:
    state = plain() | {"kind": torch.bfloat16}
    torch.save(state, tmp_path / "x.pt")
    with pytest.warns(TenutoWarning, match="kind is torch.bfloat16"):
        found = tenuto.torch.load(tmp_path / "x.pt")
    assert same({**found, "kind": 0}, {**state, "kind": 0})
    found["model"]["weight"].add_(1)  # in memory of its own
    dcp.save({"model": state["model"]}, checkpoint_id=tmp_path / "d")
    assert same(tenuto.torch.load(tmp_path / "d")["model"], state["model"])


def test_dcp_saves_and_loads_every_kind_of_value(tmp_path: Path) -> None:
    numpy: Any = np.random.RandomState(1).get_state()
    state = plain() | {"numpy": numpy, "python": random.Random(1).getstate(), "kind": torch.bfloat16}
    state |= {"pair": (1, torch.ones(2)), "empty": torch.empty(0, 3), "turned": torch.ones(3, 2).t(), "none": None}
    tied = torch.ones(4)
    state |= {"tied": {"a": tied, "b": tied, "c": tied[1:3]}, "mixed": [torch.ones(2), {"x": 1}]}
    writer = tenuto.torch.StorageWriter(tmp_path / "r")
    dcp.save(state, storage_writer=writer, checkpoint_id="step-00500")
    assert writer.checkpoint is not None and writer.checkpoint.step == 500
    into = zeroed(state)
    dcp.load(into, storage_reader=tenuto.torch.StorageReader(tmp_path / "r"))
    assert same(into["optimizer"].pop("state"), {0: state["optimizer"]["state"][0], 1: state["optimizer"]["state"][1]})
    state["optimizer"].pop("state")
    assert same(into, state) and type(into["pair"]) is tuple
    assert pickle.dumps(writer), "for async_save in a process of its own"


def zeroed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeroed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [zeroed(one) for one in value]
    return None


def test_steps_of_dcp(tmp_path: Path) -> None:
    writer = tenuto.torch.StorageWriter(tmp_path / "r", keep=keep.latest(2))
    reader = tenuto.torch.StorageReader(tmp_path / "r")
    for step in (3, 4, 7):
        dcp.save({"x": torch.tensor(step)}, storage_writer=writer, checkpoint_id=f"runs/step={step}")
    dcp.save({"x": torch.tensor(8)}, storage_writer=writer)
    assert [one.step for one in tenuto.Repository(tmp_path / "r").checkpoints()] == [8, 7]
    found = {"x": torch.tensor(0)}
    dcp.load(found, storage_reader=reader)
    assert found["x"] == 8
    dcp.load(found, storage_reader=reader, checkpoint_id="step-7")
    assert found["x"] == 7
    dcp.load(found, storage_reader=reader)
    assert found["x"] == 8, "a step that one load has named is not kept for the next"
    with pytest.raises(UsageError, match="names no step"):
        dcp.save(found, storage_writer=writer, checkpoint_id="newest")
    with pytest.raises(CheckpointException, match="no checkpoint"):
        dcp.load(found, storage_reader=reader, checkpoint_id=3)
    dcp.load(found, storage_reader=reader)
    assert found["x"] == 8, "nor one that was not there"
    with pytest.raises(UsageError, match="use_collectives=False"):
        dcp.save(found, storage_writer=writer, use_collectives=False)


def test_dcp_reads_what_a_training_has_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with tenuto.Checkpointer(tmp_path / "r", {"model": model, "note": "x"}) as ckpt:
        for _ in ckpt.steps(2):
            pass
    into = {"model": zeroed(dict(model.state_dict())), "note": ""}
    dcp.load(into, storage_reader=tenuto.torch.StorageReader(tmp_path / "r"))
    assert same(into, {"model": dict(model.state_dict()), "note": "x"})


@pytest.mark.parametrize("content", [b"", pickle.dumps({"a": 1}), b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_that_is_no_checkpoint_is_named_as_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(CorruptionError, match="a whole file of a format"):
        tenuto.torch.load(tmp_path / "model.pt")


def test_an_array_that_torch_has_no_type_for_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", names=np.array(["a", "bc"]))
    with pytest.raises(StateError, match="<U2"):
        tenuto.torch.load(tmp_path / "x.npz")
