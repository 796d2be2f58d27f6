"""Work that is done in rounds, in a thread of low priority that exists only while there is some."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tenuto.concurrency.worker_threads import lower_priority


class BackgroundRounds:
    """Runs `work` in rounds, one at a time. Each `wake` is followed by a round that begins after it. What `work` raises
    ends its thread; the next `wake` begins another."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._name = name
        self._work = work
        self._state = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False

    def wake(self) -> bool:
        """Begins a round, or another one after the one that is under way. Returns False where no thread can be started
        any more: the interpreter is shutting down."""
        with self._state:
            if self._thread is not None:
                self._again = True
                return True
            self._thread = threading.Thread(target=self._rounds, name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None
        return self._thread is not None

    def join(self, timeout: float | None) -> bool:
        """Waits for the rounds under way; returns False if they have not ended after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while (thread := self._running()) is not None and thread is not threading.current_thread():
            thread.join(None if until is None else max(until - time.monotonic(), 0.0))
            if thread.is_alive():
                return False
            with self._state:
                if self._thread is thread:  # it ended without clearing this: another process's, before a fork
                    self._thread = None
        return True

    def _running(self) -> threading.Thread | None:
        """Returns the thread of the round that is under way. Whoever is just starting it holds the lock."""
        with self._state:
            return self._thread

    def _rounds(self) -> None:
        lower_priority()
        try:
            while True:
                self._work()
                with self._state:
                    if not self._again:
                        self._thread = None
                        return
                    self._again = False
        finally:
            with self._state:
                if self._thread is threading.current_thread():  # another one may have begun since
                    self._thread = None
