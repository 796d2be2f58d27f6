"""Tensors of every kind come back as they were; what has no bytes is refused by path."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tenuto
from tenuto.errors import StateError, StateMismatch, Unserialisable
from tenuto.integrations.torch.device import QUANTISED, TORCH_DTYPES, TorchBound
from tenuto.integrations.torch.tensors import TensorSink, bytes_of
from tenuto.model.leaf import DTYPES
from tenuto.state.encode.flattener import flatten
from tenuto.state.frameworks import register

KINDS = sorted({str(kind)[6:] for kind in vars(torch).values() if isinstance(kind, torch.dtype)})


def raw(tensor: torch.Tensor) -> bytes:
    return bytes_of(tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()).tobytes()


def of_bytes(kind: torch.dtype, count: int) -> torch.Tensor:
    size = torch.empty(1, dtype=kind).element_size()
    generator = torch.Generator().manual_seed(1)
    high = 2 if kind is torch.bool else 256
    return torch.randint(0, high, (count * size,), dtype=torch.uint8, generator=generator).view(kind)


def test_every_type_that_torch_has_is_known() -> None:
    assert set(KINDS) - QUANTISED <= set(DTYPES), "a new torch type: give it a row in model/dtypes.py"


@pytest.mark.parametrize("kind", sorted(set(KINDS) - QUANTISED))
def test_every_type_keeps_its_bytes(carrier: Any, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = of_bytes(TORCH_DTYPES[kind], 12)
        state = {"t": tensor, "strided": tensor[::3], "zero": tensor[:0], "scalar": tensor[1]}
        saved = carrier.save(state)
        target = {name: torch.empty_like(one) for name, one in state.items()}
        carrier.load(saved, target)
        for found in (target, carrier.load(saved)):
            for name, one in state.items():
                assert found[name].dtype is one.dtype and found[name].shape == one.shape
                size = one.element_size()
                wanted = (
                    b"".join(bytes_of(tensor)[3 * n * size : (3 * n + 1) * size].tobytes() for n in range(4))
                    if name == "strided"
                    else bytes_of(one).tobytes()
                )
                assert bytes_of(found[name]).tobytes() == wanted, name


def test_quantised_tensors_are_refused_by_path() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(Unserialisable, match=r"^a/q: a quantised"):
        flatten({"a": {"q": tensor}})


def test_views_and_special_bits(carrier: Any) -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    state = {
        "t": base.t(),
        "x": base[:1].expand(4, 6),
        "conj": base.conj(),
        "neg": base.imag.conj() if False else base.conj().imag,
        "flip": base[1:3, 2:4],
    }
    saved = carrier.save(state)
    found = carrier.load(saved)
    target = {
        "t": torch.zeros(4, 6, dtype=torch.complex64).t(),
        "x": torch.zeros(4, 6, dtype=torch.complex64),
        "conj": torch.zeros(4, 6, dtype=torch.complex64).conj(),
        "neg": torch.zeros(4, 6, dtype=torch.complex64).conj().imag,
        "flip": torch.zeros(4, 4, dtype=torch.complex64)[1:3, 1:3],
    }
    carrier.load(saved, target)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor) and torch.equal(target[name], tensor), name


def test_parameters_and_buffers_come_back_as_such(carrier: Any) -> None:
    weight = torch.nn.Parameter(torch.randn(3), requires_grad=False)
    state = {
        "p": torch.nn.Parameter(torch.randn(2)),
        "f": weight,
        "g": torch.randn(2, requires_grad=True),
        "b": torch.nn.Buffer(torch.ones(1)),
        "again": weight,
    }
    found = carrier.round_trip(state)
    assert type(found["p"]) is torch.nn.Parameter and found["p"].requires_grad and not found["f"].requires_grad
    assert (
        found["f"] is found["again"]
        and found["g"].requires_grad
        and found["g"].is_leaf
        and isinstance(found["b"], torch.nn.Buffer)
    )


def test_small_types_of_torch(carrier: Any) -> None:
    state = {
        "s": torch.Size([2, 3]),
        "d": torch.bfloat16,
        "v": torch.device("cuda", 1),
        "k": {torch.float16: 1},
        "g": torch.Generator().manual_seed(3),
    }
    wanted = state["g"].clone_state() if hasattr(state["g"], "clone_state") else state["g"]
    for into in (None, {"s": torch.Size([]), "d": None, "v": torch.device("cpu"), "k": {}, "g": torch.Generator()}):
        found = carrier.round_trip(state, into)
        assert type(found["s"]) is torch.Size and found["s"] == state["s"]
        assert found["d"] is torch.bfloat16 and found["v"] == state["v"] and found["k"] == state["k"]
        assert torch.equal(found["g"].get_state(), wanted.get_state())


def test_ties_are_ties_again(carrier: Any) -> None:
    tensor = torch.randn(4, 4)
    state = {"a": tensor, "b": [tensor, tensor.detach()], "part": tensor[1:], "t": tensor.t()}
    flattened = flatten(state)
    assert [spec.path for spec in flattened.specs] == ["a", "part", "t"] and len(flattened.reports) == 2
    found = carrier.load(carrier.capture(flattened))
    assert (
        found["b"][0] is found["a"] and torch.equal(found["part"], tensor[1:]) and torch.equal(found["t"], tensor.t())
    )
    tied = torch.zeros(4)
    with pytest.raises(StateMismatch, match="one tensor with a in the target"):
        carrier.round_trip({"a": torch.ones(4), "b": torch.zeros(4)}, {"a": tied, "b": tied})


@pytest.mark.parametrize("layout", ["coo", "uncoalesced", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors(carrier: Any, layout: str) -> None:
    dense = torch.zeros(4, 6)
    dense[0, 1], dense[2, 3], dense[3, 5] = 1.0, -2.0, float("inf")
    make = {
        "coo": lambda one: one.to_sparse().coalesce(),
        "uncoalesced": lambda one: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (4, 6)),
        "csr": lambda one: one.to_sparse_csr(),
        "csc": lambda one: one.to_sparse_csc(),
        "bsr": lambda one: one.to_sparse_bsr((2, 2)),
        "bsc": lambda one: one.to_sparse_bsc((2, 2)),
    }[layout]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor, target = make(dense), make(torch.eye(4, 6))
        saved = carrier.save({"s": tensor})
        held = {"s": target}
        carrier.load(saved, held)
        found = carrier.load(saved)["s"]
        assert held["s"] is target
        for one in (target, found):
            assert one.layout is tensor.layout and torch.equal(one.to_dense(), tensor.to_dense())
            if tensor.layout is torch.sparse_coo:
                assert one.is_coalesced() == tensor.is_coalesced() and torch.equal(one._values(), tensor._values())


class Scaled(torch.Tensor):
    """A tensor made of two others."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, tag: str = "x") -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, tag: str = "x") -> None:
        self.inner, self.scale, self.tag = data, scale, tag

    def __tensor_flatten__(self) -> Any:
        return ["inner", "scale"], {"tag": self.tag}

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return Scaled(parts["inner"], parts["scale"], context["tag"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0].inner, args[0].scale, args[0].tag)
        raise NotImplementedError(function)


class Opaque(Scaled):
    __tensor_flatten__ = None


def test_subclasses_come_back_into_their_own_class(carrier: Any) -> None:
    def make(value: int, tag: str = "x") -> Any:
        return Scaled(torch.full((3,), value, dtype=torch.int8), torch.tensor(float(value)), tag)

    saved = carrier.save({"w": make(5)})
    assert [spec.path for spec in saved["specs"]] == ["w/inner", "w/scale"]
    target = make(0)
    carrier.load(saved, {"w": target})
    assert target.inner.tolist() == [5, 5, 5] and target.scale.item() == 5.0
    found = carrier.load(saved)["w"]
    assert type(found) is Scaled and found.inner.tolist() == [5, 5, 5] and found.scale == 5 and found.tag == "x"
    with pytest.raises(StateMismatch, match="w: "):
        carrier.load(saved, {"w": torch.zeros(3)})
    with pytest.raises(StateMismatch, match="context"):
        carrier.load(saved, {"w": make(0, "y")})


def test_a_subclass_that_is_not_loaded_is_its_parts_and_one_that_refuses_them_is_named(
    carrier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = Scaled(torch.ones(3, dtype=torch.int8), torch.tensor(2.0))
    monkeypatch.setattr(Scaled, "__module__", "gone")
    saved = carrier.save({"w": value})
    monkeypatch.undo()
    found = carrier.load(saved)["w"]
    assert found.type_name == "gone.Scaled" and found.value["inner"].tolist() == [1, 1, 1]
    monkeypatch.setattr(Scaled, "__tensor_unflatten__", staticmethod(lambda parts, *_: parts["inner"]))
    with pytest.raises(StateMismatch, match=r"w: a .*Scaled could not be made of what was saved"):
        carrier.round_trip({"w": value})


def test_what_has_no_bytes_is_refused_by_path(tmp_path: Path) -> None:
    for value in (
        torch.empty(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        torch.nn.UninitializedParameter(),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(Unserialisable, match=r"^x/0: "):
                flatten({"x": [value]})
            with pytest.raises(Unserialisable, match=r"^x/0: "):
                tenuto.save({"x": [value]}, tmp_path)


class Image(torch.Tensor):
    """A class of the program's own, whose values are the tensor's."""


class Weight(nn.Parameter):
    pass


def test_a_plain_subclass_comes_back_as_itself_or_is_told_by_path(tmp_path: Path) -> None:
    state = {"i": torch.arange(3.0).as_subclass(Image), "t": torch.ones(2), "w": Weight(torch.ones(2))}
    tenuto.save(state, tmp_path)
    target = {"i": torch.zeros(3).as_subclass(Image), "t": torch.zeros(2), "w": Weight(torch.zeros(2))}
    held = target["i"]
    tenuto.load(tmp_path, target)
    assert target["i"] is held and held.tolist() == [0, 1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error", tenuto.TenutoWarning)
        found = tenuto.load(tmp_path).state
    assert [type(one) for one in found.values()] == [Image, torch.Tensor, Weight] and found["w"].requires_grad
    assert found["i"].tolist() == [0, 1, 2] and isinstance(found["w"], nn.Parameter)


def test_a_plain_subclass_that_is_not_loaded_is_a_plain_tensor_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "__module__", "gone")
    tenuto.save({"a": [torch.arange(3.0).as_subclass(Image)]}, tmp_path)
    monkeypatch.undo()
    with pytest.warns(tenuto.TenutoWarning, match=r"a/0 \(a gone.Image\): loaded as plain tensors"):
        found = tenuto.load(tmp_path).state["a"][0]
    assert type(found) is torch.Tensor and found.tolist() == [0, 1, 2]


def test_a_registered_type_may_hold_tensors(carrier: Any) -> None:
    class Moving:
        def __init__(self, mean: torch.Tensor) -> None:
            self.mean = mean

    register(Moving, lambda one: {"mean": one.mean}, lambda plain: Moving(**plain), name="test.Moving")
    assert torch.equal(carrier.round_trip({"m": Moving(torch.ones(2))})["m"].mean, torch.ones(2))


def test_arrays_and_tensors_fill_each_other(carrier: Any) -> None:
    target = {"a": torch.zeros(3), "t": np.zeros(3, np.float32)}
    carrier.round_trip({"a": np.arange(3, dtype=np.float32), "t": torch.arange(3.0)}, target)
    assert target["a"].tolist() == target["t"].tolist() == [0, 1, 2]


def test_a_part_of_a_leaf_can_be_copied_by_itself() -> None:
    tensor = torch.arange(100, dtype=torch.float32)
    flattened = flatten({"t": tensor})
    view = np.zeros(400, np.uint8)
    bound = TorchBound(flattened.specs, [view])
    assert (
        bound.splits(tensor)
        and not bound.splits(tensor[::2])
        and not bound.splits(torch.ones(2, dtype=torch.cfloat).conj())
    )
    for start in range(0, 400, 80):
        bound.copy_part(tensor, 0, start, start + 80)
    assert view.tobytes() == tensor.numpy().tobytes()


def test_a_sink_that_is_not_contiguous_is_filled_by_torch() -> None:
    target = torch.zeros(3, 2).t()
    sink = TensorSink(target)
    assert sink.buffer is None
    sink.fill(np.arange(6, dtype=np.float32).view(np.uint8))
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_unknown_device_is_an_error_of_the_state(carrier: Any) -> None:
    saved = carrier.save({"t": torch.ones(2)})
    with pytest.raises((StateError, RuntimeError)):
        carrier.load(saved, device="nonsense")
