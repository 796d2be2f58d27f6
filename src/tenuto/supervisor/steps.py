"""What the beats of a start's ranks say of its steps: how far it has come, and how long it has made none."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from tenuto.concurrency.process_trees import lives
from tenuto.telemetry.heartbeat import ENDED, ENDING, STARTING, TRAINING, Beat, newest

RECENT_STEPS: Final = 50


class Steps:
    """The steps of one start, by the beats of its ranks. The slowest rank counts: one that stands still holds all."""

    def __init__(self) -> None:
        self.newest: int | None = None
        """The highest step that it came to."""
        self.began: int | None = None
        """The step that it resumed at."""
        self.ranks = 0
        self.phase = STARTING
        self.started_s = self.trained_s = time.monotonic()
        """`trained_s`: when it was last seen before its end."""
        self.last_s = self.started_s
        """When it last made a step, or was not expected to make any."""
        self.stepped = False
        """Whether it has made a step, or ended without."""
        self.durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self._at: int | None = None

    def take(self, beats: Sequence[Beat], now_s: float) -> None:
        latest = newest(beats)
        if not latest:
            return
        self.ranks = max(self.ranks, len(latest))
        slowest = min(latest.values(), key=lambda beat: beat.step)
        was = self.phase
        self.phase = STARTING if any(beat.phase == STARTING for beat in latest.values()) else slowest.phase
        if self.began is None and self.phase != STARTING:
            self.began = min(beat.began for beat in latest.values())
        if slowest.step != self._at:
            # From one step to a higher one. A first step may be that of a resume, and a launcher may have gone back.
            if self._at is not None and slowest.step > self._at and was == TRAINING:
                self.durations.append(max(slowest.at_s - self.last_s, 0.0) / (slowest.step - self._at))
            self._at, self.last_s = slowest.step, slowest.at_s
            self.newest = max(self.newest or 0, slowest.step)
        elif self.phase != TRAINING:
            self.last_s = now_s
        self.stepped |= self.phase in (ENDING, ENDED) or (self.began is not None and slowest.step > self.began)
        if self.phase not in (ENDING, ENDED):
            self.trained_s = now_s


def of_the_living(beats: Iterable[Beat]) -> list[Beat]:
    """Returns the beats of processes that live: a launcher may have replaced some, by fewer. All of them where none is
    found, as in another pid namespace."""
    every = list(beats)
    return [beat for beat in every if lives(beat.pid)] or every
