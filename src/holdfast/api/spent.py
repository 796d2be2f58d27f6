"""What saving has cost training so far: the time for which each save held the training thread, waiting included."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from holdfast.engine.handle import Save

RECENT: Final = 5
"""Saves whose cost tells what the next one will cost."""


class Spent:
    """The hold-ups of one process's saves. A fence is waited for after the save has returned, so its part is asked of
    the handle each time."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Save, float]] = deque(maxlen=RECENT)
        self._before_s = 0.0
        self._persist_s = 0.0

    def add(self, save: Save, held_s: float) -> None:
        """`held_s`: from the moment at which the save was due until training went on."""
        if len(self._recent) == RECENT:
            oldest, held = self._recent[0]
            self._before_s += held + oldest.fence_s
        self._recent.append((save, held_s))

    @property
    def stalls_s(self) -> list[float]:
        """Of the last few saves, oldest first."""
        return [held + save.fence_s for save, held in self._recent]

    @property
    def stalled_s(self) -> float:
        """Of all of them together."""
        return self._before_s + sum(self.stalls_s)

    @property
    def persist_s(self) -> float:
        """What writing a save takes: from begin to commit of the last that has committed, or so far of the one that is
        being written, where that is more."""
        now, so_far = time.monotonic(), 0.0
        for save, _ in reversed(self._recent):
            if save.committed:
                self._persist_s = save.seconds
                break
            if not save.done and save.begun_s is not None:
                so_far = max(so_far, now - save.begun_s)
        return max(self._persist_s, so_far)
