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
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import tenuto
from support.sharded_program import (
    Normed,
    Saved,
    check,
    gathered,
    main,
    net,
    numbers,
    rank,
    same,
    sharded,
    split,
    trained,
    wholes,
)
from tenuto.engine.group import group_save
from tenuto.errors import RankFailed, SaveFailed, ShardMismatch, StateError, StateMismatch
from tenuto.events import Committed, SaveFailedEvent
from tenuto.integrations.torch.wrappers import unsynchronised
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


@check(2)
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


# -- state that torch's wrappers leave to each rank -------------------------------------------------------------------


class Scaled(nn.Module):
    """A parameter without dimensions, like the temperature of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.0))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.ones_like(parameter) * (number + 1)
    optimizer.step()


@check(2)
def state_of_a_parameter_without_dimensions_lies_as_the_parameter_does() -> None:
    """Saved on one rank and on two, restored on one and on two; what is a number of the optimizer's stays one."""
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "own"))

    def build(kind: Any, ranks: int) -> tuple[nn.Module, Any]:
        model = distribute_module(Scaled(), two["all" if ranks == 2 else "own"])
        return model, kind(model.parameters(), lr=0.1)

    def alone(ranks: int) -> dict[str, Any]:
        return {"ranks": tenuto.Solo()} if ranks == 1 else {}

    for kind, numbers_of in ((torch.optim.AdamW, {"step"}), (torch.optim.NAdam, {"step", "mu_product"})):
        for before, after in ((1, 1), (1, 2), (2, 1), (2, 2)):
            where = place(f"scaled-{kind.__name__}-{before}-{after}")
            model, optimizer = build(kind, before)
            stepped(model, optimizer)
            if before == 2 or rank() == 0:
                tenuto.save({"model": model, "optimizer": optimizer}, where, **alone(before))
            dist.barrier()
            other, again = build(kind, after)
            tenuto.load(where, into={"model": other, "optimizer": again}, **alone(after))
            state = again.state[other.scale]
            assert {key for key, value in state.items() if not isinstance(value, DTensor)} == numbers_of, state
            stepped(model, optimizer)
            stepped(other, again)
            for one, two_ in zip(model.parameters(), other.parameters(), strict=True):
                same(one.full_tensor(), two_.full_tensor())


def normed(wrap: Callable[[nn.Module], nn.Module], by: int) -> nn.Module:
    model = wrap(Normed())
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(by)) + by).sum().backward()
    return model


@check(2)
def buffers_that_nothing_keeps_alike_are_the_first_ranks() -> None:
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        "fsdp2": lambda model: fully_shard(model),
        "ddp": lambda model: nn.parallel.DistributedDataParallel(model, broadcast_buffers=False),
    }
    for name, wrap in wraps.items():
        model = normed(wrap, rank())
        norm = getattr(model, "module", model).norm
        means = gathered(norm.running_mean)
        assert not torch.equal(*means)
        where = place(f"normed-{name}")
        with tenuto.Checkpointer(where, {"model": model}, save=every(steps=1)) as ckpt:
            for _ in ckpt.steps(2):
                norm.running_mean.mul_(2)
        other = normed(wrap, 7 + rank())
        restored = tenuto.load(where, into={"model": other})
        same(getattr(other, "module", other).norm.running_mean, means[0] * 4)
        said = "model: each rank may have its own buffers (norm.running_mean and 2 more)"
        assert any(one.startswith(said) for one in restored.certificate["caveats"]), restored.certificate
        same(tenuto.load(where, ranks=tenuto.Solo()).state["model"]["norm.running_mean"], means[0] * 4)


@check(2)
def a_buffer_of_each_rank_is_saved_beside_its_module() -> None:
    """As the refusal's hint says, in a module that nothing wraps."""

    def build(value: float) -> nn.Module:
        model = Normed()
        model.norm.running_mean.fill_(value)
        return model

    try:
        tenuto.save({"model": build(rank())}, place("own-buffer"))
    except SaveFailed as error:
        assert "model/norm.running_mean is not the same" in error.message
        assert "persistent=False" in str(error), error
    else:
        raise AssertionError("one rank's buffer was taken for that of all")

    def held(model: nn.Module) -> dict[str, Any]:
        mean = model.norm.running_mean
        model.norm.register_buffer("running_mean", mean, persistent=False)
        return {"model": model, "mean": tenuto.per_rank(mean)}

    tenuto.save(held(build(rank())), place("own-buffer"))
    other = build(-1.0)
    tenuto.load(place("own-buffer"), into=held(other))
    same(other.norm.running_mean, torch.full((6,), float(rank())))


@check(2)
def buffers_that_are_kept_alike_are_no_caveat() -> None:
    for model in (
        nn.parallel.DistributedDataParallel(Normed()),
        fully_shard(net()),
        nn.parallel.DistributedDataParallel(net(), broadcast_buffers=False),
    ):
        assert unsynchronised(model) == []


@check(4)
def each_rank_that_tensor_parallelism_sets_apart_has_its_own_first_one() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for of, holders in ((mesh, [0]), (mesh["dp"], [0, 1])):
        model = fully_shard(Normed(), mesh=of)
        model.norm.running_mean.fill_(rank() // 2)
        saved = Saved({"model": model})
        assert saved.holders["model/norm.running_mean"] == holders
        same(saved.arrays["model/norm.running_mean"], torch.zeros(6))


@check(2)
def zero_redundancy_is_saved_by_all_ranks_and_taken_by_any_optimizer() -> None:
    def build(wrapped: bool) -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        if not wrapped:
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.5)
        else:
            model = nn.parallel.DistributedDataParallel(model)
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.5)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def state(parts: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(("model", "optimizer", "scheduler"), parts, strict=True))

    parts, where = build(True), place("zero")
    with tenuto.Checkpointer(where, state(parts), save=every(steps=1)) as ckpt:
        for _ in ckpt.steps(3):
            stepped(*parts[:2])
            parts[2].step()
    rate = 0.5 * 0.5**3
    for wrapped in (True, False):
        again = build(wrapped)
        tenuto.load(where, into=state(again), **({} if wrapped else {"ranks": tenuto.Solo()}))
        assert [group["lr"] for group in again[1].param_groups] == [rate]
        stepped(*again[:2])
        if wrapped:
            stepped(*parts[:2])
        for one, other in zip(parts[0].parameters(), again[0].parameters(), strict=True):
            same(one, other)


@check(2)
def what_is_not_understood_says_what_to_use() -> None:
    flat = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    overlapping = ZeroRedundancyOptimizer(net().parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.1)
    state: dict[str, Any]
    for state, words, hint in (
        ({"model": flat}, "model: FullyShardedDataParallel (FSDP1)", "fully_shard(model)"),
        ({"optimizer": overlapping}, "optimizer: a ZeroRedundancyOptimizer with overlap_with_ddp=True", "=False"),
    ):
        try:
            tenuto.save(state, place("not-understood"))
        except StateError as error:
            assert words in error.message and hint in str(error.hint), error
        else:
            raise AssertionError(f"{words} was saved")


@check(2)
def stages_with_other_numbers_of_parameter_groups_have_two_forms() -> None:
    """A group for each layer, two and three of them; what the refusal's hint says is tried."""
    layers = range(2) if rank() == 0 else range(2, 5)

    def build(rate: float, groups: int = 0) -> tuple[nn.Module, Any, Any]:
        model = nn.ModuleDict({f"layer{number}": nn.Linear(2, 2) for number in layers})
        own = [{"params": list(layer.parameters())} for layer in model.values()]
        optimizer = torch.optim.AdamW(own + [{"params": []} for _ in range(groups - len(own))], lr=rate)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def held(parts: tuple[Any, ...], declare: Callable[[Any], Any] = lambda value: value) -> dict[str, Any]:
        return {"model": parts[0], "optimizer": declare(parts[1]), "scheduler": declare(parts[2])}

    try:
        tenuto.save(held(build(0.1)), place("stages"))
    except ShardMismatch as error:
        assert "optimizer/param_groups: the numbers of parameter groups differ" in error.message, error
        assert error.message.endswith("2 on rank 0, 3 on rank 1"), error
        assert '{"params": []}' in str(error.hint) and "tenuto.per_rank(optimizer)" in str(error.hint)
    else:
        raise AssertionError("one rank's groups were taken for those of all")
    for number, (groups, how) in enumerate(((3, {}), (0, {"declare": tenuto.per_rank}))):
        parts, again = build(0.1, groups), build(0.3, groups)
        stepped(*parts[:2])
        tenuto.save(held(parts, **how), place(f"stages-{number}"))
        tenuto.load(place(f"stages-{number}"), into=held(again, **how))
        stepped(*parts[:2])
        stepped(*again[:2])
        for one, other in zip(parts[0].parameters(), again[0].parameters(), strict=True):
            same(one, other)


class Refusing:
    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("not today")


@check(2)
def a_load_that_one_rank_cannot_set_is_raised_on_all() -> None:
    where = place("not-set")
    tenuto.save({"model": net(), "odd": Refusing()}, where)
    for refusing in (0, 1):
        target: dict[str, Any] = {"model": net(), **({"odd": Refusing()} if rank() == refusing else {})}
        try:
            tenuto.load(where, into=target)
        except (StateMismatch, RankFailed) as error:
            assert isinstance(error, StateMismatch if rank() == refusing else RankFailed), error
            assert "odd: its state could not be set: not today" in error.message, error
            assert rank() == refusing or error.ranks == (refusing,), error
        else:
            raise AssertionError("one rank has it, the other has not")
        dist.barrier()


if __name__ == "__main__":
    main()
