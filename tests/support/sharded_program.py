"""What every rank of a sharded test runs: one process group, many checks.

`python sharded_program.py RANK WORLD STORE OUT [CHECK …]`: rank 0 writes to OUT what each check came to, "" where it is
as it should be.
"""

from __future__ import annotations

import datetime
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import tenuto
from support.factored_optimizer import Factored
from support.leaf_forms import forms_of
from tenuto.errors import StateError, StateMismatch
from tenuto.repo.format.leaf_table import LeafTable
from tenuto.state.encode.flattener import Flattener, flatten
from tenuto.state.restore.match import match_state

CHECKS: dict[int, dict[str, Callable[[], None]]] = {2: {}, 4: {}}


def check(*worlds: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        for world in worlds:
            CHECKS[world][function.__name__] = function
        return function

    return register


# -- what the checks are made of --------------------------------------------------------------------------------------


def rank() -> int:
    return dist.get_rank()


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def captured(flattened: Any) -> list[tuple[int, str, str, tuple[int, ...], tuple[int, ...], str, bytes]]:
    """What a save would write: leaf, path, dtype, offsets, shape, placement, bytes of every row."""
    found = []
    numbers = range(len(flattened.specs)) if flattened.leaf is None else flattened.leaf
    assert list(numbers) == sorted(numbers)
    for row, spec in enumerate(flattened.specs):
        view = np.full(spec.nbytes, 0xA5, np.uint8)
        bound = flattened.devices[flattened.device[row]].bind([spec], [view])
        bound.copy([flattened.sources[row]], 0, 1)
        bound.wait()
        offsets = spec.offsets if spec.offsets is not None else (0,) * len(spec.shape)
        found.append((numbers[row], spec.path, spec.dtype, offsets, spec.shape, spec.placement, view.tobytes()))
    return found


class Saved:
    """The state of all ranks, laid into whole arrays: each element of a box exactly once, replicas equal."""

    def __init__(self, state: Any) -> None:
        flattener = Flattener(state)
        flattened = flattener.flatten()
        again = flattener.flatten()
        assert flattener.full_walks == 1 and again.specs == flattened.specs and again.leaf == flattened.leaf
        assert [one.data_ptr() for one in again.sources] == [one.data_ptr() for one in flattened.sources]
        assert flattened.fingerprint == again.fingerprint == flatten(state).fingerprint
        assert not flattened.reports
        self.tree, self.private = flattened.tree, flattened.private
        trees = gathered(flattened.tree)
        assert all(tree == trees[0] for tree in trees), trees
        forms = forms_of(flattened)
        shared = len(LeafTable(flattened.tree, None, forms[: len(forms) - self._own(flattened)]))
        self.forms = forms[:shared]
        everyone = gathered(forms[:shared])
        assert all(one == everyone[0] for one in everyone)
        self.rows = captured(flattened)
        self.own = {number: data for number, *_, data in self.rows if number >= shared}
        self.own_forms = forms[shared:]
        self.arrays: dict[str, Any] = {}
        self.number: dict[str, int] = {}
        self.placements: dict[str, set[str]] = {}
        self.holders: dict[str, list[int]] = {}
        self._lay(gathered([row for row in self.rows if row[0] < shared]))

    @staticmethod
    def _own(flattened: Any) -> int:
        return sum(spec.private for spec in flattened.specs)

    def _lay(self, ranks: list[Any]) -> None:
        for number, path in enumerate(LeafTable(self.tree, None, self.forms).paths):
            dtype, whole = self.forms[number]
            self.number[path] = number
            array = torch.zeros(whole, dtype=getattr(torch, dtype))
            times = np.zeros(whole, np.int64)
            self.placements[path], self.holders[path] = set(), []
            boxes: dict[Any, bytes] = {}
            for at, rows in enumerate(ranks):
                for leaf, where, kind, offsets, shape, placement, data in rows:
                    if leaf != number:
                        continue
                    assert (where, kind) == (path, dtype)
                    self.placements[path].add(placement)
                    self.holders[path].append(at)
                    box = (offsets, shape)
                    if box in boxes:
                        assert boxes[box] == data, f"{path}: replicas differ"
                        continue
                    boxes[box] = data
                    index = tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))
                    times[index] += 1
                    if data:
                        array[index] = torch.frombuffer(bytearray(data), dtype=array.dtype).view(shape)
            assert times.size == 0 or (times == 1).all(), f"{path}: {times.tolist()}"
            self.arrays[path] = array

    def load(self, into: Any, **how: Any) -> Any:
        specs = LeafTable(self.tree, self.private, [*self.forms, *self.own_forms])
        prepared = match_state(self.tree, self.private, specs, into, **how)
        boxes = prepared.boxes or [None] * len(prepared.wants)
        by_number = {number: path for path, number in self.number.items()}
        for (number, sink), box in zip(prepared.wants, boxes, strict=True):
            if number in self.own:
                data = np.frombuffer(self.own[number], np.uint8).copy()
            else:
                piece = self.arrays[by_number[number]]
                piece = piece if box is None else piece[box.slices]
                data = np.frombuffer(piece.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), np.uint8)
            if sink.buffer is None:
                sink.fill(data)
            else:
                assert sink.buffer.nbytes == data.nbytes
                sink.buffer[:] = data
        self.report = prepared.report
        self.boxes = prepared.boxes
        return prepared.apply()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def net(seed: int = 0, width: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def whole_of(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.shape == other.shape and torch.equal(one.detach(), other.detach()), (one, other)


def emptied(value: torch.Tensor) -> torch.Tensor:
    """The same kind of DTensor, with other values."""
    made = DTensor.from_local(
        torch.full_like(value.to_local(), -7.0),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return made


def through(state: Any, full: dict[str, torch.Tensor]) -> Saved:
    """Saves DTensors, compares them with what they are as a whole, and restores them into others like them."""
    saved = Saved(state)
    for path, array in full.items():
        same(saved.arrays[path], array)
    target = {key: emptied(value) for key, value in state.items()}
    saved.load(target)
    for key, value in state.items():
        same(target[key].to_local(), value.to_local())
    plain = {key: torch.zeros(value.shape) for key, value in state.items()}
    saved.load(plain)
    for key, array in full.items():
        same(plain[key], array)
    fresh = saved.load(None)
    for key, array in full.items():
        same(fresh[key], array)
    return saved


# -- DTensors ---------------------------------------------------------------------------------------------------------

SHAPES = [(8, 4), (7, 3), (1, 5), (5,), (3, 2, 4), (0, 3)]


def grid(mesh: Any, choices: list[list[Any]]) -> None:
    for shape in SHAPES:
        for number, placements in enumerate(choices):
            if any(isinstance(one, Shard) and one.dim >= len(shape) for one in placements):
                continue
            full = numbers(*shape, seed=number)
            tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            same(tensor.full_tensor(), full)
            saved = through({"x": tensor}, {"x": full})
            if full.numel():
                expected = "box" if any(isinstance(one, Shard) for one in placements) else "replicated"
                assert saved.placements["x"] == {expected}, (placements, saved.placements)


@check(2, 4)
def one_dimension() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    grid(mesh, [[Replicate()], [Shard(0)], [Shard(1)], [Shard(2)]])


@check(4)
def two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    kinds = [Replicate(), Shard(0), Shard(1)]
    grid(mesh, [[one, other] for one in kinds for other in kinds])


@check(4)
def meshes_of_one() -> None:
    mesh = init_device_mesh("cpu", (4, 1))
    grid(mesh, [[Shard(0), Shard(0)], [Shard(1), Replicate()], [Replicate(), Shard(0)]][:2])


@check(4)
def strided() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for dim, shape in ((0, (8, 3)), (1, (3, 8)), (0, (16,)), (0, (12, 2))):
        for placements in (
            [_StridedShard(dim, split_factor=2), Shard(dim)],
            [_StridedShard(dim, split_factor=2), Replicate()],
            [_StridedShard(dim, split_factor=4), Replicate()],
        ):
            full = numbers(*shape)
            tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            same(tensor.full_tensor(), full)
            through({"x": tensor}, {"x": full})


@check(4)
def another_order() -> None:
    """Sharded over the mesh from right to left."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    mesh = init_device_mesh("cpu", (2, 2))
    full = numbers(8, 3)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
    outer, inner = mesh.get_coordinate()[1], mesh.get_coordinate()[0]
    local = full.chunk(2)[outer].chunk(2)[inner].clone()
    saved = Saved({"x": DTensor(local, spec, requires_grad=False)})
    same(saved.arrays["x"], full)


@check(2)
def partial_sums_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    try:
        flatten({"m": {"x": tensor}})
    except StateError as error:
        assert error.subject == "m/x" and "redistribute" in (error.hint or "")
    else:
        raise AssertionError("a Partial DTensor was saved")


@check(4)
def part_of_the_ranks() -> None:
    """A mesh that some of the ranks are not in: they hold nothing."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [1, 2, 3])
    full = numbers(7, 2)
    tensor = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    saved = Saved({"x": tensor})
    same(saved.arrays["x"], full)
    assert saved.holders["x"] == [1, 2, 3]
    assert (saved.rows == []) is (rank() == 0)
    target = {"x": distribute_tensor(torch.zeros(7, 2), mesh, [Shard(0)], src_data_rank=None)}
    saved.load(target)
    if rank():
        same(target["x"].to_local(), tensor.to_local())


@check(2)
def other_shapes_are_told() -> None:
    mesh = init_device_mesh("cpu", (2,))
    saved = Saved({"x": distribute_tensor(numbers(8, 2), mesh, [Shard(0)])})
    try:
        saved.load({"x": distribute_tensor(numbers(6, 2), mesh, [Shard(0)])})
    except StateMismatch as error:
        assert "[8, 2]" in str(error) and "[6, 2]" in str(error), error
    else:
        raise AssertionError("a tensor of another shape was filled")


@check(2)
def tied_parts_are_one_leaf() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for shape in ((5, 2), (1, 2)):
        one = distribute_tensor(numbers(*shape), mesh, [Shard(0)])
        saved = Saved({"x": one, "y": one})
        assert list(saved.arrays) == ["x"]
        target = emptied(one)
        saved.load({"x": target, "y": target})
        same(target.to_local(), one.to_local())


# -- modules and optimizers -------------------------------------------------------------------------------------------


def trained(model: nn.Module, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), lr=0.1)
    step(model, optimizer)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(3)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def wholes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor by the path that it has without any wrapper."""
    found = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        found[f"model/{name}"] = whole_of(parameter).clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer/state/model/{name}/{key}"] = whole_of(value).clone()
    return found


def cycle(build: Callable[[], nn.Module], *, boxes: bool = True) -> Saved:
    """A training of what `build` makes goes into another that has stepped, one that has not, and a plain one."""
    model = build()
    optimizer = trained(model)
    expected = wholes(model, optimizer)
    saved = Saved({"model": model, "optimizer": optimizer})
    for path, array in expected.items():
        same(saved.arrays[path], array)
    for stepped in (True, False):
        other = build()
        again = trained(other) if stepped else torch.optim.AdamW(other.parameters(), lr=0.1)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0)
        saved.load({"model": other, "optimizer": again})
        assert (saved.boxes is not None) is boxes or rank() == 3  # which may hold nothing of anything
        for path, array in wholes(other, again).items():
            same(array, expected[path])
        step(model, optimizer)
        step(other, again)
        for path, array in wholes(other, again).items():
            same(array, wholes(model, optimizer)[path])
        saved = Saved({"model": model, "optimizer": optimizer})
        expected = wholes(model, optimizer)
    plain = net(5)
    adam = trained(plain)
    saved.load({"model": plain, "optimizer": adam})
    for path, array in wholes(plain, adam).items():
        same(array, expected[path])
    back = build()
    optimizer = torch.optim.AdamW(back.parameters(), lr=0.1)
    alone = Saved({"model": plain, "optimizer": adam})
    alone.load({"model": back, "optimizer": optimizer})
    for path, array in wholes(back, optimizer).items():
        same(array, expected[path])
    return saved


def sharded(mesh: Any = None, width: int = 6) -> nn.Module:
    model = net(width=width)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@check(2)
def fully_sharded() -> None:
    saved = cycle(sharded)
    assert saved.placements["model/0.weight"] == {"box"}
    assert saved.placements["optimizer/state/model/0.weight/exp_avg"] == {"box"}
    assert saved.placements["optimizer/state/model/0.weight/step"] == {"replicated"}


@check(4)
def hybrid_sharded() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    saved = cycle(lambda: sharded(mesh))
    assert saved.holders["model/0.weight"] == [0, 1, 2, 3]


@check(2)
def sharded_along_another_dimension() -> None:
    def build() -> nn.Module:
        model = net(width=6)
        fully_shard(model[0], shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
        return model

    cycle(build)


@check(2)
def gathered_parameters_go_back_into_their_shards() -> None:
    """Between forward and backward the root's parameters lie gathered in the module."""
    model = sharded()
    optimizer = trained(model)
    expected = wholes(model, optimizer)
    model(torch.randn(5, 4))
    saved = Saved({"optimizer": optimizer, "model": model})
    for path, array in expected.items():
        same(saved.arrays[path], array)


@check(2)
def meta_models_get_their_part() -> None:
    model = sharded()
    optimizer = trained(model)
    expected = wholes(model, optimizer)
    saved = Saved({"model": model, "optimizer": optimizer})
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    for layer in (other[0], other[2], other):
        fully_shard(layer)
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    held = list(other.parameters())
    saved.load({"model": other, "optimizer": again})
    assert all(one is two for one, two in zip(held, other.parameters(), strict=True))
    for path, array in wholes(other, again).items():
        same(array, expected[path])
    step(model, optimizer)
    step(other, again)
    for path, array in wholes(other, again).items():
        same(array, wholes(model, optimizer)[path])


@check(2)
def state_of_another_shape_than_its_parameter() -> None:
    """It is a whole on every rank, and a DTensor again, so that the next step can be taken."""
    for build in (sharded, lambda: nn.parallel.DistributedDataParallel(net())):
        model = build()
        optimizer = trained(model, Factored)
        saved = Saved({"model": model, "optimizer": optimizer})
        for stepped in (True, False):
            other = sharded()
            again = trained(other, Factored) if stepped else Factored(other.parameters())
            saved.load({"model": other, "optimizer": again})
            for state in again.state.values():
                assert {key: isinstance(value, DTensor) for key, value in state.items()} == {"step": False, "row": True}
            for path, array in wholes(other, again).items():
                same(array, saved.arrays[path])
            if build is sharded:
                step(other, again)
                if stepped:
                    step(model, optimizer)
                for path, array in wholes(other, again).items():
                    same(array, wholes(model, optimizer)[path])


def split(mesh: Any, width: int = 6) -> nn.Module:
    return parallelize_module(net(width=width), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


@check(2)
def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2,))
    saved = cycle(lambda: split(mesh))
    assert saved.placements["model/0.weight"] == saved.placements["model/2.weight"] == {"box"}
    assert saved.placements["model/2.bias"] == {"replicated"}


@check(4)
def sharded_and_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build() -> nn.Module:
        model = split(mesh["tp"], width=8)
        return fully_shard(model, mesh=mesh["dp"])

    model = build()
    optimizer = trained(model)
    saved = Saved({"model": model, "optimizer": optimizer})
    for path, array in wholes(model, optimizer).items():
        same(saved.arrays[path], array)
    other = build()
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    saved.load({"model": other, "optimizer": again})
    for path, array in wholes(other, again).items():
        same(array, saved.arrays[path])


@check(4)
def uneven_tensor_parallel() -> None:
    """FSDP cuts the rows that tensor parallelism has left on each rank, also where they do not divide."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for width in (5, 7, 3, 1, 6):
        model = split(mesh["tp"], width=width)
        expected = {name: whole_of(value).clone() for name, value in model.named_parameters()}
        fully_shard(model, mesh=mesh["dp"])
        saved = Saved({"model": model})
        for name, array in expected.items():
            same(saved.arrays[f"model/{name}"], array)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


@check(2)
def data_parallel() -> None:
    saved = cycle(lambda: nn.parallel.DistributedDataParallel(net()), boxes=False)
    assert saved.placements["model/0.weight"] == {"replicated"} and saved.holders["model/0.weight"] == [0, 1]
    assert saved.placements["optimizer/state/model/0.weight/step"] == {"replicated"}
    assert saved.placements["optimizer/state/model/0.weight/exp_avg"] == {"replicated"}


@check(2)
def running_statistics_are_the_first_ranks() -> None:
    model = nn.parallel.DistributedDataParallel(Normed())
    model(torch.randn(8, 4) + rank()).sum().backward()
    saved = Saved({"model": model})
    assert saved.holders["model/norm.running_mean"] == [0]
    mean = gathered(model.module.norm.running_mean)
    assert not torch.equal(mean[0], mean[1])
    same(saved.arrays["model/norm.running_mean"], mean[0])
    other = nn.parallel.DistributedDataParallel(Normed())
    saved.load({"model": other})
    same(other.module.norm.running_mean, mean[0])


# -- declared ---------------------------------------------------------------------------------------------------------


@check(2)
def declared_parts() -> None:
    r, n = rank(), 2
    full = {
        "rows": numbers(6, 4),
        "columns": numbers(4, 6),
        "qkv": numbers(12, 4),
        "flat": numbers(5, 3),
        "e": numbers(4, 3, 2),
    }

    def local() -> dict[str, torch.Tensor]:
        q, k, v = full["qkv"][:8], full["qkv"][8:10], full["qkv"][10:]
        return {
            "rows": full["rows"].chunk(2)[r].clone(),
            "columns": full["columns"].chunk(2, 1)[r].clone(),
            "qkv": torch.cat([one.chunk(2)[r] for one in (q, k, v)]),
            "flat": full["flat"].reshape(-1)[[0, 8][r] : [8, 15][r]].clone(),
            "e": full["e"][2 * r].clone(),
        }

    def declared(held: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {
            "rows": tenuto.shard(held["rows"], whole=(6, 4), offsets=(3 * r, 0)),
            "columns": tenuto.shard(held["columns"], dim=1, rank=r, of=n),
            "qkv": tenuto.fused(held["qkv"], sizes=(8, 2, 2), rank=r, of=n),
            "flat": tenuto.flat(held["flat"], whole=(5, 3), begin=[0, 8][r]),
        }

    state = declared(local())
    saved = Saved(state)
    for key in state:
        same(saved.arrays[key], full[key])
    target = {key: torch.full_like(one, -1) for key, one in local().items()}
    saved.load(declared(target))
    for key in state:
        same(target[key], local()[key])
    plain = {key: torch.zeros_like(full[key]) for key in state}
    saved.load(plain)
    for key in state:
        same(plain[key], full[key])
    expert = {"e": tenuto.shard(local()["e"], whole=(2, 3, 2), offsets=(r, 0, 0))}
    same(Saved(expert).arrays["e"], full["e"][[0, 2]])


class Fused(nn.Module):
    """Query, key and value fused, over two ranks."""

    def __init__(self, of: int = 1, at: int = 0) -> None:
        super().__init__()
        whole = numbers(12, 4)
        parts = [whole[:8], whole[8:10], whole[10:]]
        self.qkv = nn.Parameter(torch.cat([one.chunk(of)[at] for one in parts]))
        self.bias = nn.Parameter(numbers(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.qkv.T).sum() + self.bias.sum()


@check(2)
def declared_parameters() -> None:
    def build() -> nn.Module:
        model = Fused(2, rank())
        tenuto.declare(
            model,
            {
                "*qkv": lambda one: tenuto.fused(one, sizes=(8, 2, 2), rank=rank(), of=2),
                "bias": tenuto.replicated,
            },
        )
        return model

    model = build()
    optimizer = trained(model)
    saved = Saved({"model": model, "optimizer": optimizer})
    plain = Fused()
    adam = trained(plain)
    for path, array in wholes(plain, adam).items():
        same(saved.arrays[path], array)
    assert saved.placements["optimizer/state/model/qkv/exp_avg"] == {"box"}
    assert saved.placements["optimizer/state/model/bias/exp_avg"] == saved.placements["model/bias"] == {"replicated"}
    for stepped in (True, False):
        other = build()
        again = trained(other) if stepped else torch.optim.AdamW(other.parameters(), lr=0.1)
        with torch.no_grad():
            other.qkv.zero_()
        saved.load({"model": other, "optimizer": again})
        same(other.qkv, model.qkv)
        same(again.state[other.qkv]["exp_avg"], optimizer.state[model.qkv]["exp_avg"])
    with torch.no_grad():
        plain.qkv.zero_()
    saved.load({"model": plain, "optimizer": torch.optim.AdamW(plain.parameters())})
    same(plain.qkv, saved.arrays["model/qkv"])


@check(2)
def what_belongs_to_one_rank() -> None:
    def build(value: float) -> dict[str, Any]:
        return {
            "shared": numbers(3),
            "mine": tenuto.per_rank({"x": torch.full((rank() + 1,), value), "n": rank() + value}),
            "same": tenuto.replicated({"y": numbers(2)}),
        }

    saved = Saved(build(1.0))
    assert set(saved.arrays) == {"shared", "same/y"}
    assert saved.placements["same/y"] == {"replicated"} and saved.placements["shared"] == {"whole"}
    target = build(-1.0)
    saved.load(target)
    same(target["mine"].value["x"], torch.ones(rank() + 1))
    assert target["mine"].value["n"] == rank() + 1.0


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    at, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, function in CHECKS[world].items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        try:
            function()
            came = ""
        except BaseException:  # noqa: BLE001 - whatever it is, the test that stands for the check says it
            came = traceback.format_exc()
            print(came, file=sys.stderr, flush=True)
        every = gathered(came)
        found[name] = "\n".join(f"rank {number}: {one}" for number, one in enumerate(every) if one)
        if at == 0:
            out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
