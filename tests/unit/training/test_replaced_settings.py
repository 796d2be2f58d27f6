"""What a resume puts in the place of what the script gives to its optimizers, in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tenuto
from support.said import lines_said
from tenuto import every

Schedule = Callable[[Any], Any]


def trained(where: Path, make: Callable[[Any], Any], schedule: Schedule | None = None, steps: int = 3) -> list[str]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = make(model)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if schedule is not None:
        state["schedule"] = schedule(optimizer)
    with lines_said() as lines, tenuto.Checkpointer(where, state, save=every(steps=1)) as ckpt:
        for _ in ckpt.steps(steps):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            if schedule is not None:
                plateau = isinstance(state["schedule"], torch.optim.lr_scheduler.ReduceLROnPlateau)
                state["schedule"].step(*([1.0] if plateau else []))
    return [line for line in lines if "this script's optimizer" in line]


def adam(**more: Any) -> Callable[[Any], Any]:
    return lambda model: torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **more})


STEP: Schedule = lambda one: torch.optim.lr_scheduler.StepLR(one, 1)  # noqa: E731
CYCLE: Schedule = lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=9)  # noqa: E731
PLATEAU: Schedule = lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=0)  # noqa: E731
CHANGED = [
    ({"lr": 3e-4}, "lr 0.001 replaces 0.0003"),
    ({"weight_decay": 0.5}, "weight_decay 0.01 replaces 0.5"),
    ({"betas": (0.8, 0.9)}, "betas (0.9, 0.999) replaces (0.8, 0.9)"),
    ({"lr": 3e-4, "eps": 1e-6}, "lr 0.001 replaces 0.0003, eps 1e-08 replaces 1e-06"),
]


@pytest.mark.parametrize(("more", "said"), CHANGED)
def test_what_the_script_gives_otherwise_is_told_once(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    assert not trained(tmp_path, adam())
    (line,) = trained(tmp_path, adam(**more), steps=5)
    assert said in line and "behind the restore" in line


@pytest.mark.parametrize("schedule", [None, STEP, CYCLE, PLATEAU])
def test_nothing_is_told_of_what_a_schedule_has_changed(tmp_path: Path, schedule: Schedule | None) -> None:
    trained(tmp_path, adam(), schedule)
    assert not trained(tmp_path, adam(), schedule, steps=5)


def test_the_rate_that_a_schedule_begins_with_is_the_scripts(tmp_path: Path) -> None:
    trained(tmp_path, adam(), STEP)
    (line,) = trained(tmp_path, adam(lr=3e-4), STEP, steps=5)
    assert "lr 0.001 replaces 0.0003" in line


def test_the_line_says_how_to_keep_ones_own(tmp_path: Path) -> None:
    trained(tmp_path, adam())
    model = torch.nn.Linear(3, 1)
    optimizer = adam(lr=3e-4)(model)
    with tenuto.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        ckpt.restore()
        optimizer.param_groups[0]["lr"] = 3e-4
        assert list(ckpt.steps(4)) == [3] and optimizer.param_groups[0]["lr"] == 3e-4
