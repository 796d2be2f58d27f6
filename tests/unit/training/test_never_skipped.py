"""With on_busy="skip": the saves that are taken all the same."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

import tenuto
from support.tiny_training import Gate, state, steps_of, train
from tenuto import every, keep, on
from tenuto.engine.save.saver import Saver
from tenuto.events import Event, SaveDelayed, SaveSkipped
from tenuto.training import exit_status
from tenuto.training.preemption import Preempted


@pytest.fixture(autouse=True)
def _leaving_does_not_end_the_test_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_status._ending, "code", 0)


class Opening:
    """Lets the store go on once a save has been skipped; and, where one waits, at once."""

    def __init__(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = gate
        self.skipped: list[int] = []
        self.delayed: list[int] = []
        await_free = Saver.await_free

        def opening(saver: Saver, timeout: float | None) -> bool:
            gate.open_gate.set()
            return await_free(saver, timeout)

        monkeypatch.setattr(Saver, "await_free", opening)

    def emit(self, event: Event) -> None:
        if isinstance(event, SaveSkipped):
            self.skipped.append(event.step)
            self.gate.open_gate.set()
        elif isinstance(event, SaveDelayed):
            self.delayed.append(event.step)


@pytest.mark.parametrize("why", ["the last step", "stop", "a signal", "a tag"])
def test_a_save_that_was_asked_for_inside_a_step_that_has_to_be_saved(
    gate: Gate, place: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    one, told = state(), Opening(gate, monkeypatch)
    gate.open_gate.clear()
    save = every(steps=1) | on.end() | on.signal()
    with (
        suppress(Preempted),
        tenuto.Checkpointer(gate, one, save=save, on_busy="skip", keep=keep.all(), sinks=[told]) as ckpt,
    ):
        for step in ckpt.steps(2 if why == "the last step" else 3):
            train(one)
            ckpt.save()
            if step == 1 and why == "stop":
                ckpt.stop()
            elif step == 1 and why == "a signal":
                os.kill(os.getpid(), signal.SIGUSR1)
            elif step == 1 and why == "a tag":
                ckpt.log(tag="good")
    assert told.skipped == [] and told.delayed[0] == 2
    assert 2 in steps_of(place) and tenuto.load(place, step=2).state["n"] == 2
    if why == "a tag":
        assert tenuto.load(place, step="good").step == 2
