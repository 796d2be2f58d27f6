"""A sink that writes each event as one line of JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any

from tenuto.concurrency.interruption import undisturbed
from tenuto.events import Event
from tenuto.model.ids import CheckpointId
from tenuto.model.timing import RankSpread, RankTimings, Timing

SCHEMA = "tenuto.event/1"


class JsonLines:
    """Appends events to `target`, a path or a text stream; a path is opened at the first event.

    Each line has `schema`, `event` (the class's name), `time` (seconds since 1970 by this machine's clock, for display)
    and the event's own fields. A checkpoint is {"run", "attempt", "step"}; a timing is an object of its fields, as are
    the timings of several ranks; a number that JSON lacks is a string ("nan"). Lines of several threads, and of several
    processes that append to one file, do not mix.
    """

    def __init__(self, target: str | os.PathLike[str] | IO[str]) -> None:
        self._path = os.fspath(target) if isinstance(target, (str, os.PathLike)) else None
        self._stream: IO[str] | None = None if isinstance(target, (str, os.PathLike)) else target
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "event": type(event).__name__.removesuffix("Event"),
            "time": time.time(),
        }
        record.update((field.name, plain(getattr(event, field.name))) for field in dataclasses.fields(event))
        line = json.dumps(record, allow_nan=False) + "\n"
        with undisturbed, self._lock:  # a signal that comes here waits: it emits events too, in the same thread
            stream = self._open()
            stream.write(line)
            stream.flush()

    def close(self) -> None:
        """Closes a file that this sink opened; a later event opens it again."""
        with undisturbed, self._lock:
            if self._path is not None and self._stream is not None:
                self._stream.close()
                self._stream = None

    def _open(self) -> IO[str]:
        if self._stream is None:
            assert self._path is not None
            # A buffer larger than any line makes each flush one append to the file.
            binary = open(self._path, "ab", buffering=1 << 20)  # noqa: SIM115 - it stays open for later events
            self._stream = io.TextIOWrapper(binary, encoding="utf-8")
        return self._stream

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"JsonLines({self._path or self._stream!r})"


def plain(value: object) -> Any:
    """Returns an event field's value in a form that JSON can hold."""
    if isinstance(value, CheckpointId):
        return {"run": value.run, "attempt": value.attempt, "step": value.step}
    if isinstance(value, (Timing, RankTimings, RankSpread)):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    return str(value)
