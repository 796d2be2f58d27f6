"""When a signal may interrupt: never while the main thread is at work in Tenuto.

Python runs a signal's handler in the main thread, between any two instructions, on top of what that thread was doing.
A handler that then waits for another thread waits for ever if a frame below it holds a lock that this thread needs,
and an exception that a handler raises leaves whatever was half done. So the handlers of this package only note the
signal within a block that is `undisturbed`; what follows is done where the outermost such block ends. KeyboardInterrupt
is also raised where such a block waits (`interruptible`): nothing is half done there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType


class _MainThread:
    """What the main thread is doing, as its signal handlers see it."""

    def __init__(self) -> None:
        self.depth = 0
        """Undisturbed blocks, one within the other."""
        self.interruptible_at = -1
        """The depth of the block that waits."""
        self.interrupted = False
        """Whether a KeyboardInterrupt is to be raised."""
        self.due: list[Callable[[], None]] = []

    def catch_up(self) -> None:
        self.raise_interrupt()
        while self.due and not self.depth:
            self.due.pop(0)()

    def raise_interrupt(self) -> None:
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt


_main = _MainThread()


_main_ident = threading.main_thread().ident


def _forked() -> None:
    global _main_ident  # noqa: PLW0603 - the thread that has forked is the child's main one
    _main_ident = threading.get_ident()


os.register_at_fork(after_in_child=_forked)


def _is_main() -> bool:
    return threading.get_ident() == _main_ident


class _Undisturbed:
    """Holds signals back until the outermost block ends; within a block of another thread nothing happens."""

    def __enter__(self) -> None:
        if threading.get_ident() == _main_ident:
            _main.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.get_ident() != _main_ident:
            return
        if _main.depth > 1:
            _main.depth -= 1
            return
        _main.depth = 0  # a child that was forked within the block began there
        _main.interruptible_at = -1
        # An error is not hidden by a signal. A loop that has come to its end is none.
        if (_main.interrupted or _main.due) and (kind is None or issubclass(kind, StopIteration)):
            _main.catch_up()


class _Interruptible:
    """Lets KeyboardInterrupt be raised at any line of the block, also within one that is undisturbed."""

    def __init__(self) -> None:
        self._before = -1

    def __enter__(self) -> None:
        if _is_main():
            self._before, _main.interruptible_at = _main.interruptible_at, _main.depth
            try:
                _main.raise_interrupt()
            except KeyboardInterrupt:
                _main.interruptible_at = self._before
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _is_main():
            _main.interruptible_at = self._before


undisturbed = _Undisturbed()
interruptible = _Interruptible


def when_undone(action: Callable[[], None]) -> None:
    """Calls `action` now, or where the outermost undisturbed block ends. For signal handlers."""
    if _main.depth:
        _main.due.append(action)
    else:
        action()


def interrupt() -> None:
    """Raises KeyboardInterrupt now, or where the main thread next waits, or where the outermost undisturbed block
    ends. While one is held back already, another is raised at once. For signal handlers."""
    if _main.depth and _main.interruptible_at != _main.depth and not _main.interrupted:
        _main.interrupted = True
        return
    _main.interrupted = False
    raise KeyboardInterrupt


class Latch:
    """An event that happens once. Unlike `threading.Event` it holds no lock of Python's own while it waits or is set,
    so an exception that a signal's handler raises there leaves none locked for ever."""

    def __init__(self) -> None:
        self._happened = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        return self._happened

    def set(self) -> None:
        try:
            self._happened = True  # first: who comes from here on does not wait
        finally:
            self._release()

    def wait(self, timeout: float | None = None) -> bool:
        """Returns whether it has happened, within `timeout` seconds."""
        if not self._happened:
            with interruptible():
                try:
                    self._lock.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
                finally:  # a handler may raise when the lock is taken already
                    if self.is_set():
                        self._release()  # for the next one that waits
        return self._happened

    def _release(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            return  # another thread has just done the same


def _reset_after_fork() -> None:
    _main.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_reset_after_fork)
