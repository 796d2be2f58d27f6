"""Modules that load in their own way: strict all the same, and the report says what became of each entry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

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
