"""The save side: what a policy is told, what it answers, and how policies combine."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, final

from tenuto.errors import UsageError
from tenuto.policy.numbers import Margin, duration, whole_number


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


@dataclass(frozen=True, slots=True)
class DividedPolicy:
    """A policy, and its two parts in a job: all ranks decide `alike` each by itself, one decides the rest for all."""

    whole: SavePolicy
    alike: SavePolicy
    by_one: SavePolicy


def divided(policy: SavePolicy) -> DividedPolicy:
    """Divides a policy by what all ranks of a job decide alike."""
    parts = parts_of(policy)
    alike = AnyOf(tuple(part for part in parts if part.alike))
    return DividedPolicy(policy, alike, AnyOf(tuple(part for part in parts if not part.alike)))


def parts_of(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    """What a policy is combined of; itself, if of nothing."""
    return policy.parts if isinstance(policy, AnyOf) else (policy,)


# --------------------------------------------------------------------------------------------------
# What a metric can ask for: a save when it is better than ever, or lower than at the last save.


@dataclass(frozen=True, slots=True)
class OnImprove(SavePolicy):
    """`top`: better than the worst of so many best saves is enough."""

    metric: str
    mode: Literal["min", "max"] = "min"
    by: Margin = field(default_factory=lambda: Margin(0.0))
    top: int = 1

    def metrics(self) -> frozenset[str]:
        return frozenset({self.metric})

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        value = now.metrics.get(self.metric, math.nan)
        if math.isnan(value):
            return None
        sign = 1.0 if self.mode == "min" else -1.0
        before = sorted(_values(self.metric, history), key=lambda other: sign * other)
        if not before:
            return f"the first {self.metric} ({value:g})"
        if len(before) < self.top:
            return f"{self.metric} is among the best {self.top} ({value:g})"
        bar = before[self.top - 1]
        if not self.by.reached(sign * (bar - value), bar):
            return None
        what = "the best" if self.top == 1 else f"the {self.top} best"
        return f"{self.metric} improved ({value:g}; {what} before: {bar:g})"

    def __repr__(self) -> str:
        words = [repr(self.metric), f"mode={self.mode!r}", *([f"by={self.by!r}"] if self.by.amount else [])]
        return f"on.improve({', '.join(words)})"


@dataclass(frozen=True, slots=True)
class OnDrop(SavePolicy):
    metric: str
    by: Margin

    def metrics(self) -> frozenset[str]:
        return frozenset({self.metric})

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        value = now.metrics.get(self.metric, math.nan)
        if math.isnan(value):
            return None
        before = _values(self.metric, history)
        if not before:
            return f"the first {self.metric} ({value:g})"
        last = before[-1]
        if not self.by.reached(last - value, last):
            return None
        return f"{self.metric} dropped from {last:g} at the last save to {value:g}"

    def __repr__(self) -> str:
        return f"on.drop({self.metric!r}, by={self.by!r})"


def _values(metric: str, history: SaveHistory) -> list[float]:
    """The metric at the saves before that have it, oldest first."""
    found = (float(saved.get(metric, math.nan)) for saved in history.saved)
    return [value for value in found if not math.isnan(value)]


# --------------------------------------------------------------------------------------------------
# Saving as often as the machine can bear: within a share of the wall time that saves may hold training up for.
#
# What a save costs is learned from the saves before: the longest hold-up of the last few is what the next is expected
# to cost. Two rules keep the share: of the time since the last save, and of all the time since the start, so that
# neither a burst nor a slow drift goes beyond it. Nor is a save taken that would have to wait for one before; and
# none faster than they can be written, however many may be in flight: what is taken beyond that would wait in the
# end.

MOST: Final = 0.5
"""Whoever lets saves take more than half of the time means something else."""


@dataclass(frozen=True, slots=True)
class EveryStall(SavePolicy):
    """At most `share` (0 to 0.5) of wall time is spent on saves in the training thread: copying, waiting for fences."""

    share: float

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        if history.waits:
            return None
        if not history.stalls_s:
            return f"the first save tells what a save costs (every stall={self._text})"
        expected = max(history.stalls_s)
        since = now.now_s - (history.started_s if history.last_saved_s is None else history.last_saved_s)
        in_all = now.now_s - history.started_s
        if expected > self.share * since or history.stalled_s + expected > self.share * in_all:
            return None
        if since < history.persist_s:
            return None
        return f"{since:.1f} s since the last save bear another {expected * 1000:.0f} ms (every stall={self._text})"

    @property
    def _text(self) -> str:
        return f"{self.share * 100:g}%"

    def __repr__(self) -> str:
        return f"every(stall={self._text!r})"


def stall_share(value: object) -> float:
    """`value` ("1%", or a part such as 0.01) as a share of wall time. UsageError where it is none."""
    hint = "give a share of wall time above 0 and at most half, such as every(stall='1%')"
    number, percent = value, False
    if isinstance(value, str) and value.strip().endswith("%"):
        number, percent = value.strip()[:-1], True
    if isinstance(value, bool | bytes) or (isinstance(value, str) and not percent):
        raise UsageError(f"every(stall={value!r}) is no share", hint=hint)
    try:
        share = float(number) / (100 if percent else 1)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"every(stall={value!r}) is no share", hint=hint) from None
    if not 0 < share <= MOST:
        raise UsageError(f"every(stall={value!r}) is no share that a training can keep", hint=hint)
    return share


# --------------------------------------------------------------------------------------------------
# What can ask for a save: a number of steps, epochs or minutes, the end of training, a signal.


@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """Pure in the step, so that every rank and every attempt decides alike."""

    steps: int

    @property
    def alike(self) -> bool:
        return True

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        return _of("step", now.step, self.steps) if now.step % self.steps == 0 else None

    def __repr__(self) -> str:
        return f"every(steps={self.steps})"


@dataclass(frozen=True, slots=True)
class EveryEpochs(SavePolicy):
    """At the end of an epoch whose number, counted from 1, is a multiple of `epochs`."""

    epochs: int

    @property
    def alike(self) -> bool:
        return True

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        if not now.epoch_ended or not now.epoch or now.epoch % self.epochs:
            return None
        return _of("epoch", now.epoch, self.epochs)

    def __repr__(self) -> str:
        return f"every(epochs={self.epochs})"


@dataclass(frozen=True, slots=True)
class EveryMinutes(SavePolicy):
    """When so much time has passed since the last save of this process began, or since its start."""

    minutes: float

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        since = history.started_s if history.last_saved_s is None else history.last_saved_s
        passed = (now.now_s - since) / 60
        if passed < self.minutes:
            return None
        what = "the start" if history.last_saved_s is None else "the last save"
        return f"{passed:.1f} minutes since {what} (every {self.minutes:g})"

    def __repr__(self) -> str:
        return f"every(minutes={self.minutes:g})"


@dataclass(frozen=True, slots=True)
class OnEnd(SavePolicy):
    @property
    def alike(self) -> bool:
        return True

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        return "training ends" if now.ending else None

    def __repr__(self) -> str:
        return "on.end()"


@dataclass(frozen=True, slots=True)
class OnSignal(SavePolicy):
    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        return None if now.signal is None else f"{now.signal} came"

    @property
    def catches_signals(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "on.signal()"


def every(
    *,
    steps: int | None = None,
    minutes: float | None = None,
    epochs: int | None = None,
    stall: str | float | None = None,
) -> SavePolicy:
    """Saves every so many completed steps, minutes or completed epochs; of several given, whichever comes.

    `stall` saves as often as the machine can bear: saves hold training up for at most this share of wall time ("1%", or
    0.01), as measured. Raises UsageError where none is given, or one is not above zero (or, of steps and epochs, not
    whole).
    """
    parts: list[SavePolicy] = []
    if steps is not None:
        parts.append(EverySteps(whole_number(steps, "every(steps={})")))
    if minutes is not None:
        parts.append(EveryMinutes(duration(minutes, "every(minutes={})")))
    if epochs is not None:
        parts.append(EveryEpochs(whole_number(epochs, "every(epochs={})")))
    if stall is not None:
        parts.append(EveryStall(stall_share(stall)))
    if not parts:
        raise UsageError("every() of what?", hint="write every(steps=200), every(minutes=10) or every(epochs=1)")
    return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))


def _of(unit: str, number: int, interval: int) -> str:
    return f"{unit} {number} (every {unit})" if interval == 1 else f"{unit} {number} (every {interval} {unit}s)"
