"""Typed events, and the sinks that take them. Emitting to no sink costs one loop over an empty tuple, and what comes
piece by piece is not even made for nobody."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tenuto.model.ids import CheckpointId
from tenuto.model.timing import RankTimings, Timing


@dataclass(frozen=True, slots=True)
class Event:
    """Root of all events."""


@dataclass(frozen=True, slots=True)
class AttemptClaimed(Event):
    run: str
    attempt: int
    parent: CheckpointId | None


@dataclass(frozen=True, slots=True)
class SaveStarted(Event):
    id: CheckpointId
    save_id: str
    bytes: int
    leaves: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Captured(Event):
    """The state is copied; training may go on. `stall_s`: how long the training thread was held."""

    id: CheckpointId
    stall_s: float
    arena: str = ""


@dataclass(frozen=True, slots=True)
class Progress(Event):
    """Bytes moved so far of a save, a restore or a verification (`phase`)."""

    phase: str
    subject: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PackWritten(Event):
    id: CheckpointId
    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Committed(Event):
    id: CheckpointId
    bytes: int
    seconds: float
    """From the begin of the save to the durable manifest."""
    timing: Timing = field(default_factory=Timing)
    """Where the time went."""


@dataclass(frozen=True, slots=True)
class SavedToMemory(Event):
    """The state is whole and sealed in memory: it survives the process, not the machine. `stall_s`: how long the
    training thread was held; `seconds`: from the begin of the capture to the seal."""

    id: CheckpointId
    bytes: int
    stall_s: float
    seconds: float
    content: str = ""
    """The digest of all that the state holds: equal for equal states."""


@dataclass(frozen=True, slots=True)
class RestoredFromMemory(Event):
    """Training goes on from an image in memory that was sealed `age_s` seconds ago. `base`: the newest checkpoint of
    its line that is durable."""

    id: CheckpointId
    age_s: float
    base: CheckpointId | None


@dataclass(frozen=True, slots=True)
class SaveFailedEvent(Event):
    id: CheckpointId
    error: str
    phase: str


@dataclass(frozen=True, slots=True)
class SaveSkipped(Event):
    run: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class SaveDelayed(Event):
    """A save that was due has held training for `seconds` until one before it was written."""

    run: str
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CandidateSkipped(Event):
    """A checkpoint was passed over on restore because it is damaged."""

    id: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class RestoredEvent(Event):
    id: CheckpointId
    bytes: int
    seconds: float
    content: str = ""
    """The digest of all that the checkpoint holds."""
    ranks: RankTimings | None = None
    """Of several ranks: where the time went on each of them."""


@dataclass(frozen=True, slots=True)
class RanksBehind(Event):
    """The first of several ranks has waited `seconds` for `ranks`, which are behind: for what, and what these have said
    that they do, in words. Told after two seconds, and each time that it has become twice as long."""

    run: str
    phase: str
    ranks: tuple[int, ...]
    seconds: float
    who: str
    """The ranks, as people name them."""
    doing: str


@dataclass(frozen=True, slots=True)
class Removed(Event):
    id: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class LeafDemoted(Event):
    """A leaf that was to be copied beside training is captured eagerly from now on."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Warned(Event):
    """Something a person should know; training goes on."""

    message: str
    subject: str = ""


class Sink(Protocol):
    """Takes events, from any thread. What it raises is reported once and never reaches training."""

    def emit(self, event: Event) -> None: ...


@dataclass(slots=True)
class Emitter:
    """Hands each event to every sink; a sink that fails is dropped, with a warning that names it."""

    sinks: tuple[Sink, ...] = ()
    _dropped: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, sinks: Iterable[Sink]) -> Emitter:
        return cls(tuple(sinks))

    @property
    def listened(self) -> bool:
        """Whether any sink is left. Ask before making an event that comes piece by piece."""
        return bool(self.sinks)

    def emit(self, event: Event) -> None:
        for sink in self.sinks:
            try:
                sink.emit(event)
            except Exception as error:  # noqa: BLE001 - a broken meter must not end training; it is said once, loudly
                self.sinks = tuple(kept for kept in self.sinks if kept is not sink)
                self._dropped.append(repr(sink))
                warnings.warn(
                    f"the event sink {sink!r} failed and is no longer used: {error!r}", RuntimeWarning, stacklevel=2
                )

    def warn(self, message: str, subject: str = "") -> None:
        """Something that a person should know, sink or none."""
        self.emit(Warned(message, subject))
        warnings.warn(f"tenuto: {message}", RuntimeWarning, stacklevel=3)
