"""Processes that were started with all that they have started themselves: found, and killed as a whole."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from typing import Protocol

import psutil  # type: ignore[import-untyped]


class Started(Protocol):
    """A process that leads a group of its own, such as a `subprocess.Popen` with `start_new_session`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


def below(pid: int) -> tuple[psutil.Process, ...]:
    """Returns all descendants."""
    try:
        return tuple(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return ()


def lives(pid: int) -> bool:
    """Returns whether a process of this machine has this pid, and is not dead and waiting to be reaped."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def kill(group: int, known: Iterable[psutil.Process] = ()) -> None:
    """Kills a process group, and processes that have left it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    for one in known:
        with contextlib.suppress(psutil.Error):
            one.kill()


def end(process: Started, known: Iterable[psutil.Process] = ()) -> None:
    """Kills the process, its group, and descendants that have moved to a session of their own, and waits for it."""
    kill(process.pid, {*known, *(below(process.pid) if process.poll() is None else ())})
    process.wait()
