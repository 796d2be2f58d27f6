"""A fence that is passed by the thread that waits at it: a signal's handler may say `ckpt.fence()` in between."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tenuto
from support.fenced_training import HeldCopy, Model, Told, assert_images_are_right, holding, snapshot, spying, stepping
from tenuto import every, keep
from tenuto.engine.fence import fence
from tenuto.events import Warned

PATIENCE_S = 30

pytestmark = pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")


@pytest.fixture
def held_copy() -> Iterator[HeldCopy]:
    with holding() as held:
        yield held


@pytest.fixture
def handled() -> Iterator[dict[int, Any]]:
    """Signal -> what handles it, within the test. One that hangs in a lock is ended by an alarm."""

    def hangs(number: int, frame: Any) -> None:
        pytest.fail("the thread waits for itself")

    handlers: dict[int, Any] = {signal.SIGALRM: hangs}
    before = {
        number: signal.signal(number, lambda number, frame: handlers[number](number, frame))
        for number in (signal.SIGALRM, signal.SIGUSR2)
    }
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    yield handlers
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def interrupted(
    tmp_path: Path, held_copy: HeldCopy, handled: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Told, list[int]]:
    """What became of a training of six saved steps, in which a handler passed the fence of step 5 while the next update
    waited there, and which of them are committed, each of which is right."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    told, main, body = Told(), threading.get_ident(), stepping(model, optimizer)
    waits, entered, passed = threading.Event(), threading.Event(), threading.Event()
    let_copies_end = fence.Fence._await_copies

    def waiting(self: fence.Fence) -> None:
        waits.set()
        let_copies_end(self)

    def interrupt() -> None:
        assert held_copy.reached.wait(PATIENCE_S) and waits.wait(PATIENCE_S)
        while not entered.wait(0.05):  # a signal that comes just before a thread begins to wait does not wake it
            signal.pthread_kill(main, signal.SIGUSR2)

    more: dict[str, Any] = {"save": every(steps=1), "keep": keep.all(), "sinks": [told], "capture": "fenced"}
    with spying(told), tenuto.Checkpointer(tmp_path, state, **more) as ckpt:

        def handler(number: int, frame: Any) -> None:
            entered.set()
            held_copy.let_go()
            ckpt.fence()
            passed.set()

        handled[signal.SIGUSR2] = handler
        thread = threading.Thread(target=interrupt)
        for step in ckpt.steps(6):
            if step == 5:
                monkeypatch.setattr(fence.Fence, "_await_copies", waiting)
                thread.start()
            body(step)
            told.snapshots[step + 1] = snapshot(state)
            if step == 4:
                held_copy.hold()
        thread.join()
    assert told.late[5] and passed.is_set()
    return told, assert_images_are_right(tmp_path, state, told)


def test_a_handler_may_ask_for_the_fence_at_which_its_thread_waits(interrupted: tuple[Told, list[int]]) -> None:
    told, steps = interrupted
    assert {1, 2, 3, 4, 6} <= set(steps) and not told.demoted


def test_a_save_whose_fence_a_handler_has_passed_stands(interrupted: tuple[Told, list[int]]) -> None:
    told, steps = interrupted
    assert steps == [1, 2, 3, 4, 5, 6] and not told.failed
    assert not [event.message for event in told.events if isinstance(event, Warned) and "broke off" in event.message]
