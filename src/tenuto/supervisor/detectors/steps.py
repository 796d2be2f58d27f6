"""Steps of the training itself: a rank that is slower than the others, and a job that has become slower.

Ranks that wait for each other within a step take equally long for it: a straggler is seen where they do so once in
several steps, or not at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from tenuto.supervisor.detectors.contract import END, STEPS, Finding, Sample
from tenuto.units import seconds

RANKS: Final = 3
"""With fewer there is no majority to be slower than."""
WINDOW: Final = 12
"""Samples by which a rank is judged: a minute."""
MOST: Final = 10
"""In so many of them it is slower."""
SLOWER: Final = 1.2
DEVIATIONS: Final = 4.0
MAD: Final = 1.4826
"""Times the median absolute deviation: the standard deviation of normal values."""
BASELINE: Final = 120
KNOWN: Final = 24
"""Samples by which the job's own pace is known: ten minutes, two at least."""
WEIGHT: Final = 0.2
SLOW_DOWN: Final = 1.5
LASTING: Final = 12


class StepTimes:
    source: Final = STEPS
    period_s: Final = 5.0

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._slower: dict[str, deque[bool]] = {}
        self._paces: deque[float] = deque(maxlen=BASELINE)
        self._average: float | None = None
        self._slow = 0

    def sample(self) -> None:
        """The supervisor takes these samples itself, of the training's beats."""
        return None

    def judge(self, sample: Sample) -> Sequence[Finding]:
        if sample.source == END:
            self._reset()
        if sample.source != STEPS:
            return ()
        return [*self._stragglers(sample), *self._slow_down(sample)]

    def _stragglers(self, sample: Sample) -> Iterator[Finding]:
        paces = {rank: values["step_s"] for rank, values in sample.by_thing().items() if "step_s" in values}
        if len(paces) < RANKS:
            return
        usual = median(paces.values())
        spread = MAD * median(abs(one - usual) for one in paces.values())
        for rank, pace in sorted(paces.items()):
            slower = self._slower.setdefault(rank, deque(maxlen=WINDOW))
            slower.append(pace > max(SLOWER * usual, usual + DEVIATIONS * spread))
            if sum(slower) >= MOST:
                words = f"rank {rank} takes {seconds(pace)} for a step, the others {seconds(usual)}"
                yield Finding("straggler", words, f"rank {rank}")

    def _slow_down(self, sample: Sample) -> Iterator[Finding]:
        pace = sample.values.get("step_s")
        if pace is None:
            return
        self._average = pace if self._average is None else WEIGHT * pace + (1 - WEIGHT) * self._average
        if len(self._paces) >= KNOWN:
            usual = median(self._paces)
            spread = MAD * median(abs(one - usual) for one in self._paces)
            self._slow = self._slow + 1 if self._average > max(SLOW_DOWN * usual, usual + DEVIATIONS * spread) else 0
            if self._slow >= LASTING:
                words = f"a step takes {seconds(self._average)}, usually {seconds(usual)}"
                yield Finding("slow-steps", words)
        if self._slow == 0:
            self._paces.append(pace)  # what is slow does not become usual
