"""Sharded tensors in one process: a world of one rank, worlds that only seem to have more, declared parameters."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import tenuto
from support import loaded_interpreter, sharded_forks
from support.factored_optimizer import Factored
from support.leaf_forms import forms_of
from tenuto.errors import StateError, StateMismatch, Unserialisable, UsageError
from tenuto.integrations.torch import modules
from tenuto.integrations.torch.meshes import _spans
from tenuto.repo.format.leaf_table import LeafTable
from tenuto.state.declarations import part_view
from tenuto.state.encode.flattener import Flattener, flatten
from tenuto.state.restore.match import match_state

World = Callable[[int, int], None]


@pytest.fixture
def world() -> Iterator[World]:
    """Makes this process rank `rank` of a world of `size` whose collectives do nothing."""

    def join(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_a_world_of_one_rank_saves_wholes(alone: None, carrier: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = stepped(model)
    loose = distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [Shard(0)])
    state = {"model": model, "optimizer": optimizer, "loose": loose, "ddp": nn.parallel.DistributedDataParallel(net())}
    found = flatten(state)
    assert found.leaf is None
    assert all((spec.whole, spec.offsets, spec.placement) == (None, None, "whole") for spec in found.specs)
    saved = carrier.save(state)
    plain = net()
    again = stepped(plain)
    target = {"model": plain, "optimizer": again, "loose": torch.zeros(2, 3), "ddp": net()}
    carrier.load(saved, target)
    assert torch.equal(target["loose"], loose.full_tensor())
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other)
        assert torch.equal(optimizer.state[one]["exp_avg"].full_tensor(), again.state[other]["exp_avg"])
    back = net()
    fully_shard(back)
    adam = torch.optim.AdamW(back.parameters())
    carrier.load(carrier.save({"model": plain, "optimizer": again}), {"model": back, "optimizer": adam})
    for one, other in zip(model.parameters(), back.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
        assert isinstance(adam.state[other]["exp_avg"], DTensor)
        assert torch.equal(optimizer.state[one]["exp_avg"].full_tensor(), adam.state[other]["exp_avg"].full_tensor())
        assert not isinstance(adam.state[other]["step"], DTensor)


def test_state_that_is_each_ranks_own_comes_back_sharded_or_plain_as_it_was(alone: None, tmp_path: Any) -> None:
    def made() -> dict[str, Any]:
        model = net()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": tenuto.per_rank(optimizer)}

    saved, target = made(), made()
    saved["model"](torch.ones(2, 4)).sum().backward()
    saved["optimizer"].value.step()
    for parameter, entry in saved["optimizer"].value.state.items():
        entry["own"] = torch.ones(parameter.shape)  # of the parameter's shape, and plain all the same
    tenuto.save(saved, tmp_path)
    tenuto.load(tmp_path, target)
    state = target["optimizer"].value.state
    for one, other in zip(saved["model"].parameters(), target["model"].parameters(), strict=True):
        assert isinstance(state[other]["exp_avg"], DTensor) and not isinstance(state[other]["own"], DTensor)
        theirs = saved["optimizer"].value.state[one]["exp_avg"]
        assert torch.equal(state[other]["exp_avg"].full_tensor(), theirs.full_tensor())
    target["model"](torch.ones(2, 4)).sum().backward()
    target["optimizer"].value.step()


def test_parts_of_tensors_that_are_made_of_others_are_refused_by_path(world: World) -> None:
    class Eight(torch.Tensor):
        @staticmethod
        def __new__(cls, codes: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

        def __init__(self, codes: torch.Tensor) -> None:
            self.codes = codes

        def __tensor_flatten__(self) -> Any:
            return ["codes"], None

        @staticmethod
        def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Any:
            return Eight(parts["codes"])

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return cls(function(*(getattr(one, "codes", one) for one in args), **(kwargs or {})))

    world(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    local = Eight(torch.zeros(4, dtype=torch.uint8))
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    with pytest.raises(Unserialisable, match=r"^o/0: a part of a .*Eight, which other tensors make up") as caught:
        flatten({"o": [sharded]})
    assert "as DDP does" in str(caught.value.hint)


def test_parts_without_elements_are_each_a_tensor_of_its_own(alone: None, carrier: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def state() -> dict[str, Any]:
        made = {name: distribute_tensor(torch.zeros(0, 3), mesh, [Replicate()]) for name in ("x", "y")}
        local = {name: tenuto.shard(torch.zeros(0, 3), whole=(0, 3), offsets=(0, 0)) for name in ("p", "q")}
        return made | local

    target = state()
    carrier.load(carrier.save(state()), target)
    assert sorted(carrier.report.restored) == ["p", "q", "x", "y"]


@pytest.mark.parametrize("sharded", [True, False])
def test_state_of_another_shape_is_a_whole_beside_parts(alone: None, carrier: Any, sharded: bool) -> None:
    def build(sharded: bool) -> dict[str, Any]:
        model = net()
        if sharded:
            fully_shard(model)
        return {"model": model, "optimizer": Factored(model.parameters())}

    def step(state: dict[str, Any]) -> list[torch.Tensor]:
        state["model"](torch.linspace(0, 1, 8).view(2, 4)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        return [getattr(one, "full_tensor", lambda one=one: one)() for one in state["model"].parameters()]

    state, target = build(sharded), build(True)
    step(state)
    carrier.round_trip(state, target)
    for one in target["optimizer"].state.values():
        assert {key: isinstance(value, DTensor) for key, value in one.items()} == {"step": False, "row": True}
    for one, other in zip(step(state), step(target), strict=True):
        assert torch.equal(one, other)


def test_a_plain_tensor_that_an_optimizer_keeps_of_a_sharded_parameter_stays_one(alone: None, carrier: Any) -> None:
    def build(filled: float) -> dict[str, Any]:
        torch.manual_seed(1)
        model = net()
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter] = {"scales": torch.full((3,), filled)}
        return {"model": model, "optimizer": optimizer}

    state, target = build(2.0), build(0.0)
    before = [one["scales"] for one in target["optimizer"].state.values()]
    carrier.round_trip(state, target)
    for one, held in zip(target["optimizer"].state.values(), before, strict=True):
        assert one["scales"] is held and held.tolist() == [2.0] * 3


def test_a_sum_over_one_rank_is_made_already(alone: None, carrier: Any) -> None:
    tensor = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)), [Partial()], run_check=False)
    assert carrier.round_trip({"x": tensor})["x"].tolist() == [1, 1, 1]


def test_every_way_that_tensor_parallelism_and_fsdp_cut_rows() -> None:
    """Three ranks of FSDP around two of tensor parallelism, where strided shards are not what torch reads them as."""
    widths = [1, 5, 13]
    done = loaded_interpreter.run([sharded_forks.__file__, *map(str, widths)], torch=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = done.stdout
    for width, ranks in zip(widths, json.loads(told), strict=True):
        rows = [(begin, values) for rank in ranks for begin, values in rank]
        assert all(values == [float(begin + place) for place in range(len(values))] for begin, values in rows)
        assert sorted(one for _, values in rows for one in values) == [float(one) for one in range(width)]


@given(st.integers(0, 60), st.integers(1, 5), st.integers(2, 4))
@settings(max_examples=100)
def test_strided_parts_are_those_of_the_inner_cut_first(length: int, outer: int, inner: int) -> None:
    """What FSDP holds is found from the number of rows alone, or refused."""
    indices = list(range(length))
    found: list[int] = []
    whole = True
    for one in range(outer):
        for other in range(inner):
            held = chunk(chunk(indices, inner)[other], outer)[one]
            try:
                spans = _spans(length, len(held), [(outer, one, inner), (inner, other, 1)], "x")
            except StateError:
                whole = False
                continue
            assert [index for span in spans for index in range(*span)] == held
            found += held
    assert not whole or sorted(found) == indices


def chunk(indices: list[int], count: int) -> list[list[int]]:
    step = max(-(-len(indices) // count), 1)
    return [indices[at * step : (at + 1) * step] for at in range(count)]


def test_strided_parts_that_could_be_either_are_refused() -> None:
    with pytest.raises(StateError, match="could be either") as raised:
        for length, outer, inner in itertools.product(range(40), range(2, 6), range(2, 5)):
            for one, other in itertools.product(range(outer), range(inner)):
                held = len(chunk(chunk(list(range(length)), inner)[other], outer)[one])
                _spans(length, held, [(outer, one, inner), (inner, other, 1)], "m/x")
    assert raised.value.subject == "m/x" and raised.value.hint


def test_local_tensors_that_placements_do_not_explain(world: World) -> None:
    world(1, 2)
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.zeros(5, 2), mesh, [Shard(0)], run_check=False, shape=(8, 2), stride=(2, 1))
    with pytest.raises(StateError, match=r"m/x: .*\[5, 2\].*\[4, 2\]"):
        flatten({"m": {"x": tensor}})


def test_no_collective_is_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world(0, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    state = {"x": distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)], src_data_rank=None)}
    state["y"] = DTensor.from_local(torch.ones(3), mesh, [Replicate(), Replicate()], run_check=False)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a collective")

    for name in ("all_gather", "broadcast", "all_reduce", "all_gather_into_tensor", "barrier", "all_gather_object"):
        monkeypatch.setattr(dist, name, refuse)
    monkeypatch.setattr(DTensor, "full_tensor", refuse)
    monkeypatch.setattr(DTensor, "redistribute", refuse)
    flattener = Flattener(state)
    assert [spec.placement for spec in flattener.flatten().specs] == ["box", "replicated"]
    assert flattener.flatten().sources[0] is state["x"]._local_tensor
    with torch.no_grad():
        state["x"].add_(1)
    flattener.flatten()
    assert flattener.full_walks == 1
    state["x"] = distribute_tensor(torch.ones(8, 8), mesh, [Shard(1), Shard(0)], src_data_rank=None)
    assert flattener.flatten().specs != () and flattener.full_walks == 2


def test_contiguous_parts_offer_their_memory(world: World) -> None:
    world(1, 2)
    mesh = init_device_mesh("cpu", (2,))
    for dim in (0, 1):
        tensor = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(dim)], src_data_rank=None)
        found = flatten({"x": torch.ones(4, 4)})
        prepared = match_state(found.tree, None, LeafTable(found.tree, None, forms_of(found)), {"x": tensor})
        assert prepared.boxes is not None
        (box,), ((_, sink),) = prepared.boxes, prepared.wants
        assert box is not None and box.offsets == ((2, 0) if dim == 0 else (0, 2))
        assert sink.buffer is not None and sink.buffer.nbytes == 32
    rows = torch.zeros(4, 4)
    shard = tenuto.fused(rows, sizes=(4, 4), rank=1, of=2, dim=1)
    found = flatten({"x": torch.ones(4, 8)})
    prepared = match_state(found.tree, None, LeafTable(found.tree, None, forms_of(found)), {"x": shard})
    assert [sink.buffer for _, sink in prepared.wants] == [None, None]


def test_a_sharded_module_is_walked_once(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fully_shard(net())
    flattener = Flattener({"model": model})
    first = flattener.flatten()

    def walked(*_: Any) -> Any:
        raise AssertionError("the entries of a module that has not changed are known")

    with monkeypatch.context() as patched:
        patched.setattr(modules, "entries", walked)
        second = flattener.flatten()
    assert second.tree == first.tree and second.fingerprint == first.fingerprint
    model.register_buffer("seen", torch.ones(2))
    third = flattener.flatten()
    assert any("seen" in spec.path for spec in third.specs) and third.fingerprint != first.fingerprint
    del model.seen
    model.register_buffer("seen", torch.ones(2), persistent=False)
    assert flattener.flatten().fingerprint == first.fingerprint


def test_a_fenced_capture_knows_the_local_tensors(alone: None) -> None:
    from tenuto.integrations.torch import fence

    model = net()
    fully_shard(model)
    gate = fence.gate(state := {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, print)
    try:
        gate.begin_save()
        model(torch.ones(2, 4)).sum().backward()
        state["optimizer"].step()
        assert list(gate.fenceable(flatten(state).sources)) == [0, 1, 2, 3]
    finally:
        gate.close()


# -- declared ---------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.arange(24.0).view(6, 4))
        self.bias = nn.Parameter(torch.zeros(3))


def test_declared_parameters_are_parts_wherever_they_are_met() -> None:
    model, other = Part(), Part()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    flattener = Flattener({"model": model, "optimizer": optimizer, "list": [model.gate], "dict": {"g": model.gate}})
    assert {spec.placement for spec in flattener.flatten().specs} == {"whole"}
    tenuto.declare(tenuto.fused(model.gate, sizes=(8, 4), rank=0, of=2))
    tenuto.declare(tenuto.replicated(model.bias))
    found = flattener.flatten()
    assert [(spec.path, spec.placement, spec.whole) for spec in found.specs] == [
        ("model/gate", "box", (12, 4)),
        ("model/gate", "box", (12, 4)),
        ("model/bias", "replicated", None),
    ]
    (model.gate.sum() + model.bias.sum()).backward()
    optimizer.step()
    found = flattener.flatten()
    assert [spec.path for spec in found.specs[3:]] == ["optimizer/state/model/gate/momentum_buffer"] * 2 + [
        "optimizer/state/model/bias/momentum_buffer"
    ]
    assert {spec.placement for spec in flatten({"model": other}).specs} == {"whole"}
    assert {spec.placement for spec in flatten({"model": copy.deepcopy(model)}).specs} <= {"whole", "box", "replicated"}


def test_rules_by_name() -> None:
    model = net()
    tenuto.declare(model, {"0.*": lambda one: tenuto.shard(one, dim=0, rank=1, of=2), "*.bias": tenuto.replicated})
    placements = {spec.path: (spec.placement, spec.leaf_shape) for spec in flatten(model).specs}
    assert placements == {
        "0.weight": ("box", (12, 4)),
        "0.bias": ("box", (12,)),
        "2.weight": ("whole", (3, 6)),
        "2.bias": ("replicated", (3,)),
    }
    whole = net()
    tenuto.declare(tenuto.replicated(whole))
    assert {spec.placement for spec in flatten(whole).specs} == {"replicated"}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda model: tenuto.declare(model),
        lambda model: tenuto.declare(5),
        lambda model: tenuto.declare(tenuto.replicated(5)),
        lambda model: tenuto.declare(tenuto.per_rank(model[0].weight)),
        lambda model: tenuto.declare(model, {"nothing.*": tenuto.replicated}),
        lambda model: tenuto.declare(model, {"0.weight": lambda one: one}),
        lambda model: tenuto.declare(5, {"0.weight": tenuto.replicated}),
    ],
)
def test_what_cannot_be_declared(wrong: Callable[[Any], None]) -> None:
    with pytest.raises(UsageError):
        wrong(net())


def test_a_declared_tensor_that_is_another_now() -> None:
    model = Part()
    tenuto.declare(tenuto.shard(model.gate, dim=0, rank=0, of=2))
    model.gate.data = torch.zeros(2, 2)
    with pytest.raises(StateError, match=r"model/gate: .*\[2, 2\].*\[6, 4\]"):
        flatten({"model": model})


def test_a_meta_target_that_was_declared_gets_its_part() -> None:
    whole = torch.arange(48.0).view(12, 4)
    found = flatten({"model": {"gate": whole, "bias": torch.ones(3)}})
    with torch.device("meta"):
        model = Part()
    tenuto.declare(tenuto.fused(model.gate, sizes=(8, 4), rank=1, of=2))
    target = {"model": model}
    prepared = match_state(found.tree, None, LeafTable(found.tree, None, forms_of(found)), target)
    assert prepared.boxes is not None
    for (number, sink), box in zip(prepared.wants, prepared.boxes, strict=True):
        piece = found.sources[number] if box is None else found.sources[number][box.slices]
        sink.fill(piece.contiguous().view(-1).view(torch.uint8).numpy())
    held = model.gate
    prepared.apply()
    assert model.gate is held and torch.equal(model.gate, torch.cat([whole[4:8], whole[10:]]))
    assert torch.equal(model.bias, torch.ones(3))


def test_shards_of_what_is_no_tensor_here() -> None:
    with pytest.raises((StateError, Unserialisable), match="x: "):
        flatten({"x": _shard_of(nn.Linear(1, 1))})
    with pytest.raises(StateMismatch):
        found = flatten({"x": torch.ones(3)})
        shard = tenuto.shard(torch.zeros(2, dtype=torch.float64), whole=(3,), offsets=(0,))
        match_state(found.tree, None, found.specs, {"x": shard})


def _shard_of(value: Any) -> Any:
    shard = tenuto.shard(torch.zeros(2), whole=(3,), offsets=(0,))
    shard.value = value
    return shard


def test_parts_of_every_type_and_stride(carrier: Any) -> None:
    for kind in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64):
        base = torch.arange(48).view(6, 8).to(torch.float32).to(kind)
        local = base[:, ::2]
        boxes = [((slice(None), slice(2)), (0, 0)), ((slice(6), slice(2, 4)), (0, 4))]
        shard = tenuto.shard(local, whole=(6, 6), boxes=boxes)
        found = flatten({"x": shard})
        whole = torch.zeros(6, 6, dtype=kind)
        for spec, data in zip(found.specs, carrier.capture(found)["images"].values(), strict=True):
            part = torch.frombuffer(bytearray(data.tobytes()), dtype=kind).view(spec.shape)
            whole[:, spec.offsets[1] : spec.offsets[1] + 2] = part
        assert torch.equal(whole[:, [0, 1, 4, 5]].to(torch.complex64), local.to(torch.complex64))
        target = torch.zeros(6, 8, dtype=kind)[:, ::2]
        into = {"x": tenuto.shard(target, whole=(6, 6), boxes=boxes)}
        prepared = match_state(found.tree, None, LeafTable(found.tree, None, forms_of(found)), into)
        assert prepared.boxes is not None
        for (_, sink), box in zip(prepared.wants, prepared.boxes, strict=True):
            assert box is not None and sink.buffer is None
            sink.fill(whole[box.slices].contiguous().view(-1).view(torch.uint8).numpy())
        prepared.apply()
        assert torch.equal(target.to(torch.complex64), local.to(torch.complex64))
        assert part_view(local, shard.layout.parts[1]).shape == (6, 2)
