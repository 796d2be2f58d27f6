"""What a metric can ask for: a save when it is better than ever, or lower than at the last save."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from holdfast.policy.numbers import Margin
from holdfast.policy.saving import Moment, SaveHistory, SavePolicy


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
