"""Many leaves are matched together: what comes of it is what comes of looking at each by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tenuto.errors import StateMismatch, TenutoError
from tenuto.state.restore import entries

COUNT = 40


def saved_tensors() -> dict[str, Any]:
    return {f"w{number}": torch.full((3, 4), float(number)) for number in range(COUNT)}


def zeros() -> dict[str, Any]:
    return {f"w{number}": torch.zeros(3, 4) for number in range(COUNT)}


def tied(state: dict[str, Any]) -> None:
    state["w7"] = state["w3"]


def view_of_another(state: dict[str, Any]) -> None:
    state["w7"] = torch.zeros(4, 3).t()


def parameter(state: dict[str, Any]) -> None:
    state["w7"] = torch.nn.Parameter(state["w7"])


def other_shape(state: dict[str, Any]) -> None:
    state["w7"] = torch.zeros(4, 3)


def other_type(state: dict[str, Any]) -> None:
    state["w7"] = torch.zeros(3, 4, dtype=torch.int32)


def sparse(state: dict[str, Any]) -> None:
    state["w7"] = state["w7"].to_sparse()


def empty(state: dict[str, Any]) -> None:
    state["w7"] = torch.zeros(0, 4)


def negative_view(state: dict[str, Any]) -> None:
    state["w7"] = torch._neg_view(state["w7"].clone())


def complex_numbers(state: dict[str, Any]) -> None:
    state["w7"] = torch.full((3, 4), 2 - 1j).conj()


def meta(state: dict[str, Any]) -> None:
    state["w7"] = torch.zeros(3, 4, device="meta")


def number(state: dict[str, Any]) -> None:
    state["w7"] = 7


def array(state: dict[str, Any]) -> None:
    state["w7"] = np.ones((3, 4), np.float32)


def awkward_name(state: dict[str, Any]) -> None:
    state["a/b"] = state["w7"].clone()


def number_as_key(state: dict[str, Any]) -> None:
    state[5] = state["w7"].clone()


def gone(state: dict[str, Any]) -> None:
    del state["w7"]


def reversed_order(state: dict[str, Any]) -> None:
    held = list(state.items())[::-1]
    state.clear()
    state.update(held)


def nested(state: dict[str, Any]) -> None:
    state["w7"] = {name: value.clone() for name, value in state.items()}


def none(state: dict[str, Any]) -> None:
    """As it is."""


CHANGES = [
    none,
    tied,
    view_of_another,
    parameter,
    other_shape,
    other_type,
    sparse,
    empty,
    negative_view,
    complex_numbers,
    number,
    array,
    awkward_name,
    number_as_key,
    gone,
    reversed_order,
    nested,
]
PAIRS = [
    *((change, change) for change in CHANGES),
    *((none, change) for change in [*CHANGES[1:], meta]),
    *((change, none) for change in CHANGES[1:]),
]


def spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: spelled(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor):
        held = value.detach().to_dense().resolve_conj().resolve_neg()
        return type(value), value.layout, value.stride() if value.layout is torch.strided else None, held.tolist()
    return repr(value)


def outcome(carrier: Any, ours: Callable[..., None], theirs: Callable[..., None], strict: bool) -> Any:
    state, target = saved_tensors(), zeros()
    theirs(state)
    ours(target)
    before = {key: id(value) for key, value in target.items()}
    try:
        carrier.round_trip({"model": state}, {"model": target}, strict=strict)
    except TenutoError as error:
        return type(error), str(error), spelled(target)
    kept = [key for key, value in target.items() if before.get(key) == id(value)]
    return spelled(target), kept, carrier.report


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_together_is_as_one_by_one(
    carrier: Any, monkeypatch: pytest.MonkeyPatch, theirs: Callable[..., None], ours: Callable[..., None], strict: bool
) -> None:
    together = outcome(carrier, ours, theirs, strict)
    monkeypatch.setattr(entries, "_MANY", 10**9)
    assert together == outcome(carrier, ours, theirs, strict)


def test_many_are_filled_where_they_lie(carrier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tenuto.integrations.torch import tensors

    def alone(*_: Any) -> None:
        raise AssertionError("ordinary tensors are matched together")

    monkeypatch.setattr(tensors, "restore", alone)
    saved = carrier.save({"model": saved_tensors(), "plain": 3})
    for change in (none, reversed_order, gone):
        target = {"model": zeros(), "plain": 0}
        change(target["model"])
        held = dict(target["model"])
        carrier.load(saved, target, strict=False)
        assert target["plain"] == 3
        assert all(target["model"][name] is held[name] for name in held)
        assert all(torch.equal(held[name], one) for name, one in saved_tensors().items() if name in held)


def test_two_leaves_for_one_tensor_are_refused(carrier: Any) -> None:
    target = zeros()
    tied(target)
    with pytest.raises(StateMismatch, match="model/w7: one tensor with model/w3 in the target, two in the checkpoint"):
        carrier.round_trip({"model": saved_tensors()}, {"model": target})
