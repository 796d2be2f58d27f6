"""An exit status that tells of a failure in the background.

By the time a background failure could end the process, nobody is there to raise it to: an exception in an atexit hook
leaves the status 0 (measured). So one hook, which runs before all others, looks whether a failure stands; if so it runs
the others itself, flushes, and ends the process with `os._exit`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any


class ExitStatus:
    """Whether a failure stands that nothing has made good since: one for each run that this process trains.

    Making one arms the hook of this process. A forked child leaves as if there were none.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        _ending.arm()

    def fail(self, reason: str) -> None:
        """From now on the exit status is not zero."""
        _ending.standing[self] = reason

    def clear(self) -> None:
        """A later save has committed: the failure no longer stands."""
        _ending.standing.pop(self, None)

    @property
    def failure(self) -> str | None:
        """Why the exit status will not be zero, or None."""
        return _ending.standing.get(self)


def leaving_with(code: int) -> None:
    """Says with which status this process is about to leave (`Preempted` is raised): a failure then does not hide it.

    The status of a plain `sys.exit(3)` cannot be seen from a hook, and becomes 1 where a failure stands.
    """
    _ending.code = code


def before_exit(close: Callable[[], object]) -> Callable[[], None]:
    """Has `close` called at exit before the failures are counted, the last given first. Returns what takes it back.

    What `close` raises is printed, and makes the exit status non-zero.
    """
    _ending.arm()
    entry = (close,)
    _ending.closers.append(entry)

    def withdraw() -> None:
        _ending.closers = [kept for kept in _ending.closers if kept is not entry]

    return withdraw


class _Ending:
    """What this process does when it ends. Every change is one operation on a dict or list, so no lock is needed, which
    a fork could leave locked for ever."""

    def __init__(self) -> None:
        self.standing: dict[ExitStatus, str] = {}
        self.closers: list[tuple[Callable[[], object]]] = []
        self.code = 0
        self.armed_in: int | None = None

    def arm(self) -> None:
        """Once for each process. The hook has to run before all others, so that it can run them: it is registered at
        the last moment, when the interpreter begins to wait for threads."""
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
        if not self.standing:
            return
        code = self.code or 1
        try:
            atexit.unregister(self.run)
            atexit._run_exitfuncs()
            reasons = "; ".join(f"{status.what}: {reason}" for status, reason in self.standing.items())
            _say(f"tenuto: leaving with status {code}: {reasons}\n")
        finally:
            os._exit(code)

    def close_all(self) -> None:
        while self.closers:
            (close,) = self.closers.pop()
            try:
                close()
            except BaseException as error:  # noqa: BLE001 - told here and by the exit status; the others are still to run
                sys.excepthook(type(error), error, error.__traceback__)
                ExitStatus("at exit").fail(f"{type(error).__name__}: {error}")

    def forget(self) -> None:
        """In a forked child: what stands in the parent is not the child's."""
        self.standing, self.closers, self.code, self.armed_in = {}, [], 0, None


def _say(text: str) -> None:
    """Writes to stderr and flushes both streams, as far as they are still there."""
    for stream, words in ((sys.stdout, ""), (sys.stderr, text)):
        try:
            stream.write(words)
            stream.flush()
        except (OSError, ValueError, AttributeError):  # a closed pipe or no stream: the status still tells
            continue


_ending = _Ending()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ending.forget)
