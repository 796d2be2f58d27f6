"""When to save: the policies, their inputs and decisions, and how they combine."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Final, Literal, final

from tenuto.errors import UsageError
from tenuto.policy.interval import SaveCosts, interval, time_between_failures, waste
from tenuto.policy.numbers import Margin, direction_of, duration, min_or_max, whole_number
from tenuto.record import record
from tenuto.units import count, seconds


@record
class Moment:
    """Where training is when it asks. `now_s`: any monotonic clock in seconds, the same one as in SaveHistory."""

    step: int
    """Completed steps."""
    now_s: float
    epoch: int | None = None
    """Completed epochs, including one that ends now; None outside `epochs`."""
    epoch_ended: bool = False
    ending: bool = False
    """Whether training ends after this step: the loop is done, or `stop` was called."""
    signal: str | None = None
    """The name of the signal that asked this process to stop."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@record
class SaveHistory:
    """This process's saves so far. `last_saved_step` includes a save in flight and the restored step."""

    started_s: float
    first_step: int = 0
    """The step this process started from: 0, or the restored one."""
    last_saved_step: int | None = None
    last_saved_s: float | None = None
    """When this process last started a save; None before its first."""
    saved: Sequence[Mapping[str, float]] = ()
    """Metrics of the earlier saves on this line of training, oldest first, as logged or noted later.

    Includes saves from before a resume as far as their checkpoints still exist; excludes failed saves.
    """
    stalls_s: Sequence[float] = ()
    """Seconds for which each of this process's last few saves blocked training, oldest first."""
    stalled_s: float = 0.0
    """Seconds for which all of its saves blocked training."""
    persist_s: float = 0.0
    """Seconds to write a save, start to commit: the last committed one, or the current one so far if that is longer.

    Several saves in flight are written one after the other.
    """
    waits: bool = False
    """Whether another save would have to wait now, because as many as allowed are in flight."""
    in_flight: int = 1
    """How many saves may be in flight."""
    slowdown: float = 0.0
    """By which share steps take longer while a save is being written; 0 until that is known."""
    failures: int = 0
    """How often the run's earlier processes ended without releasing it, as far as its records go back."""
    trained_s: float = 0.0
    """How long those processes trained."""


@record
class Decision:
    """Whether to save now, and why, in words that follow "saved: " or "not saved: "."""

    save: bool
    reason: str


NOTHING_ASKED: Final = Decision(False, "nothing asked for it")


class SavePolicy(ABC):
    """Decides when to save. Policies combine with `|`: a save is made when any of them wants it.

    To write one, implement `wants` as a function of its arguments alone.
    """

    @abstractmethod
    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        """Returns why to save now, or None."""

    @property
    def catches_signals(self) -> bool:
        """Returns whether this policy waits for a signal and so needs signal handlers."""
        return False

    @property
    def alike(self) -> bool:
        """Returns whether every rank reaches the same decision by itself: from the position alone, without clock,
        signal or metric.

        Otherwise one rank decides, and the save happens at a step that all ranks have agreed on.
        """
        return False

    def metrics(self) -> frozenset[str]:
        """Returns the names of the metrics that this policy reads, so that values of earlier saves are loaded."""
        return frozenset()

    @final
    def decide(self, now: Moment, history: SaveHistory) -> Decision:
        """Returns whether to save. Never saves a step twice, or before a first step is complete."""
        if now.step <= history.first_step:
            return Decision(False, "no step was completed since the start")
        if history.last_saved_step is not None and now.step <= history.last_saved_step:
            return Decision(False, f"step {history.last_saved_step} is saved already")
        reason = self.wants(now, history)
        return NOTHING_ASKED if reason is None else Decision(True, reason)

    @final
    def __or__(self, other: SavePolicy) -> SavePolicy:
        second: object = other  # type checkers reject other types, but not everybody runs one
        if not isinstance(second, SavePolicy):
            raise UsageError(
                f"{self!r} | {other!r} does not combine: the second one does not say when to save",
                hint="combine every(...), on.end(), on.improve(...) and the like with |; keep.latest(n) goes to keep=",
            )
        return AnyOf(parts_of(self) + parts_of(other))


@record
class AnyOf(SavePolicy):
    """Saves when any of `parts` wants to, and reports all reasons."""

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


@record
class DividedPolicy:
    """A policy, and its two parts in a job: all ranks decide `alike` each by itself, one decides the rest for all."""

    whole: SavePolicy
    alike: SavePolicy
    by_one: SavePolicy


def split_by_agreement(policy: SavePolicy) -> DividedPolicy:
    """Divides a policy by what all ranks of a job decide alike."""
    parts = parts_of(policy)
    alike = AnyOf(tuple(part for part in parts if part.alike))
    return DividedPolicy(policy, alike, AnyOf(tuple(part for part in parts if not part.alike)))


def parts_of(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    """Returns the policies that `policy` combines; itself if it combines none."""
    return policy.parts if isinstance(policy, AnyOf) else (policy,)


# Metric triggers: a save when a metric improves on every save, or drops below the last one.


@record
class OnImprove(SavePolicy):
    """Saves when `metric` is better than the worst of the `top` best saves."""

    metric: str
    mode: Literal["min", "max"] = "min"
    by: Margin = field(default_factory=lambda: Margin(0.0))
    top: int = 1
    by_name: bool = field(default=False, compare=False)
    """Whether `max` was taken because of the metric's name."""

    @classmethod
    def of(cls, metric: str, mode: object, by: Margin | None = None, top: int = 1) -> OnImprove:
        """Returns the policy; without a mode, with the one that the metric's name says, else the lowest."""
        found = direction_of(metric) if mode is None else None
        said = min_or_max(mode, metric) if mode is not None else found or "min"
        return cls(metric, said, by or Margin(0.0), top, by_name=found == "max")

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


@record
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
    """Returns the metric's values at the earlier saves that have it, oldest first."""
    found = (float(saved.get(metric, math.nan)) for saved in history.saved)
    return [value for value in found if not math.isnan(value)]


# Saves as often as the machine can bear, within a share of wall time.
#
# The expected cost of the next save is the longest stall of the last few. Two rules keep the share, over the time since
# the last save and over all the time since the start, so that neither a burst nor a slow drift exceeds it. A save that
# would have to wait for an earlier one is not made, nor one that comes faster than saves can be written: it would only
# wait in the end.

MAX_SHARE: Final = 0.5
"""The largest share: more than half of the time is surely a mistake."""


@record
class EveryStall(SavePolicy):
    """Spends at most `share` (0 to 0.5) of wall time blocking the training thread for saves: copies and fence waits."""

    share: float

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        if history.waits:
            return None
        if not history.stalls_s:
            return f"the first save shows what a save costs (every stall={self._text})"
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


def stall_share(value: object, name: str = "stall") -> float:
    """Returns `value` ("1%", or a fraction such as 0.01) as a share of wall time. Raises UsageError if it is none."""
    hint = f"give a share of wall time above 0 and at most half, such as every({name}='1%')"
    number, percent = value, False
    if isinstance(value, str) and value.strip().endswith("%"):
        number, percent = value.strip()[:-1], True
    if isinstance(value, bool | bytes) or (isinstance(value, str) and not percent):
        raise UsageError(f"every({name}={value!r}) is not a share", hint=hint)
    try:
        share = float(number) / (100 if percent else 1)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"every({name}={value!r}) is not a share", hint=hint) from None
    if not 0 < share <= MAX_SHARE:
        raise UsageError(f"every({name}={value!r}) is not a share that a training can keep", hint=hint)
    return share


@record
class EveryOptimum(SavePolicy):
    """Saves as often as loses least training time, by what saves cost and how often the run fails: more of the work is
    lost in a failure with fewer saves, and more of it goes into saves with more. Both are measured, and the interval
    follows them.

    share: of wall time that saves may block training for, 0 to 0.5. mtbf_s: seconds between failures; learnt if None.
    """

    share: float
    mtbf_s: float | None = None

    @property
    def learns_failures(self) -> bool:
        return self.mtbf_s is None

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        if history.waits:
            return None
        if not history.stalls_s:
            return "the first save shows what a save costs (every auto)"
        stall_s = max(history.stalls_s)  # as in EveryStall: the budget holds for the next save too
        costs = SaveCosts(stall_s, history.persist_s, history.slowdown)
        in_all = now.now_s - history.started_s
        mtbf_s = self.mtbf_s or time_between_failures(history.failures, history.trained_s + in_all)
        best_s = interval(costs, mtbf_s, budget=self.share, in_flight=history.in_flight)
        since = now.now_s - (history.started_s if history.last_saved_s is None else history.last_saved_s)
        if since < best_s + stall_s or history.stalled_s + stall_s > self.share * in_all:
            return None
        expected = waste(max(best_s, 1e-6), costs, mtbf_s)
        known = "as given" if self.mtbf_s else f"{count(history.failures, 'failure')} so far"
        return (
            f"{seconds(since)} since the last save; best is {seconds(best_s)}: a save blocks {seconds(stall_s)} and "
            f"takes {seconds(history.persist_s)}, a failure every {seconds(mtbf_s)} ({known}), at most "
            f"{self.share:.3g} of the time blocked; {expected:.2%} of the time goes into saves and what failures lose, "
            f"restarts left out (every auto)"
        )

    def __repr__(self) -> str:
        given = f", mtbf_hours={self.mtbf_s / 3600:g}" if self.mtbf_s else ""
        return f"every(auto='{self.share * 100:g}%'{given})"


# Other triggers: a number of steps, epochs or minutes, the end of training, a signal.


@record
class EverySteps(SavePolicy):
    """Depends on the step alone, so every rank and every attempt decides alike."""

    steps: int

    @property
    def alike(self) -> bool:
        return True

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        return _of("step", now.step, self.steps) if now.step % self.steps == 0 else None

    def __repr__(self) -> str:
        return f"every(steps={self.steps})"


@record
class EveryEpochs(SavePolicy):
    """Saves at the end of an epoch whose number, counted from 1, is a multiple of `epochs`."""

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


@record
class EveryMinutes(SavePolicy):
    """Saves `minutes` after this process's last save started, or after its own start."""

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


@record
class OnEnd(SavePolicy):
    @property
    def alike(self) -> bool:
        return True

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        return "training ends" if now.ending else None

    def __repr__(self) -> str:
        return "on.end()"


@record
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
    hours: float | None = None,
    epochs: int | None = None,
    stall: str | float | None = None,
    auto: str | float | bool | None = None,
    mtbf_hours: float | None = None,
) -> SavePolicy:
    """Saves every so many completed steps, minutes, hours or completed epochs; of several, whichever comes first.

    stall: saves as often as possible while saves block training for at most this share of wall time ("1%", or 0.01).
    auto: saves as often as loses least, by the measured cost of saves and the failures of this run, and blocks training
        for at most this share of wall time (True: 1 %).
    mtbf_hours: with `auto`, how many hours lie between failures, where you know.

    Raises UsageError if nothing is given, a value is not above zero, or steps or epochs are not whole numbers.
    """
    parts: list[SavePolicy] = []
    if steps is not None:
        parts.append(EverySteps(whole_number(steps, "every(steps={})")))
    if minutes is not None:
        parts.append(EveryMinutes(duration(minutes, "every(minutes={})")))
    if hours is not None:
        parts.append(EveryMinutes(duration(hours, "every(hours={})") * 60))
    if epochs is not None:
        parts.append(EveryEpochs(whole_number(epochs, "every(epochs={})")))
    if stall is not None:
        parts.append(EveryStall(stall_share(stall)))
    if mtbf_hours is not None and not auto:
        raise UsageError("mtbf_hours= goes with auto=", hint='every(auto="1%", mtbf_hours=3)')
    if auto:
        mtbf_s = None if mtbf_hours is None else duration(mtbf_hours, "every(mtbf_hours={})") * 3600
        parts.append(EveryOptimum(stall_share("1%" if auto is True else auto, "auto"), mtbf_s))
    if not parts:
        raise UsageError("every() of what?", hint="write every(steps=200), every(minutes=10) or every(epochs=1)")
    return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))


def _of(unit: str, number: int, interval: int) -> str:
    return f"{unit} {number} (every {unit})" if interval == 1 else f"{unit} {number} (every {interval} {unit}s)"
