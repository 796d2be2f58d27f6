"""Optimizers whose target is another one than the saved: other shapes, wrappers, devices, tensors of other tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import tenuto
from tenuto.errors import StateMismatch
from tenuto.integrations.torch.optimizers import restore
from tenuto.state.restore.restorer import Restorer


def state_of(head: int, kind: Any = torch.optim.AdamW, *, hooked: bool = False, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, head))
    optimizer = kind(model.parameters(), lr=0.01)
    if hooked:
        optimizer.register_load_state_dict_post_hook(lambda optimizer: None)
    return {"model": model, "optimizer": optimizer}


def train(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.ones(3, 4)).square().sum().backward()
    state["optimizer"].step()


# -- parameters of another shape ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adafactor])
def test_state_of_a_parameter_that_has_another_shape_is_left_alone(carrier: Any, kind: Any, hooked: bool) -> None:
    saved = state_of(2, kind)
    train(saved)
    carried, target = carrier.save(saved), state_of(10, kind, hooked=hooked, seed=1)
    carrier.load(carried, target, strict=False)
    told = [one.partition(":")[0] for one in carrier.report.mismatched]
    assert told == ["model/1.weight", "model/1.bias", "optimizer/state/model/1.weight", "optimizer/state/model/1.bias"]
    ours, theirs = target["optimizer"].state, saved["optimizer"].state
    for one, other in zip(target["model"][0].parameters(), saved["model"][0].parameters(), strict=True):
        assert ours[one].keys() == theirs[other].keys()
        assert all(
            torch.equal(torch.as_tensor(ours[one][key]), torch.as_tensor(theirs[other][key])) for key in ours[one]
        )
    train(target)
    train(target)


def test_state_of_another_shape_is_named_where_only_the_weights_are_left_out(carrier: Any) -> None:
    saved = state_of(2)
    train(saved)
    carried, target = carrier.save(saved), state_of(10)
    with pytest.raises(StateMismatch, match=r"optimizer/state/model/1.weight: .* \[2, 8\] .* \[10, 8\]"):
        carrier.load(carried, target, exclude="model/1.*")
    carrier.load(carried, target, exclude=["model/1.*", "optimizer/state/model/1.*"])
    assert len(target["optimizer"].state) == 2
    train(target)


class Turned(nn.Linear):
    """Saves its weight transposed, and takes it so."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].t().contiguous()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t()
        super()._load_from_state_dict(state, prefix, *rest)


def test_state_comes_back_whatever_shape_the_module_saves_its_weight_in(carrier: Any) -> None:
    def build() -> dict[str, Any]:
        model = Turned(3, 2)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    saved, target = build(), build()
    for parameter in saved["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    saved["optimizer"].step()
    carrier.round_trip(saved, target)
    assert target["optimizer"].state[target["model"].weight]["exp_avg"].shape == (2, 3)


# -- wrappers -------------------------------------------------------------------------------------------------------


class Delegating(Optimizer):
    """As trainers wrap an optimizer: a subclass that is never initialised."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.inner.defaults)  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def delegating(parameters: Any, lr: float) -> Delegating:
    return Delegating(torch.optim.AdamW(parameters, lr=lr))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    ours, theirs = one["optimizer"].state_dict(), other["optimizer"].state_dict()
    pairs = zip(one["model"].parameters(), other["model"].parameters(), strict=True)
    return ours["param_groups"] == theirs["param_groups"] and all(torch.equal(a, b) for a, b in pairs) and all(
        torch.equal(value, theirs["state"][number][key])
        for number, held in ours["state"].items() for key, value in held.items()
    )  # fmt: skip


def test_a_wrapper_that_is_never_initialised_goes_on_bit_for_bit(carrier: Any) -> None:
    saved, target = state_of(2, delegating), state_of(2, delegating, seed=1)
    train(saved)
    train(saved)
    carrier.round_trip(saved, target)
    assert len(target["optimizer"].state) == 4 and same(saved, target)
    train(saved)
    train(target)
    assert same(saved, target)


@pytest.mark.parametrize("capture", ["eager", "fenced"])
def test_a_wrapper_in_the_state_of_a_checkpointer(tmp_path: Any, capture: Any) -> None:
    saved, target = state_of(2, delegating), state_of(2, delegating, seed=1)
    with tenuto.Checkpointer(tmp_path, saved, save=tenuto.every(steps=1), capture=capture) as ckpt:
        for _ in ckpt.steps(3):
            train(saved)
    with tenuto.Checkpointer(tmp_path, target) as ckpt:
        assert ckpt.restore().checkpoint.step == 3
    assert same(saved, target)


# -- devices --------------------------------------------------------------------------------------------------------


class Listed(Optimizer):
    """Keeps lists and dictionaries of tensors beside each parameter."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "capturable": False})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one] = {"step": torch.ones(()), "list": [torch.ones(2)], "dict": {"a": [torch.ones(3)]},
                                   "host": [torch.ones(4)], "numbers": [1, 2]}  # fmt: skip


def moved(node: Any, name: str) -> None:
    """Says of the leaves below `name` that they lay on a device."""
    if isinstance(node, dict):
        for key, child in node.get("i", []) if node.get("!") in ("dict", "bypath") else []:
            _everywhere(child) if key == name else moved(child, name)
        moved(node.get("v"), name)


def _everywhere(node: Any) -> None:
    if isinstance(node, dict) and node.get("!") == "leaf":
        node["device"] = "cuda"
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _everywhere(child)


@pytest.mark.parametrize("saved_on", [True, False])
def test_state_in_lists_lies_beside_its_parameter_and_step_counts_by_the_options_that_come_back(
    carrier: Any, monkeypatch: Any, saved_on: bool
) -> None:
    saved, target = state_of(2, Listed), state_of(2, Listed, seed=1)
    train(saved)
    saved["optimizer"].param_groups[0]["capturable"] = saved_on
    target["optimizer"].param_groups[0]["capturable"] = not saved_on
    carried = carrier.save(saved)
    for name in ("list", "dict"):
        moved(carried["tree"], name)
    monkeypatch.setattr(restore, "device_after", lambda parameter, restorer: torch.device("meta"))
    monkeypatch.setattr(Restorer, "device_at", lambda self, path: "cuda")

    def devices(**chosen: Any) -> list[str]:
        carrier.load(carried, target, **chosen)
        held = target["optimizer"].state[target["model"][0].weight]
        return [one.device.type for one in (held["list"][0], held["dict"]["a"][0], held["host"][0], held["step"])]

    by_option = {True: "meta", False: "cpu"}
    target["optimizer"].state.clear()
    assert devices(exclude="optimizer/param_groups") == ["meta", "meta", "cpu", by_option[not saved_on]]
    target["optimizer"].state.clear()
    assert devices() == ["meta", "meta", "cpu", by_option[saved_on]]


# -- tensors of other tensors ---------------------------------------------------------------------------------------


class Scaled(torch.Tensor):
    """A tensor made of two others."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.inner, self.scale = data, scale

    def __tensor_flatten__(self) -> Any:
        return ["inner", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return Scaled(parts["inner"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0].inner, args[0].scale)
        raise NotImplementedError(function)


class Eight(Optimizer):
    """Keeps its average in eight bits."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if not self.state[one]:
                    inner = torch.zeros(one.shape, dtype=torch.int8)
                    self.state[one] = {"step": torch.zeros(()), "average": Scaled(inner, torch.zeros(()))}
                self.state[one]["average"].inner += 1
                self.state[one]["average"].scale += 2
                self.state[one]["step"] += 1


class Eighth(Eight):
    """Loads in a way of its own."""

    def load_state_dict(self, state: Any) -> None:
        for number, parameter in enumerate(one for group in self.param_groups for one in group["params"]):
            self.state[parameter] = state["state"].get(number, {})


@pytest.mark.parametrize("kind", [Eight, Eighth])
def test_state_made_of_other_tensors_is_filled_where_there_is_some(carrier: Any, kind: Any) -> None:
    saved, target = state_of(2, kind), state_of(2, kind, seed=1)
    train(saved)
    train(saved)
    train(target)
    parameter = target["model"][0].weight
    held = target["optimizer"].state[parameter]["average"]
    carrier.round_trip(saved, target)
    entry = target["optimizer"].state[parameter]
    assert entry["average"] is held and (held.inner == 2).all() and held.scale.item() == 4 and entry["step"] == 2
    train(target)


@pytest.mark.parametrize("kind", [Eight, Eighth])
def test_state_made_of_other_tensors_is_made_anew_where_there_is_none(carrier: Any, kind: Any) -> None:
    saved, target = state_of(2, kind), state_of(2, kind, seed=1)
    train(saved)
    saved["optimizer"].state[saved["model"][1].weight]["nested"] = [Scaled(torch.ones(2), torch.ones(()))]
    carrier.round_trip(saved, target)
    entry = target["optimizer"].state[target["model"][0].weight]
    assert type(entry["average"]) is Scaled and (entry["average"].inner == 1).all() and entry["average"].scale == 2
    assert type(target["optimizer"].state[target["model"][1].weight]["nested"][0]) is Scaled
    train(target)
    assert (entry["average"].inner == 2).all()


@pytest.mark.parametrize("kind", [Eight, Eighth])
def test_state_of_a_class_that_is_not_loaded_is_a_mismatch_where_there_is_none(
    carrier: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, target = state_of(2, kind), state_of(2, kind, seed=1)
    train(saved)
    monkeypatch.setattr(Scaled, "__module__", "gone")
    carried = carrier.save(saved)
    monkeypatch.undo()
    with pytest.raises(StateMismatch, match=r"optimizer/state/model/0.weight/average: .*gone.* make its state first"):
        carrier.load(carried, target)
    carrier.load(carried, target, strict=False)
    assert not any(target["optimizer"].state.values()) and len(carrier.report.mismatched) == 4
    train(target)
