"""Threads that are kept when their work is done: to start one costs a training thread up to a millisecond each time,
for the new thread has to come to the processor before `start` returns. To hand work to one that waits costs nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

KEPT: Final = 4
"""Threads of one kind that are kept without work."""
IDLE: Final = "tenuto-idle"
"""What such a thread is called."""


class BackgroundWork:
    """Something that another thread does, which never raises. Like a thread that has been started."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self.name = name
        self._work: Callable[[], None] | None = work
        self._ended = threading.Event()

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def do(self) -> None:
        work, self._work = self._work, None  # whoever still holds this holds nothing of what it worked on
        try:
            if work is not None:
                work()
        finally:
            del work
            self._ended.set()


class WorkerThreads:
    """Threads of one kind. What has lowered its own priority serves only work that does the same."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[BackgroundWork]] = []
        self._guard = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)

    def submit(self, work: Callable[[], None], name: str) -> BackgroundWork:
        """Has `work` done by a thread that is called `name` meanwhile. RuntimeError where none can be started any more:
        at the interpreter's end. The work itself must not raise."""
        given = BackgroundWork(work, name)
        with self._guard:
            queue = self._idle.pop() if self._idle else None
        if queue is None:
            queue = SimpleQueue()
            threading.Thread(target=self._serve, args=(queue,), name=name, daemon=True).start()
        queue.put(given)
        return given

    def _serve(self, queue: SimpleQueue[BackgroundWork]) -> None:
        own = threading.current_thread()
        while True:
            given = queue.get()
            own.name = given.name
            given.do()
            del given
            own.name = IDLE
            with self._guard:
                if len(self._idle) >= KEPT:
                    return
                self._idle.append(queue)

    def _forget(self) -> None:
        """In a forked child, where none of the threads is."""
        self._idle = []
        self._guard = threading.Lock()


beside = WorkerThreads()
"""For work at the priority of training: what somebody waits for, and copies that an update waits for."""
behind = WorkerThreads()
"""For work that stands back behind training."""
