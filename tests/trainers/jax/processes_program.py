"""One of several processes with two devices each: `RANK SIZE PORT WHERE MESH FROM UPTO OUT`.

It restores, checks that it has the values of step FROM, takes steps up to UPTO, and writes OUT. With "none" for WHERE
it only asks for a Checkpointer without saying how the processes meet. MESH is a shape such as 2x2 over all devices.
"""

from __future__ import annotations

import os
import sys
from typing import Any

RANK, SIZE, PORT, WHERE, MESH, FROM, UPTO, OUT = sys.argv[1:]
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import tenuto  # noqa: E402

if int(SIZE) > 1:
    jax.distributed.initialize(f"127.0.0.1:{PORT}", int(SIZE), int(RANK))
shape = tuple(map(int, MESH.split("x")))
mesh = Mesh(np.array(jax.devices()).reshape(shape), ("x", "y")[: len(shape)])
LAST = "y" if len(shape) > 1 else None
SAVED_BY_AS_MANY = ("0", "2")
AXES = {"both": ("x", LAST), "rows": ("x",), "columns": (None, "x"), "whole": ()}


def state(step: int) -> dict[str, jax.Array]:
    """Returns the values of a step, laid out over the mesh: some shards on one process, some on both."""
    found = {}
    for name, axes in AXES.items():
        whole = np.arange(64, dtype=np.float32).reshape(8, 8) + 100 * step + len(name)
        placed = NamedSharding(mesh, PartitionSpec(*axes))
        found[name] = jax.make_array_from_callback(whole.shape, placed, lambda index, whole=whole: whole[index])
    local = jax.random.wrap_key_data(np.array([step, int(RANK)], np.uint32))
    return {**found, "mine": tenuto.per_rank({"key": local, "n": jnp.array(step * 10 + int(RANK))})}


def same(one: Any, other: Any) -> bool:
    if hasattr(one, "value"):  # what belongs to this rank alone
        return np.array_equal(one.value["n"], other.value["n"]) and bool(one.value["key"] == other.value["key"])
    pairs = zip(one.addressable_shards, other.addressable_shards, strict=True)
    return one.sharding == other.sharding and all(np.array_equal(a.data, b.data) for a, b in pairs)


if WHERE == "none":
    tenuto.Checkpointer("memory://none", {"x": jnp.ones(1)})
meet = tenuto.SharedFiles(WHERE + ".meet", int(RANK), int(SIZE)) if int(SIZE) > 1 else None
train = state(0)
with tenuto.Checkpointer(WHERE, train, save=tenuto.every(steps=1), ranks=meet) as ckpt:
    ckpt.restore()
    assert ckpt.step == int(FROM), f"step {ckpt.step}, not {FROM}"
    wanted = state(ckpt.step)
    for name in (*AXES, "mine") if FROM in SAVED_BY_AS_MANY else AXES:
        assert same(train[name], wanted[name]), f"{name} is not what it was at step {FROM}"
    for step in range(int(FROM) + 1, int(UPTO) + 1):
        train.update(state(step))
        ckpt.step_done(step)
with open(OUT, "w") as file:
    file.write("done")
