"""What the beats of a start's ranks say of its steps: how far it has come, and how long it has made none."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from tenuto.concurrency.process_trees import lives
from tenuto.supervisor.decide import Pace
from tenuto.telemetry.heartbeat import ENDED, ENDING, STARTING, TRAINING, Beat, newest


class Steps:
    """The steps of one start, by the beats of its ranks. The slowest rank counts: one that stands still holds all."""

    def __init__(self) -> None:
        self.of = 0
        """What is trained, as its beats name it: the newest where a script trains one run after the other."""
        self.reached: dict[int, int] = {}
        """The highest step that it came to, of each run."""
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
        self.pace = Pace()
        self._at: int | None = None

    @property
    def newest(self) -> int | None:
        """The highest step that it came to, of the run that is trained now."""
        return self.reached.get(self.of)

    def take(self, beats: Sequence[Beat], now_s: float) -> None:
        latest = newest(beats)
        if not latest:
            return
        self.ranks = max(self.ranks, len(latest))
        of = max(latest.values(), key=lambda beat: beat.at_s).of
        if of != self.of:
            self._begin_run(of, now_s)
        ours = [beat for beat in latest.values() if beat.of == of]
        slowest = min(ours, key=lambda beat: beat.step)
        self.phase = STARTING if any(beat.phase == STARTING for beat in ours) else slowest.phase
        if self.began is None and self.phase != STARTING:
            self.began = min(beat.began for beat in ours)
        if slowest.step != self._at:
            self._at, self.last_s = slowest.step, slowest.at_s
            self.reached[of] = max(self.reached.get(of, 0), slowest.step)
        elif self.phase != TRAINING:
            self.last_s = now_s
        self.pace = Pace(
            min(beat.known for beat in ours),
            *(max(getattr(beat, name) for beat in ours) for name in ("first_s", "longest_s", "usual_s")),
        )
        self.stepped |= self.phase in (ENDING, ENDED) or (self.began is not None and slowest.step > self.began)
        if self.phase not in (ENDING, ENDED):
            self.trained_s = now_s

    def _begin_run(self, of: int, now_s: float) -> None:
        if self.of:
            self.started_s = self.last_s = now_s
        self.of, self.began, self._at, self.stepped, self.phase = of, None, None, False, STARTING


def of_the_living(beats: Iterable[Beat]) -> list[Beat]:
    """Returns the beats of processes that live: a launcher may have replaced some, by fewer. All of them where none is
    found, as in another pid namespace."""
    every = list(beats)
    return [beat for beat in every if lives(beat.pid)] or every
