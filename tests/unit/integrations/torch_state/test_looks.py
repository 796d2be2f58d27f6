"""A dictionary of tensors is looked at as a whole: what changes in it is seen, and nothing else costs a full look."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tenuto.errors import Unserialisable
from tenuto.state import frameworks
from tenuto.state.contract import Flattened
from tenuto.state.encode.flattener import Flattener, flatten

State = dict[str, Any]


def make() -> State:
    base = torch.arange(12.0)
    return {
        "model": {
            "a": torch.randn(2, 3),
            "b/c": torch.randn(3, 2),
            "empty": torch.empty(0),
            "parameter": nn.Parameter(torch.randn(4)),
            "low": base[:6],
            "high": base[6:],
        },
        "epoch": 1,
    }


def same(quick: Flattened, full: Flattened) -> None:
    assert quick.tree == full.tree
    assert (quick.specs, quick.fingerprint, quick.reports) == (full.specs, full.fingerprint, full.reports)
    for one, other in zip(quick.sources, full.sources, strict=True):  # the parts of a sparse tensor are views
        assert one is other or one.data_ptr() == other.data_ptr()
    assert (quick.devices, list(quick.device)) == (full.devices, list(full.device))


def put(name: str, value: Callable[[torch.Tensor], Any]) -> Callable[[State], None]:
    def change(state: State) -> None:
        state["model"][name] = value(state["model"].get(name))

    return change


def points(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    """The same tensor, with something else behind it."""

    def change(state: State) -> None:
        state["model"][name].data = value(state["model"][name].data)

    return change


def whole(value: Callable[[State], Any]) -> Callable[[State], None]:
    def change(state: State) -> None:
        state["model"] = value(state["model"])

    return change


UNCHANGED = {
    "nothing": lambda state: None,
    "other values": points("a", lambda one: one.fill_(3)),
    "another tensor": put("a", lambda one: one.clone()),
    "other memory": points("a", lambda one: one.clone()),
    "another parameter": put("parameter", lambda one: nn.Parameter(one.detach().clone())),
    "another empty one": put("empty", lambda one: torch.empty(0)),
    "an equal dictionary": whole(dict),
    "a plain value": lambda state: state.update(epoch=2.0),
}

CHANGED = {
    "shape": put("a", lambda one: torch.randn(2, 4)),
    "shape behind it": points("a", lambda one: torch.randn(2, 4)),
    "shape in the same memory": points("a", lambda one: one.view(3, 2)),
    "strides": put("a", lambda one: torch.randn(3, 2).t()),
    "strides in the same memory": points("a", lambda one: torch.as_strided(one, (2, 3), (1, 2))),
    "type": put("a", lambda one: one.double()),
    "type behind it": points("a", lambda one: one.half()),
    "type in the same memory": points("a", lambda one: one.view(torch.int32)),
    "class": put("a", nn.Parameter),
    "no parameter any more": put("parameter", lambda one: one.detach()),
    "a buffer": put("a", nn.Buffer),
    "a gradient": lambda state: state["model"]["a"].requires_grad_(),
    "none": lambda state: state["model"]["parameter"].requires_grad_(False),
    "layout": put("a", lambda one: torch.eye(3).to_sparse()),
    "tied": put("a", lambda one: torch.as_strided(torch.zeros(1), (2, 3), (0, 0))),
    "a tie": lambda state: state["model"].update(a=state["model"]["b/c"]),
    "an overlap": lambda state: state["model"].update(high=torch.as_strided(state["model"]["low"], (6,), (1,), 3)),
    "a number": put("a", lambda one: 3),
    "an array": put("a", lambda one: one.numpy()),
    "a key more": put("late", lambda one: torch.ones(2)),
    "a key less": lambda state: state["model"].pop("a"),
    "another key": lambda state: state["model"].update(z=state["model"].pop("high")),
    "another order": lambda state: state["model"].update(a=state["model"].pop("a")),
    "a key that is not a string": whole(lambda model: {**model, 3: torch.ones(1)}),
    "nothing in it": whole(lambda model: {}),
    "a list": whole(lambda model: list(model.values())),
    "a module": whole(lambda model: nn.Linear(2, 2)),
    "elsewhere": lambda state: state.update(moved=state.pop("model")),
    "once more": lambda state: state.update(again=dict(state["model"])),
    "in front": lambda state: state.update({"model": {"first": torch.ones(1)}, "second": state["model"]}),
}


@pytest.mark.parametrize("change", UNCHANGED.values(), ids=UNCHANGED)
def test_what_keeps_the_structure_costs_no_full_look(change: Callable[[State], None]) -> None:
    state = make()
    flattener = Flattener(state)
    flattener.flatten()
    change(state)
    same(flattener.flatten(), flatten(state))
    assert flattener.full_walks == 1


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_what_changes_the_structure_is_seen(change: Callable[[State], None]) -> None:
    state = make()
    flattener = Flattener(state)
    flattener.flatten()
    change(state)
    same(flattener.flatten(), flatten(state))
    assert flattener.full_walks == 2
    same(flattener.flatten(), flatten(state))
    assert flattener.full_walks == 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([*UNCHANGED.values(), *CHANGED.values()]), max_size=6))
def test_the_quick_look_is_the_full_one(changes: list[Callable[[State], None]]) -> None:
    state = make()
    flattener = Flattener(state)
    for change in changes:
        try:
            change(state)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            continue  # the changes before have left nothing that this one could change
        same(flattener.flatten(), flatten(state))


def test_an_ordered_dictionary_is_another_one() -> None:
    state = make()
    flattener = Flattener(state)
    assert flattener.flatten().tree["i"][0][1]["!"] == "dict"
    state["model"] = collections.OrderedDict(state["model"])
    quick = flattener.flatten()
    assert quick.tree["i"][0][1]["!"] == "ordereddict"
    same(quick, flatten(state))


def test_a_state_that_is_one_dictionary_of_tensors() -> None:
    state = make()["model"]
    flattener = Flattener(state)
    flattener.flatten()
    state["a"] = state["a"].clone()
    same(flattener.flatten(), flatten(state))
    assert flattener.full_walks == 1
    state["a"] = state["a"].double()
    same(flattener.flatten(), flatten(state))
    assert flattener.full_walks == 2


def test_a_conjugate_view_of_the_same_memory_is_seen() -> None:
    state = {"held": torch.randn(3, dtype=torch.complex64)}
    flattener = Flattener(state)
    flattener.flatten()
    state["held"].data = state["held"].data.conj()
    assert state["held"].is_conj()
    same(flattener.flatten(), flatten(state))
    assert flattener.full_walks == 2


def test_a_sparse_tensor_that_is_dense_now_is_seen() -> None:
    flattener = Flattener(state := {"held": torch.eye(3).to_sparse(), "more": 1})
    for held in (torch.eye(3), torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse()):
        flattener.flatten()
        state["held"] = held
        same(flattener.flatten(), flatten(state))
    assert flattener.full_walks == 4


def test_what_is_replaced_is_freed() -> None:
    state = make()
    flattener = Flattener(state)
    flattener.flatten()
    old = weakref.ref(state["model"]["a"])
    state["model"]["a"] = state["model"]["a"].clone()
    gc.collect()
    assert old() is None


def test_a_type_that_is_registered_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make()
    flattener = Flattener(state)
    flattener.flatten()
    monkeypatch.setattr(frameworks, "_registered", {})
    monkeypatch.setattr(frameworks, "_by_name", {})
    frameworks.register(nn.Parameter, lambda one: one.tolist(), torch.tensor)
    quick = flattener.flatten()
    assert dict(quick.tree["i"][0][1]["i"])["parameter"]["!"] == "tagged"
    same(quick, flatten(state))
    same(flattener.flatten(), flatten(state))


def test_what_has_no_bytes_is_refused_by_path() -> None:
    with pytest.raises(Unserialisable, match=r"^model/b~1c: a meta tensor"):
        flatten({"model": {"a": torch.ones(1), "b/c": torch.ones(1, device="meta")}})
    with pytest.raises(Unserialisable, match=r"__metadata__"):
        flatten({"__metadata__": torch.ones(1)})


def test_optimizer_state_that_is_no_tensor_any_more_is_seen() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    flattener = Flattener(state := {"model": model, "optimizer": optimizer})
    flattener.flatten()
    for change in (
        lambda: optimizer.state[model.weight].update(step=3),
        lambda: optimizer.state.update({model.weight: None}),
    ):
        change()
        same(flattener.flatten(), flatten(state))
    assert flattener.full_walks == 3
