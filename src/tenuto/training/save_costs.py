"""What the optimal interval between saves goes by: how a save slows steps down, and how often the run has failed."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from statistics import median
from typing import Final

from tenuto.policy.save import EveryOptimum, Moment, SaveHistory, SavePolicy, parts_of
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
    """What `every(auto=)` goes by in one process, beside what any policy is given."""

    def __init__(self, learns_failures: bool) -> None:
        self._learns_failures = learns_failures
        self._pace = StepPace()
        self._past = PastFailures()
        self._continued_s = time.monotonic()

    @classmethod
    def of(cls, policy: SavePolicy) -> OptimumFacts | None:
        """Returns None for a policy that goes by none of it."""
        found = [part for part in parts_of(policy) if isinstance(part, EveryOptimum)]
        return cls(any(part.learns_failures for part in found)) if found else None

    def begin(self, repo: Repo, run: str, attempt: int) -> None:
        if self._learns_failures:
            self._past = past_failures(repo, run, until=attempt)

    def added_to(self, history: SaveHistory, moment: Moment, *, beside_a_save: bool) -> SaveHistory:
        """Counts the step that has just ended, and returns the history with all that is known."""
        self._pace.add(moment.now_s - self._continued_s, beside_a_save=beside_a_save)
        past = self._past
        return replace(history, slowdown=self._pace.slowdown, failures=past.failures, trained_s=past.trained_s)

    def continues(self) -> None:
        """Says that training continues after a step's decision or save, which are no part of the next step."""
        self._continued_s = time.monotonic()
