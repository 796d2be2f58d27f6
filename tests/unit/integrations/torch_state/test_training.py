"""Models, optimizers and what goes with them, restored into a fresh process's objects: training goes on bit for bit."""

from __future__ import annotations

import copy
import fnmatch
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

from tenuto.errors import StateError, StateMismatch, Unserialisable
from tenuto.state.encode.flattener import Flattener, flatten


def bits(state: Any) -> Any:
    """Everything a flattened state says: its tree and its bytes."""
    flattened = flatten(state)
    return flattened.tree, [
        source.detach().numpy().tobytes()
        if source.dtype is not torch.bfloat16
        else source.float().detach().numpy().tobytes()
        for source in flattened.sources
    ]


class Tied(nn.Module):
    """GPT's shape: the embedding is the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(index)))


def make(optimizer: Any = lambda p: torch.optim.AdamW(p, lr=0.01), seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Tied()
    made = optimizer(model.parameters())
    return {"model": model, "optimizer": made, "scheduler": CosineAnnealingLR(made, 20), "step": 0}


def train(state: dict[str, Any], steps: int, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        index = torch.randint(0, 7, (6,), generator=generator)

        def closure(index: torch.Tensor = index) -> torch.Tensor:
            state["optimizer"].zero_grad()
            loss = state["model"](index).square().mean()
            loss.backward()
            return loss

        state["optimizer"].step(closure)
        state["scheduler"].step()
        state["step"] += 1


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3, max_iter=2),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2])
def test_training_goes_on_bit_for_bit(carrier: Any, name: str, before: int) -> None:
    state = make(OPTIMIZERS[name])
    train(state, 3)
    saved = carrier.save(state)
    target = make(OPTIMIZERS[name], seed=1)
    train(target, before, seed=9)
    carrier.load(saved, target)
    assert bits(target) == bits(state)
    train(state, 2, seed=6)
    train(target, 2, seed=6)
    assert bits(target) == bits(state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_quick_look_equals_the_full_one(name: str) -> None:
    state = make(OPTIMIZERS[name])
    flattener = Flattener(state)
    flattener.flatten()
    for step in range(4):
        train(state, 1, seed=step)
        quick, full = flattener.flatten(), flatten(state)
        assert (quick.tree, quick.specs, quick.fingerprint, quick.reports) == (
            full.tree,
            full.specs,
            full.fingerprint,
            full.reports,
        )
        assert all(
            one is other or one.data_ptr() == other.data_ptr()
            for one, other in zip(quick.sources, full.sources, strict=True)
        )
    assert flattener.full_walks <= (6 if name == "lbfgs" else 2)


def test_optimizer_state_lies_under_the_parameters_path() -> None:
    state = make()
    train(state, 1)
    paths = [spec.path for spec in flatten(state).specs]
    assert "model/embed.weight" in paths and "model/head.weight" not in paths and "model/mask" not in paths
    assert "optimizer/state/model/embed.weight/exp_avg" in paths
    assert not any(path.startswith("optimizer/state/0") for path in paths)


def test_ties_stay_ties_and_tensors_stay_where_they_are(carrier: Any) -> None:
    state, target = make(), make(seed=1)
    train(state, 1)
    held, place = target["model"].embed.weight, target["model"].embed.weight.data_ptr()
    carrier.round_trip(state, target)
    model = target["model"]
    assert model.head.weight is model.embed.weight is held and held.data_ptr() == place
    found = carrier.round_trip(state)
    assert found["model"]["head.weight"] is found["model"]["embed.weight"]


def test_a_state_that_was_not_there_yet_is_taken_away_again(carrier: Any) -> None:
    early = make(OPTIMIZERS["momentum"])
    saved = carrier.save(early)
    target = make(OPTIMIZERS["momentum"])
    train(target, 3)
    carrier.load(saved, target)
    assert not target["optimizer"].state and target["step"] == 0 and bits(target) == bits(early)


def test_several_optimizers_groups_and_frozen_parameters(carrier: Any) -> None:
    def build(order: bool) -> dict[str, Any]:
        torch.manual_seed(int(order))
        first, second, loose = nn.Linear(3, 3), nn.Linear(3, 2), torch.zeros(2, requires_grad=True)
        first.bias.requires_grad_(False)
        groups = [
            {"params": [first.weight, second.bias], "lr": 0.1},
            {"params": [loose], "lr": 0.2, "weight_decay": 0.5},
        ]
        one = torch.optim.Adam(groups[::-1] if order else groups)
        two = torch.optim.SGD([second.weight], lr=0.3, momentum=0.9)
        return {"optimizers": [one, two], "models": {"a": first, "b": second}, "loose": loose}

    state, target = build(False), build(True)
    loss = state["models"]["b"](state["models"]["a"](torch.ones(2, 3))) + state["loose"]
    loss.sum().backward()
    for optimizer in state["optimizers"]:
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    carrier.round_trip(state, target)
    adam = target["optimizers"][0]
    assert [group["lr"] for group in adam.param_groups] == [0.2, 0.05] and adam.param_groups[0]["weight_decay"] == 0.5
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(adam.state[target["loose"]][name], state["optimizers"][0].state[state["loose"]][name])
    assert "optimizers/1/state/models/b/weight/momentum_buffer" in [spec.path for spec in flatten(state).specs]


def test_a_parameter_that_the_state_does_not_hold_is_an_error() -> None:
    state = make()
    with pytest.raises(StateError, match=r"^optimizer: group 0 of this AdamW"):
        flatten({"optimizer": state["optimizer"]})


def test_groups_that_differ_are_a_mismatch(carrier: Any) -> None:
    saved = carrier.save(make())
    target = make(lambda p: torch.optim.AdamW(list(p)[:1]))
    with pytest.raises(StateMismatch, match="optimizer/param_groups/0"):
        carrier.load(saved, target)


def test_half_precision_parameters_keep_single_precision_moments(carrier: Any) -> None:
    def build() -> dict[str, Any]:
        model = nn.Linear(3, 3).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer}

    for hooked in (False, True):
        state, target = build(), build()
        for parameter in state["model"].parameters():
            state["optimizer"].state[parameter] = {
                "master": torch.randn(parameter.shape),
                "m": torch.randn(2, dtype=torch.float64),
                "n": 3,
            }
        if hooked:
            target["optimizer"].register_load_state_dict_post_hook(lambda optimizer: None)
        carrier.round_trip(state, target)
        for ours, theirs in zip(target["model"].parameters(), state["model"].parameters(), strict=True):
            found, wanted = target["optimizer"].state[ours], state["optimizer"].state[theirs]
            assert found["master"].dtype is torch.float32 and torch.equal(found["master"], wanted["master"])
            assert found["m"].dtype is torch.float64 and torch.equal(found["m"], wanted["m"]) and found["n"] == 3


def test_optimizer_hooks_are_respected(carrier: Any) -> None:
    seen: list[str] = []
    state, target = make(), make(seed=1)
    train(state, 2)
    state["optimizer"].register_state_dict_post_hook(lambda optimizer, said: {**said, "extra": torch.ones(2)})
    target["optimizer"].register_load_state_dict_pre_hook(
        lambda optimizer, said: seen.append("pre") or {**said, "extra": seen.append(str(said["extra"].sum().item()))}
    )
    target["optimizer"].register_load_state_dict_post_hook(lambda optimizer: seen.append("post"))
    flattener = Flattener(state)
    saved = carrier.capture(flattener.flatten())
    assert flattener.flatten().tree == flatten(state).tree and flattener.full_walks == 1
    carrier.load(saved, target)
    assert seen == ["pre", "2.0", "post"]
    for ours, theirs in zip(target["model"].parameters(), state["model"].parameters(), strict=True):
        assert torch.equal(target["optimizer"].state[ours]["exp_avg"], state["optimizer"].state[theirs]["exp_avg"])


def test_wrappers_are_no_part_of_a_name(carrier: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    saved = carrier.save({"model": plain})
    names = [spec.path for spec in saved["specs"]]
    for wrap in (
        lambda one: nn.DataParallel(one),
        lambda one: torch.compile(one),
        lambda one: nn.DataParallel(torch.compile(one)),
        lambda one: nn.Sequential(checkpoint_wrapper(one[0]), torch.compile(one[1])),
    ):
        wrapped = wrap(copy.deepcopy(plain))
        for parameter in wrapped.parameters():
            nn.init.zeros_(parameter)
        assert sorted(spec.path for spec in flatten({"model": wrapped}).specs) == sorted(names)
        carrier.load(saved, {"model": wrapped})
        assert all(torch.equal(one, other) for one, other in zip(wrapped.parameters(), plain.parameters(), strict=True))


def test_a_name_that_only_looks_like_a_wrapper_stays(carrier: Any) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)
            self._orig_mod = nn.Linear(1, 1)

    assert [spec.path for spec in flatten({"m": Holder()}).specs] == [
        "m/module.weight",
        "m/module.bias",
        "m/_orig_mod.weight",
        "m/_orig_mod.bias",
    ]


class Hooked(nn.Linear):
    """Saves its weight transposed, and takes it so."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].t().contiguous()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t()
        super()._load_from_state_dict(state, prefix, *rest)


class Extra(nn.Linear):
    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_modules_that_save_in_their_own_way(carrier: Any) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(Hooked(2, 2), Extra(2, 2), nn.Linear(2, 2))
        model.append(nn.utils.spectral_norm(nn.Linear(2, 2)))
        model.append(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
        return model

    model, target = build(), build()
    model[1].kept = {"scale": torch.ones(3), "history": [1, 2.5]}
    flattener = Flattener({"m": model})
    flattener.flatten()
    model[1].kept["history"].append(3)
    flattened = flattener.flatten()
    assert flattened.tree == flatten({"m": model}).tree
    carrier.load(carrier.capture(flattened), {"m": target})
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, target.state_dict()[name]), name
    assert target[1].kept["history"] == [1, 2.5, 3] and torch.equal(target[1].kept["scale"], torch.ones(3))
    model(torch.ones(1, 2))


def test_extra_state_alone_leaves_tensors_in_place(carrier: Any) -> None:
    model, target = nn.Sequential(Extra(2, 2)), nn.Sequential(Extra(2, 2))
    model[0].kept = 5
    place = target[0].weight.data_ptr()
    carrier.round_trip({"m": model}, {"m": target})
    assert (
        target[0].kept == 5 and target[0].weight.data_ptr() == place and torch.equal(target[0].weight, model[0].weight)
    )


def test_a_module_that_refuses_is_named(carrier: Any) -> None:
    saved = carrier.save({"m": Hooked(2, 2)})
    saved["tree"]["i"][0][1]["i"][0][0] = "wrong"
    saved["specs"] = tuple(
        type(spec)(spec.path.replace("weight", "wrong"), spec.dtype, spec.shape) for spec in saved["specs"]
    )
    with pytest.raises(StateMismatch, match=r"^m: "):
        carrier.load(saved, {"m": Hooked(2, 2)})


def test_lazy_modules(carrier: Any) -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(Unserialisable, match=r"^m/0.weight"):
        flatten({"m": lazy})
    ready = nn.Sequential(nn.Linear(2, 3))
    carrier.round_trip({"m": ready}, {"m": lazy})
    assert torch.equal(lazy[0].weight, ready[0].weight)


def test_a_meta_model_is_given_memory_as_the_same_objects(carrier: Any) -> None:
    state = make()
    train(state, 2)
    with torch.device("meta"):
        model = Tied()
    model.mask = torch.ones(2)
    optimizer = torch.optim.AdamW(model.parameters())
    target = {"model": model, "optimizer": optimizer, "scheduler": CosineAnnealingLR(optimizer, 20), "step": 0}
    held = model.embed.weight
    carrier.round_trip(state, target)
    assert model.embed.weight is held is model.head.weight is optimizer.param_groups[0]["params"][0]
    assert not held.is_meta and type(held) is nn.Parameter and held.requires_grad and bits(target) == bits(state)
    train(state, 2, seed=7)
    train(target, 2, seed=7)
    assert bits(target) == bits(state)


def test_a_meta_tensor_that_nothing_fills_is_an_error_by_path(carrier: Any) -> None:
    saved = carrier.save({"model": Tied()})
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(StateError, match="model/mask: a meta tensor that no leaf"):
        carrier.load(saved, {"model": model}, strict=False)
    assert model.embed.weight.is_meta
    with pytest.raises(Unserialisable, match=r"model/embed.weight: a meta tensor"):
        flatten({"model": model})


def test_a_meta_tensor_that_something_refers_to_weakly_is_an_error_by_path(carrier: Any) -> None:
    import weakref

    with torch.device("meta"):
        target = nn.Linear(2, 2)
    watch = weakref.ref(target.weight)
    with pytest.raises(StateError, match=r"m/weight: .*weak reference"):
        carrier.round_trip({"m": nn.Linear(2, 2)}, {"m": target})
    assert watch() is target.weight


def test_average_models_scalers_and_schedulers(carrier: Any) -> None:
    def build() -> dict[str, Any]:
        state = make()
        state["ema"] = torch.optim.swa_utils.AveragedModel(state["model"])
        state["scaler"] = torch.amp.GradScaler("cpu")
        optimizer = state["optimizer"]
        state["cycle"] = OneCycleLR(optimizer, 0.1, total_steps=20)
        state["lambda"] = LambdaLR(optimizer, lambda step: 0.9**step)
        state["both"] = SequentialLR(
            optimizer, [CosineAnnealingLR(optimizer, 5), LambdaLR(optimizer, lambda s: 1.0)], [3]
        )
        return state

    state, target = build(), build()
    train(state, 3)
    state["ema"].update_parameters(state["model"])
    state["ema"].update_parameters(state["model"])
    state["scaler"].scale(torch.ones(1))
    state["scaler"].update(123.0)
    state["cycle"].step()
    state["both"].step()
    carrier.round_trip(state, target)
    assert bits(target) == bits(state) and target["scaler"].get_scale() == 123.0
    assert target["optimizer"].param_groups[0]["lr"] == state["optimizer"].param_groups[0]["lr"]


def test_a_dictionary_of_tensors_is_matched_like_a_module(carrier: Any) -> None:
    saved = carrier.save({"model": nn.Linear(2, 2)})
    entries = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    carrier.load(saved, {"model": entries})
    assert entries["weight"].any()
    with pytest.raises(StateMismatch, match="model/bias: in the checkpoint only"):
        carrier.load(saved, {"model": {"weight": torch.zeros(2, 2)}})
    model = nn.Linear(2, 2)
    carrier.round_trip({"model": entries}, {"model": model})
    assert torch.equal(model.weight, entries["weight"])


def test_one_model_at_the_root(carrier: Any) -> None:
    model, target = nn.Linear(2, 2), nn.Linear(2, 2)
    saved = carrier.save(model)
    assert [spec.path for spec in saved["specs"]] == ["weight", "bias"]
    assert carrier.load(saved, target) is target and torch.equal(model.weight, target.weight)
    with pytest.raises(StateMismatch) as caught:
        carrier.load(saved, {"model": target})
    assert caught.value.hint == "into=model"
    with torch.no_grad():
        model.weight += 1
    assert carrier.load(carrier.save({"model": model, "step": 1}), target) is target
    assert torch.equal(model.weight, target.weight)


def test_renamed_parameters_find_their_optimizer_state(carrier: Any) -> None:
    def build(name: str) -> dict[str, Any]:
        model = nn.ModuleDict({name: nn.Linear(2, 2)})
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    state, target = build("old"), build("new")
    state["model"]["old"](torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()
    carrier.round_trip(state, target, rename={"model/old": "model/new"})
    weight, saved = target["model"]["new"].weight, state["model"]["old"].weight
    assert torch.equal(weight, saved)
    assert torch.equal(target["optimizer"].state[weight]["exp_avg"], state["optimizer"].state[saved]["exp_avg"])


def test_changes_of_structure_are_seen(carrier: Any) -> None:
    state = make()
    flattener = Flattener(state)

    def check(looks: int) -> None:
        quick, full = flattener.flatten(), flatten(state)
        assert (quick.tree, quick.specs, quick.fingerprint) == (full.tree, full.specs, full.fingerprint)
        assert flattener.full_walks == looks

    def drop(module: Any, said: Any, prefix: str, metadata: Any) -> None:
        del said[f"{prefix}late"]

    check(1)
    check(1)
    train(state, 1)
    check(2)
    state["model"].embed.weight.data = state["model"].embed.weight.data.clone()
    check(2)
    state["model"].embed.weight.data = state["model"].embed.weight.data.double()
    state["optimizer"].state.clear()
    check(3)
    state["model"].embed.weight.requires_grad_(False)
    check(4)
    state["model"].head.weight = nn.Parameter(torch.ones(7, 4))
    check(5)
    state["model"].register_buffer("late", torch.ones(3))
    check(6)
    state["more"] = torch.ones(2)
    check(7)
    state["more"] = torch.ones(3)
    check(8)
    state["more"] = torch.zeros(3)
    check(8)
    state["same"] = state["more"]
    check(9)
    state["same"] = torch.zeros(3)
    check(10)
    state["optimizer"].param_groups[0]["lr"] = torch.tensor(0.5)
    check(11)
    del state["same"]
    check(12)
    state["model"].register_state_dict_post_hook(drop)
    check(13)
    state["model"] = Tied()
    with pytest.raises(StateError, match="optimizer"):
        flattener.flatten()


values = st.recursive(
    st.integers(0, 9) | st.sampled_from(["tensor", "array", "shared", "bytes"]),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.sampled_from("abcd"), below, max_size=4),
    max_leaves=10,
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(values, min_size=2, max_size=5))
def test_any_state_looked_at_again_equals_a_full_look(shapes: list[Any]) -> None:
    """One state turns into another and another: the kept flattener never tells anything that a full look would not."""
    shared = torch.ones(3)

    def filled(shape: Any) -> Any:
        if isinstance(shape, list):
            return [filled(one) for one in shape]
        if isinstance(shape, dict):
            return {key: filled(one) for key, one in shape.items()}
        kinds = {
            "tensor": lambda: torch.zeros(2),
            "array": lambda: np.ones(3),
            "shared": lambda: shared,
            "bytes": lambda: bytes(2000),
        }
        return kinds[shape]() if isinstance(shape, str) else shape

    state: dict[str, Any] = {}
    flattener = Flattener(state)
    for shape in shapes:
        for again in range(2):
            state["it"], state["n"] = filled(shape), again
            quick, full = flattener.flatten(), flatten(state)
            assert (quick.tree, quick.specs, quick.fingerprint) == (full.tree, full.specs, full.fingerprint)
            assert (quick.reports, quick.device) == (full.reports, full.device)
            assert all(type(one) is type(other) for one, other in zip(quick.sources, full.sources, strict=True))


def test_state_that_an_optimizer_replaces_is_freed() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    flattener = Flattener({"model": model, "optimizer": optimizer})
    flattener.flatten()
    entry = optimizer.state[model.weight]
    old = weakref.ref(entry["exp_avg"])
    entry["exp_avg"] = entry["exp_avg"].clone()
    gc.collect()
    assert old() is None
    flattened = flattener.flatten()
    assert any(source is entry["exp_avg"] for source in flattened.sources)
    assert flattener.full_walks == 1


def test_a_conjugate_view_behind_the_same_tensor_is_seen() -> None:
    values = torch.ones(3, dtype=torch.complex64)
    model = torch.nn.Module()
    model.register_buffer("held", torch.ones(3, dtype=torch.complex64))
    flattener = Flattener({"model": model})
    flattener.flatten()
    model.held.data = values.conj()
    assert model.held.is_conj()
    flattener.flatten()
    assert flattener.full_walks == 2


# -- a part of an optimizer -------------------------------------------------------------------------------------------


def ready(rate: float, seed: int, *, hooked: bool = False) -> dict[str, Any]:
    """Two layers that have been trained; what one seed leaves in the optimizer is nowhere what another does."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter) + seed
    optimizer.step()
    if hooked:
        optimizer.register_load_state_dict_post_hook(lambda optimizer: None)
    return {"model": model, "optimizer": optimizer}


def moments(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    optimizer = state["optimizer"]
    found = {f"{name}/{key}": value.clone() for name, parameter in state["model"].named_parameters()
             for key, value in optimizer.state[parameter].items()}  # fmt: skip
    return found | {"lr": torch.tensor(optimizer.param_groups[0]["lr"])}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(
    ("chosen", "theirs"),
    [
        ({"include": ["model/*", "optimizer/*"]}, ["*"]),
        ({"include": ["model/*", "optimizer/state/*"]}, ["*/*"]),
        ({"include": "*/exp_avg"}, ["*/exp_avg"]),
        ({"include": "*/lr"}, ["lr"]),
        ({"exclude": "optimizer/param_groups"}, ["*/*"]),
        ({"exclude": "*/lr"}, ["*/*"]),
        ({"exclude": "*/exp_avg_sq"}, ["lr", "*/step", "*/exp_avg"]),
        ({"exclude": "optimizer/state/model/0.*"}, ["lr", "1.*"]),
        ({"exclude": "optimizer"}, []),
    ],
)
def test_any_part_of_an_optimizer_may_be_left_as_it_is(
    carrier: Any, chosen: dict[str, Any], theirs: list[str], hooked: bool
) -> None:
    saved, target = ready(0.5, 1), ready(0.25, 2, hooked=hooked)
    before, wanted = moments(target), moments(saved)
    carrier.round_trip(saved, target, **chosen)
    for name, value in moments(target).items():
        comes_back = any(fnmatch.fnmatchcase(name, pattern) for pattern in theirs)
        assert torch.equal(value, (wanted if comes_back else before)[name]), name
    assert target["optimizer"].param_groups[0]["betas"] == (0.9, 0.999)
    assert ("optimizer" in carrier.report.skipped) is (not theirs)
    target["optimizer"].step()


@pytest.mark.parametrize("hooked", [False, True])
def test_state_that_is_not_restored_is_not_asked_for_and_not_lost(carrier: Any, hooked: bool) -> None:
    saved, target = ready(0.5, 1), ready(0.25, 2, hooked=hooked)
    saved["optimizer"].state.clear()
    before = moments(target)
    carrier.round_trip(saved, target, exclude="optimizer/state")
    after = moments(target)
    assert after.pop("lr") == 0.5
    assert all(torch.equal(value, before[name]) for name, value in after.items()) and len(after) == len(before) - 1
    if hooked:
        return  # torch's own load_state_dict() takes no state without a step
    carrier.round_trip(saved, target, exclude="*/exp_avg")
    assert {name.partition("/")[2] for name in moments(target)} == {"", "exp_avg"}


@pytest.mark.parametrize("hooked", [False, True])
def test_groups_that_share_no_parameter_keep_their_options(carrier: Any, hooked: bool) -> None:
    def build(names: list[str], rates: list[float]) -> dict[str, Any]:
        model = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("a", "b", "c")})
        groups = [{"params": list(model[name].parameters()), "lr": lr} for name, lr in zip(names, rates, strict=True)]
        optimizer = torch.optim.SGD(groups, momentum=rates[0])
        if hooked:
            optimizer.register_load_state_dict_post_hook(lambda optimizer: None)
        return {"model": model, "optimizer": optimizer}

    saved, target = build(["a", "b"], [0.5, 0.25]), build(["c", "b"], [0.125, 0.0625])
    with pytest.raises(StateMismatch, match="optimizer/param_groups/0"):
        carrier.round_trip(saved, target)
    carrier.round_trip(saved, target, strict=False)
    groups = target["optimizer"].param_groups
    assert [(group["lr"], group["momentum"]) for group in groups] == [(0.125, 0.125), (0.25, 0.5)]
    carrier.round_trip(saved, target, exclude="optimizer/param_groups")


class Counted:
    """Something that says its state itself, in nested dictionaries."""

    def __init__(self, value: int) -> None:
        self.state = {"count": value, "inner": {"a": np.full(2, value), "b": value}, "only": {value: value}}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("chosen", "count", "a", "b"),
    [
        ({"include": "object/*"}, 1, 1, 1),
        ({"include": "object/inner/a"}, 2, 1, 2),
        ({"exclude": "object/inner/a"}, 1, 2, 1),
        ({"exclude": ["object/inner", "object/only"]}, 1, 2, 2),
        ({"exclude": "object"}, 2, 2, 2),
    ],
)
def test_any_part_of_an_objects_state_may_be_left_as_it_is(
    carrier: Any, chosen: dict[str, Any], count: int, a: int, b: int
) -> None:
    target = {"object": Counted(2), "x": np.zeros(1)}
    carrier.round_trip({"object": Counted(1), "x": np.ones(1)}, target, **chosen)
    found = target["object"].state
    assert (found["count"], found["inner"]["a"].tolist(), found["inner"]["b"]) == (count, [a, a], b)
