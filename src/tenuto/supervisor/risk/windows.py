"""The last minutes of what was read, as a few numbers that rules and models look at."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tenuto.supervisor.decide import CAUSES
from tenuto.supervisor.detectors.contract import END, Sample

POINTS: Final = 240
"""Points of one series that are kept: of a longer window the newest."""
KINDS: Final = ("last", "max", "rise", "slope")
"""Of each value: the last one, the largest, the last less the first, and the least-squares slope a minute."""


def is_fault(sample: Sample) -> bool:
    """Returns whether a sample is an end that nobody asked for."""
    return sample.source == END and sample.kind in CAUSES


class _Series:
    """The newest points of one value: rows of times and of values, in a buffer that is moved up when it is full."""

    __slots__ = ("_buffer", "_end", "_first")

    def __init__(self) -> None:
        self._buffer = np.empty((2, 2 * POINTS))
        self._first = self._end = 0

    def append(self, at: float, value: float) -> None:
        buffer = self._buffer
        if self._end == buffer.shape[1]:
            kept = buffer[:, self._first : self._end]
            buffer[:, : kept.shape[1]] = kept.copy()
            self._first, self._end = 0, kept.shape[1]
        buffer[0, self._end], buffer[1, self._end] = at, value
        self._end += 1
        self._first = max(self._first, self._end - POINTS)

    def numbers(self, since: float) -> Iterator[tuple[str, float]]:
        """Yields the value of each of `KINDS`, of the points that are not before `since`; drops the others."""
        times = self._buffer[0]
        while self._first < self._end and times[self._first] < since:
            self._first += 1
        if self._first == self._end:
            return
        at, values = self._buffer[:, self._first : self._end]
        first, last = float(values[0]), float(values[-1])
        yield "last", last
        yield "max", float(np.maximum.reduce(values))
        yield "rise", last - first
        apart = at - np.add.reduce(at) / len(at)
        spread = float(apart @ apart)
        yield "slope", float(apart @ values) / spread * 60 if spread else 0.0


@dataclass(slots=True)
class Windows:
    """Keeps each value's last `window_s` seconds, since the last end of the training.

    Values of several things (`0.temperature`, `1.temperature`) are one: the highest of each number counts, so that a
    model holds for machines with other numbers of them.
    """

    window_s: float
    _series: dict[tuple[str, str, str], _Series] = field(default_factory=dict)
    _faults: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS))

    def take(self, sample: Sample) -> None:
        if sample.source == END:
            self._series.clear()
            if is_fault(sample):
                self._faults.append(sample.at)
            return
        for name, value in sample.values.items():
            thing, _, what = name.rpartition(".")
            key = (sample.source, what, thing)
            series = self._series.get(key)
            if series is None:
                series = self._series[key] = _Series()
            series.append(sample.at, value)

    def features(self, now: float) -> dict[str, float]:
        """Returns the numbers by `SOURCE.VALUE.KIND`; `end.count`: faults within the window; `end.since`: seconds since
        the last one, at most ten windows."""
        found: dict[str, float] = {}
        for (source, what, _), series in self._series.items():
            for kind, value in series.numbers(now - self.window_s):
                name = f"{source}.{what}.{kind}"
                if name not in found or value > found[name]:
                    found[name] = value
        longest_s = 10 * self.window_s
        found["end.count"] = float(sum(now - at <= self.window_s for at in self._faults))
        found["end.since"] = min(now - self._faults[-1], longest_s) if self._faults else longest_s
        return found


def in_words(name: str, value: float) -> str:
    """Returns a feature and its value as people read it: `memory.rss: slope 1.2e+07`."""
    what, _, kind = name.rpartition(".")
    unit = " a minute" if kind == "slope" else ""
    return f"{what} {kind} {value:.3g}{unit}"


Features = Mapping[str, float]
