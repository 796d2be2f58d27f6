"""capture="fenced" and torch.compile: a compiled step has no hook to wait at, so there nothing is fenced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from support.fenced_training import HeldCopy, Model, Told, assert_images_are_right, holding, loss_of, train
from support.thinning import thinned
from tenuto.engine.fence import fence as image_fence
from tenuto.events import Warned
from tenuto.integrations.torch import fence
from tenuto.state import update_barrier

FIRST = 5
"""The step that is compiled; the save before it is of the same number, and is fenced."""

pytestmark = pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    assert not update_barrier._barriers, "a fence outlived its Checkpointer"
    fence.steps.compiled.ran = False


@pytest.fixture
def held_copy() -> Iterator[HeldCopy]:
    with holding() as held:
        yield held


Compile = Callable[[torch.optim.Optimizer], Callable[[], object]]
COMPILED: dict[str, Compile] = {
    "eager": lambda one: torch.compile(one.step, backend="eager"),
    "aot_eager": lambda one: torch.compile(one.step, backend="aot_eager"),
    "in a function": lambda one: torch.compile(lambda: one.step(), backend="aot_eager"),
}


def compiled_later(place: Path, held_copy: HeldCopy, compiled: Compile) -> tuple[list[int], Told]:
    """A training whose steps are compiled from `FIRST` on. The copy of the save before is held until an update waits
    for it, or has passed by. The steps that are committed, each of which is right."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    step_fast, pass_by = compiled(optimizer), image_fence.Fence.before_update

    def passing(self: image_fence.Fence) -> None:
        if held_copy.reached.is_set():
            held_copy.let_go()
        pass_by(self)

    def body(step: int) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        if step == FIRST:
            assert held_copy.reached.wait(60)
        step_fast() if step >= FIRST else optimizer.step()
        held_copy.let_go()
        if step == FIRST - 1:
            held_copy.hold()

    with mock.patch.object(image_fence.Fence, "before_update", passing):
        told = train(place, state, body, steps=9)
    assert told.late[FIRST], "the save before the first compiled step is fenced"
    return assert_images_are_right(place, state, told), told


def said(told: Told) -> list[str]:
    return [event.message for event in told.events if isinstance(event, Warned) and "torch.compile" in event.message]


@pytest.mark.parametrize("compiled", thinned(COMPILED.values(), 3), ids=COMPILED.keys())
def test_a_compiled_step_is_eager_and_it_says_so_and_the_first_waits_before_it_runs(
    tmp_path: Path, held_copy: HeldCopy, compiled: Compile
) -> None:
    steps, told = compiled_later(tmp_path, held_copy, compiled)
    assert steps == list(range(1, 10)) and not told.failed and not told.demoted
    assert not any(told.late.get(step) for step in (6, 7, 8))
    assert len(said(told)) == 1


def test_a_compiled_step_that_does_not_wait_tears_and_is_not_committed(
    tmp_path: Path, held_copy: HeldCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one would that was traced elsewhere."""
    monkeypatch.setattr(fence, "_before_compiled", lambda: None)
    steps, told = compiled_later(tmp_path, held_copy, COMPILED["aot_eager"])
    assert steps == [1, 2, 3, 4, 6, 7, 8, 9] and set(told.failed) == set(told.torn) == {FIRST}
    assert not any(told.late.get(step) for step in (6, 7, 8))
    assert len(said(told)) == 1


def test_a_step_that_was_compiled_before_there_was_a_fence_is_eager(tmp_path: Path, held_copy: HeldCopy) -> None:
    """The hook is new to it then, so it is compiled anew."""

    def compiled(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        step_fast = torch.compile(optimizer.step, backend="eager")
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = torch.zeros_like(one)
        for _ in range(2):
            step_fast()
        return step_fast

    steps, told = compiled_later(tmp_path, held_copy, compiled)
    assert steps == list(range(1, 10)) and not told.failed and not told.demoted
    assert not any(told.late.get(step) for step in (6, 7, 8))
