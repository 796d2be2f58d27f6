"""Trends of a quantity that runs out: robust against single readings."""

from __future__ import annotations

from collections import deque
from itertools import combinations, pairwise
from statistics import median
from typing import Final

POINTS: Final = 24
"""A slope is taken of so many readings at most: 276 pairs."""
STEADY: Final = 0.25
CLEAR: Final = 4.0
"""Each third of the time has to bring so much of a fall, at least, and no single reading more than half of it: one step
down is no trend. And the whole is so many times what lies between two readings, usually: noise is none either."""


class Trend:
    """The last readings of one quantity, `span_s` seconds of them. Memory and time are bounded."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._readings: deque[tuple[float, float]] = deque(maxlen=4096)

    def add(self, at: float, value: float) -> None:
        if self._readings and at <= self._readings[-1][0]:
            self._readings.clear()  # the clock was set back
        self._readings.append((at, value))
        while at - self._readings[0][0] > self._span_s:
            self._readings.popleft()

    @property
    def known_s(self) -> float:
        """For how long it is known."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0.0

    @property
    def fallen(self) -> float:
        """By how much the last reading is below the first one."""
        return self._readings[0][1] - self._readings[-1][1] if self._readings else 0.0

    def left_s(self) -> float | None:
        """Returns in how many seconds it comes to zero at the present trend; None if it does not fall steadily. The
        trend is the median of the slopes between all pairs of readings (Theil and Sen)."""
        every = max(-(-len(self._readings) // POINTS), 1)
        points = list(self._readings)[::-every]
        third = len(points) // 3
        if not third:
            return None
        late, middle, early = (
            median(value for _, value in points[first : first + third]) for first in (0, third, len(points) - third)
        )
        fall, drops = early - late, [before[1] - after[1] for after, before in pairwise(points)]
        usual = median(map(abs, drops))
        if min(early - middle, middle - late) < STEADY * fall or not max(2 * max(drops), CLEAR * usual) < fall:
            return None
        slopes = [(later[1] - earlier[1]) / (later[0] - earlier[0]) for later, earlier in combinations(points, 2)]
        slope = median(slopes)
        return None if slope >= 0 else self._readings[-1][1] / -slope


class Streaks:
    """Counts how often in a row something has held, for each of several things."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def count(self, thing: str, holds: bool) -> int:
        number = self._numbers[thing] = self._numbers.get(thing, 0) + 1 if holds else 0
        return number
