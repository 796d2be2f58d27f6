"""How long steps take, and how much longer while a save is written beside them."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

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
