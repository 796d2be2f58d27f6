"""Loops that take their batches past the data of their Checkpointer, and random state that is restored when they say
so."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.tiny_training import place, state, train
from tenuto import every
from tenuto.errors import TenutoWarning, UsageError

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
