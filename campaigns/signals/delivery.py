"""Delivers a signal to this process when a thread of it comes to a certain line of Tenuto's.

The line is found by tracing: the signal is sent from within the trace function, so its handler runs before the line
does, and what it raises is raised there. At a line of a writing thread that thread waits until the handler has begun.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import tenuto
from campaigns.signals.trainings import Report
from tenuto.training import preemption

ROOT: Final = str(Path(tenuto.__file__).parent)
NOTED_S: Final = 1.0
"""How long a writing thread waits until the training thread has heard the signal: that may be over by then."""


@dataclass(frozen=True, order=True)
class Site:
    """The `count`-th time that a thread comes to a line."""

    writer: bool
    file: str
    line: int
    event: str
    count: int = 1

    def __str__(self) -> str:
        thread = "writer" if self.writer else "training"
        return f"{self.file}:{self.line} {self.event} ({thread}, {self.count})"


Key = tuple[bool, str, int, str]


def is_traced(file: str) -> bool:
    return file.startswith(ROOT) or file == threading.__file__


class Tracer:
    """Calls `came` at each line (and return) of Tenuto's and of `threading`, in the training thread and in others."""

    def __init__(self, came: Callable[[Key], None]) -> None:
        self._came = came
        self._main = threading.get_ident()

    def start(self) -> None:
        threading.settrace(self._called)
        sys.settrace(self._called)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if not is_traced(file):
            return None
        writer = threading.get_ident() != self._main
        if writer and file == threading.__file__:
            return None
        name = file[len(ROOT) + 1 :] if file.startswith(ROOT) else "threading.py"

        def local(frame: FrameType, event: str, arg: Any) -> Any:
            if event in ("line", "return"):
                self._came((writer, name, frame.f_lineno, event))
            return local

        return local


class Recorder:
    """Counts how often each line is reached."""

    def __init__(self) -> None:
        self.counts: dict[Key, int] = {}

    def __call__(self, key: Key) -> None:
        self.counts[key] = self.counts.get(key, 0) + 1


class Delivery:
    """Sends `numbers`, one after the other, at `site`."""

    def __init__(self, site: Site, numbers: tuple[int, ...], report: Report) -> None:
        self._key = (site.writer, site.file, site.line, site.event)
        self._left = site.count
        self._numbers = numbers
        self._report = report
        self._heard = threading.Event()

    def watch(self) -> None:
        """Notes when a handler of Tenuto's begins: it runs in the training thread, wherever that is."""
        handle, heard = preemption.SignalWatch._handle, self._heard

        def noted(self: preemption.SignalWatch, number: int, frame: FrameType | None) -> None:
            heard.set()
            handle(self, number, frame)

        preemption.SignalWatch._handle = noted  # type: ignore[method-assign]

    def __call__(self, key: Key) -> None:
        if key != self._key or self._left == 0:
            return
        self._left -= 1
        if self._left:
            return
        report = self._report
        report["begun_then"], report["done_then"] = report["begun"], report["done"]
        report["watched_then"] = len(preemption._installed)
        report["delivered"] = 1
        for number in self._numbers:
            os.kill(os.getpid(), number)
        if self._key[0] and signal.getsignal(self._numbers[0]) is not signal.SIG_DFL:
            self._heard.wait(NOTED_S)
