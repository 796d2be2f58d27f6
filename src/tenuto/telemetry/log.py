"""A sink that writes events to the standard library's logger `tenuto`."""

from __future__ import annotations

import logging

from tenuto import events
from tenuto.telemetry.sentences import sentence

_LEVELS: dict[type[events.Event], int] = {
    events.Captured: logging.DEBUG,
    events.SaveStarted: logging.DEBUG,
    events.SavedToMemory: logging.DEBUG,
    events.SaveSkipped: logging.WARNING,
    events.LeafDemoted: logging.WARNING,
    events.Warned: logging.WARNING,
    events.CandidateSkipped: logging.WARNING,
    events.SaveFailedEvent: logging.ERROR,
}


class LogSink:
    """Logs one short line for each event that matters to a person: failures at ERROR, most others at INFO."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("tenuto")

    def emit(self, event: events.Event) -> None:
        level = _LEVELS.get(type(event), logging.INFO)
        if not self._logger.isEnabledFor(level):
            return
        line = sentence(event)
        if line is not None:
            self._logger.log(level, "%s", line)
