"""A save beside training stands back; one that training waits for does not."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import events
from holdfast.engine.politeness import NICE, stand_back

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_thread_that_asks_stands_back() -> None:
    seen: list[int] = []

    def background() -> None:
        stand_back()
        seen.append(niceness())

    before = niceness()
    thread = threading.Thread(target=background)
    thread.start()
    thread.join()
    assert seen == [max(NICE, before)]
    assert niceness() == before


class Priorities:
    """A sink that notes, for each pack written, how the writing thread stands."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def emit(self, event: events.Event) -> None:
        if isinstance(event, events.PackWritten):
            self.seen.append(niceness())


def test_a_save_beside_training_stands_back_and_one_that_is_waited_for_does_not(tmp_path: Path) -> None:
    sink = Priorities()
    with holdfast.Checkpointer(tmp_path, {"w": np.ones(10)}, sinks=[sink]) as checkpointer:
        before = niceness()
        checkpointer.step_done()
        checkpointer.save().wait()
        checkpointer.step_done()
        checkpointer.save(wait=True)
    assert sink.seen[:2] == [max(NICE, before), before]
