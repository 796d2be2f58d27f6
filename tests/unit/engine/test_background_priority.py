"""A save beside training stands back; one that training waits for does not."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.memory_training import shared_memory
from tenuto import events, every
from tenuto.concurrency.worker_threads import NICE, WorkerThreads, lower_priority
from tenuto.engine.memory_tier import cadence
from tenuto.engine.save import saver

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What `work` answers in a thread of its own, which may lower its priority."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_only_the_thread_that_asks_stands_back() -> None:
    before = niceness()
    assert in_a_thread(lambda: (lower_priority(), niceness())[1]) == max(NICE, before)
    assert niceness() == before


def test_a_thread_that_a_background_thread_has_started_serves_nothing_that_training_waits_for() -> None:
    """A new thread has the priority of the one that starts it."""
    pool, before, found = WorkerThreads(foreground=True), niceness(), list[int]()

    def submit() -> None:
        work = pool.submit(lambda: found.append(niceness()), "work")
        work.join()

    in_a_thread(lambda: (lower_priority(), submit()))
    for _ in range(2):
        submit()
    assert found == [max(NICE, before), before, before]


CALLS = {"x86_64": (251, 252), "aarch64": (30, 31)}
"""Numbers of ioprio_set and ioprio_get, by machine."""
LAST = 2 << 13 | 7
"""The last of the best-effort class: behind all that reads and writes without having said how."""


def io_priority(put: int | None = None) -> int:
    """Of this thread; -1 where it cannot be asked, or set to `put`."""
    if platform.machine() not in CALLS:
        return -1
    call, (set_it, get_it) = ctypes.CDLL(None).syscall, CALLS[platform.machine()]
    if put is not None and call(set_it, 1, 0, put) != 0:
        return -1
    return int(call(get_it, 1, 0))


def test_the_thread_that_asks_stands_back_from_the_disk_too() -> None:
    if in_a_thread(lambda: io_priority(LAST)) != LAST:
        pytest.skip("threads have no priorities of their own for the disk here")
    before = io_priority()
    assert before != LAST
    assert in_a_thread(lambda: (lower_priority(), io_priority())[1]) == LAST
    assert io_priority() == before


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is there that has stood back in a test before."""
    parked = WorkerThreads()
    monkeypatch.setattr(cadence, "background_threads", parked)
    monkeypatch.setattr(saver, "background_threads", parked)


class Priorities:
    """A sink that notes, for each pack written and each state kept in memory, how the thread stands that did it."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def emit(self, event: events.Event) -> None:
        if isinstance(event, events.PackWritten | events.SavedToMemory):
            self.seen.append(niceness())


@pytest.mark.usefixtures("fresh")
def test_a_save_beside_training_stands_back_and_one_that_is_waited_for_does_not(tmp_path: Path) -> None:
    sink = Priorities()
    with tenuto.Checkpointer(tmp_path, {"w": np.ones(10)}, sinks=[sink]) as checkpointer:
        before = niceness()
        checkpointer.step_done()
        checkpointer.save().wait()
        checkpointer.step_done()
        checkpointer.save(wait=True)
    assert sink.seen[:2] == [max(NICE, before), before]


@pytest.fixture
def memory() -> Iterator[None]:
    with shared_memory():
        yield


@pytest.mark.usefixtures("fresh", "memory")
def test_a_state_that_goes_into_memory_is_digested_and_sealed_behind_training(tmp_path: Path) -> None:
    sink, before = Priorities(), niceness()
    options: dict[str, Any] = {"save": every(steps=1000), "memory": every(steps=1), "sinks": [sink]}
    with tenuto.Checkpointer(tmp_path, {"w": np.ones(10)}, **options) as checkpointer:
        checkpointer.step_done()
        checkpointer.step_done()
    assert sink.seen == [max(NICE, before)] * 2
    assert niceness() == before
