"""Reusable worker threads.

Starting a thread costs the training thread up to a millisecond, because `start` returns only after the new thread has
been scheduled. Handing work to an idle thread costs nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

MAX_IDLE: Final = 4
"""Idle threads kept for reuse in each pool."""
IDLE: Final = "tenuto-idle"
"""The name of an idle thread."""


class BackgroundWork:
    """A piece of work that another thread runs and that never raises; joins like a started thread."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self.name = name
        self._work: Callable[[], None] | None = work
        self._ended = threading.Event()

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def do(self) -> None:
        work, self._work = (
            self._work,
            None,
        )  # whoever keeps this object must not keep the work alive
        try:
            if work is not None:
                work()
        finally:
            del work
            self._ended.set()


class WorkerThreads:
    """A pool of worker threads of one priority: a thread that has lowered its priority must not serve other work."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[BackgroundWork]] = []
        self._guard = threading.Lock()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def submit(self, work: Callable[[], None], name: str) -> BackgroundWork:
        """Runs `work` on a pool thread, which carries `name` meanwhile. The work must not raise.

        Raises RuntimeError at interpreter exit, when no thread can be started any more.
        """
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
                if len(self._idle) >= MAX_IDLE:
                    return
                self._idle.append(queue)

    def _reset_after_fork(self) -> None:
        """Resets the pool in a forked child, which has none of the threads."""
        self._idle = []
        self._guard = threading.Lock()


foreground_threads = WorkerThreads()
"""Runs work at training's priority: work that somebody waits for, and copies that an update waits for."""
background_threads = WorkerThreads()
"""Runs work at background priority."""
