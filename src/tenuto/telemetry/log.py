"""Formats events as one sentence each, and writes them to the standard library's logger `tenuto`."""

from __future__ import annotations

import logging

from tenuto import events
from tenuto.model.timing import RankTimings
from tenuto.units import count, seconds, size

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


def sentence(event: events.Event) -> str | None:
    """Returns one line for the event; None for events that only meters want (progress, single packs)."""
    match event:
        case events.AttemptClaimed(run, attempt, parent):
            return f"{run}: attempt {attempt} begins" + (f", from {parent}" if parent else ", from nothing")
        case events.SaveStarted(id, _, nbytes, leaves, reason):
            return f"saving {id}: {size(nbytes)} in {count(leaves, 'leaf')}" + (f" ({reason})" if reason else "")
        case events.Captured(id, stall_s, _):
            return f"captured {id}: training was held for {seconds(stall_s)}"
        case events.Committed(id, nbytes, took):
            return f"saved {id}: {size(nbytes)} in {seconds(took)}"
        case events.SavedToMemory(id, nbytes, _, took, _):
            return f"{id} is sealed in memory: {size(nbytes)} in {seconds(took)}"
        case events.RestoredFromMemory(id, age_s, base):
            durable = f"; the newest durable checkpoint is {base}" if base is not None else ""
            return f"going on from memory: {id}, sealed {seconds(age_s)} ago{durable}"
        case events.SaveFailedEvent(id, error, phase):
            return f"the save of {id} FAILED while {phase}: {error}"
        case events.SaveSkipped(run, step, reason):
            return f"{run}: step {step} is not saved: {reason}"
        case events.SaveDelayed(run, step, waited):
            return f"{run}: the save of step {step} has waited {seconds(waited)} for the one before"
        case events.CandidateSkipped(id, reason):
            return f"{id} is damaged and was passed over: {reason}"
        case events.RestoredEvent(id, nbytes, took, _, ranks):
            return f"restored {id}: {size(nbytes)} in {seconds(took)}{_slowest(ranks)}"
        case events.RanksBehind(run, phase, _, waited, _, doing):
            return f"{run}: {phase} has waited {seconds(waited)} for {doing}"
        case events.Removed(id, reason):
            return f"removed {id}: {reason}"
        case events.LeafDemoted(path, reason):
            return f"{path} is captured eagerly from now on: {reason}"
        case events.Warned(message, _):
            return message
        case _:
            return None


def _slowest(ranks: RankTimings | None) -> str:
    """Names the slowest rank, if there are several."""
    took = None if ranks is None or ranks.ranks < 2 else ranks.parts.get("seconds")
    if took is None:
        return ""
    rank, longest = took.slowest[0]
    return f"; rank {rank} was the slowest with {seconds(longest)}, the median {seconds(took.median)}"
