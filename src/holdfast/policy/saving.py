"""The save side: what a policy is told, what it answers, and how policies combine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from holdfast.errors import UsageError


@dataclass(frozen=True, slots=True)
class Moment:
    """Where training is when it asks. `now_s` is any monotonic clock in seconds, the same one as in SaveHistory."""

    step: int
    """Completed steps."""
    now_s: float
    epoch: int | None = None
    """Completed epochs, the one that ends now included; None outside `epochs`."""
    epoch_ended: bool = False
    ending: bool = False
    """Training ends after this step: the loop is done, or `stop` was called."""
    signal: str | None = None
    """The name of the signal that asked this process to leave."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveHistory:
    """What this process has done so far. `last_saved_step` counts a save in flight, and the step that was restored."""

    started_s: float
    first_step: int = 0
    """The step that this process began from: 0, or the restored one."""
    last_saved_step: int | None = None
    last_saved_s: float | None = None
    """When this process last began a save; None before its first."""
    saved: Sequence[Mapping[str, float]] = ()
    """Metrics of the saves before on this line of training, oldest first, as logged and as noted later. Those of
    checkpoints that a resumed run goes on from are among them as far as they still exist; failed saves are not."""
    stalls_s: Sequence[float] = ()
    """Seconds for which each of the last few saves of this process held training up, oldest first."""
    stalled_s: float = 0.0
    """The same of all its saves together."""
    persist_s: float = 0.0
    """Seconds that writing a save takes: from begin to commit of the last that has committed, or so far of the one that
    is being written, where that is more. With several in flight they are written one after the other."""
    waits: bool = False
    """Whether another save would have to wait now: as many as may be in flight are."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to save now, and why, in words that follow "saved: " or "not saved: "."""

    save: bool
    reason: str


class SavePolicy(ABC):
    """When to save. Policies combine with `|`: the save is made when any of them wants it.

    To write one, implement `wants`. It must be a function of its arguments alone.
    """

    @abstractmethod
    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        """Why to save now, or None."""

    @property
    def catches_signals(self) -> bool:
        """Whether this policy waits for a signal, so that handlers for it are needed."""
        return False

    @property
    def alike(self) -> bool:
        """Whether all ranks of a job decide alike, each by itself: by where training is alone, and by no clock, signal
        or metric. What is not is decided by one rank, and saved at a step that all have agreed on."""
        return False

    def metrics(self) -> frozenset[str]:
        """Names of the metrics that this policy asks by, so that those of earlier saves are at hand."""
        return frozenset()

    @final
    def decide(self, now: Moment, history: SaveHistory) -> Decision:
        """A step is never saved twice, and nothing is saved before a first step is complete, whatever is wanted."""
        if now.step <= history.first_step:
            return Decision(False, "no step was completed since the start")
        if history.last_saved_step is not None and now.step <= history.last_saved_step:
            return Decision(False, f"step {history.last_saved_step} is saved already")
        reason = self.wants(now, history)
        return Decision(False, "nothing asked for it") if reason is None else Decision(True, reason)

    @final
    def __or__(self, other: SavePolicy) -> SavePolicy:
        second: object = other  # a checker refuses what is none; not everybody runs one
        if not isinstance(second, SavePolicy):
            raise UsageError(
                f"{self!r} | {other!r} does not combine: the second one does not say when to save",
                hint="combine every(...), on.end(), on.improve(...) and the like with |; keep.latest(n) goes to keep=",
            )
        return AnyOf(parts_of(self) + parts_of(other))


@dataclass(frozen=True, slots=True)
class AnyOf(SavePolicy):
    """Saves when any of `parts` wants to; all reasons are told."""

    parts: tuple[SavePolicy, ...]

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        reasons = [reason for part in self.parts if (reason := part.wants(now, history)) is not None]
        return "; ".join(dict.fromkeys(reasons)) or None

    @property
    def catches_signals(self) -> bool:
        return any(part.catches_signals for part in self.parts)

    @property
    def alike(self) -> bool:
        return all(part.alike for part in self.parts)

    def metrics(self) -> frozenset[str]:
        return frozenset().union(*(part.metrics() for part in self.parts))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def divided(policy: SavePolicy) -> tuple[SavePolicy, SavePolicy]:
    """What of a policy all ranks of a job decide alike, and what one of them decides for all."""
    parts = parts_of(policy)
    return AnyOf(tuple(part for part in parts if part.alike)), AnyOf(tuple(part for part in parts if not part.alike))


def parts_of(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    """What a policy is combined of; itself, if of nothing."""
    return policy.parts if isinstance(policy, AnyOf) else (policy,)
