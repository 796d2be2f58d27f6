"""What is asked for, and what is left, between the batches of an epoch and the end of its body; and loops one after
another."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.said import said
from support.tiny_training import state, steps_of, train
from tenuto import every, keep, on
from tenuto.errors import SaveFailed, TenutoWarning, UsageError
from tenuto.policy.save import SavePolicy
from tenuto.training import exit_status
from tenuto.training.preemption import Preempted

ALL = keep.latest(100)


@pytest.fixture(autouse=True)
def _leaving_does_not_end_the_test_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_status._ending, "code", 0)


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
    with said("left incomplete"), pytest.raises(KeyboardInterrupt):
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
    wanted = "though it was asked for: the state has changed since its loop was left"
    with said(wanted) if changed else contextlib.nullcontext([]) as lines:
        with tenuto.Checkpointer(place, one, data=[1, 2], save=on.signal(), keep=ALL) as ckpt:
            for epoch in ckpt.epochs(9):
                for batch in ckpt.batches:
                    train(one, batch)
                ask(ckpt, epoch)
                break
            one["n"] += int(changed)
    assert steps_of(place) == ([] if changed else [2])
    assert bool(lines) is changed


def test_the_handle_of_a_save_that_was_not_taken_says_so(place: Path) -> None:
    one = state()
    with said("step 2 is not saved"):
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


# -- resumed behind an epoch's last batch ------------------------------------------------------------------------------

Done = list[tuple[int, int, float]]


def averaging(
    place: Path,
    *,
    save: SavePolicy,
    accumulate: int = 1,
    data: Iterable[int] = (1, 2, 3, 4),
    during: Callable[[tenuto.Checkpointer, int], None] = lambda ckpt, epoch: None,
    validating: Callable[[tenuto.Checkpointer, int], None] = lambda ckpt, epoch: None,
) -> tuple[dict[str, Any], Done]:
    """Three epochs whose body ends with a mean over its batches, a schedule and a validation; returns what each
    validation has seen."""
    one, done = {**state(), "decays": 0}, Done()
    with tenuto.Checkpointer(place, one, data=data, save=save, keep=ALL) as ckpt:
        for epoch in ckpt.epochs(3, accumulate=accumulate):
            total, count = 0.0, 0
            for batch in ckpt.batches:
                train(one, batch)
                total, count = total + batch, count + 1
                during(ckpt, epoch)
            mean = total / count
            one["decays"] += 1
            validating(ckpt, epoch)
            done.append((epoch, one["n"], mean))
    return one, done


def once(at: int, do: Callable[[], Any]) -> Callable[[tenuto.Checkpointer, int], None]:
    def act(ckpt: tenuto.Checkpointer, epoch: int) -> None:
        if epoch == at:
            do()

    return act


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("save", [every(steps=1), every(steps=2), every(steps=1) | on.signal()], ids=repr)
def test_a_save_by_steps_at_an_epochs_last_batch_is_of_the_epochs_end(
    place: Path, tmp_path: Path, save: SavePolicy, accumulate: int
) -> None:
    expected, whole = averaging(tmp_path / "whole", save=save, accumulate=accumulate)
    with pytest.raises(KeyboardInterrupt):
        averaging(place, save=save, accumulate=accumulate, validating=once(1, interrupt))
    resumed, rest = averaging(place, save=save, accumulate=accumulate)
    assert [epoch for epoch, *_ in rest] == [1, 2], "the validation that was cut runs again"
    assert [(epoch, n) for epoch, n, _ in rest] == [(epoch, n) for epoch, n, _ in whole[1:]]
    assert resumed["decays"] == expected["decays"] == 3


@pytest.mark.parametrize("again", [False, True])
def test_a_signal_in_a_validation_is_acted_upon_where_the_body_ends(place: Path, again: bool) -> None:
    """A second one saves at once what is there, and the rest of the body runs again."""

    def leave() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        if again:
            os.kill(os.getpid(), signal.SIGUSR1)

    begun: list[int] = []
    with said("SIGUSR1: finishing step 8, then"), pytest.raises(Preempted):
        averaging(
            place,
            save=on.signal(),
            validating=lambda ckpt, epoch: (begun.append(epoch), once(1, leave)(ckpt, epoch))[1],
        )
    assert steps_of(place) == [8] and begun == [0, 1]
    assert tenuto.load(place).state["decays"] == (1 if again else 2)
    if again:
        with said("epoch 2 has no batches left behind step 8"), pytest.raises(ZeroDivisionError):
            averaging(place, save=on.signal())
    else:
        resumed, rest = averaging(place, save=on.signal())
        assert rest == [(2, 12, 2.5)] and resumed["decays"] == 3


def test_a_due_save_is_taken_where_the_loop_is_left_behind_the_batches(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, data=[1, 2], save=every(steps=2), keep=ALL) as ckpt:
        for _ in ckpt.epochs(9):
            for batch in ckpt.batches:
                train(one, batch)
            break
    assert steps_of(place) == [2]


def test_a_signal_in_a_validation_after_which_the_loop_is_left_saves_the_last_step(place: Path) -> None:
    one = state()
    with pytest.raises(Preempted), tenuto.Checkpointer(place, one, data=[1, 2], save=on.signal(), keep=ALL) as ckpt:
        for _ in ckpt.epochs(9):
            for batch in ckpt.batches:
                train(one, batch)
            os.kill(os.getpid(), signal.SIGUSR1)
            break
    assert steps_of(place) == [2]


def test_stop_in_an_epochs_last_batch_ends_the_epoch(place: Path) -> None:
    def stop(ckpt: tenuto.Checkpointer, epoch: int) -> None:
        if ckpt.step == 3:
            ckpt.stop()

    _, done = averaging(place, save=on.end(), during=stop)
    assert done == [(0, 4, 2.5)]
    _, rest = averaging(place, save=on.end())
    assert rest == [(1, 8, 2.5), (2, 12, 2.5)]


class Unsized:
    """Batches without a length, which count by themselves."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        while self.given < 4:
            self.given += 1
            yield self.given
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def test_data_without_a_length_says_where_nothing_was_left(place: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        averaging(place, save=every(steps=1), data=Unsized(), validating=once(0, interrupt))
    with said("epoch 1 has no batches left behind step 4, from which training resumed"):
        with pytest.raises(ZeroDivisionError):
            averaging(place, save=every(steps=1), data=Unsized())


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
        with said("step 1 is dropped: another process committed step 7"):
            ckpt.step_done()
        assert (ckpt.step, one["n"]) == (7, 7)
        ckpt.step_done()
    assert steps_of(place) == [8, 7]
