"""The console: what a person should know of saving and resuming, in one line each on stderr or in the log."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final, Literal, get_args

from tenuto import events, log_lines
from tenuto.errors import UsageError

Log = Literal["default", "saves", "silent"]
VARIABLE: Final = "TENUTO_LOG"
"""Sets `log` for a script that cannot be changed; the argument wins."""
_PRINTED: Final = (
    events.Resumed,
    events.PassedOver,
    events.WaitingForOwner,
    events.NothingToDo,
    events.SignalReceived,
    events.Leaving,
    events.RanksBehind,
)
_OF_SAVES: Final = (events.Committed, events.SaveSkipped, events.SaveDelayed)


class Console:
    """Writes a line for what happened to data or to training's time. Routine saves are left out unless asked for.

    rank: one of several ranks other than 0; it says only what happened to it alone.
    raises: a failed save is raised, and so needs no line.
    """

    def __init__(self, *, saves: bool = False, rank: int = 0, raises: bool = False) -> None:
        self._kinds = (*_PRINTED, *_OF_SAVES) if saves else _PRINTED
        self._rank = rank
        self._raises = raises
        self._failure = ""
        """The failure that was said last, without what has digits in it: the same one again is not, until a save
        commits."""

    def emit(self, event: events.Event) -> None:
        if self._is_printed(event):
            from tenuto.telemetry.log import level_of, sentence  # of no use where nothing is said

            line = sentence(event)
            if line is not None:
                log_lines.log(level_of(event), f"rank {self._rank}: {line}" if self._rank else line)

    def _is_printed(self, event: events.Event) -> bool:
        if isinstance(event, events.Warned):
            return not event.issued
        if self._rank:
            return False
        if isinstance(event, events.SaveFailedEvent):
            before, self._failure = self._failure, re.sub(r"\w*\d\w*", "", event.error)
            return not self._raises and self._failure != before
        if isinstance(event, events.Committed):
            self._failure = ""
        return isinstance(event, self._kinds)


def console(log: str | None, sinks: Iterable[events.AnySink], *, rank: int = 0, raises: bool = False) -> Console | None:
    """Returns the console for `log`, or for what the environment says where that is None; None where it is silent or a
    LogSink does its work. Raises UsageError for what is neither."""
    name, value = ("log", log) if log is not None else (VARIABLE, os.environ.get(VARIABLE) or "default")
    known = get_args(Log)
    if value not in known:
        raise UsageError(
            f"{name}={value!r} is not one of {', '.join(map(repr, known))}", subject=name, hint=f'{name}="silent"'
        )
    if value == "silent" or any(getattr(sink, "replaces_console", False) for sink in sinks):
        return None
    return Console(saves=value == "saves", rank=rank, raises=raises)
