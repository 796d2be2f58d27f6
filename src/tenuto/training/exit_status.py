"""Makes a failure in the background show in the process's exit status.

When such a failure could end the process, it can no longer be raised: an exception in an atexit hook leaves the status
0 (measured). So one hook, which runs before all others, checks for failures that no later save has made good. If there
is one, it runs the other hooks itself, flushes, and ends the process with `os._exit`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any


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


class _Ending:
    """What this process does at exit. Every change is one operation on a dict or list, so no lock is needed, which a
    fork could leave locked for ever."""

    def __init__(self) -> None:
        self.failures: dict[ExitStatus, str] = {}
        self.closers: list[tuple[Callable[[], object]]] = []
        self.code = 0
        self.armed_in: int | None = None

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
        atexit.unregister(self.run)
        atexit.register(self.run)

    def run(self) -> None:
        if self.armed_in != os.getpid():
            return
        self.close_all()
        if not self.failures:
            return
        code = self.code or 1
        try:
            atexit.unregister(self.run)
            atexit._run_exitfuncs()
            reasons = "; ".join(f"{status.what}: {reason}" for status, reason in self.failures.items())
            _write(f"tenuto: leaving with status {code}: {reasons}\n")
        finally:
            os._exit(code)

    def close_all(self) -> None:
        while self.closers:
            (close,) = self.closers.pop()
            try:
                close()
            except BaseException as error:  # noqa: BLE001 - reported here and by the exit status; the others have to run
                sys.excepthook(type(error), error, error.__traceback__)
                ExitStatus("at exit").fail(f"{type(error).__name__}: {error}")

    def forget(self) -> None:
        """Forgets, in a forked child, the failures and closers of its parent."""
        self.failures, self.closers, self.code, self.armed_in = {}, [], 0, None


def _write(text: str) -> None:
    """Writes to stderr and flushes both streams, as far as they still exist."""
    for stream, words in ((sys.stdout, ""), (sys.stderr, text)):
        try:
            stream.write(words)
            stream.flush()
        except (OSError, ValueError, AttributeError):  # a closed pipe or no stream: the status still shows it
            continue


_ending = _Ending()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ending.forget)
