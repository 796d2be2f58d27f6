"""Formats events as one sentence each, and writes them to the standard library's logger `tenuto`."""

from __future__ import annotations

import logging
from typing import Final

from tenuto import events, log_lines
from tenuto.errors import typed
from tenuto.model.ids import CheckpointId
from tenuto.model.timing import RankTimings
from tenuto.units import count, seconds, size

_LEVELS: dict[type[events.Event], int] = {
    events.AttemptClaimed: logging.DEBUG,
    events.Captured: logging.DEBUG,
    events.SaveStarted: logging.DEBUG,
    events.SavedToMemory: logging.DEBUG,
    events.RestoredEvent: logging.DEBUG,
    events.RestoredFromMemory: logging.DEBUG,
    events.CandidateSkipped: logging.DEBUG,
    events.SaveSkipped: logging.WARNING,
    events.LeafDemoted: logging.WARNING,
    events.Warned: logging.WARNING,
    events.PassedOver: logging.WARNING,
    events.WaitingForOwner: logging.WARNING,
    events.RanksBehind: logging.WARNING,
    events.SaveFailedEvent: logging.ERROR,
}


class LogSink:
    """Logs one short line for each event that matters to a person: failures at ERROR, what is routine at DEBUG, most
    others at INFO. Among `sinks` it replaces the console."""

    replaces_console: Final = True

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or log_lines.LOGGER

    def emit(self, event: events.Event) -> None:
        level = level_of(event)
        if not self._logger.isEnabledFor(level):
            return
        line = sentence(event)
        if line is not None:
            self._logger.log(level, "%s", line)


def level_of(event: events.Event) -> int:
    return _LEVELS.get(type(event), logging.INFO)


def sentence(event: events.Event) -> str | None:
    """Returns one line for the event; None for events that only meters want (progress, single packs)."""
    match event:
        case events.AttemptClaimed(run, attempt, parent):
            return f"claimed run {run} as attempt {attempt}, " + (f"after {parent}" if parent else "from nothing")
        case events.SaveStarted(id, _, nbytes, leaves, reason):
            why = f" ({reason})" if reason else ""
            return f"saving {_step(id)}: {size(nbytes)} in {count(leaves, 'leaf')}{why}"
        case events.Captured(id, stall_s, _):
            return f"copied {_step(id)}: training was blocked for {seconds(stall_s)}"
        case events.Committed(id, nbytes, took):
            return f"saved {_step(id)} ({size(nbytes)} in {seconds(took)})"
        case events.SavedToMemory(id, nbytes, _, took, _):
            return f"sealed {_step(id)} in memory ({size(nbytes)} in {seconds(took)})"
        case events.RestoredFromMemory(id, age_s, _):
            return f"restored {_step(id)} from memory, sealed {seconds(age_s)} ago"
        case events.SaveFailedEvent(id, error, phase, hint):
            what = error if "save of" in error else f"the save of {id} failed while {phase}: {error}"
            return f"{what}; {hint}" if hint else what
        case events.SaveSkipped(run, step, reason):
            return f"skipped the save of step {step} of run {run}: {reason}"
        case events.SaveDelayed(run, step, waited):
            return (
                f"the save of step {step} of run {run} blocked training for {seconds(waited)}, "
                "until the one before was written"
            )
        case events.CandidateSkipped(id, reason):
            return f"{_step(id)} is damaged and was passed over: {reason}"
        case events.RestoredEvent(id, nbytes, took, _, ranks):
            return f"restored {_step(id)} ({size(nbytes)} in {seconds(took)}, verified{_slowest(ranks)})"
        case events.Resumed():
            return _resumed(event)
        case events.PassedOver(where, skipped, taken):
            return _passed_over(where, skipped, taken)
        case events.WaitingForOwner(run, owner, _, _, state, left):
            return f"waiting up to {seconds(left)} for {owner}, which owns run {run}: {state}"
        case events.NothingToDo(run, done, total, unit):
            return (
                f"run {run} is at {unit} {done}, so {unit}s({total}) has nothing left to do; ask for more, "
                f"or begin another run with run=..."
            )
        case events.SignalReceived(run, name, step, in_step):
            again = "; Ctrl-C again stops at once" if name == "SIGINT" else ""
            what = f"finishing step {step + 1}, then" if in_step else f"step {step} is done;"
            return f"{name}: {what} saving run {run} and leaving{again}"
        case events.Leaving():
            return _leaving(event)
        case events.RanksBehind(run, phase, _, waited, _, doing):
            return f"run {run} has waited {seconds(waited)} in {phase} for {doing}"
        case events.Removed(id, reason):
            return f"removed {_step(id)}: {reason}"
        case events.TierSkipped(id, tier, reason):
            return f"{tier} does not get {_step(id)}: {reason}"
        case events.TierLag(run, tier, _, behind, nbytes, error):
            late = f"is {count(behind, 'checkpoint')} ({size(nbytes)}) behind" if behind else "has what it is to have"
            return f"run {run}: {tier} {late}{f': {error}' if error else ''}"
        case events.LeafDemoted(path, reason):
            return f"{path} is captured eagerly from now on: {reason}"
        case events.Warned(message, _):
            return message
        case _:
            return None


def _step(id: CheckpointId) -> str:
    return f"step {id.step} of run {id.run}"


def _resumed(event: events.Resumed) -> str:
    what = f"resumed run {event.id.run} at step {event.id.step}"
    if event.run not in ("", event.id.run):
        what = f"run {event.run} begins with {_step(event.id)},"
    verdict = f"; {event.verdict}" if event.verdict else ""
    cost = f"{size(event.bytes)} in {seconds(event.seconds)}, verified{verdict}"
    if event.age_s is None:
        return f"{what} from {event.where} ({cost})"
    base = f"; the newest checkpoint in {event.where} is step {event.base.step}" if event.base is not None else ""
    return f"{what} from memory, sealed {seconds(event.age_s)} ago ({cost}){base}"


def _passed_over(where: str, skipped: tuple[tuple[CheckpointId, str], ...], taken: CheckpointId | None) -> str:
    (id, reason), more = skipped[0], len(skipped) - 1
    others = f", as were {more} more," if more else ""
    instead = f" for step {taken.step}" if taken is not None else ""
    command = typed("tenuto", "verify", where, "--run", id.run)
    return f"{_step(id)} is damaged and was passed over{others}{instead} ({reason}); run `{command}`"


def _leaving(event: events.Leaving) -> str:
    status = f"with status {event.status}" if event.status is not None else "as an earlier handler of the signal says"
    saved = event.saved
    if saved is None:
        return f"{event.signal}: leaving {status}; nothing of run {event.run} is saved in {event.where}"
    behind = "" if saved.step == event.step else f", {count(event.step - saved.step, 'step')} behind"
    return f"{event.signal}: leaving {status}; step {saved.step} of run {event.run} is saved in {event.where}{behind}"


def _slowest(ranks: RankTimings | None) -> str:
    """Names the slowest rank, if there are several."""
    took = None if ranks is None or ranks.ranks < 2 else ranks.parts.get("seconds")
    if took is None:
        return ""
    rank, longest = took.slowest[0]
    return f"; rank {rank} was the slowest with {seconds(longest)}, the median {seconds(took.median)}"
