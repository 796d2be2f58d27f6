"""Signals that come where a loop is between two steps: nothing that was trained is lost, and nothing passed over."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - its generators are then among what a signal finds untouched

import holdfast
from holdfast import on
from holdfast.guard import exitstatus
from holdfast.guard.preempted import Preempted
from holdfast.policy.saving import Moment, SaveHistory, SavePolicy
from tiny_training import state, steps_of, train


@pytest.fixture(autouse=True)
def _leaving_does_not_end_the_test_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exitstatus._ending, "code", 0)


def ask() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


class Batches(list[int]):
    """Asks this process to leave while batch `at` is awaited."""

    at = -1

    def __iter__(self) -> Iterator[int]:
        for number in range(len(self)):
            if number == self.at:
                ask()
            yield number


class Stream:
    """Batches without a length, from where its own state says. Asks to leave when it is at its end, where `asks`."""

    def __init__(self, *, asks: bool = False) -> None:
        self.next = 0
        self.asks = asks

    def __iter__(self) -> Iterator[int]:
        while self.next < 4:
            self.next += 1
            yield self.next - 1
        self.next = 0
        if self.asks:
            ask()

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Asking(SavePolicy):
    """Asks this process to leave when it is asked about step `at`, too late for that to be noticed there."""

    def __init__(self, at: int) -> None:
        self.at = at

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        if now.step == self.at and now.signal is None:
            ask()
        return None


Seen = list[tuple[int, int]]


def epochs(
    place: Path, data: Any, *, save: SavePolicy | None = None, after: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], Seen]:
    """Two epochs, and what was trained on; `after` runs where an evaluation would."""
    one, seen = state(), Seen()
    try:
        with holdfast.Checkpointer(place, one, data=data, save=save or on.signal()) as ckpt:
            for epoch in ckpt.epochs(2):
                for batch in ckpt.batches:
                    train(one, batch)
                    seen.append((epoch, batch))
                after()
    except Preempted:
        pass
    return one, seen


def everything(batches: int) -> Seen:
    return [(epoch, batch) for epoch in range(2) for batch in range(batches)]


@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_signal_while_a_batch_is_awaited_is_acted_upon_after_the_step_with_it(place: Path, at: int) -> None:
    data = Batches(range(6))
    data.at = at
    one, seen = epochs(place, data)
    assert seen == everything(6)[: at + 1]
    assert steps_of(place) == [at + 1] and one["n"] == at + 1
    resumed, rest = epochs(place, Batches(range(6)))
    assert seen + rest == everything(6) and resumed["n"] == 12


def test_a_signal_while_the_end_of_the_data_is_awaited_saves_the_last_step(place: Path) -> None:
    one, seen = epochs(place, Stream(asks=True))
    assert seen == everything(4)[:4]
    assert steps_of(place) == [4] and holdfast.load(place).state["n"] == one["n"] == 4


def test_a_signal_in_the_evaluation_after_data_without_a_length_saves_the_last_step(place: Path) -> None:
    _, seen = epochs(place, Stream(), after=ask)
    assert seen == everything(4)[:4]
    assert steps_of(place) == [4] and holdfast.load(place).state["n"] == 4


def test_a_signal_that_comes_while_a_step_is_completed_awaits_no_other_batch(place: Path) -> None:
    data = Batches(range(6))
    _, seen = epochs(place, data, save=Asking(3) | on.signal())
    assert seen == everything(6)[:3]
    assert steps_of(place) == [3] and holdfast.load(place).state["n"] == 3


def test_one_that_comes_while_a_counted_step_is_completed_saves_that_one(place: Path) -> None:
    one = state()
    with (
        pytest.raises(Preempted),
        holdfast.Checkpointer(place, one, save=Asking(3) | on.signal()) as ckpt,
    ):
        for _ in ckpt.steps(9):
            train(one)
    assert steps_of(place) == [3] and holdfast.load(place).state["n"] == 3


def own_loop(place: Path, steps: int, at: int) -> dict[str, Any]:
    """A loop that somebody else owns. The signal comes in the body of its step `at`, between two changes."""
    one = state()
    with holdfast.Checkpointer(place, one, save=on.signal()) as ckpt:
        ckpt.restore()
        for step in range(steps):
            one["w"] += 1
            if step == at:
                ask()
            one["n"] += 1
            ckpt.step_done()
        if at == steps:
            ask()
    raise AssertionError("nobody left")


def test_a_signal_in_a_loop_of_ones_own_finishes_the_step(place: Path) -> None:
    with pytest.raises(Preempted):
        own_loop(place, 5, 2)
    saved = holdfast.load(place)
    assert saved.step == saved.state["n"] == saved.state["w"][0] == 3


def test_one_behind_the_last_step_of_a_loop_of_ones_own_saves_that_step(place: Path) -> None:
    with pytest.raises(Preempted):
        own_loop(place, 5, 5)
    saved = holdfast.load(place)
    assert saved.step == saved.state["n"] == 5
