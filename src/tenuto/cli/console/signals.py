"""Signals that end a command which has started other processes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP exit like Ctrl-C: what was started is killed, what was written is removed."""

    def exit_on_signal(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    earlier = {number: signal.signal(number, exit_on_signal) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
