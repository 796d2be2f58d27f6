"""What can ask for a save: a number of steps, epochs or minutes, the end of training, a signal."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import UsageError
from holdfast.policy.numbers import duration, whole_number
from holdfast.policy.pace import EveryStall, stall_share
from holdfast.policy.saving import AnyOf, Moment, SaveHistory, SavePolicy


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
