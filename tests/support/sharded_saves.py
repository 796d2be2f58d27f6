"""Whole saves and restores over real process groups, as checks of `sharded_program`, which this runs all of."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tenuto
from support.sharded_program import check, main, net, numbers, rank, same, sharded, split, trained, wholes
from tenuto.engine.group import group_save
from tenuto.errors import SaveFailed
from tenuto.events import Committed, SaveFailedEvent
from tenuto.policy import every, keep
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

Built = tuple[dict[str, Any], torch.Tensor, str]
"""A state, a tensor in it that ranks hold alike, and its path."""


def place(name: str) -> Path:
    """One for all ranks."""
    return Path(sys.argv[1]).parent / f"{name}-of-{dist.get_world_size()}"


# -- replicas that differ ---------------------------------------------------------------------------------------------


class Seen:
    def __init__(self) -> None:
        self.committed: list[int] = []
        self.failed: dict[int, str] = {}

    def emit(self, event: object) -> None:
        if isinstance(event, Committed):
            self.committed.append(event.id.step)
        if isinstance(event, SaveFailedEvent):
            self.failed[event.id.step] = event.error


def declared() -> Built:
    tensor = numbers(5, 3)
    return {"x": tenuto.replicated(tensor)}, tensor, "x"


def distributed() -> Built:
    tensor = distribute_tensor(numbers(4, 3), init_device_mesh("cpu", (2,)), [Replicate()])
    return {"x": tensor}, tensor, "x"


def data_parallel() -> Built:
    model = nn.parallel.DistributedDataParallel(net())
    return {"model": model, "optimizer": trained(model)}, model.module[0].weight, "model/0.weight"


def momentum() -> Built:
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = trained(model)
    tensor = optimizer.state[model.module[2].bias]["exp_avg"]
    return {"model": model, "optimizer": optimizer}, tensor, "optimizer/state/model/2.bias/exp_avg"


def hybrid() -> Built:
    """Shards over one axis of the mesh, replicas over the other: ranks 0 and 2 hold the same."""
    model = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return {"model": model, "optimizer": trained(model)}, model[0].weight, "model/0.weight"


def flip(tensor: torch.Tensor) -> None:
    """One bit of one element, of what this rank holds."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        local.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def apart_at_first(build: Callable[[], Built], odd: int, words: str) -> None:
    state, tensor, path = build()
    if rank() == odd:
        flip(tensor)
    where = place(f"first-{build.__name__}")
    try:
        tenuto.save(state, where)
    except SaveFailed as error:
        assert f"{path} {words}" in error.message, error
    else:
        raise AssertionError("replicas that differ were saved")
    repo = Repo.open(open_store(where))
    assert not [step for attempt in repo.attempts("main") for step in repo.committed("main", attempt)]


def apart_later(build: Callable[[], Built], odd: int, words: str) -> None:
    """With every second save compared: one that is not goes through, the next does not, and those behind it do, once
    what differed is mended."""
    state, tensor, path = build()
    seen = Seen()
    with (
        mock.patch.object(group_save, "COMPARE_EVERY", 2),
        tenuto.Checkpointer(
            place(f"later-{build.__name__}"), state, save=every(steps=1), keep=keep.all(), sinks=[seen]
        ) as ckpt,
    ):
        for step in ckpt.steps(6):
            if step in (2, 4) and rank() == odd:
                flip(tensor)
    assert seen.committed == [1, 2, 3, 5, 6], seen.failed
    assert list(seen.failed) == [4] and f"{path} {words}" in seen.failed[4], seen.failed


@check(2)
def replicas_that_differ_are_named() -> None:
    for build in (declared, distributed, data_parallel, momentum):
        for apart in (apart_at_first, apart_later):
            apart(build, 1, "is not the same on rank 1 as on rank 0")


@check(4)
def shards_that_their_replicas_do_not_have_are_named() -> None:
    for apart in (apart_at_first, apart_later):
        apart(hybrid, 2, "is not the same on rank 2 as on rank 0")


# -- no collective ----------------------------------------------------------------------------------------------------

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)


@contextmanager
def without_collectives() -> Iterator[None]:
    """Whoever calls one by a name of torch's meets an error; and no process group has run one meanwhile."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a collective")

    before = run_so_far()
    with ExitStack() as stack:
        for module in (dist, distributed_c10d):
            for name in COLLECTIVES:
                stack.enter_context(mock.patch.object(module, name, refuse))
        for name in ("full_tensor", "redistribute"):
            stack.enter_context(mock.patch.object(DTensor, name, refuse))
        yield
    assert run_so_far() == before


def run_so_far() -> list[int]:
    """How many collectives each process group has run, by its own count."""
    return [group._get_sequence_number_for_group() for group in distributed_c10d._world.pg_map]


def parallel_state() -> dict[str, Any]:
    """Everything that is told apart: parts of FSDP and of tensor parallelism, what DDP holds alike, DTensors of one's
    own, and what only this rank has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, cut, copied = sharded(mesh), split(mesh, width=8), nn.parallel.DistributedDataParallel(net())
    return {
        "model": model,
        "optimizer": trained(model),
        "cut": cut,
        "of the cut": trained(cut),
        "copied": copied,
        "of the copied": trained(copied),
        "loose": distribute_tensor(numbers(7, 3), mesh, [Shard(0)]),
        "alike": distribute_tensor(numbers(5), mesh, [Replicate()]),
        "own": tenuto.per_rank(torch.full((3,), float(rank()))),
    }


@torch.no_grad()
def change(state: dict[str, Any], factor: float) -> None:
    """As a step does, without any other rank."""
    tensors = [state["loose"], state["alike"]]
    for name in ("model", "cut", "copied"):
        tensors += state[name].parameters()
    for name in ("optimizer", "of the cut", "of the copied"):
        tensors += [value for held in state[name].state.values() for value in held.values()]
    for tensor in tensors:
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).mul_(factor)


def all_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {name: state[name].full_tensor() for name in ("loose", "alike")}
    for model, optimizer in (("model", "optimizer"), ("cut", "of the cut"), ("copied", "of the copied")):
        found |= {f"{model}: {path}": value for path, value in wholes(state[model], state[optimizer]).items()}
    return found


@check(2, 4)
def saves_and_restores_run_no_collective() -> None:
    state, target = parallel_state(), parallel_state()
    change(target, 0.0)
    dist.barrier()
    before = run_so_far()
    dist.barrier()
    assert run_so_far() != before, "a collective is counted"
    where = place("no-collective")
    with without_collectives():
        with tenuto.Checkpointer(where, state, save=every(steps=1)) as ckpt:
            for _ in ckpt.steps(3):
                change(state, 1.5)
        with tenuto.Checkpointer(where, target, save=every(steps=1)) as ckpt:
            restored = ckpt.restore()
            assert restored is not None and restored.step == 3
            for _ in ckpt.steps(4):
                change(target, 0.5)
        tenuto.save(target, where, run="once")
        tenuto.load(where, into=target, run="once")
    change(state, 0.5)
    found, wanted = all_of(target), all_of(state)
    assert found.keys() == wanted.keys() and len(wanted) > 30
    for path, value in wanted.items():
        same(found[path], value)


if __name__ == "__main__":
    main()
