"""A training as a tree of processes of its own: started, signalled, and ended as a whole, daemons too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Final

import psutil  # type: ignore[import-untyped]

from tenuto.concurrency.process_trees import below, kill

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.02
KILLED_S: Final = 10.0
"""How long the kernel may take to end what was killed."""


def adopt_orphans() -> None:
    """Has processes whose parent ends become children of this one, as far as the system can (Linux): a daemon that a
    training leaves behind would keep its memory and devices from the next start."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class ProcessTree:
    """A command, in a session of its own. It is asked to leave when this process is killed."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], stdout: IO[str] | None = None) -> None:
        """Raises OSError where the command cannot be started."""
        parent = os.getpid()
        self._others = frozenset(below(parent))
        """Children of before, as of a shell that became this process: they are none of the command's."""

        def ask_to_leave_with_parent() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it was killed in between
                os._exit(1)

        self._process = subprocess.Popen(
            list(command), env=dict(environment), stdout=stdout, start_new_session=True,
            preexec_fn=ask_to_leave_with_parent,  # noqa: PLW1509 - `threaded` has seen that no other thread runs Python
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout: float) -> int | None:
        """Returns the status (negative: the signal that ended it) of the command itself; None if it runs after
        `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        """Passes a signal on to the command, which passes it on as it likes."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def strike(self, pid: int, number: int) -> None:
        """Sends a signal to one process below this one; one that has just ended is left alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def descendants(self) -> list[int]:
        """Returns the process ids below this process, but for those that it had before: the command's, and those that
        have lost their parent."""
        return [one.pid for one in self._descendants()]

    def _descendants(self) -> list[psutil.Process]:
        return [one for one in below(os.getpid()) if one not in self._others]

    def end(self, grace_s: float) -> None:
        """Ends all that is left of it: asks to leave, waits `grace_s` at most, and kills."""
        if grace_s and self._process.poll() is None:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)  # one that is stopped cannot leave
            self.wait(grace_s)
        deadline = time.monotonic() + KILLED_S
        while (left := self._descendants()) and time.monotonic() < deadline:
            kill(self.pid, left)
            self._process.poll()
            self.reap()
            time.sleep(_POLL_S)

    def reap(self) -> None:
        """Takes the status of orphans that have ended; the command's own is left to `wait`."""
        for one in self._descendants():
            if one.pid != self._process.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(one.pid, os.WNOHANG)


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)
