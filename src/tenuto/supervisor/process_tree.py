"""A training as a tree of processes of its own: started, signalled, and ended as a whole, daemons too.

What stands between the supervisor and a training (a shell, `tee`, a launcher) knows nothing of what a signal is to
bring about. So a signal goes to the trainings themselves, and to the rest only once these have left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import psutil  # type: ignore[import-untyped]

from tenuto.concurrency.process_trees import below, kill, lives

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.02
_REST_S: Final = 3.0
"""How long what is left of a command may take to end by itself, once all that were asked to leave have left."""
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
        self._asked: list[psutil.Process] = []
        """Those that have got the last signal."""
        self._left_s: float | None = None
        """Since when none of these is left."""

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

    def signal(self, number: int, trainings: Collection[int]) -> None:
        """Sends a signal to the processes that train, each once. Where none of `trainings` lives: to those that handle
        it, the nearest to the command of each branch; to all where none does, and SIGINT as a terminal sends it."""
        living = self._descendants()
        self._asked = [one for one in living if one.pid in trainings and lives(one.pid)]
        if not self._asked and number != signal.SIGINT:
            self._asked = _outermost([one for one in living if _handles(one.pid, number)])
        self._asked = self._asked or living
        self._left_s = None
        self._send(number)

    def ask_the_rest(self) -> None:
        """Asks what is left of the command to leave, once those that were asked have left and it does not end by
        itself: a shell would go on with its next line."""
        if not self._asked or any(lives(one.pid) for one in self._asked):
            return
        now_s = time.monotonic()
        self._left_s = now_s if self._left_s is None else self._left_s
        if now_s - self._left_s >= _REST_S:
            self._asked, self._left_s = self._descendants(), None
            self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for one in self._asked:
            self.strike(one.pid, number)

    def has(self, pids: Collection[int]) -> bool:
        """Returns whether one of these processes is of the command's, and lives."""
        return any(one.pid in pids and lives(one.pid) for one in self._descendants())

    def strike(self, pid: int, number: int) -> None:
        """Sends a signal to one process below this one; one that has just ended is left alone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # another user's, by sudo: it is no training
            os.kill(pid, number)

    def descendants(self) -> list[int]:
        """Returns the process ids below this process, but for those that it had before: the command's, and those that
        have lost their parent."""
        return [one.pid for one in self._descendants()]

    def _descendants(self) -> list[psutil.Process]:
        return [one for one in below(os.getpid()) if one not in self._others]

    def end(self, grace_s: float, trainings: Collection[int] = ()) -> None:
        """Ends all that is left of it: asks to leave, as `signal` does, waits `grace_s` at most, and kills."""
        until = time.monotonic() + grace_s
        if grace_s and self._descendants():
            self.signal(signal.SIGTERM, trainings)
            for one in self._descendants():
                self.strike(one.pid, signal.SIGCONT)  # one that is stopped cannot leave
            while self._descendants() and time.monotonic() < until:
                self._process.poll()
                self.reap()
                self.ask_the_rest()
                time.sleep(_POLL_S)
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


def _handles(pid: int, number: int) -> bool:
    """Returns whether a process has a handler of its own for a signal, as far as this system says so (Linux)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _outermost(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Returns those that are below none of the others."""
    pids = {one.pid for one in processes}
    return [one for one in processes if not pids & _above(one)]


def _above(one: psutil.Process) -> set[int]:
    try:
        return {parent.pid for parent in one.parents()}
    except psutil.Error:
        return set()


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)
