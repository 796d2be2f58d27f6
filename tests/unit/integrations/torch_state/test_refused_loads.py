"""A load that is refused has changed nothing, whoever refuses it; what a load fills, autograd knows."""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import tenuto
from tenuto.errors import StateMismatch


class Metric:
    """Loads what it has in pieces, and refuses in the middle where it is told to."""

    def __init__(self, value: float, *, refuses: bool = False) -> None:
        self.value = value
        self.seen = [value]
        self.table = np.full(3, value)
        self.total = torch.full((2,), value)
        self.by_name = {"a": {"deep": value}}
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "seen": self.seen, "table": self.table, "total": self.total, "more": self.by_name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.seen.extend(state["seen"])
        self.table[:] = state["table"]
        self.total.copy_(state["total"])
        self.by_name["a"]["deep"] = state["more"]["a"]["deep"]
        self.fresh = True
        if self.refuses:
            raise KeyError("a field of an older version")
        self.seen = list(state["seen"])


class Stubborn(nn.Module):
    """A module with a load of its own, which refuses behind its tensors."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        nn.init.constant_(self.inner.weight, value)
        self.register_buffer("many", torch.full((2,), value))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.many.resize_(5)
        super()._load_from_state_dict(state, prefix, *rest)
        self.inner.load_state_dict({key[len(prefix + "inner.") :]: one for key, one in state.items() if "inner" in key})
        raise RuntimeError("not of this version")


class Hooked(torch.optim.SGD):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        raise ValueError("not of this version")


@dataclass
class Setting:
    rate: float
    items: list[int]


def everything(value: float, refusing: str) -> dict[str, Any]:
    """A target of every kind of thing, of which `refusing` refuses."""
    torch.manual_seed(int(value))
    model = nn.Linear(3, 2)
    own = parametrizations.weight_norm(nn.Linear(2, 2))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    adam.step()
    state: dict[str, Any] = {
        "first": Metric(value),
        "model": model,
        "own": own,
        "adam": adam,
        "array": np.full(4, value),
        "plain": {"a": [value, {"b": value}], "s": {value}, "q": collections.deque([value])},
        "setting": Setting(value, [int(value)]),
        "generator": torch.Generator().manual_seed(int(value)),
        "dice": random.Random(value),
        "bits": np.random.default_rng(int(value)),
        "replicated": tenuto.replicated(torch.full((2,), value)),
        "metric": Metric(value, refuses=refusing == "metric"),
        "sparse": torch.eye(3).to_sparse() * value,
    }
    if refusing == "module":
        state["stubborn"] = Stubborn(value)
    if refusing == "optimizer":
        weight = nn.Linear(2, 2)
        state["other"] = weight
        state["hooked"] = Hooked(weight.parameters(), lr=value, momentum=0.9)
    if refusing == "registered":
        state["z"] = Odd(value)
    return state


class Odd:
    """A registered type whose plain form is not taken back."""

    def __init__(self, value: float) -> None:
        self.value = value


def refuse(plain: Any) -> Any:
    raise ValueError("not of this version")


tenuto.register(Odd, lambda one: one.value, refuse, name="test.refused.Odd")


def pictured(value: Any) -> Any:
    """Returns everything that a value holds, for comparison."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        return ("tensor", list(value.shape), dense.tolist())
    if isinstance(value, np.ndarray):
        return ("array", value.tolist())
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, dict):
        return {key: pictured(one) for key, one in value.items()}
    if isinstance(value, list | tuple | collections.deque):
        return [type(value).__name__, *map(pictured, value)]
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        return pictured(value.state_dict())
    return pictured(vars(value)) if hasattr(value, "__dict__") else value


@pytest.mark.parametrize("refusing", ["metric", "module", "optimizer", "registered"])
def test_what_anybody_refuses_has_changed_nothing(tmp_path: Path, refusing: str) -> None:
    tenuto.save(everything(3.0, refusing), tmp_path)
    target = everything(1.0, refusing)
    before = copy.deepcopy(pictured(target))
    held = [*target["model"].parameters(), *target["own"].parameters(), target["metric"].total]
    with pytest.raises(StateMismatch) as caught:
        tenuto.load(tmp_path, target)
    assert pictured(target) == before
    assert "not put back" not in str(caught.value), caught.value
    now = [*target["model"].parameters(), *target["own"].parameters(), target["metric"].total]
    assert all(one is other for one, other in zip(held, now, strict=True))


def test_the_same_states_load_where_nobody_refuses(tmp_path: Path) -> None:
    tenuto.save(everything(3.0, ""), tmp_path)
    target = everything(1.0, "")
    tenuto.load(tmp_path, target)
    assert target["metric"].seen == [3.0] and target["array"].tolist() == [3.0] * 4 and target["setting"].rate == 3.0


def test_a_plain_layer_for_one_with_weight_norm_is_refused_whole(tmp_path: Path) -> None:
    tenuto.save({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}, tmp_path)
    target = nn.Sequential(nn.Linear(2, 2), parametrizations.weight_norm(nn.Linear(2, 2)))
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(StateMismatch, match=r"parametrizations\.weight"):
        tenuto.load(tmp_path, {"model": target})
    assert all(torch.equal(one, before[key]) for key, one in target.state_dict().items())


def test_what_is_too_large_to_be_kept_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenuto.state.restore.kept.ROOM", 3 << 10)
    tenuto.save({"model": nn.Linear(40, 40), "metric": Metric(3.0)}, tmp_path)
    with pytest.raises(StateMismatch, match=r"overwritten already, and not put back: metric, model\n  hint: |: m.*l$"):
        tenuto.load(tmp_path, {"model": nn.Linear(40, 40), "metric": Metric(1.0, refuses=True)})


def _linear(carry: Callable[[nn.Module], Any], where: Path, into: Callable[[nn.Module], Any]) -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    carry(model)
    tenuto.save({"model": carry(model)}, where)
    loss = model(torch.ones(2, 40)).sum()
    tenuto.load(where, into(model))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_backward_whose_forward_came_before_the_load_raises_as_in_torch(tmp_path: Path) -> None:
    same = lambda model: model  # noqa: E731
    _linear(same, tmp_path / "module", lambda model: {"model": model})
    tensors = lambda model: dict(model.named_parameters())  # noqa: E731
    _linear(tensors, tmp_path / "tensors", lambda model: {"model": tensors(model)})
    strided = lambda model: {"t": model[2].weight.detach().t(), "w": model[2].weight.detach()[:, ::2]}  # noqa: E731
    _linear(strided, tmp_path / "views", lambda model: {"model": strided(model)})


def test_a_backward_whose_forward_came_before_a_late_fill_raises(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    with tenuto.Checkpointer(tmp_path, {"model": model}, save=tenuto.every(steps=1)) as ckpt:
        for _ in ckpt.steps(1):
            pass
    state: dict[str, Any] = {"model": tenuto.late()}
    with tenuto.Checkpointer(tmp_path, state, save=tenuto.every(steps=1)) as ckpt:
        ckpt.restore()
        loss = model(torch.ones(2, 8)).sum()
        state["model"] = model
        ckpt.restore()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
