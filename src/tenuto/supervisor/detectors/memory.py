"""Memory of the host and of this process's control groups: nearly used up, or used up soon at the present trend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tenuto.concurrency.memory_headroom import control_groups, machine
from tenuto.supervisor.detectors.contract import Finding, Sample
from tenuto.supervisor.detectors.trend import Streaks, Trend
from tenuto.units import seconds, size

PRESSURE: Final = Path("/proc/pressure/memory")
SPAN_S: Final = 60.0
KNOWN_S: Final = 25.0
"""How long a trend is known before it counts."""
SOON_S: Final = 120.0
SCARCE: Final = 0.25
"""A trend counts where less than this share is available: a training that begins takes memory quickly."""
FALLEN: Final = 0.02
"""And only where so much of all memory went within the span."""
LEAST: Final = 0.02
LEAST_BYTES: Final = 1 << 30
"""Nearly used up: less than this share, and than so many bytes, is available, twice in a row."""
STALLED: Final = 25.0
"""Percent of the last ten seconds in which nothing ran for want of memory, three times in a row."""


class Memory:
    source: Final = "memory"
    period_s: Final = 5.0

    def __init__(self) -> None:
        self._trends: dict[str, Trend] = {}
        self._streaks = Streaks()

    def sample(self) -> Mapping[str, float] | None:
        values: dict[str, float] = {}
        if (host := machine()) is not None:
            values |= {"host_available_bytes": host.available, "host_total_bytes": host.total}
        tightest = min(control_groups(), key=lambda room: room.available, default=None)
        if tightest is not None:
            values |= {"cgroup_available_bytes": tightest.available, "cgroup_total_bytes": tightest.total}
        return {**values, **_pressure()} or None

    def judge(self, sample: Sample) -> Sequence[Finding]:
        return list(self._found(sample)) if sample.source == self.source else ()

    def _found(self, sample: Sample) -> Iterator[Finding]:
        values = sample.values
        for scope, whose in (("host", "the machine"), ("cgroup", "the control group")):
            available, total = values.get(f"{scope}_available_bytes"), values.get(f"{scope}_total_bytes")
            if available is None or not total:
                continue
            trend = self._trends.setdefault(scope, Trend(SPAN_S))
            trend.add(sample.at, available)
            left_s = trend.left_s() if trend.known_s >= KNOWN_S and trend.fallen >= FALLEN * total else None
            room = f"{size(int(available))} of {size(int(total))}"
            if self._streaks.count(scope, available < min(LEAST * total, LEAST_BYTES)) >= 2:
                yield Finding("memory", f"{whose} has {room} left", whose)
            elif left_s is not None and left_s < SOON_S and available < SCARCE * total:
                yield Finding("memory", f"{whose} has {room} left, for {seconds(left_s)} as it goes", whose, left_s)
        stalled = values.get("psi_full_avg10", 0.0)
        if self._streaks.count("pressure", stalled >= STALLED) >= 3:
            yield Finding("memory", f"nothing runs for {stalled:.0f} % of the time, for want of memory", "pressure")


def _pressure() -> dict[str, float]:
    """Returns which percentages of the last ten seconds some and all processes waited for memory, where the kernel
    says it."""
    try:
        lines = PRESSURE.read_text().split("\n")
        return {f"psi_{line.split()[0]}_avg10": float(line.split()[1].partition("=")[2]) for line in lines if line}
    except (OSError, ValueError, IndexError):
        return {}
