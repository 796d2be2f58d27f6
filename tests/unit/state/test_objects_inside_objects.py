"""What an object's own state holds of other objects comes back into those that the target has there, or is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import tenuto
from tenuto.errors import StateMismatch


class Count:
    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Whole:
    """Says its attributes as they are, as torch's schedulers do."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def test_objects_in_attributes_lists_and_dicts_are_those_of_the_target(tmp_path: Path) -> None:
    tenuto.save(
        {"o": Whole(one=Count(1), some=[Count(2), Count(3)], named={"a": (Count(4), 5)}, deep=Whole(in_it=Count(6)))},
        tmp_path,
    )
    target = Whole(one=Count(), some=[Count(), Count()], named={"a": (Count(), 0)}, deep=Whole(in_it=Count()))
    held = [target.one, *target.some, target.named["a"][0], target.deep.in_it]
    tenuto.load(tmp_path, {"o": target})
    assert [one.seen for one in held] == [1, 2, 3, 4, 6] and target.named["a"][1] == 5
    now = [target.one, *target.some, target.named["a"][0], target.deep.in_it]
    assert all(one is other for one, other in zip(held, now, strict=True))


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (Whole(), "o/one"),
        (Whole(one=None, some=[Count()]), "o/one"),
        (Whole(one={"seen": 0}, some=[Count()]), "o/one"),
        (Whole(one=Count(), some=[]), "o/some/0"),
    ],
)
def test_an_object_that_the_target_has_not_there_is_refused_by_path(tmp_path: Path, target: Whole, path: str) -> None:
    tenuto.save({"o": Whole(one=Count(1), some=[Count(2)])}, tmp_path)
    before = dict(target.__dict__)
    with pytest.raises(StateMismatch, match=rf"{path}: an object's state \(.*Count\) in the checkpoint") as caught:
        tenuto.load(tmp_path, {"o": target})
    assert "that would take it in the target" in caught.value.message and target.__dict__ == before


def test_no_sibling_lends_its_objects(tmp_path: Path) -> None:
    tenuto.save({"o": Whole(some=[{"c": Count(1)}, {"c": Count(2)}], named={"a": {"c": Count(3)}})}, tmp_path)
    with pytest.raises(StateMismatch) as caught:
        tenuto.load(tmp_path, {"o": Whole(some=[{"c": Count()}], named={"b": {"c": Count()}})})
    assert "o/some/1/c: " in caught.value.message and "o/named/a/c: " in caught.value.message


def test_modules_and_optimizers_inside_an_objects_state(tmp_path: Path) -> None:
    def made(value: float) -> Whole:
        module = nn.Linear(2, 2)
        nn.init.constant_(module.weight, value)
        return Whole(teacher=module, seen=value)

    tenuto.save({"o": made(3.0)}, tmp_path)
    target = made(0.0)
    held = target.teacher
    tenuto.load(tmp_path, {"o": target})
    assert target.teacher is held and (held.weight == 3).all() and target.seen == 3.0
    with pytest.raises(StateMismatch, match="o/teacher: "):
        tenuto.load(tmp_path, {"o": Whole()})


class Warm(lr_scheduler.LRScheduler):
    """Warms up, and hands over to the scheduler that it holds."""

    def __init__(self, optimizer: Any, steps: int, after: Any) -> None:
        self.steps, self.after = steps, after
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        if self.last_epoch > self.steps:
            self.after.step()
            return self.after.get_last_lr()
        return [rate * (1 + self.last_epoch / self.steps) for rate in self.base_lrs]


def test_a_scheduler_that_holds_its_successor_goes_on(tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        after = lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"model": model, "optimizer": optimizer, "scheduler": Warm(optimizer, 3, after)}

    def train(state: dict[str, Any], where: Path, until: int) -> list[float]:
        rates = []
        with tenuto.Checkpointer(where, state, save=tenuto.every(steps=1)) as ckpt:
            for _ in ckpt.steps(until):
                state["optimizer"].step()
                state["scheduler"].step()
                rates.append(state["optimizer"].param_groups[0]["lr"])
        return rates

    whole = train(made(), tmp_path / "whole", 12)
    for before in (2, 6):
        train(made(), tmp_path / str(before), before)
        again = made()
        assert train(again, tmp_path / str(before), 12) == whole[before:]
        assert isinstance(again["scheduler"].after, lr_scheduler.CosineAnnealingLR)


class Step:
    """A rule of LambdaLR that is an object and keeps another."""

    def __init__(self, count: Any) -> None:
        self.count = count

    def __call__(self, epoch: int) -> float:
        return 1.0 / (1 + self.count.seen)


def test_objects_that_rules_of_schedulers_hold(tmp_path: Path) -> None:
    def made(seen: int) -> Any:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        inner = lr_scheduler.LambdaLR(optimizer, Step(Count(seen)))
        other = lr_scheduler.ExponentialLR(optimizer, 0.5)
        return lr_scheduler.SequentialLR(optimizer, [inner, other], milestones=[2])

    tenuto.save({"s": made(4)}, tmp_path)
    target = made(0)
    held = target._schedulers[0].lr_lambdas[0].count
    tenuto.load(tmp_path, {"s": target})
    assert target._schedulers[0].lr_lambdas[0].count is held and held.seen == 4


@dataclass
class Best:
    value: float


def test_no_stand_in_for_a_class_is_handed_to_an_object(tmp_path: Path) -> None:
    tenuto.save({"o": Whole(best=[Best(1.0)])}, tmp_path)
    target = Whole(best=[Best(0.0)])
    tenuto.load(tmp_path, {"o": target})
    assert target.best == [Best(1.0)]
    with pytest.raises(StateMismatch, match=r"o/best/0: a .*Best in the checkpoint, no class for it: tenuto.register"):
        tenuto.load(tmp_path, {"o": Whole(best=[])})


def test_a_number_in_an_objects_place_is_refused(tmp_path: Path) -> None:
    tenuto.save({"c": Count(1)}, tmp_path)
    target: dict[str, Any] = {"c": 5}
    with pytest.raises(StateMismatch, match=r"c: an object's state \(.*Count\) in the checkpoint, the value 5"):
        tenuto.load(tmp_path, target)
    assert target == {"c": 5}
    assert tenuto.load(tmp_path).state == {"c": {"seen": 1}}
