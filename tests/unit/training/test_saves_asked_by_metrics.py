"""Saves that a metric asks for, early and late, before and after a resume."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import tenuto
from support.said import said
from support.tiny_training import Gate, state, steps_of, train
from tenuto import every, keep, on
from tenuto.errors import SaveFailed, StoreFull, TenutoWarning
from tenuto.events import Event, SaveStarted, Warned

ALL = keep.all()


class Recorded:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, SaveStarted):
            self.reasons.append(event.reason)


def run(place: object, losses: dict[int, float], total: int, save: object, **more: object) -> list[int]:
    """Trains to `total` steps; `losses` are logged inside the step that completes that number."""
    one = state()
    with tenuto.Checkpointer(place, one, save=save, keep=ALL, **more) as ckpt:  # type: ignore[arg-type]
        for step in ckpt.steps(total):
            train(one)
            if step + 1 in losses:
                ckpt.log(loss=losses[step + 1])
    return steps_of(place)


def test_improve_saves_what_is_better_than_every_save_before(place: Path) -> None:
    losses = {1: 5.0, 2: 6.0, 3: 4.0, 4: float("nan"), 5: 4.0, 7: 3.9, 8: 3.0}
    assert run(place, losses, 9, on.improve("loss", by=0.5)) == [8, 3, 1]


def test_improve_remembers_across_a_resume_what_still_exists(place: Path) -> None:
    assert run(place, {1: 5.0, 2: 3.0}, 3, on.improve("loss") | on.end()) == [3, 2, 1]
    assert run(place, {4: 4.0, 5: 2.5, 6: 2.7}, 6, on.improve("loss")) == [5, 3, 2, 1]


def test_a_rolled_back_line_counts_for_nothing(place: Path) -> None:
    run(place, {1: 5.0, 2: 1.0}, 3, on.improve("loss"))
    assert run(place, {2: 4.0, 3: 4.5}, 3, on.improve("loss"), resume_from=1)[0] == 2
    assert [str(id) for id in tenuto.Repository(place).walk()] == ["main/a0002/2", "main/a0001/1"]
    assert run(place, {1: 9.0}, 1, on.improve("loss"), resume_from=None)[0] == 1


def test_drop_compares_with_the_last_save_alone(place: Path) -> None:
    losses = {1: 1.0, 2: 0.96, 3: 0.94, 4: 0.93, 5: 2.0, 6: 0.80}
    assert run(place, losses, 7, on.drop("loss", by="5%")) == [6, 3, 1]


def test_a_failed_save_does_not_raise_the_bar(gate: Gate, place: Path) -> None:
    one = state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tenuto.Checkpointer(gate, one, save=on.improve("loss"), keep=ALL) as ckpt:
            for step, loss in zip(ckpt.steps(3), (5.0, 1.0, 4.0), strict=True):
                train(one)
                if step == 1:
                    ckpt.wait(60)
                    gate.failure, gate.failures = StoreFull("full"), -1
                if step == 2:
                    with pytest.raises(SaveFailed):
                        ckpt.wait(60)
                    gate.failure = None
                ckpt.log(loss=loss)
    assert steps_of(place) == [3, 1]


def test_a_metric_of_an_epoch_saves_the_epochs_state(place: Path) -> None:
    one, seen = state(), {}
    sink = Recorded()
    with tenuto.Checkpointer(place, one, data=[1, 2, 3], save=on.improve("val_loss"), keep=ALL, sinks=[sink]) as ckpt:
        for epoch in ckpt.epochs(4):
            for batch in ckpt.batches:
                train(one, batch)
            seen[ckpt.step] = one["w"].copy()
            ckpt.log(val_loss=[0.9, 0.95, 0.5, 0.6][epoch])
    assert steps_of(place) == [9, 3]
    for step in (9, 3):
        assert np.array_equal(tenuto.load(place, step=step).state["w"], seen[step])
    assert dict(tenuto.Repository(place).manifest(tenuto.Repository(place).find()).metrics)["val_loss"] == 0.5
    assert sink.reasons == ["the first val_loss (0.9)", "val_loss improved (0.5; the best before: 0.9)"]


def test_a_late_metric_of_a_saved_step_is_noted_and_counts_from_then_on(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(
        place, one, data=[1, 2], save=tenuto.every(steps=2) | on.improve("val_loss"), keep=ALL
    ) as ckpt:
        for epoch in ckpt.epochs(2):
            for batch in ckpt.batches:
                train(one, batch)
            ckpt.log(val_loss=[0.5, 0.4][epoch])
    seen = tenuto.Repository(place)
    assert steps_of(place) == [4, 2]
    assert [seen.metrics(id)["val_loss"] for id in seen.checkpoints()] == [0.4, 0.5]
    assert run(place, {5: 0.45}, 5, on.improve("val_loss")) == [4, 2]
    one = state()
    with tenuto.Checkpointer(place, one, save=on.improve("val_loss"), keep=ALL) as ckpt:
        for step in ckpt.steps(7):
            ckpt.log(val_loss=0.45 if step == 5 else 0.3)
    assert steps_of(place)[0] == 5


def test_after_the_loop_a_late_metric_saves_at_once_if_nothing_was_touched(place: Path, tmp_path: Path) -> None:
    for where, touch in ((place, False), (tmp_path / "other", True)):
        one = state()
        with tenuto.Checkpointer(where, one, save=on.improve("val_loss"), keep=ALL) as ckpt:
            for _ in ckpt.steps(3):
                train(one)
            np.random.random()  # evaluation draws, too
            if touch:
                one["w"] += 1
                with said("step 3 is not saved, though"):
                    ckpt.log(val_loss=0.5)
            else:
                ckpt.log(val_loss=0.5)
        assert steps_of(where) == ([] if touch else [3])


def test_in_a_loop_of_ones_own_a_late_metric_saves_the_step_it_belongs_to(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, save=on.improve("val_loss"), keep=ALL) as ckpt:
        ckpt.restore()
        for step in range(1, 6):
            train(one)
            if step == 4:
                with said("step 3 is not saved"):
                    ckpt.log(val_loss=0.1)  # before step_done(4): the state is no longer that of step 3
            ckpt.step_done(step)
            if step in (2, 5):
                ckpt.log(val_loss=1.0 / step)
    assert steps_of(place) == [5, 2]
    assert tenuto.load(place, step=2).state["n"] == 2
    assert tenuto.load(place, step=5).state["n"] == 5


def test_a_metric_that_save_asks_by_and_nothing_logs_is_told(place: Path) -> None:
    with pytest.warns(TenutoWarning) as caught:
        with tenuto.Checkpointer(place, state(), save=on.improve("val_los") | on.end()) as ckpt:
            for _ in ckpt.steps(2):
                ckpt.log(val_loss=1.0, acc=0.5)
    own = (one for one in caught if issubclass(one.category, TenutoWarning))  # and none of a collection's
    (said,) = {str(one.message).partition("\n")[0] for one in own}
    assert said == (
        "on.improve('val_los', mode='min') | on.end() asks by 'val_los', which nothing has logged up to "
        "step 2 (metrics logged: 'acc', 'val_loss'); that part of it saves nothing"
    )
    assert steps_of(place) == [2]


class Warnings:
    def __init__(self) -> None:
        self.said: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Warned):
            self.said.append(event.message)


def test_a_metric_that_nothing_logs_is_told_at_the_end_of_the_second_epoch(place: Path) -> None:
    sink = Warnings()
    kept = keep.best(1, "val_loss") | keep.latest(2)
    with pytest.warns(TenutoWarning, match="'val_loss', which nothing has logged up to step 4"):
        with tenuto.Checkpointer(place, state(), data=[1, 2], save=every(steps=1), keep=kept, sinks=[sink]) as ckpt:
            for epoch in ckpt.epochs(3):
                assert len(sink.said) == (epoch == 2), "once, as soon as two epochs have ended without it"
                for _ in ckpt.batches:
                    ckpt.log(loss=1.0)
    (one,) = sink.said  # and not again at the end
    assert "keep.best(1, 'val_loss', mode='min') | keep.latest(2) uses" in one
    assert "metrics logged: 'loss'" in one and one.endswith("hint: did you mean 'loss'?")


def test_without_epochs_it_is_told_after_many_steps(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenuto.training.logged_metrics.PATIENCE_STEPS", 3)
    sink = Warnings()
    with pytest.warns(TenutoWarning, match="which nothing has logged up to step 3"):
        with tenuto.Checkpointer(place, state(), save=on.drop("x", by=1), sinks=[sink]) as ckpt:
            for step in ckpt.steps(6):
                assert len(sink.said) == (step >= 3)
    assert steps_of(place) == []
