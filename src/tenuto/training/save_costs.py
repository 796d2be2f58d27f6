"""What the optimal interval between saves goes by: how a save slows steps down, and how often the run has failed."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Final

from tenuto.policy.save import EveryOptimum, SavePolicy, parts_of
from tenuto.repo.ownership.past_failures import PastFailures, past_failures
from tenuto.repo.repository import Repo

RECENT: Final = 64
ENOUGH: Final = 5
"""Steps of each kind before they are compared."""


class StepPace:
    """Compares the last steps beside which a save was being written with the last others."""

    def __init__(self) -> None:
        self._beside: deque[float] = deque(maxlen=RECENT)
        self._alone: deque[float] = deque(maxlen=RECENT)

    def add(self, seconds: float, *, beside_a_save: bool) -> None:
        (self._beside if beside_a_save else self._alone).append(seconds)

    @property
    def slowdown(self) -> float:
        """By which share steps beside a save take longer, 0 to 1; 0 while too few of either kind are known."""
        if min(len(self._beside), len(self._alone)) < ENOUGH:
            return 0.0
        alone = median(self._alone)
        return min(max(median(self._beside) / alone - 1, 0.0), 1.0) if alone > 0 else 0.0


class OptimumFacts:
    """What is known for `every(auto=)` in one process; nothing is looked at for other policies."""

    def __init__(self, policy: SavePolicy) -> None:
        found = [part for part in parts_of(policy) if isinstance(part, EveryOptimum)]
        self._pace = StepPace() if found else None
        self._learns = any(part.learns_failures for part in found)
        self._continued_s = time.monotonic()
        self.past = PastFailures()

    def begin(self, repo: Repo, run: str, attempt: int) -> None:
        if self._learns:
            self.past = past_failures(repo, run, until=attempt)

    def step(self, now_s: float, *, beside_a_save: bool) -> float:
        """Counts the step that has just ended, and returns the slowdown. The save after it is no part of the next."""
        if self._pace is None:
            return 0.0
        self._pace.add(now_s - self._continued_s, beside_a_save=beside_a_save)
        return self._pace.slowdown

    def continues(self) -> None:
        """Says that training continues after a step's decision or save."""
        self._continued_s = time.monotonic()
