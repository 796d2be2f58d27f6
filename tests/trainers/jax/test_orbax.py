"""Checkpoints that Orbax's own code wrote are read by ours, and the reverse: all values equal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tenuto
from tenuto.errors import CorruptionError
from tenuto.formats import Content, Tensor, detect, read
from tenuto.formats.contract import ArrayTensor
from tenuto.formats.registry import named


def state() -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = {
        "w": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, PartitionSpec("x", "y"))),
        "b": jnp.arange(3, dtype=jnp.bfloat16),
        "f8": jnp.ones((2, 3), jnp.float8_e4m3fn),
    }
    return {
        "params": params,
        "opt": optax.adam(1e-3).init({"w": jnp.ones((2, 2))}),
        "step": 3,
        "rate": 0.5,
        "list": [jnp.ones(2), np.arange(3)],
        "nothing": None,
    }


def arrays(tree: Any) -> Any:
    """Returns a tree that was read, with its tensors as arrays."""
    return jax.tree.map(lambda one: one.read() if isinstance(one, Tensor) else one, tree)


def check(found: Any) -> None:
    wanted = state()
    assert found["step"] == 3 and found["rate"] == 0.5 and found["nothing"] is None
    pairs = [(found["params"][name], wanted["params"][name]) for name in wanted["params"]]
    pairs += [
        (found["opt"][0]["mu"]["w"], wanted["opt"][0].mu["w"]),
        (found["opt"][0]["count"], wanted["opt"][0].count),
    ]
    pairs += [*zip(found["list"], wanted["list"], strict=True)]
    for ours, theirs in pairs:
        assert (
            ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == np.asarray(theirs).tobytes()
        )


@pytest.mark.parametrize("storage", [{}, {"use_ocdbt": False}, {"use_ocdbt": True, "use_zarr3": True}])
def test_what_orbax_wrote_is_read(tmp_path: Path, storage: dict[str, bool]) -> None:
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**storage)).save(
        tmp_path / "saved", args=ocp.args.PyTreeSave({**state(), "name": "a text"})
    )
    assert detect(tmp_path / "saved").name == "orbax"
    with read(tmp_path / "saved") as reader:
        assert reader.made_by == "jax" and reader.tree["name"] == "a text"
        check(arrays(reader.tree))
        weights = reader.tree["params"]["w"]
        part = np.empty(20, np.uint8)
        weights.read_into(part, 8)
        assert part.view(np.float32).tolist() == [2, 3, 4, 5, 6]


def test_a_managers_newest_complete_step_is_read(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "runs") as manager:
        for step in (7, 10):
            manager.save(step, args=ocp.args.StandardSave({**state(), "at": jnp.array(step)}))
    shutil.copytree(tmp_path / "runs" / "10", tmp_path / "runs" / "11")
    (tmp_path / "runs" / "11" / "commit_success.txt").unlink()
    (tmp_path / "runs" / "11" / "_CHECKPOINT_METADATA").unlink()
    with read(tmp_path / "runs") as reader:
        assert reader.step == 10 and reader.remarks == ["step 10, the newest of 2"]
        check(arrays(reader.tree))
    with read(tmp_path / "runs" / "7") as reader:
        assert reader.step == 7 and arrays(reader.tree)["at"] == 7
    with pytest.raises(CorruptionError, match="not complete"):
        read(tmp_path / "runs" / "11")


def test_it_is_saved_here_and_restored_into_a_training(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", state())
    with read(tmp_path / "orbax") as reader:
        tenuto.save(reader.tree, tmp_path / "ours")
    target = {"params": jax.tree.map(jnp.zeros_like, state()["params"])}
    tenuto.load(tmp_path / "ours", target)
    assert target["params"]["w"].sharding == state()["params"]["w"].sharding
    assert all(np.array_equal(target["params"][name], one) for name, one in state()["params"].items())


def test_orbax_restores_what_is_exported(tmp_path: Path) -> None:
    saved = {"params": state()["params"], "moments": [jnp.ones(2), jnp.array(2.5)], "none": jnp.zeros((0, 3))}
    tenuto.save(saved, tmp_path / "ours")
    done = tenuto.Repository(tmp_path / "ours").export(tmp_path / "orbax", to="orbax", include="*")
    assert "none has no elements, and Orbax keeps no such array: left out" in done.remarks
    del saved["none"]
    target = jax.tree.map(jnp.zeros_like, saved)
    found = ocp.StandardCheckpointer().restore(tmp_path / "orbax", target)
    for ours, theirs in zip(jax.tree.leaves(saved), jax.tree.leaves(found), strict=True):
        assert ours.dtype == theirs.dtype and ours.sharding == theirs.sharding
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert not list(tmp_path.glob("*.spool"))


@pytest.mark.parametrize("damage", ["no json", "no tree", "another shape", "no data", "outside"])
def test_a_hostile_directory_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "saved"
    ocdbt = damage != "outside"
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)).save(
        path, args=ocp.args.PyTreeSave({"w": jnp.arange(6.0)})
    )
    about = json.loads((path / "_METADATA").read_text())
    if damage == "no json":
        (path / "_METADATA").write_text("{")
    elif damage == "no tree":
        (path / "_METADATA").write_text('{"tree_metadata": 3}')
    elif damage == "no data":
        shutil.rmtree(path / "d")
        shutil.rmtree(path / "ocdbt.process_0")
        (path / "manifest.ocdbt").write_bytes(b"nothing")
    elif damage == "outside":
        keys = about["tree_metadata"].popitem()[1]
        keys["key_metadata"][0]["key"] = "../../w"
        about["tree_metadata"]["('../../w',)"] = keys
        (path / "_METADATA").write_text(json.dumps(about))
    else:
        found = (path / "array_metadatas" / "process_0").read_text()
        (path / "array_metadatas" / "process_0").write_text(found.replace("6", "7"))
        about["tree_metadata"]["('w',)"]["value_metadata"]["write_shape"] = [7]
        (path / "_METADATA").write_text(json.dumps(about))
        with read(path) as reader:  # Orbax itself goes by the arrays, and so do we
            assert reader.tree["w"].shape == (6,)
        return
    with pytest.raises(CorruptionError, match="saved") as caught:
        read(path).tensors()["w"].read()
    assert "nothing was taken from it" in str(caught.value.hint)


def test_a_writer_refuses_what_orbax_has_no_type_for(tmp_path: Path) -> None:
    texts = np.array(["a", "b"])
    tensor = ArrayTensor(texts.view(np.uint8), "numpy:<U1", texts.shape)
    with pytest.raises(tenuto.errors.UsageError, match="no type for 'names'"):
        named("orbax").write(tmp_path / "part", Content({"names": tensor}))
