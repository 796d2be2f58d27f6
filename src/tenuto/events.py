"""Typed events, the sinks that receive them, and warnings.

What happens to data or to training's time is an event, which the console prints as one line. Code that uses Tenuto in a
way that may lose something gets a Python warning, a TenutoWarning at the line that it is about.

Emitting to no sink costs one loop over an empty tuple; frequent events are not even created when no sink listens.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, Protocol

from tenuto import log_lines
from tenuto.errors import TenutoWarning, UsageError
from tenuto.model.ids import CheckpointId
from tenuto.model.timing import RankTimings, Timing
from tenuto.printable import clean_lines
from tenuto.record import record


@record
class Event:
    """The base class of all events."""


@record
class AttemptClaimed(Event):
    """This process owns the run from now on. `parent`: the checkpoint that it resumed from."""

    run: str
    attempt: int
    parent: CheckpointId | None


@record
class SaveStarted(Event):
    """A save begins. `reason`: what asked for it, in words."""

    id: CheckpointId
    save_id: str
    bytes: int
    leaves: int
    reason: str = ""


@record
class Captured(Event):
    """The state is copied and training continues. `stall_s`: seconds the training thread was blocked."""

    id: CheckpointId
    stall_s: float
    arena: str = ""


@record
class Progress(Event):
    """The bytes moved so far by a save, a restore or a verification (`phase`)."""

    phase: str
    subject: str
    done: int
    total: int


@record
class PackWritten(Event):
    """A data file of a save is written and flushed; `seconds` is how long that took."""

    id: CheckpointId
    name: str
    bytes: int
    seconds: float


@record
class Committed(Event):
    """A checkpoint exists, durably."""

    id: CheckpointId
    bytes: int
    seconds: float
    """Seconds from the start of the save to the durable manifest."""
    timing: Timing = field(default_factory=Timing)
    """Where the time went."""


@record
class SavedToMemory(Event):
    """The state is complete and sealed in memory: it survives the process, not the machine.

    stall_s: seconds the training thread was blocked.
    seconds: from the start of the capture to the seal.
    """

    id: CheckpointId
    bytes: int
    stall_s: float
    seconds: float
    content: str = ""
    """The digest of the whole state: equal for equal states."""


@record
class RestoredFromMemory(Event):
    """Training resumes from an image in memory that was sealed `age_s` seconds ago.

    base: the newest durable checkpoint of the same line of training.
    """

    id: CheckpointId
    age_s: float
    base: CheckpointId | None


@record
class SaveFailedEvent(Event):
    """A save ended without a checkpoint. `phase`: what it was doing."""

    id: CheckpointId
    error: str
    phase: str
    hint: str = ""
    """What to type or to look at."""


@record
class SaveSkipped(Event):
    """A save that was due was not taken, for `reason`."""

    run: str
    step: int
    reason: str


@record
class SaveDelayed(Event):
    """A due save blocked training for `seconds` until the save before it was written."""

    run: str
    step: int
    seconds: float


@record
class CandidateSkipped(Event):
    """A restore skipped a checkpoint because it is damaged."""

    id: CheckpointId
    reason: str


@record
class RestoredEvent(Event):
    """A checkpoint was restored, every byte verified."""

    id: CheckpointId
    bytes: int
    seconds: float
    content: str = ""
    """The digest of the whole checkpoint."""
    ranks: RankTimings | None = None
    """Where the time went on each rank, for a run with several ranks."""


@record
class Resumed(Event):
    """Training resumes from a checkpoint or from memory.

    where: the repository. bytes, seconds: what was read and verified, and how long that took.
    age_s: for a state in memory, the seconds since it was sealed.
    base: the newest durable checkpoint of the same line of training.
    verdict: whether the resume is exact, in words; empty where the checkpoint does not say.
    run: what is trained from here on, which may begin with a checkpoint of another run.
    """

    id: CheckpointId
    where: str
    bytes: int
    seconds: float
    age_s: float | None = None
    base: CheckpointId | None = None
    verdict: str = ""
    run: str = ""


@record
class PassedOver(Event):
    """A restore passed over the newest checkpoints of a run, since they are damaged.

    skipped: each with the reason, newest first. taken: the one restored instead, if any.
    """

    where: str
    skipped: tuple[tuple[CheckpointId, str], ...]
    taken: CheckpointId | None


@record
class WaitingForOwner(Event):
    """A claim has waited two seconds for the process that owns the run.

    owner: that process, in words. state: what is known of it. seconds: for how long the claim waits at most from now.
    """

    run: str
    owner: str
    pid: int
    host: str
    state: str
    seconds: float


@record
class NothingToDo(Event):
    """A loop found the run where it was to end. done, total: completed, and asked for, in `unit` ("step" or
    "epoch")."""

    run: str
    done: int
    total: int
    unit: str


@record
class SignalReceived(Event):
    """A signal asked this process to leave; `step` is completed. in_step: the one after it is finished first."""

    run: str
    signal: str
    step: int
    in_step: bool


@record
class Leaving(Event):
    """This process leaves because of a signal. step: the last completed one. saved: the newest committed checkpoint.
    status: the exit status, None where an earlier handler of that signal decides it."""

    run: str
    signal: str
    step: int
    saved: CheckpointId | None
    where: str
    status: int | None


@record
class RanksBehind(Event):
    """Rank 0 has waited `seconds` for `ranks` in `phase`. Emitted after two seconds, then each time the wait has
    doubled.

    doing: what the late ranks last reported to be doing, in words.
    """

    run: str
    phase: str
    ranks: tuple[int, ...]
    seconds: float
    who: str
    """The late ranks, formatted for people."""
    doing: str


@record
class Removed(Event):
    """Retention removed a checkpoint. `reason`: why the policy does not keep it. `where`: the place that it is removed
    from."""

    id: CheckpointId
    reason: str
    where: str = ""


@record
class TierLag(Event):
    """How far a tier that is filled in the background is behind.

    newest: its newest whole checkpoint, as far as this process knows.
    behind, bytes: the checkpoints that it is to get and lacks, and their bytes.
    error: what went wrong last; empty if nothing did.
    """

    run: str
    tier: str
    newest: CheckpointId | None
    behind: int
    bytes: int
    error: str = ""


@record
class TierSkipped(Event):
    """A tier does not get a checkpoint that was due there."""

    id: CheckpointId
    tier: str
    reason: str


@record
class LeafDemoted(Event):
    """A leaf that was to be copied in the background is captured eagerly from now on."""

    path: str
    reason: str


@record
class Warned(Event):
    """Something a person should know; training continues.

    issued: it is a Python warning too, which points at the code that it is about.
    """

    message: str
    subject: str = ""
    issued: bool = False


class Sink(Protocol):
    """Receives events from any thread. An exception is reported once and never reaches training.

    A function of one event is a sink as well.
    """

    def emit(self, event: Event) -> None:
        """Receives an event."""


AnySink = Sink | Callable[[Event], object]
"""What `sinks=` takes: objects with `emit`, and functions of one event."""


def listed(sinks: Iterable[AnySink]) -> tuple[AnySink, ...]:
    """Returns `sinks`. Raises UsageError for what is none."""
    if isinstance(sinks, Iterable):
        found = tuple(sinks)
        wrong = [sink for sink in found if not callable(getattr(sink, "emit", sink))]
        if not wrong:
            return found
    raise UsageError(
        f"sinks={sinks!r} is not a list of sinks: each has emit(event), or is a function of one event",
        subject="sinks",
        hint='sinks=[print], or sinks=[tenuto.telemetry.JsonLines("events.jsonl")]',
    )


@dataclass(slots=True)
class Emitter:
    """Sends each event to every sink; drops a sink that fails, with a warning that names it.

    console: a sink that takes no frequent events.
    """

    sinks: tuple[AnySink, ...] = ()
    console: Sink | None = None

    @classmethod
    def of(cls, sinks: Iterable[AnySink]) -> Emitter:
        return cls(listed(sinks))

    @property
    def listened(self) -> bool:
        """Returns whether any sink is left. Check it before creating a frequent event."""
        return bool(self.sinks)

    def emit(self, event: Event) -> None:
        if self.console is not None:
            self.console.emit(event)
        for sink in self.sinks:
            try:
                take: Any = getattr(sink, "emit", None) or sink
                take(event)
            except Exception as error:  # noqa: BLE001 - a broken meter must not end training; it is said once, loudly
                self.sinks = tuple(kept for kept in self.sinks if kept is not sink)
                warn(f"the event sink {sink!r} failed and is no longer used: {error!r}")

    def warn(self, message: str, subject: str = "") -> None:
        """Emits Warned, and issues a Python warning about the caller's code as `warn` does."""
        self.emit(Warned(message, subject, issued=True))
        warn(message)

    def report(self, message: str, subject: str = "") -> None:
        """Emits Warned, for what happened to data or to training's time."""
        self.emit(Warned(message, subject))


def warn(message: str) -> None:
    """Issues a TenutoWarning that points at the innermost frame of the user's code. In a thread that runs none, logs
    the message instead."""
    frame = _users_frame()
    if frame is not None:
        _issue(message, frame)
    else:
        log_lines.log(logging.WARNING, message)


_PACKAGE: Final = os.path.dirname(__file__) + os.sep
_BETWEEN: Final = frozenset(
    {"accelerate", "asyncio", "concurrent", "contextlib", "functools", "threading", "torch", "weakref"}
)
"""Packages whose code calls Tenuto on behalf of the user's: context managers, hooks of optimizers, threads."""


def _users_frame() -> FrameType | None:
    """Returns the innermost frame of the user's code; None in a thread, or at an end of the process, that has none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not frame.f_code.co_filename.startswith(_PACKAGE) and module.partition(".")[0] not in _BETWEEN:
            return frame
        frame = frame.f_back
    return None


def _issue(message: str, frame: FrameType) -> None:
    names = frame.f_globals
    try:
        warnings.warn_explicit(
            clean_lines(message),
            TenutoWarning,
            frame.f_code.co_filename,
            frame.f_lineno,
            module=names.get("__name__"),
            registry=names.setdefault("__warningregistry__", {}),
        )
    except ValueError:  # stderr is closed, which Python's own writing of warnings does not expect
        log_lines.log(logging.WARNING, message)
