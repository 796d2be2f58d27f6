"""Jumps of a logged metric that falls, such as a loss: single spikes, divergence, and values that are no numbers.

Each value is compared with the median of those before it, in units of their median absolute deviation, which a few
outliers do not move (Leys et al., "Detecting outliers: Do not use standard deviation around the mean, use absolute
deviation around the median", 2013).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final, Literal

from tenuto.record import record

WINDOW: Final = 50
"""The most values before it that one is compared with."""
FEWEST: Final = 8
"""As long as there are fewer values before it, none is judged."""
DEVIATIONS: Final = 8.0
"""How many deviations above the median a spike lies."""
LASTING: Final = 5
"""From so many spikes in a row on the metric diverges."""
_NORMAL: Final = 1.4826
"""By which a median absolute deviation is multiplied to be the standard deviation of a normal distribution."""
_NORMAL_75: Final = 1.15
"""What three of four deviations of a normal distribution are below: metrics that alternate have a median of nought."""
_LEAST: Final = 0.01
"""The smallest deviation, as a fraction of the median: a metric that hardly moves has no spikes of a thousandth."""

Kind = Literal["spike", "divergence", "nan"]


@record
class Spike:
    """A value that does not follow those before it.

    kind: "spike"; "divergence" for the fifth spike in a row and those after it; "nan" for what is NaN or infinite.
    median: of the values before. deviations: how far above it the value lies, inf for "nan".
    """

    step: int
    value: float
    kind: Kind
    median: float
    deviations: float


class SpikeWatch:
    """Judges the values of one metric one by one."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row = 0

    def add(self, step: int, value: float) -> Spike | None:
        """Adds a value; returns what it is, None for a usual one. A metric that stays high counts as usual once half of
        the window is as high."""
        before = list(self._window)
        middle = median(before) if before else math.nan
        if not math.isfinite(value):
            return Spike(step, value, "nan", middle, math.inf)
        self._window.append(value)
        if len(before) < FEWEST:
            return None
        away = sorted(abs(one - middle) for one in before)
        spread = max(_NORMAL * median(away), away[len(away) * 3 // 4] / _NORMAL_75, _LEAST * abs(middle), 1e-12)
        deviations = (value - middle) / spread
        if deviations <= DEVIATIONS:
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        return Spike(step, value, "divergence" if self._in_a_row >= LASTING else "spike", middle, deviations)


def spikes(series: Iterable[tuple[int, float]]) -> list[Spike]:
    """Returns the spikes of a metric that falls, from its steps and values in order."""
    watch = SpikeWatch()
    found = (watch.add(step, float(value)) for step, value in series)
    return [spike for spike in found if spike is not None]


def falls(metric: str, mode: str | None) -> bool:
    """Returns whether a metric is one whose rise is bad news. `mode`: as policies have it, if they do."""
    return mode == "min" or (mode is None and "loss" in metric.lower())
