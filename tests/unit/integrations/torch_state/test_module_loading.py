"""Modules that load in their own way: strict all the same, and the report says what became of each entry."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import tenuto
from tenuto.errors import StateMismatch


def build(layers: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    more = [nn.Linear(2, 2) for _ in range(layers - 2)]
    return nn.Sequential(nn.Linear(2, 2), parametrizations.weight_norm(nn.Linear(2, 2)), *more)


def test_what_is_missing_or_left_over_is_refused_also_where_a_part_is_asked_for(carrier: Any) -> None:
    small, large = carrier.save({"model": build(2)}), carrier.save({"model": build(3)})
    with pytest.raises(StateMismatch, match=r"model/2.weight: not in the checkpoint"):
        carrier.load(small, {"model": build(3)}, exclude="model/0.*")
    with pytest.raises(StateMismatch, match=r"model/2.weight: in the checkpoint only"):
        carrier.load(large, {"model": build(2)}, exclude="model/0.*")
    target, saved = build(3, seed=1), build(2)
    before = target[0].weight.clone()
    carrier.load(small, {"model": target}, exclude=["model/0.*", "model/2.*"])
    assert torch.equal(target[0].weight, before) and torch.equal(target[1].weight, saved[1].weight)


def test_the_report_says_what_the_module_said(carrier: Any) -> None:
    small, large, target = carrier.save({"model": build(2)}), carrier.save({"model": build(3)}), build(2, seed=1)
    carrier.load(large, {"model": target}, strict=False)
    assert carrier.report.unexpected == ("model/2.weight", "model/2.bias")
    assert "model/0.weight" in carrier.report.restored and "model/2.weight" not in carrier.report.restored
    assert torch.equal(target[1].weight, build(3)[1].weight)
    carrier.load(small, {"model": build(3)}, strict=False)
    assert carrier.report.missing == ("model/2.weight", "model/2.bias") and not carrier.report.unexpected
    carrier.load(small, {"model": build(3)}, strict=False, include="model/2.*")
    assert carrier.report.missing == ("model/2.weight", "model/2.bias")


def test_what_does_not_fit_is_told_once(carrier: Any) -> None:
    saved, target = carrier.save({"model": build(2)}), build(2)
    target[0] = nn.Linear(2, 3)
    carrier.load(saved, {"model": target}, strict=False)
    assert len(carrier.report.mismatched) == 2 and not carrier.report.missing


class Older(nn.Linear):
    """Knows the name that its weight had once."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel")
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_name_that_the_module_translates_is_restored(carrier: Any) -> None:
    saved = carrier.save({"model": {"kernel": torch.ones(2, 2), "bias": torch.ones(2)}})
    for how in ({}, {"strict": False}, {"include": "model"}):
        target = Older(2, 2)
        carrier.load(saved, {"model": target}, **how)
        assert target.weight.all() and carrier.report.restored == ("model/kernel", "model/bias"), how
        assert not carrier.report.unexpected and not carrier.report.missing


# -- a module that decides itself about the sizes of its tensors


class Growing(nn.Module):
    """Has as many entries as there were when it was saved, as torch's observers do."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(float(count)))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen.resize_(state[prefix + "seen"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


class Hooked(nn.Module):
    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(float(count)))
        self._register_load_state_dict_pre_hook(self._grow)

    def _grow(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.empty_like(state[prefix + "seen"])


class Whole(nn.Module):
    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(float(count)))

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.seen = torch.zeros_like(state["seen"])
        return super().load_state_dict(state, strict, assign)


class Around(nn.Module):
    """Grows what a module inside it has, which has no code of its own."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("seen", torch.arange(float(count)))
        self.register_load_state_dict_pre_hook(self._grow)

    def _grow(self, module: Any, state: Any, prefix: str, *rest: Any) -> None:
        self.inner.seen.resize_(state[prefix + "inner.seen"].shape)


def seen(module: nn.Module) -> list[float]:
    return next(module.buffers()).tolist()


@pytest.mark.parametrize("kind", [Growing, Hooked, Whole, Around])
def test_a_module_is_asked_about_sizes_that_differ(tmp_path: Path, kind: Any) -> None:
    tenuto.save({"model": kind(4)}, tmp_path)
    target = kind(1)
    report = tenuto.load(tmp_path, {"model": target}).report
    assert seen(target) == [0, 1, 2, 3] and not report.mismatched


@pytest.mark.parametrize("kind", [Growing, Hooked, Around])
def test_a_module_inside_others_is_asked_and_its_neighbours_are_not(tmp_path: Path, kind: Any) -> None:
    def made(count: int, width: int = 2) -> Any:
        return nn.Sequential(nn.Linear(width, 2), nn.ModuleDict({"a": nn.Sequential(kind(count))}))

    tenuto.save({"model": made(4)}, tmp_path)
    target = made(0)
    tenuto.load(tmp_path, {"model": target})
    assert seen(target[1]) == [0, 1, 2, 3]
    with pytest.raises(StateMismatch, match=r"model/0.weight: float32 \[2, 2\] in the checkpoint, float32 \[2, 3\]"):
        tenuto.load(tmp_path, {"model": made(0, width=3)})


def test_observers_of_quantised_training_come_back(tmp_path: Path) -> None:
    from torch.ao.quantization import observer

    def made() -> Any:
        return nn.Sequential(nn.Linear(2, 2), observer.PerChannelMinMaxObserver())

    saved, target = made(), made()
    saved(torch.randn(3, 2))
    tenuto.save({"model": saved}, tmp_path)
    tenuto.load(tmp_path, {"model": target})
    assert torch.equal(target[1].min_val, saved[1].min_val) and target[1].min_val.numel() == 3


class Stretching(Growing):
    """Takes the size, and then other values than those that were saved."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        self.seen += 1


class Casting(nn.Module):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((3,), 1 / 3, dtype=kind))
        self.register_buffer("other", torch.full((2,), 1.0 if kind is torch.float32 else 2.0))

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


@pytest.mark.parametrize(
    ("saved", "target", "theirs"),
    [
        (Stretching(4), Stretching(1), r"float32 \[4\] in the checkpoint, float32 \[1\]"),
        (Casting(torch.float32), Casting(torch.float16), r"float32 \[3\] in the checkpoint, float16 \[3\]"),
        (Older(3, 2), Older(2, 2), r"float32 \[2, 3\] in the checkpoint, float32 \[2, 2\]"),
    ],
)
def test_other_values_than_those_saved_are_refused_and_nothing_has_changed(
    tmp_path: Path, saved: nn.Module, target: nn.Module, theirs: str
) -> None:
    tenuto.save({"model": saved}, tmp_path)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(StateMismatch, match=theirs):
        tenuto.load(tmp_path, {"model": target})
    assert all(torch.equal(one, before[key]) for key, one in target.state_dict().items())


def test_without_strictness_what_the_module_refuses_is_left_and_the_rest_is_taken(tmp_path: Path) -> None:
    tenuto.save({"model": Casting(torch.float32)}, tmp_path)
    target = Casting(torch.float16)
    restored = tenuto.load(tmp_path, {"model": target}, strict=False)
    assert restored.left == ("model/seen: float32 [3] in the checkpoint, float16 [3] in the target",)
    assert target.other.tolist() == [1.0, 1.0] and restored.report.restored == ("model/other",)
