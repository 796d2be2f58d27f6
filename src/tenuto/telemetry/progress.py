"""A progress bar on stderr for saves, restores and verifications; silent if stderr is no terminal."""

from __future__ import annotations

import sys
import threading
import time
from typing import IO, TYPE_CHECKING

from tenuto.events import CandidateSkipped, Committed, Event, Progress, RanksBehind, RestoredEvent, SaveFailedEvent

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


INTERVAL_S = 0.1
"""Seconds between two updates of one bar."""

VERBS = {"save": "saving", "restore": "restoring", "verify": "verifying", "copy": "copying", "compare": "comparing"}


class ProgressBar:
    """Shows one bar for each operation in progress and removes it when the operation ends.

    stream: where to draw; by default stderr at the time of the first event.
    min_bytes: smaller operations show no bar, since they end before one could be read.
    """

    def __init__(self, stream: IO[str] | None = None, *, min_bytes: int = 64 << 20) -> None:
        self._stream = stream
        self._min_bytes = min_bytes
        self._lock = threading.Lock()
        self._bars: Bars | None = None
        self._tasks: dict[tuple[str, str], tuple[TaskID, float]] = {}

    def emit(self, event: Event) -> None:
        match event:
            case Progress(phase, subject, done, total) if total >= self._min_bytes:
                self._move((phase, subject), done, total)
            case RanksBehind(run, phase, _, _, who):
                self._wait_for(run, phase, who)
            case Committed(id) | SaveFailedEvent(id):
                self._end(("save", str(id)))
                self._end(("behind", id.run))
            case CandidateSkipped(id):
                self._end(("restore", str(id)))
            case RestoredEvent(id):
                self._end(("restore", str(id)))
                self._end(("behind", id.run))
            case _:
                pass

    def close(self) -> None:
        """Removes all bars from the terminal."""
        with self._lock:
            self._tasks.clear()
            self._stop()

    def _move(self, key: tuple[str, str], done: int, total: int) -> None:
        stream = self._stream or sys.stderr
        if stream is None or not stream.isatty():
            return
        now = time.monotonic()
        with self._lock:
            if done >= total:
                self._drop(key)
                return
            if key not in self._tasks:
                bars = self._start(stream)
                words = f"{VERBS.get(key[0], key[0])} {key[1]}"
                self._tasks[key] = (bars.add_task(words, completed=done, total=total), now)
                return
            task, moved = self._tasks[key]
            if now - moved >= INTERVAL_S and self._bars is not None:
                self._tasks[key] = (task, now)
                self._bars.update(task, completed=done, total=total)

    def _wait_for(self, run: str, phase: str, who: str) -> None:
        """Shows an open-ended bar that names the late ranks."""
        stream = self._stream or sys.stderr
        if stream is None or not stream.isatty():
            return
        words = f"{phase}: waiting for {who}"
        with self._lock:
            if ("behind", run) in self._tasks and self._bars is not None:
                self._bars.update(self._tasks["behind", run][0], description=words)
            else:
                self._tasks["behind", run] = (self._start(stream).add_task(words, total=None), time.monotonic())

    def _end(self, key: tuple[str, str]) -> None:
        if self._tasks:
            with self._lock:
                self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        task = self._tasks.pop(key, None)
        if task is not None and self._bars is not None:
            self._bars.remove_task(task[0])
        if not self._tasks:
            self._stop()

    def _start(self, stream: IO[str]) -> Bars:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bars

            # Leaves training's own output alone: rich's redirection would replace sys.stdout.
            self._bars = Bars(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(file=stream),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bars.start()
        return self._bars

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __repr__(self) -> str:
        return "ProgressBar()"
