"""Traces of samples for detectors: made here, or read from a recording, and judged."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tenuto.supervisor.detectors.contract import Detector, Finding, Sample

BEGAN = 1_790_000_000.0


def trace(
    source: str, values: Callable[[float], Mapping[str, float]], *, period_s: float, lasts_s: float
) -> Iterator[Sample]:
    """Yields samples of `values` at each time, in seconds since the trace began. Each goes through a line."""
    for number in range(int(lasts_s / period_s)):
        yield Sample.read(Sample(BEGAN + number * period_s, source, values(number * period_s)).line())


def recorded(path: Path) -> Iterator[Sample]:
    with gzip.open(path, "rt") as lines:
        yield from map(Sample.read, lines)


def merged(*traces: Iterable[Sample]) -> list[Sample]:
    return sorted((sample for one in traces for sample in one), key=lambda sample: sample.at)


def judged(detector: Detector, samples: Iterable[Sample]) -> list[tuple[float, Finding]]:
    """Returns what is found, with the seconds since the trace began."""
    return [(sample.at - BEGAN, one) for sample in samples for one in detector.judge(sample)]


def named(detector: Detector, samples: Iterable[Sample]) -> list[str]:
    """Returns the names of what is found, each once, in order."""
    return list(dict.fromkeys(one.name for _, one in judged(detector, samples)))
