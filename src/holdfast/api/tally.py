"""Counting what becomes of saves. Used from the training thread alone, which asks each handle how its save ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from holdfast.api.stats import Stats
from holdfast.engine.handle import Save
from holdfast.model.spread import RankTimings
from holdfast.model.timing import Timing

if TYPE_CHECKING:
    from holdfast.api.remembering import Remembering

RECENT: Final = 50
"""Committed saves of which the medians are."""


class Tally:
    """The saves of one process."""

    def __init__(self) -> None:
        self.durable_s: float | None = None
        """Of when the newest state is that is committed, by the monotonic clock."""
        self._taken = self._committed = self._failed = self._skipped = self._delayed = 0
        self._delayed_s = 0.0
        self._held_s = 0.0
        """By what became no save."""
        self._in_flight: list[tuple[Save, float]] = []
        self._timings: deque[Timing] = deque(maxlen=RECENT)
        self._ranks: RankTimings | None = None
        self._began_s: float | None = None
        self._ended_s: float | None = None

    def begin(self) -> None:
        """Training may save from now on."""
        self._began_s = time.monotonic()

    def end(self) -> None:
        """Training is over."""
        self._ended_s = time.monotonic()

    def take(self, save: Save, due_s: float) -> None:
        """A save is taken, of the state as it was at `due_s`."""
        self._settle()
        self._taken += 1
        self._in_flight.append((save, due_s))

    def skip(self, held_s: float) -> None:
        """A save that was due was not taken, for as many as may be in flight were still being written."""
        self._skipped += 1
        self._held_s += held_s

    def delay(self, seconds: float) -> None:
        """A save that was due has waited until one before was written."""
        self._delayed += 1
        self._delayed_s += seconds

    def stats(self, held_s: float, memory: Remembering | None) -> Stats:
        """`held_s`: how long the saves that were taken have held training."""
        self._settle()
        now = time.monotonic()
        until = now if self._ended_s is None else self._ended_s
        newest_s = memory.newest_s if memory is not None else None
        return Stats(
            taken=self._taken,
            committed=self._committed,
            failed=self._failed,
            skipped=self._skipped,
            delayed=self._delayed,
            delayed_s=self._delayed_s,
            kept_in_memory=memory.kept if memory is not None else 0,
            skipped_in_memory=memory.skipped if memory is not None else 0,
            delayed_in_memory=memory.delayed if memory is not None else 0,
            fence_in_memory_s=memory.fence_s if memory is not None else 0.0,
            cpu_in_memory_s=memory.cpu_s if memory is not None else 0.0,
            held_s=held_s + self._held_s + (memory.held_s if memory is not None else 0.0),
            elapsed_s=until - self._began_s if self._began_s is not None else 0.0,
            last=self._timings[-1] if self._timings else None,
            usual=medians(self._timings) if self._timings else None,
            ranks=self._ranks,
            disk_age_s=now - self.durable_s if self.durable_s is not None else None,
            memory_age_s=now - newest_s if newest_s is not None else None,
        )

    def _settle(self) -> None:
        """Saves that have ended since are counted."""
        going_on = []
        for save, due_s in self._in_flight:
            if not save.done:
                going_on.append((save, due_s))
            elif save.committed:
                self._committed += 1
                self._timings.append(save.timing)
                self._ranks = save.ranks
                self.durable_s = due_s
            else:
                self._failed += 1
        self._in_flight = going_on


def medians(timings: Sequence[Timing] | deque[Timing]) -> Timing:
    """Of each part by itself: they need not be those of one save."""
    middle: dict[str, Any] = {
        field.name: median(getattr(one, field.name) for one in timings) for field in fields(Timing)
    }
    middle["bytes"] = round(middle["bytes"])
    return Timing(**middle)
