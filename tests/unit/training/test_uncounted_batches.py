"""Loops that take their batches past the data of their Checkpointer, and random state that is restored when they say
so."""

from __future__ import annotations

import logging
import random
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.tiny_training import place, state, train
from tenuto import every
from tenuto.errors import TenutoWarning, UsageError
from tenuto.training import uncounted

__all__ = ["place"]

BATCHES = [1.0, 2.0, 3.0, 4.0]


def ours(told: Iterable[warnings.WarningMessage]) -> int:
    """How many of them are Tenuto's: a collection of garbage may warn of what other tests have left open."""
    return sum(issubclass(one.category, TenutoWarning) for one in told)


def certificates(place: Path) -> list[bool]:
    repository = tenuto.Repository(place)
    found = sorted(repository.checkpoints("main"), key=lambda one: one.step)
    return [bool(repository.certificate(one)["exact"]) for one in found]


def test_steps_that_take_their_batches_elsewhere_are_told_until_one_comes_from_the_data(place: Path) -> None:
    one = state()
    with pytest.warns(TenutoWarning, match=r"nothing counts them") as told:
        with tenuto.Checkpointer(place, one, data=BATCHES, save=every(steps=1), keep=tenuto.keep.latest(9)) as ckpt:
            for step in ckpt.steps(4):
                train(one, BATCHES[step] if step < 2 else next(ckpt.batches))
    assert ours(told) == 1
    assert certificates(place) == [False, False, True, True]


def test_an_epoch_whose_body_takes_its_batches_elsewhere_ends_where_the_next_begins(place: Path) -> None:
    """Exactly, and it says that none of them is a step."""
    one = state()
    with pytest.warns(TenutoWarning, match="the epoch took no batch from ckpt.batches") as told:
        with tenuto.Checkpointer(place, one, data=BATCHES, save=every(epochs=1)) as ckpt:
            for _ in ckpt.epochs(2):
                for batch in BATCHES:
                    train(one, batch)
            assert ckpt.step == 2
    assert ours(told) == 1
    assert certificates(place) == [True, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tenuto.Checkpointer(place, one, data=BATCHES, save=every(epochs=1)) as ckpt:
            for _ in ckpt.epochs(4):
                for batch in ckpt.batches:
                    train(one, batch)
            assert ckpt.step == 2 + 2 * len(BATCHES)


def test_a_loop_of_ones_own_behind_one_of_ours_is_told(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, data=BATCHES, save=every(steps=1)) as ckpt:
        for _ in ckpt.steps(2):
            train(one, next(ckpt.batches))
        with pytest.warns(TenutoWarning, match="nothing counts them"):
            train(one, BATCHES[2])
            ckpt.step_done()
    assert certificates(place) == [True, True, False]


def _resumed(place: Path) -> tuple[Any, Any]:
    """Saves after a step, with what is drawn next; returns a Checkpointer that is to resume from there, and that."""
    random.seed(1)
    np.random.seed(1)
    one = state()
    with tenuto.Checkpointer(place, one, save=every(steps=1)) as ckpt:
        ckpt.step_done()
        ckpt.wait()
        return tenuto.Checkpointer(place, state(), resume_from="latest"), (random.random(), np.random.random())


def test_random_state_is_restored_where_the_loop_says_so_and_up_to_its_first_step(place: Path) -> None:
    ckpt, wanted = _resumed(place)
    with pytest.raises(UsageError, match="nothing was restored yet"):
        ckpt.restore_random_state()
    ckpt.restore()
    for _ in range(2):
        random.random(), np.random.random()  # a trainer's checks
        ckpt.restore_random_state()
        assert (random.random(), np.random.random()) == wanted
    ckpt.step_done()
    with pytest.raises(UsageError, match="step 2 is completed since the restore"):
        ckpt.restore_random_state()
    ckpt.close()


def test_a_fresh_start_has_no_random_state_to_restore(place: Path) -> None:
    with tenuto.Checkpointer(place, state()) as ckpt:
        ckpt.restore()
        before = random.getstate()
        ckpt.restore_random_state()
        assert random.getstate() == before


# -- no step at all ----------------------------------------------------------------------------------------------------


class Heard(logging.Handler):
    """Sets an event once a line with `words` is said."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words, self.lines, self.event = words, list[str](), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.words in record.getMessage():
            self.lines.append(record.getMessage())
            self.event.set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    logger, handler = logging.getLogger("tenuto"), Heard("nothing is saved, though")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


ALWAYS_DUE = every(minutes=1e-9)


def test_a_loop_of_ones_own_that_reports_no_step_is_told_so(
    place: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uncounted, "PATIENCE_S", 0.0)
    with tenuto.Checkpointer(place, state(), save=ALWAYS_DUE) as ckpt:
        ckpt.restore()
        assert heard.event.wait(60)
    assert "say ckpt.step_done() after each step" in heard.lines[0] and len(heard.lines) == 1


@pytest.mark.parametrize("loop", ["steps", "epochs"])
def test_a_body_that_trains_everything_is_told_where_a_step_ends(
    place: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setattr(uncounted, "PATIENCE_S", 0.0)
    with tenuto.Checkpointer(place, state(), save=ALWAYS_DUE) as ckpt:
        for _ in getattr(ckpt, loop)(1):
            assert heard.event.wait(60)
    assert "a step ends where the body of its loop does" in heard.lines[0] and len(heard.lines) == 1


def test_a_training_that_completes_steps_is_told_nothing(
    place: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uncounted, "PATIENCE_S", 1e-3)
    monkeypatch.setattr(uncounted, "LOOK_AGAIN_S", 1e-3)
    looks = threading.Semaphore(0)
    look = uncounted.FirstSave._check
    monkeypatch.setattr(uncounted.FirstSave, "_check", lambda self: (look(self), looks.release()))
    with tenuto.Checkpointer(place, state(), save=every(steps=2)) as ckpt:
        for step in ckpt.steps(4):
            if step == 0:
                assert looks.acquire(timeout=60) and looks.acquire(timeout=60), "no save is due before step 2"
        ckpt.batch_done(epoch_ended=True)
    assert not heard.lines


def test_batches_that_complete_no_step_are_told_of_where_one_would_have_been_saved(place: Path, heard: Heard) -> None:
    with tenuto.Checkpointer(place, state(), save=every(steps=3)) as ckpt:
        ckpt.restore()
        for number in range(1, 9):
            ckpt.batch_done(epoch_ended=number % 4 == 0, why="The trainer counts none.")
            assert bool(heard.lines) is (number >= 4)
    assert len(heard.lines) == 1 and heard.lines[0].endswith("completed no step. The trainer counts none.")
