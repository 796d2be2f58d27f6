"""Why a training process ends, for whoever supervises it: a small JSON file beside its heartbeat.

An exit status says that something failed; this says what, in which rank and at which step. It is read by a process of
the same machine, once the training has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tenuto.record import record

LONGEST: Final = 300
"""Characters of a message."""
_LARGEST: Final = 64 << 10


@record
class LastWords:
    """What one process says of its end.

    at_s: by `time.monotonic` of this machine. step: completed steps. unhealthy: whether it ends because of its values
    or its loss. errors: the names of the error's classes, its own first. where, run: what it trained; empty where it
    had nothing open. uncaught: whether nothing has caught the error, so that the process has to end. left: the signal
    on which it leaves, with what was to be saved saved; 0 for other ends.
    """

    pid: int
    rank: int
    step: int
    at_s: float
    message: str
    unhealthy: bool = False
    errors: tuple[str, ...] = ()
    where: str = ""
    run: str = ""
    uncaught: bool = False
    left: int = 0


def write(directory: Path, words: LastWords) -> None:
    """Puts them into the directory of the heartbeats, whole or not at all. Does nothing once that is gone: the
    supervisor is."""
    path = directory / f"{words.rank}-{words.pid}.end"
    with contextlib.suppress(OSError):
        path.with_suffix(".new").write_text(json.dumps(asdict(words)))
        os.replace(path.with_suffix(".new"), path)


def read(directory: Path) -> list[LastWords]:
    """Returns the last words of all processes that have left some there, the earliest first. What is no such file is
    left out."""
    found = []
    for path in directory.glob("*.end"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            if path.stat().st_size <= _LARGEST:
                words = LastWords(**json.loads(path.read_text()))
                found.append(words)
    return sorted(found, key=lambda one: one.at_s)


def of_error(error: BaseException) -> tuple[str, tuple[str, ...]] | None:
    """Returns an error's message, its name first, and the names of its classes; None for what is no failure, such as
    `sys.exit(0)` or an interrupt."""
    exits = isinstance(error, SystemExit) and isinstance(error.code, str)
    if not exits and not isinstance(error, Exception):
        return None
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    message = f"{name}: {lines[0]}" if lines else name
    return message[:LONGEST], tuple(one.__name__ for one in type(error).__mro__[:-1])


_uncaught: list[Callable[[BaseException], None]] = []
"""The newest listener alone: a process ends once."""


def when_uncaught(listen: Callable[[BaseException], None]) -> None:
    """Has `listen` called with the error that nothing in this process catches, before it is printed."""
    if not _uncaught:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
            for one in _uncaught:
                one(error)
            return before(kind, error, trace)

        sys.excepthook = hook
    _uncaught[:] = [listen]
