"""Makes a failure in the background show in the process's exit status.

When such a failure could end the process, it can no longer be raised: an exception in an atexit hook leaves the status
0 (measured). So one hook, which runs before all others, checks for failures that no later save has made good. If there
is one, it runs the other hooks itself, flushes, and ends the process with `os._exit`.

A signal that asks to leave ends the process with 128 + n also after training, and while the interpreter ends: there a
handler that raises would change nothing, and without one the process would be killed, whatever it still has to finish.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Final

from tenuto.concurrency.interruption import when_undone

ENDED_BY: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask to leave, and would kill without a handler. SIGINT has one of Python's own."""


class ExitStatus:
    """The failure of one run that this process trains, until a later save makes it good.

    Creating one arms the hook of this process. A forked child exits as if there were none.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        _ending.arm()

    def fail(self, reason: str) -> None:
        _ending.failures[self] = reason

    def clear(self) -> None:
        _ending.failures.pop(self, None)

    @property
    def failure(self) -> str | None:
        """Why the exit status will not be zero, or None."""
        return _ending.failures.get(self)


def leaving_with(code: int) -> None:
    """Sets the status with which this process is about to exit, as `Preempted` or a `sys.exit(3)` that leaves a
    Checkpointer's `with` has it, so that a failure does not hide it. That of any other exit is unknown to a hook, and
    becomes 1 after a failure."""
    _ending.code = code


def before_exit(close: Callable[[], object]) -> Callable[[], None]:
    """Has `close` called at exit before the failures are checked, the last given first. Returns a function that
    undoes this. What `close` raises is printed, and makes the exit status non-zero."""
    _ending.arm()
    entry = (close,)
    _ending.closers.append(entry)

    def withdraw() -> None:
        _ending.closers = [kept for kept in _ending.closers if kept is not entry]

    return withdraw


def catch_to_the_end() -> None:
    """Has signals that ask to leave caught while the interpreter ends."""
    _ending.catches = True


def interpreter_ends() -> bool:
    return _ending.begun and _ending.armed_in == os.getpid()


def end_with_status(number: int, frame: FrameType | None) -> None:
    """Handles a signal where no training is left to finish: as the default would, with the status 128 + n."""
    if _ending.armed_in != os.getpid():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    when_undone(partial(end_by, number))


def end_by(number: int) -> None:
    """Ends this process by a signal. Raises Preempted; while the interpreter ends it does so at once, with what is in
    flight committed."""
    from tenuto.training.preemption import Preempted

    if not interpreter_ends():
        leaving_with(128 + number)
        raise Preempted(number)
    _ending.end(128 + number)


class _Ending:
    """What this process does at exit. Every change is one operation on a dict or list, so no lock is needed, which a
    fork could leave locked for ever."""

    def __init__(self) -> None:
        self.failures: dict[ExitStatus, str] = {}
        self.closers: list[tuple[Callable[[], object]]] = []
        self.code = 0
        self.armed_in: int | None = None
        self.catches = False
        """Whether signals are to be caught to the end."""
        self.begun = False
        """Whether the interpreter ends."""
        self.asked = False
        """Whether a signal has come since then."""
        self.closing = False

    def arm(self) -> None:
        """Arms the hook, once for each process. It has to run before all others, so that it can run them: it is
        registered at the last moment, when the interpreter begins to wait for threads."""
        if self.armed_in == os.getpid():
            return
        self.armed_in = os.getpid()
        late: Any = getattr(threading, "_register_atexit", None)
        try:
            late(self.register)
        except (TypeError, RuntimeError):  # not there in this Python, or the interpreter is ending already
            self.register()

    def register(self) -> None:
        self.begun = True
        self.handle_signals()
        atexit.unregister(self.run)
        if _child_of_multiprocessing():  # it runs no hooks, and ends after this
            self.close_all()
            if self.failures:
                self.leave()
        else:
            atexit.register(self.run)

    def handle_signals(self) -> None:
        """Handles those that nobody handles."""
        if self.catches and threading.current_thread() is threading.main_thread():
            for number in ENDED_BY:
                if signal.getsignal(number) == signal.SIG_DFL:
                    signal.signal(number, end_with_status)

    def run(self) -> None:
        if self.armed_in != os.getpid():
            return
        self.close_all()
        self.handle_signals()
        try:
            atexit.unregister(self.run)
            atexit._run_exitfuncs()
        finally:
            if self.failures or self.asked:
                self.leave()
        # Nothing of Python's runs from here on: a signal would kill a process that is done.
        for number in ENDED_BY:
            if signal.getsignal(number) == end_with_status:
                signal.signal(number, signal.SIG_IGN)
        _drop_unwritten_lines()

    def end(self, code: int) -> None:
        """Ends the process, for a signal."""
        self.code, self.asked = self.code or code, True
        if not self.closing:  # else that is under way below this handler, and `run` leaves
            self.close_all()
            self.leave()

    def leave(self) -> None:
        code = self.code or 1
        try:
            reasons = "; ".join(f"{status.what}: {reason}" for status, reason in self.failures.items())
            _write(f"tenuto: leaving with status {code}: {reasons}\n" if reasons else "")
        finally:
            os._exit(code)

    def close_all(self) -> None:
        self.closing = True
        while self.closers:
            (close,) = self.closers.pop()
            try:
                close()
            except BaseException as error:  # noqa: BLE001 - reported here and by the exit status; the others have to run
                sys.excepthook(type(error), error, error.__traceback__)
                ExitStatus("at exit").fail(f"{type(error).__name__}: {error}")
        self.closing = False

    def forget(self) -> None:
        """Forgets, in a forked child, the failures and closers of its parent."""
        self.__init__()  # type: ignore[misc]
        for number in ENDED_BY:
            if signal.getsignal(number) == end_with_status:
                signal.signal(number, signal.SIG_DFL)


def _write(text: str) -> None:
    """Writes to stderr and flushes both streams, as far as they still exist."""
    for stream, words in ((sys.stdout, ""), (sys.stderr, text)):
        try:
            stream.write(words)
            stream.flush()
        except (OSError, ValueError, AttributeError):  # a closed pipe or no stream: the status still shows it
            continue


def _child_of_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _drop_unwritten_lines() -> None:
    """Drops what stderr has not taken: Python would try once more, and make a status of 120 of it."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = None


_ending = _Ending()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ending.forget)
