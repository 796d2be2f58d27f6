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


@dataclass(slots=True)
class Windows:
    """Keeps each value's last `window_s` seconds, since the last end of the training.

    Values of several things (`0.temperature`, `1.temperature`) are one: the highest of each number counts, so that a
    model holds for machines with other numbers of them.
    """

    window_s: float
    _series: dict[tuple[str, str, str], deque[tuple[float, float]]] = field(default_factory=dict)
    _faults: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS))

    def take(self, sample: Sample) -> None:
        if sample.source == END:
            self._series.clear()
            if is_fault(sample):
                self._faults.append(sample.at)
            return
        for name, value in sample.values.items():
            thing, _, what = name.rpartition(".")
            points = self._series.setdefault((sample.source, what, thing), deque(maxlen=POINTS))
            points.append((sample.at, value))

    def features(self, now: float) -> dict[str, float]:
        """Returns the numbers by `SOURCE.VALUE.KIND`; `end.count`: faults within the window; `end.since`: seconds since
        the last one, at most ten windows."""
        found: dict[str, float] = {}
        for (source, what, _), points in self._series.items():
            while points and points[0][0] < now - self.window_s:
                points.popleft()
            for kind, value in _numbers(points):
                name = f"{source}.{what}.{kind}"
                found[name] = max(value, found.get(name, value))
        longest_s = 10 * self.window_s
        found["end.count"] = float(sum(now - at <= self.window_s for at in self._faults))
        found["end.since"] = min(now - self._faults[-1], longest_s) if self._faults else longest_s
        return found


def _numbers(points: deque[tuple[float, float]]) -> Iterator[tuple[str, float]]:
    if not points:
        return
    at, values = np.array(points).T
    yield "last", float(values[-1])
    yield "max", float(values.max())
    yield "rise", float(values[-1] - values[0])
    since = at - at.mean()
    spread = float(since @ since)
    yield "slope", float(since @ values) / spread * 60 if spread else 0.0


def in_words(name: str, value: float) -> str:
    """Returns a feature and its value as people read it: `memory.rss: slope 1.2e+07`."""
    what, _, kind = name.rpartition(".")
    unit = " a minute" if kind == "slope" else ""
    return f"{what} {kind} {value:.3g}{unit}"


Features = Mapping[str, float]
