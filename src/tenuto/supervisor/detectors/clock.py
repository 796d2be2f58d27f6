"""The wall clock against the monotonic one: it was set, or the machine stood still."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from tenuto.supervisor.detectors.contract import Finding, Sample
from tenuto.units import seconds

JUMP_S: Final = 1.0
"""NTP slews by less than 3 ms in a period."""
_BOOT: Final = getattr(time, "CLOCK_BOOTTIME", None)


class Clock:
    source: Final = "clock"
    period_s: Final = 5.0

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}

    def sample(self) -> Mapping[str, float]:
        while True:
            now_s = time.monotonic()
            values = {"wall_s": time.time() - now_s}
            if _BOOT is not None:
                values["suspended_s"] = time.clock_gettime(_BOOT) - now_s
            if time.monotonic() - now_s < JUMP_S / 10:  # else it was held up between two of these, not the clock set
                return values

    def judge(self, sample: Sample) -> Sequence[Finding]:
        if sample.source != self.source:
            return ()
        before, self._before = self._before, sample.values
        jump_s, slept_s = (
            sample.values.get(name, 0.0) - before.get(name, sample.values.get(name, 0.0))
            for name in ("wall_s", "suspended_s")
        )
        if slept_s >= JUMP_S:
            return [Finding("clock", f"the machine was suspended for {seconds(slept_s)}")]
        if abs(jump_s) >= JUMP_S:
            return [
                Finding("clock", f"the clock was set {'forward' if jump_s > 0 else 'back'} by {seconds(abs(jump_s))}")
            ]
        return ()
