"""Signals that come where a loop is between two steps: nothing that was trained is lost, and nothing passed over."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import tenuto
from support.said import said
from support.tiny_training import Gate, state, steps_of, train
from tenuto import every, on
from tenuto.concurrency.worker_threads import BackgroundWork, background_threads
from tenuto.engine.save import handle
from tenuto.errors import Superseded
from tenuto.integrations.torch.data import iteration
from tenuto.policy.save import Moment, SaveHistory, SavePolicy
from tenuto.repo.ownership.claim import Attempt
from tenuto.store.local import store as local_store
from tenuto.store.memory import MemoryStore
from tenuto.telemetry import JsonLines
from tenuto.training import exit_status, training_session
from tenuto.training.preemption import Preempted, SignalWatch

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _leaving_does_not_end_the_test_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_status._ending, "code", 0)


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
        with tenuto.Checkpointer(place, one, data=data, save=save or on.signal()) as ckpt:
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
    assert steps_of(place) == [4] and tenuto.load(place).state["n"] == one["n"] == 4


def test_a_signal_in_the_evaluation_after_data_without_a_length_saves_the_last_step(place: Path) -> None:
    _, seen = epochs(place, Stream(), after=ask)
    assert seen == everything(4)[:4]
    assert steps_of(place) == [4] and tenuto.load(place).state["n"] == 4


def draw() -> None:
    """What an evaluation does: iterating a loader of torch's draws from its global generator."""
    torch.rand(())
    np.random.random()


def test_a_signal_in_an_evaluation_that_draws_saves_the_last_step_as_it_was(place: Path, tmp_path: Path) -> None:
    np.random.seed(0)
    expected, _ = epochs(tmp_path / "whole", Batches(range(4)), after=draw)
    np.random.seed(0)
    epochs(place, Batches(range(4)), after=lambda: (draw(), ask()))
    assert steps_of(place) == [4]
    np.random.seed(99)
    resumed, seen = epochs(place, Batches(range(4)), after=draw)
    assert seen == everything(4)[4:] and resumed["n"] == 8
    assert np.array_equal(resumed["w"], expected["w"])


def test_a_second_signal_after_the_position_in_the_data_has_moved_on_saves_nothing(place: Path) -> None:
    data = Stream()
    epochs(place, data, after=lambda: (data.load_state_dict({"next": 3}), ask(), ask()))
    assert steps_of(place) == []


def test_an_evaluation_that_takes_longer_than_a_signal_leaves_is_not_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_session, "REST_S", 0.05)

    def evaluate() -> None:
        ask()
        threading.Event().wait(60)
        pytest.fail("it leaves before the evaluation ends")

    epochs(place, Stream(), after=evaluate)
    assert steps_of(place) != []


def test_a_signal_is_not_sent_again_once_its_training_is_closed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that catches what it leaves by, and goes on, is not ended ten seconds later."""
    monkeypatch.setattr(training_session, "REST_S", 3600.0)
    began: list[threading.Timer] = []

    def evaluate() -> None:
        ask()
        began.extend(
            one for one in threading.enumerate() if isinstance(one, threading.Timer) and one.function is os.kill
        )

    epochs(place, Stream(), after=evaluate)
    assert began and steps_of(place) != []
    for one in began:
        one.join(PATIENCE_S)
        assert not one.is_alive()


def model() -> dict[str, Any]:
    return {"model": torch.nn.Linear(50, 50), "steps": 0}


def grow(one: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in one["model"].parameters():
            parameter.add_(1)
    one["steps"] += 1


def swap(one: dict[str, Any]) -> None:
    """Averaged weights come in, by what torch does not count."""
    for parameter in one["model"].parameters():
        parameter.data.copy_(parameter.data / 2)


@pytest.mark.parametrize("swapped", [True, False])
def test_a_second_signal_while_averaged_weights_are_swapped_in_does_not_save_them(place: Path, swapped: bool) -> None:
    one = model()
    with pytest.raises(Preempted), tenuto.Checkpointer(place, one, data=[1, 2], save=on.signal()) as ckpt:
        for _ in ckpt.epochs(2):
            for _ in ckpt.batches:
                grow(one)
            if swapped:
                swap(one)
            ask()
            ask()
            pytest.fail("it leaves at once")
    assert steps_of(place) == ([] if swapped else [2])


@pytest.mark.parametrize("swapped", [True, False])
def test_a_metric_that_comes_while_averaged_weights_are_swapped_in_does_not_save_them(
    place: Path, swapped: bool
) -> None:
    one = model()
    with tenuto.Checkpointer(place, one, save=on.improve("val_loss")) as ckpt:
        ckpt.restore()
        grow(one)
        ckpt.step_done()
        if swapped:
            swap(one)
            with said("step 1 is not saved, though"):
                ckpt.log(val_loss=0.5)
            grow(one)
            ckpt.step_done()
        else:
            ckpt.log(val_loss=0.5)
    assert steps_of(place) == ([] if swapped else [1])


def test_a_signal_in_an_epoch_that_takes_its_batches_elsewhere_saves_it_at_its_end(place: Path) -> None:
    one = state()
    with pytest.raises(Preempted), tenuto.Checkpointer(place, one, save=on.signal()) as ckpt:
        for epoch in ckpt.epochs(5):
            one["w"] += 1
            if epoch == 2:
                ask()
            one["n"] += 1
    saved = tenuto.load(place)
    assert saved.step == saved.state["n"] == saved.state["w"][0] == 3


def test_a_training_that_is_over_does_not_leave_in_the_middle_of_anothers_step(place: Path, tmp_path: Path) -> None:
    one, save = state(), on.end() | on.signal()
    with pytest.raises(Preempted), tenuto.Checkpointer(tmp_path / "outer", state(), save=save) as outer:
        list(outer.steps(1))
        with tenuto.Checkpointer(place, one, save=save) as inner:
            for step in inner.steps(5):
                one["w"] += 1
                if step == 2:
                    ask()
                one["n"] += 1
    saved = tenuto.load(place)
    assert saved.step == saved.state["n"] == saved.state["w"][0] == 3
    assert steps_of(tmp_path / "outer") == [1]


def test_a_signal_that_comes_while_a_step_is_completed_awaits_no_other_batch(place: Path) -> None:
    data = Batches(range(6))
    _, seen = epochs(place, data, save=Asking(3) | on.signal())
    assert seen == everything(6)[:3]
    assert steps_of(place) == [3] and tenuto.load(place).state["n"] == 3


def test_one_that_comes_while_a_counted_step_is_completed_saves_that_one(place: Path) -> None:
    one = state()
    with (
        pytest.raises(Preempted),
        tenuto.Checkpointer(place, one, save=Asking(3) | on.signal()) as ckpt,
    ):
        for _ in ckpt.steps(9):
            train(one)
    assert steps_of(place) == [3] and tenuto.load(place).state["n"] == 3


def test_a_signal_does_not_take_the_place_of_the_error_that_ended_training(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(self: Attempt) -> None:
        ask()
        raise Superseded("another process has the run now", subject=self.run)

    one = state()
    with (
        pytest.raises(Superseded),
        tenuto.Checkpointer(place, one, save=every(steps=2) | on.signal()) as ckpt,
    ):
        for step in ckpt.steps(9):
            train(one)
            if step == 1:
                monkeypatch.setattr(Attempt, "check", lost)
    assert "SIGUSR1 came as well as Superseded, which ends the training" in caplog.text


class Ask:
    """Asks this process to leave, once, where the main thread calls it after it was armed."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self) -> None:
        if self.armed and threading.current_thread() is threading.main_thread():
            self.armed = False
            ask()


def leaves_with_its_step(
    where: Path | MemoryStore, armed: Ask, then: Callable[[tenuto.Checkpointer], object], data: Any = (1, 2)
) -> None:
    """Trains one epoch, which nothing but a signal saves, and does behind it what is asked to leave."""
    one = state()
    with pytest.raises(Preempted), tenuto.Checkpointer(where, one, data=data, save=on.signal()) as ckpt:
        for _ in ckpt.epochs(1):
            for _ in (1, 2) if data is None else ckpt.batches:
                train(one)
        armed.armed = True
        then(ckpt)
    assert not armed.armed
    assert tenuto.load(where).step == (1 if data is None else 2)


def test_a_signal_while_an_iterated_loader_is_noted_waits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asking, words, loader = Ask(), iteration._words, DataLoader([1, 2])
    monkeypatch.setattr(iteration, "_words", lambda dataset: (asking(), words(dataset))[1])
    iteration.follow()
    leaves_with_its_step(place, asking, lambda _: list(loader), data=None)


def test_a_signal_while_an_event_is_written_waits(place: Path, tmp_path: Path) -> None:
    asking = Ask()

    class Lines(io.StringIO):
        def write(self, text: str) -> int:
            asking()
            return super().write(text)

    one, sink = state(), JsonLines(Lines())
    tenuto.save(one, tmp_path / "other")
    with pytest.raises(Preempted), tenuto.Checkpointer(place, one, save=on.signal(), sinks=[sink]) as ckpt:
        for _ in ckpt.steps(3):
            train(one)
            asking.armed = True
            tenuto.load(tmp_path / "other", sinks=[sink])
    assert steps_of(place) == [1]


def test_a_signal_while_the_newest_step_is_looked_up_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    asking, store = Ask(), MemoryStore("a-signal-while-the-newest-is-looked-up")

    class Objects(dict[str, tuple[bytes, int]]):
        def items(self) -> Any:
            asking()
            return super().items()

    monkeypatch.setattr(store.place, "objects", Objects())
    leaves_with_its_step(store, asking, tenuto.Checkpointer.latest_step)


def test_a_signal_while_a_file_is_given_its_name_waits(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = Ask()

    class Names(set[str]):
        def add(self, name: str) -> None:
            asking()
            super().add(name)

    monkeypatch.setattr(local_store, "_in_flight", Names())
    leaves_with_its_step(place, asking, lambda _: tenuto.save(state(), tmp_path / "other"))


def own_loop(place: Path, steps: int, at: int) -> dict[str, Any]:
    """A loop that somebody else owns. The signal comes in the body of its step `at`, between two changes."""
    one = state()
    with tenuto.Checkpointer(place, one, save=on.signal()) as ckpt:
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
    saved = tenuto.load(place)
    assert saved.step == saved.state["n"] == saved.state["w"][0] == 3


def test_one_behind_the_last_step_of_a_loop_of_ones_own_saves_that_step(place: Path) -> None:
    with pytest.raises(Preempted):
        own_loop(place, 5, 5)
    saved = tenuto.load(place)
    assert saved.step == saved.state["n"] == 5


class AskingNotes(dict[Any, Any]):
    """Notes that wait, in which a signal comes when one is added: its adder holds a lock that the writer needs."""

    def setdefault(self, key: Any, default: Any = None) -> Any:
        ask()
        return super().setdefault(key, default)


def test_a_signal_while_a_late_metric_is_noted_waits_for_nothing_that_cannot_come(
    place: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "STANDSTILL_S", PATIENCE_S)
    monkeypatch.setattr(training_session, "CLOSE_DEADLINE_S", PATIENCE_S)
    one = state()
    with pytest.raises(Preempted), tenuto.Checkpointer(gate, one, save=on.end() | on.signal()) as ckpt:
        gate.open_gate.clear()
        for _ in ckpt.steps(2):
            train(one)
        assert ckpt._training is not None
        ckpt._training.saving._notes._pending = AskingNotes()
        threading.Timer(0.1, gate.open_gate.set).start()
        ckpt.log(loss=0.5)
    saved = tenuto.load(place)
    assert saved.step == 2


def test_a_signal_while_the_first_step_claims_the_run_saves_that_step(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = SignalWatch.install

    def installed(self: SignalWatch) -> SignalWatch:
        found = install(self)
        ask()
        return found

    monkeypatch.setattr(SignalWatch, "install", installed)
    with pytest.raises(Preempted):
        own_loop(place, 5, -1)
    saved = tenuto.load(place)
    assert saved.step == saved.state["n"] == 1


def test_an_interrupt_while_the_writing_thread_is_started_leaves_its_save_to_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, run, interrupts = state(), background_threads.run, [KeyboardInterrupt()]

    def started(given: BackgroundWork) -> None:
        run(given)
        given.join()
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(background_threads, "run", started)
    with tenuto.Checkpointer(place, one, save=on.end()) as ckpt:
        ckpt.restore()
        train(one)
        ckpt.step_done()
        with pytest.raises(KeyboardInterrupt):
            ckpt.save()
        train(one)
        ckpt.step_done()
        ckpt.save(wait=True)
    assert steps_of(place) == [2, 1]
    assert tenuto.load(place, step=1).state["n"] == 1


def test_an_interrupt_without_the_policy_that_catches_signals_leaves_nothing_half_done(place: Path) -> None:
    one, half_done = state(), True

    class Interrupting(SavePolicy):
        def wants(self, now: Moment, history: SaveHistory) -> str | None:
            if now.step == 2 and not now.ending:
                nonlocal half_done
                os.kill(os.getpid(), signal.SIGINT)
                half_done = False
            return "each step"

    with pytest.raises(KeyboardInterrupt), tenuto.Checkpointer(place, one, save=Interrupting()) as ckpt:
        for _ in ckpt.steps(5):
            train(one)
    assert not half_done and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with tenuto.Checkpointer(place, one) as ckpt:
        for _ in ckpt.steps(3):
            train(one)
    assert steps_of(place)[0] == one["n"] == 3
