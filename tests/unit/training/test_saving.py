"""When a save is taken, what it holds, and what happens when it fails."""

from __future__ import annotations

import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.said import said
from support.tiny_training import Gate, state, steps_of, train
from tenuto import every, keep, on
from tenuto.errors import (
    DeadlineExceeded,
    NotARepository,
    SaveFailed,
    StateMismatch,
    StoreError,
    StoreFull,
    TenutoWarning,
    Unserialisable,
    UsageError,
)
from tenuto.events import Committed, Event, Removed, SaveFailedEvent, SaveSkipped
from tenuto.maintenance.retention import plan_retention

ALL = keep.latest(100)


class Recorded:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def test_the_saved_bytes_are_those_of_the_moment(gate: Gate, place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(gate, one, save=every(steps=1), keep=ALL) as ckpt:
        for step in ckpt.steps(2):
            if step == 1:
                one["w"][:] = 77  # while the save of step 1 is held back
                gate.open_gate.set()
                break_out = ckpt
                break
            one["w"][:] = 5
            gate.open_gate.clear()
        one["w"][:] = 99
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            break_out.close()
    assert np.all(tenuto.load(place).state["w"] == 5)


def test_save_inside_a_step_acts_at_its_end(place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(place, one, save=every(steps=100), keep=ALL) as ckpt:
        handle = None
        for step in ckpt.steps(3):
            if step == 1:
                handle = ckpt.save()
                assert handle is ckpt.save()
                assert not handle.done
                with pytest.raises(UsageError, match="still open"):
                    handle.wait()
            train(one)
        assert handle is not None
        assert handle.wait().step == 2
    assert steps_of(place) == [2]
    assert tenuto.load(place).state["n"] == 2


def test_save_outside_a_step_captures_at_once_and_only_once(place: Path) -> None:
    one = state()
    ckpt = tenuto.Checkpointer(place, one, save=every(steps=100), keep=ALL)
    first = ckpt.save(wait=True)
    assert first.committed and first.step == 0
    with pytest.warns(TenutoWarning, match="step_done"):
        assert ckpt.save() is first
    ckpt.step_done()
    assert ckpt.save(wait=True).step == 1
    ckpt.close()
    assert steps_of(place) == [1, 0]


def test_saving_before_restoring_is_refused_where_it_would_hide_checkpoints(place: Path) -> None:
    tenuto.save(state(), place, step=7)
    with tenuto.Checkpointer(place, state(), keep=ALL) as ckpt:
        with pytest.raises(UsageError, match="nothing was restored"):
            ckpt.save()
        ckpt.restore()
        with pytest.warns(TenutoWarning, match="no step was completed"):
            assert ckpt.save().step == 7
    with tenuto.Checkpointer(place, state(), resume_from=None, keep=ALL) as ckpt:
        assert ckpt.save(wait=True).step == 0
    assert [str(id) for id in tenuto.Repository(place).checkpoints()] == ["main/a0003/0", "main/a0001/7"]


def test_metrics_belong_to_their_step_and_late_ones_are_noted(place: Path) -> None:
    with tenuto.Checkpointer(place, state(), save=every(steps=1), keep=ALL) as ckpt:
        for step in ckpt.steps(2):
            ckpt.log(loss=float(step))
        ckpt.log(val_loss=np.float32(0.25), odd=float("nan"))
    seen = tenuto.Repository(place)
    last, first = seen.checkpoints()
    assert seen.metrics(first) == {"loss": 0.0}
    found = seen.metrics(last)
    assert np.isnan(found.pop("odd"))
    assert found == {"loss": 1.0, "val_loss": 0.25}
    assert dict(seen.manifest(last).metrics) == {"loss": 1.0}


def test_a_metric_that_is_no_number_is_refused(place: Path) -> None:
    with tenuto.Checkpointer(place, state()) as ckpt, pytest.raises(UsageError, match="'loss' is not a number"):
        ckpt.log(loss="low")


def test_a_metric_that_keep_judges_by_and_nothing_logs_is_told(place: Path) -> None:
    with pytest.warns(TenutoWarning, match="'val_loss', which nothing has logged"):
        with tenuto.Checkpointer(place, state(), save=every(steps=1), keep=keep.best(1, "val_loss")) as ckpt:
            list(ckpt.steps(2))
    assert steps_of(place) == [2, 1], "until it is logged, all are kept"


def test_retention_follows_each_commit(place: Path) -> None:
    sink = Recorded()
    with tenuto.Checkpointer(place, state(), save=every(steps=1), keep=keep.latest(2), sinks=[sink]) as ckpt:
        for _ in ckpt.steps(6):
            pass
    assert steps_of(place) == [6, 5]
    assert [event.id.step for event in sink.of(Removed)] == [1, 2, 3, 4]
    assert [event.id.step for event in sink.of(Committed)] == [1, 2, 3, 4, 5, 6]


def test_a_save_that_is_due_while_one_is_in_flight_is_skipped_but_not_the_last(gate: Gate, place: Path) -> None:
    sink = Recorded()
    one = state()
    policy = every(steps=1) | on.end()
    with tenuto.Checkpointer(gate, one, save=policy, on_busy="skip", keep=ALL, sinks=[sink]) as ckpt:
        gate.open_gate.clear()
        for step in ckpt.steps(4):
            train(one)
            if step == 3:
                gate.open_gate.set()
    assert steps_of(place) == [4, 1]
    assert [event.step for event in sink.of(SaveSkipped)] == [2, 3]
    assert tenuto.load(place).state["n"] == 4


def test_a_failed_save_warns_and_is_freed_and_the_next_one_counts(gate: Gate, place: Path) -> None:
    sink = Recorded()
    gate.failure, gate.failures = StoreError("the disk is on fire"), 1
    with said("on fire"):
        with tenuto.Checkpointer(gate, state(), save=every(steps=1), keep=ALL, sinks=[sink]) as ckpt:
            for _ in ckpt.steps(3):
                ckpt.wait() if ckpt.step > 1 else None
    assert steps_of(place) == [3, 2]
    assert [event.id.step for event in sink.of(SaveFailedEvent)] == [1]
    left = sorted(path.name for path in (place / "runs/main/a0001/step-00000001").iterdir())
    assert left == ["manifest.json"]  # the aborted mark


def test_a_failed_save_raises_at_the_next_call_where_that_is_wanted(gate: Gate) -> None:
    gate.failure, gate.failures = StoreError("the disk is on fire"), -1
    with said("on fire"), pytest.raises(SaveFailed, match="on fire"):
        with tenuto.Checkpointer(gate, state(), save=every(steps=1), on_error="raise", keep=ALL) as ckpt:
            for _ in ckpt.steps(3):
                ckpt._training.saving.saver.join(30)


def test_waiting_raises_whatever_on_error_says(gate: Gate) -> None:
    gate.failure, gate.failures = StoreError("the disk is on fire"), -1
    ckpt = tenuto.Checkpointer(gate, state(), keep=ALL)
    with said("on fire"), pytest.raises(SaveFailed, match="on fire"):
        ckpt.save(wait=True)
    ckpt.close()


def test_i8_waiting_without_a_timeout_ends_where_the_store_hangs(
    gate: Gate, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = tenuto.Checkpointer(gate, state(), keep=ALL)
    ckpt.step_done()
    gate.open_gate.clear()
    ckpt.save()
    assert gate.reached.wait(60)
    monkeypatch.setattr("tenuto.engine.save.handle.STANDSTILL_S", 0.05)
    with pytest.raises(DeadlineExceeded, match=r"the save of main/a0001/1 has not got on for 0.05 s"):
        ckpt.wait()
    gate.open_gate.set()
    monkeypatch.undo()
    ckpt.wait()
    assert steps_of(place) == [1]
    hold, tidies = threading.Event(), threading.Event()

    def held(*arguments: Any, **named: Any) -> Any:
        tidies.set()
        assert hold.wait(60)
        return plan_retention(*arguments, **named)

    monkeypatch.setattr("tenuto.training.retention_worker.plan_retention", held)
    ckpt.step_done()
    ckpt.save(wait=True)
    assert tidies.wait(60)
    assert ckpt._training.saving.saver.join(60)  # else it may be the thread of the save that has not ended in time
    monkeypatch.setattr("tenuto.engine.save.handle.STANDSTILL_S", 0.05)
    with pytest.raises(DeadlineExceeded, match=r"retention of run 'main' has not ended within 0.05 s"):
        ckpt.wait()
    hold.set()
    ckpt.close()


def test_a_full_disk_makes_room_once(gate: Gate, place: Path) -> None:
    one = state()
    ckpt = tenuto.Checkpointer(gate, one, save=on.end(), keep=keep.latest(1))
    ckpt.save(wait=True)
    ckpt.wait()  # its round of retention too, which would else see the next one under the first policy
    ckpt._training.saving.tiers.keep = keep.latest(2)
    ckpt.step_done()
    ckpt.save(wait=True)
    ckpt.wait()
    assert steps_of(place) == [1, 0]
    ckpt._training.saving.tiers.keep = keep.latest(1)
    gate.failure, gate.failures = StoreFull("no space", subject="x"), 1
    ckpt.step_done()
    assert ckpt.save(wait=True).committed
    ckpt.close()
    assert steps_of(place) == [2]


def test_state_born_later_is_planned_anew_and_what_cannot_be_saved_is_named(place: Path) -> None:
    with pytest.raises(Unserialisable, match="bad/thing"):
        tenuto.Checkpointer(place, {"bad": {"thing": lambda: 0}})
    one: dict[str, object] = state()
    with pytest.raises(Unserialisable, match="late"):
        with tenuto.Checkpointer(place, one, save=every(steps=1), keep=ALL) as ckpt:
            for step in ckpt.steps(3):
                if step == 1:
                    one["more"] = np.arange(100_000)
                if step == 2:
                    one["late"] = object()
    assert np.array_equal(tenuto.load(place).state["more"], np.arange(100_000))
    assert steps_of(place) == [2, 1]


def test_a_changed_structure_is_told_on_resume(place: Path) -> None:
    tenuto.save({"w": np.zeros(3), "old": np.ones(2)}, place)
    with tenuto.Checkpointer(place, {"w": np.zeros(4)}) as ckpt, pytest.raises(StateMismatch, match="w"):
        ckpt.steps(1)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"save": "always"}, "save="),
        ({"keep": every(steps=1)}, "keep="),
        ({"on_busy": "queue"}, "on_busy"),
        ({"on_error": "ignore"}, "on_error"),
        ({"memory_budget": -1}, "memory_budget"),
        ({"resume_from": "the newest one"}, "resume_from"),
        ({"run": "../up"}, "run"),
    ],
)
def test_arguments_that_make_no_sense_touch_nothing(place: Path, arguments: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        tenuto.Checkpointer(place, state(), **arguments)  # type: ignore[arg-type]
    assert word == "resume_from" or not place.exists()


def test_a_state_that_is_no_mapping_is_refused(place: Path) -> None:
    with pytest.raises(UsageError, match="must be a mapping"):
        tenuto.Checkpointer(place, [1, 2])  # type: ignore[arg-type]


def test_a_budget_that_the_image_does_not_fit_fails_loudly_before_the_first_step(place: Path) -> None:
    with pytest.raises(SaveFailed, match="budget"):
        tenuto.Checkpointer(place, {"w": np.zeros(1 << 20)}, memory_budget=1 << 19)


def test_i9_memory_that_the_machine_does_not_have_is_not_taken(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenuto.engine.staging.pool.memory_headroom", lambda: (64 << 20) + 1000)
    with pytest.raises(SaveFailed, match=r"64\.0 MiB are free"):
        tenuto.save({"w": np.zeros(8 << 20)}, place)
    monkeypatch.setattr("tenuto.engine.staging.pool.memory_headroom", lambda: 100 << 20)
    tenuto.save({"w": np.zeros(8 << 20)}, place)


def test_an_unwritable_place_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotARepository, match="file is a file"):
        tenuto.Checkpointer(tmp_path / "file", state())
    assert (tmp_path / "file").read_text() == "x"


def test_a_close_on_the_way_out_of_an_error_does_not_hide_it(place: Path) -> None:
    """Also where a signal has come, for which nobody has left yet."""
    ckpt = tenuto.Checkpointer(place, state(), save=on.end() | on.signal())

    def steps() -> None:
        try:
            for _ in ckpt.steps(3):
                signal.raise_signal(signal.SIGTERM)
                raise ZeroDivisionError("the loss is not a number")
        finally:
            ckpt.close()

    with pytest.raises(ZeroDivisionError), said("left incomplete"):
        steps()
