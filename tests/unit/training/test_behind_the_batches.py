"""What is asked for, and what is left, between the batches of an epoch and the end of its body; and loops one after
another."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.tiny_training import state, steps_of, train
from tenuto import every, keep, on
from tenuto.errors import SaveFailed, TenutoWarning, UsageError

ALL = keep.latest(100)
Ask = Callable[[tenuto.Checkpointer, int], None]


def saving(ckpt: tenuto.Checkpointer, epoch: int) -> None:
    ckpt.save()


def tagging(ckpt: tenuto.Checkpointer, epoch: int) -> None:
    ckpt.log(tag=f"epoch-{epoch}")


def trained(place: Path, ask: Ask | None, die_at: int | None = None) -> dict[str, Any]:
    """Three epochs of two batches; behind the batches the scheduler decays, and the evaluation draws."""
    np.random.seed(3)
    one = {**state(), "decays": 0}
    with tenuto.Checkpointer(place, one, data=[1, 2], save=on.signal(), keep=ALL) as ckpt:
        for epoch in ckpt.epochs(3):
            for batch in ckpt.batches:
                if ckpt.step == die_at:
                    raise KeyboardInterrupt
                train(one, batch)
            if ask is not None:
                ask(ckpt, epoch)
            one["decays"] += 1
            np.random.random()
    return one


@pytest.mark.parametrize("ask", [saving, tagging])
def test_what_is_asked_for_behind_the_batches_is_taken_where_the_body_ends(
    place: Path, tmp_path: Path, ask: Ask
) -> None:
    """A resume from there does the rest of the body neither again nor not at all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TenutoWarning)  # nothing asks for a save
        expected = trained(tmp_path / "other", None)
    with pytest.warns(TenutoWarning, match="left incomplete"), pytest.raises(KeyboardInterrupt):
        trained(place, ask, die_at=3)
    assert steps_of(place) == [2]
    assert tenuto.load(place).state["decays"] == 1
    resumed = trained(place, ask)
    assert (resumed["n"], resumed["decays"]) == (expected["n"], expected["decays"]) == (6, 3)
    assert np.array_equal(resumed["w"], expected["w"])
    assert steps_of(place) == [6, 4, 2]


def test_it_is_waited_for_after_the_body_alone(place: Path) -> None:
    one, found = state(), []
    with tenuto.Checkpointer(place, one, data=[1, 2], save=on.signal(), keep=ALL) as ckpt:
        for _ in ckpt.epochs(1):
            for batch in ckpt.batches:
                train(one, batch)
            found.append(ckpt.save(wait=True))
            assert ckpt.save() is found[0]
            with pytest.raises(UsageError, match="still open"):
                found[0].wait()
            ckpt.log(tag="last")
        assert found[0].wait().step == 2 and found[0].committed
    assert tenuto.load(place, step="last").step == 2
    with tenuto.Checkpointer(place, state(), data=[1, 2]) as ckpt:
        ckpt.restore()
        assert ckpt.epoch == 1


@pytest.mark.parametrize("ask", [saving, tagging])
@pytest.mark.parametrize("changed", [False, True])
def test_what_was_asked_for_is_taken_where_the_loop_is_left(place: Path, ask: Ask, changed: bool) -> None:
    """By a break; unless the state has gone on since, which is said."""
    one = state()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with tenuto.Checkpointer(place, one, data=[1, 2], save=on.signal(), keep=ALL) as ckpt:
            for epoch in ckpt.epochs(9):
                for batch in ckpt.batches:
                    train(one, batch)
                ask(ckpt, epoch)
                break
            one["n"] += int(changed)
    texts = [str(one.message) for one in said if "is not saved" in str(one.message)]
    assert steps_of(place) == ([] if changed else [2])
    assert bool(texts) is changed
    if changed:
        assert "though it was asked for: the state has changed since its loop was left" in texts[0]


def test_the_handle_of_a_save_that_was_not_taken_says_so(place: Path) -> None:
    one = state()
    with pytest.warns(TenutoWarning, match="step 2 is not saved"):
        with tenuto.Checkpointer(place, one, data=[1, 2], save=every(steps=3), keep=ALL) as ckpt:
            for _ in ckpt.epochs(9):
                for batch in ckpt.batches:
                    train(one, batch)
                handle = ckpt.save()
                break
            train(one)
            assert list(ckpt.steps(3)) == [2]
    with pytest.raises(SaveFailed, match="step 2 is not saved"):
        handle.wait()
    assert steps_of(place) == [3]


@pytest.mark.parametrize("stops", [False, True])
def test_a_break_behind_the_batches_says_what_is_not_saved(place: Path, stops: bool) -> None:
    one = state()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with tenuto.Checkpointer(place, one, data=[1, 2]) as ckpt:
            for epoch in ckpt.epochs(9):
                for batch in ckpt.batches:
                    train(one, batch)
                if epoch == 1:
                    if not stops:
                        break
                    ckpt.stop()
    texts = [str(one.message) for one in said]
    assert steps_of(place) == ([4] if stops else [])
    assert any("step 4 is not saved" in text and "ckpt.stop()" in text for text in texts) is not stops


def test_stop_ends_one_loop_and_no_other(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, data=[1, 2], save=every(steps=100), keep=ALL) as ckpt:
        for step in ckpt.steps(50):
            train(one)
            if step == 6:
                ckpt.stop()
        assert list(ckpt.steps(9)) == [7, 8]
        ckpt.stop()
        assert list(ckpt.steps(12)) == [], "said between two loops it is the next one's"
        assert list(ckpt.epochs(1)) == [0]
        for _ in ckpt.epochs(9):
            for batch in ckpt.batches:
                train(one, batch)
            ckpt.stop()
            break
        assert list(ckpt.steps(14)) == [12, 13]


def test_a_policy_by_epochs_in_a_loop_without_them_says_so(place: Path, tmp_path: Path) -> None:
    for where, own in ((place, False), (tmp_path / "own", True)):
        with pytest.warns(TenutoWarning, match=r"every\(epochs=1\) saves nothing here") as said:
            with tenuto.Checkpointer(where, state(), data=[1, 2], save=every(epochs=1) | on.signal()) as ckpt:
                if own:
                    ckpt.step_done()
                    ckpt.step_done()
                else:
                    list(ckpt.steps(4))
        assert sum("saves nothing here" in str(one.message) for one in said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tenuto.Checkpointer(tmp_path / "epochs", state(), data=[1, 2], save=every(epochs=1)) as ckpt:
            for _ in ckpt.epochs(1):
                list(ckpt.batches)


# -- claimed without a restore -----------------------------------------------------------------------------------------


def test_a_save_before_the_loop_of_a_fresh_start_is_of_the_same_training(place: Path) -> None:
    tenuto.save(state(), place, step=7)
    with tenuto.Checkpointer(place, state(), resume_from=None, save=on.end(), keep=ALL) as ckpt:
        assert ckpt.save(wait=True).step == 0
        assert list(ckpt.steps(3)) == [0, 1, 2]
    assert steps_of(place) == [3, 0, 7]


@pytest.mark.parametrize("resume_from", ["latest", 7])
def test_a_step_of_ones_own_loop_is_refused_where_nothing_was_restored(place: Path, resume_from: Any) -> None:
    """What was trained is neither overwritten nor does it hide what is there."""
    tenuto.save({**state(), "n": 7}, place, step=7)
    one = state()
    with tenuto.Checkpointer(place, one, resume_from=resume_from, save=every(steps=1), keep=ALL) as ckpt:
        train(one)
        with pytest.raises(UsageError, match="nothing was restored"):
            ckpt.step_done()
        assert one["n"] == 1
        ckpt.restore()
        assert one["n"] == 7
        ckpt.step_done()
    assert steps_of(place) == [8, 7]


def test_a_step_that_another_process_has_overtaken_is_dropped_and_that_is_said(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, save=every(steps=1), keep=ALL) as ckpt:
        assert ckpt.restore() is None
        tenuto.save({**state(), "n": 7}, place, step=7)
        train(one)
        with pytest.warns(TenutoWarning, match="step 1 is dropped: another process had committed step 7"):
            ckpt.step_done()
        assert (ckpt.step, one["n"]) == (7, 7)
        ckpt.step_done()
    assert steps_of(place) == [8, 7]
