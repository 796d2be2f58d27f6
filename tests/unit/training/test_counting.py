"""What a step is, when it counts, and where a resumed loop goes on."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import tenuto
from support.thinning import crossed, thinned
from support.tiny_training import state, steps_of, train
from tenuto import every, keep, on
from tenuto.errors import TenutoWarning, UsageError

ALL = keep.latest(100)


def run(place: Path, total: int, stop_at: int | None = None, every_steps: int = 5) -> dict[str, object]:
    """Trains to `total`; leaves by an exception inside the step that would complete `stop_at`."""
    np.random.seed(0)
    one = state()
    with tenuto.Checkpointer(place, one, data=[1, 2, 3, 4, 5, 6, 7], save=every(steps=every_steps), keep=ALL) as ckpt:
        for step in ckpt.steps(total):
            assert step == one["n"] == ckpt.step
            train(one, next(ckpt.batches))
            if stop_at is not None and step + 1 == stop_at:
                raise KeyboardInterrupt
    return one


def test_steps_is_a_drop_in_for_range(place: Path) -> None:
    with tenuto.Checkpointer(place, state()) as ckpt:
        loop = ckpt.steps(4)
        assert len(loop) == 4
        assert list(loop) == list(range(4))
        assert ckpt.step == 4
    with tenuto.Checkpointer(place, state()) as ckpt:
        loop = ckpt.steps(6)
        assert len(loop) == 2
        assert list(loop) == [4, 5]


@pytest.mark.parametrize("stop_at", thinned([4, 7, 8, 14, 16], 2))
def test_a_resumed_run_equals_an_uninterrupted_one(place: Path, tmp_path: Path, stop_at: int) -> None:
    expected = run(tmp_path / "whole", 23)
    with pytest.warns(TenutoWarning, match=f"step {stop_at} was left incomplete"), pytest.raises(KeyboardInterrupt):
        run(place, 23, stop_at=stop_at)
    np.random.seed(99)
    resumed = run(place, 23)
    assert resumed["n"] == expected["n"]
    assert np.array_equal(resumed["w"], expected["w"])


def test_a_step_that_is_left_is_never_saved(place: Path) -> None:
    one = state()
    with pytest.warns(TenutoWarning, match="step 3 was left incomplete"):
        with tenuto.Checkpointer(place, one, save=every(steps=1) | on.end(), keep=ALL) as ckpt:
            loop = ckpt.steps(10)
            for step in loop:
                train(one)
                if step == 2:
                    break
            with pytest.raises(UsageError, match="left incomplete"):
                ckpt.steps(10)
    assert steps_of(place) == [2, 1]


def test_a_loop_with_nothing_to_do_saves_nothing(place: Path) -> None:
    for _ in range(2):
        with tenuto.Checkpointer(place, state(), save=every(steps=1) | on.end(), keep=ALL) as ckpt:
            assert len(list(ckpt.steps(3))) in (0, 3)
    assert steps_of(place) == [3, 2, 1]


def test_stop_finishes_the_step_saves_and_ends(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, save=every(steps=100), keep=ALL) as ckpt:
        for step in ckpt.steps(50):
            train(one)
            if step == 6:
                ckpt.stop()
        assert ckpt.step == 7
    assert steps_of(place) == [7]


def epochs(
    place: Path, total: int, *, accumulate: int = 1, die_at: tuple[int, int] | None = None, cut: int | None = None
) -> tuple[dict[str, object], list[object]]:
    """Trains epochs of seven batches; dies at (epoch, batch), or breaks out of each epoch after `cut` batches."""
    np.random.seed(0)
    one = state()
    seen: list[object] = []
    policy = every(steps=1) | every(epochs=1)
    with tenuto.Checkpointer(place, one, data=list(range(1, 8)), save=policy, keep=ALL) as ckpt:
        for epoch in ckpt.epochs(total, accumulate=accumulate):
            assert epoch == ckpt.epoch
            for number, batch in enumerate(ckpt.batches):
                train(one, batch)
                seen.append((epoch, batch))
                if die_at == (epoch, batch):
                    raise KeyboardInterrupt
                if cut is not None and number + 1 == cut:
                    break
            ckpt.log(val_loss=float(epoch))
        one["steps"] = ckpt.step
    return one, seen


@pytest.mark.parametrize(("accumulate", "per_epoch"), [(1, 7), (2, 4), (7, 1), (9, 1)])
def test_coming_back_for_the_next_batch_completes_a_step(place: Path, accumulate: int, per_epoch: int) -> None:
    one, seen = epochs(place, 3, accumulate=accumulate)
    assert one["steps"] == 3 * per_epoch
    assert seen == [(epoch, batch) for epoch in range(3) for batch in range(1, 8)]


@pytest.mark.parametrize(("die_at", "accumulate"), crossed([(0, 1), (0, 5), (1, 1), (1, 7), (2, 4)], [1, 2]))
def test_epochs_resume_inside_one(place: Path, tmp_path: Path, accumulate: int, die_at: tuple[int, int]) -> None:
    expected, _ = epochs(tmp_path / "whole", 3, accumulate=accumulate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(KeyboardInterrupt):
            epochs(place, 3, accumulate=accumulate, die_at=die_at)
    np.random.seed(5)
    resumed, seen = epochs(place, 3, accumulate=accumulate)
    assert resumed["steps"] == expected["steps"]
    assert np.array_equal(resumed["w"], expected["w"])
    assert seen[-1] == (2, 7)


def test_a_break_out_of_batches_completes_its_step_at_the_epochs_end(place: Path) -> None:
    one, _ = epochs(place, 2, cut=3)
    assert one["steps"] == 6
    assert steps_of(place) == [6, 5, 4, 3, 2, 1]


def test_stop_inside_an_epoch_resumes_inside_it(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, data=list(range(1, 8)), keep=ALL) as ckpt:
        for _ in ckpt.epochs(2):
            for batch in ckpt.batches:
                train(one)
                if batch == 3:
                    ckpt.stop()
    with tenuto.Checkpointer(place, state(), data=list(range(1, 8)), keep=ALL) as ckpt:
        seen = [(epoch, batch) for epoch in ckpt.epochs(2) for batch in ckpt.batches]
    assert seen == [(0, 4), (0, 5), (0, 6), (0, 7), *((1, batch) for batch in range(1, 8))]


def test_epochs_without_batches_count_one_step_each(place: Path) -> None:
    with tenuto.Checkpointer(place, state(), save=every(epochs=1), keep=ALL) as ckpt:
        assert list(ckpt.epochs(3)) == [0, 1, 2]
        assert ckpt.step == 3
    assert steps_of(place) == [3, 2, 1]


@pytest.mark.parametrize("data", [None, [1, 2]])
def test_metrics_of_an_epoch_that_takes_its_batches_elsewhere_are_its_own(place: Path, data: object) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, data=data, save=every(epochs=1), keep=keep.best(1, "val_loss")) as ckpt:
        for epoch in ckpt.epochs(3):
            train(one)
            ckpt.log(val_loss=[0.9, 0.5, 0.7][epoch])
    seen = tenuto.Repository(place)
    assert steps_of(place) == [3, 2], "the last one and the best one"
    assert [seen.metrics(id) for id in seen.checkpoints()] == [{"val_loss": 0.7}, {"val_loss": 0.5}]
    assert tenuto.load(place, step=2).state["n"] == 2


def test_metrics_before_the_first_batch_of_an_epoch_are_of_the_step_before(place: Path) -> None:
    with tenuto.Checkpointer(place, state(), data=[1, 2], save=every(epochs=1), keep=ALL) as ckpt:
        for epoch in ckpt.epochs(3):
            ckpt.log(before=float(epoch))
            if epoch == 2:
                break
            for batch in ckpt.batches:
                ckpt.log(batch=batch)
    seen = tenuto.Repository(place)
    assert [seen.metrics(id) for id in seen.checkpoints()] == [
        {"batch": 2.0, "before": 2.0},
        {"batch": 2.0, "before": 1.0},
    ]


def test_a_save_inside_an_epoch_without_batches_is_of_its_end(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, save=every(steps=100), keep=ALL) as ckpt:
        for epoch in ckpt.epochs(3):
            train(one)
            if epoch == 1:
                assert ckpt.save().step == 2
                one["text"] = "after it"
    saved = tenuto.load(place)
    assert steps_of(place) == [2] and (saved.state["n"], saved.state["text"]) == (2, "after it")


def test_a_break_out_of_an_epoch_without_batches_leaves_its_step_incomplete(place: Path) -> None:
    with pytest.warns(TenutoWarning, match="step 2 was left incomplete"):
        with tenuto.Checkpointer(place, state(), save=every(epochs=1) | on.end(), keep=ALL) as ckpt:
            for epoch in ckpt.epochs(3):
                if epoch == 1:
                    break
    assert steps_of(place) == [1]


def test_a_trainer_that_owns_the_loop(place: Path) -> None:
    one = state()
    ckpt = tenuto.Checkpointer(place, one, save=every(steps=2) | on.end(), keep=ALL)
    assert ckpt.restore() is None
    for number in range(1, 6):
        train(one)
        ckpt.step_done(step=number, loss=1.0 / number)
    with pytest.raises(UsageError, match="not above"):
        ckpt.step_done(step=5)
    ckpt.close()
    ckpt.close()
    assert steps_of(place) == [5, 4, 2]
    again = tenuto.Checkpointer(place, state(), save=every(steps=2), keep=ALL)
    restored = again.restore()
    assert restored is not None and restored.step == again.step == 5
    assert tenuto.Repository(place).metrics(restored.checkpoint.id) == {"loss": 0.2}
    again.close()


@pytest.mark.parametrize("wrong", [-1, 1.5, "3", True])
def test_a_total_that_is_no_count_is_refused(place: Path, wrong: object) -> None:
    with tenuto.Checkpointer(place, state()) as ckpt, pytest.raises(UsageError, match="whole number"):
        ckpt.steps(wrong)  # type: ignore[arg-type]


def test_batches_without_a_loop_or_without_data_says_so(place: Path) -> None:
    with tenuto.Checkpointer(place, state(), save=every(steps=1)) as ckpt:
        with pytest.raises(UsageError, match="belongs inside"):
            _ = ckpt.batches
        for _ in ckpt.steps(1):
            with pytest.raises(UsageError, match="no data="):
                next(ckpt.batches)
