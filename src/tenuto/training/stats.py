"""Counts what saving has done and cost in one process, and shows it as a table."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from tenuto.engine.save.handle import Save
from tenuto.model.timing import RankTimings, Timing
from tenuto.record import record
from tenuto.units import count, seconds, size

if TYPE_CHECKING:
    from tenuto.engine.memory_tier.cadence import MemoryCadence


ROWS: Final = (
    ("training blocked", "held_s"),
    ("  look at the state", "look_s"),
    ("  save before", "wait_s"),
    ("  prepare", "prepare_s"),
    ("  copy", "capture_s"),
    ("  fence", "fence_s"),
    ("  until committed", "join_s"),
    ("copy in background", "late_s"),
    ("behind other saves", "queue_s"),
    ("until durable", "seconds"),
    ("  begin", "begin_s"),
    ("  seal in memory", "seal_s"),
    ("  digest", "digest_s"),
    ("  write and flush", "write_s"),
    ("  index", "index_s"),
    ("  commit", "commit_s"),
    ("processor time", "cpu_s"),
)
"""The rows of a table of timings and their fields in a `Timing`; rows of zeros are left out."""


@record
class Stats:
    """What saving has done and cost since this process began to train. `str` is a table.

    Ages are those of the states themselves, in seconds: training that a crash would lose now. A checkpoint that
    training resumed from counts as made at the resume. After `close` the ages still increase, the rest stays.
    """

    taken: int = 0
    """Saves that were begun: `committed`, `failed`, or still `in_flight`."""
    committed: int = 0
    failed: int = 0
    skipped: int = 0
    """Saves that were due and not taken, because as many as may be in flight were still being written."""
    delayed: int = 0
    """Saves that had to wait until one before was written, `delayed_s` seconds in all."""
    delayed_s: float = 0.0
    kept_in_memory: int = 0
    """States that were sealed in memory between saves."""
    skipped_in_memory: int = 0
    """States that were due in memory and not taken, because the one before was not sealed."""
    delayed_in_memory: int = 0
    """States that had to wait for the one before to be sealed."""
    fence_in_memory_s: float = 0.0
    """How long updates waited for copies of states in memory, where these are fenced."""
    cpu_in_memory_s: float = 0.0
    """Processor time that states in memory took in the background: copying behind a fence, digesting, sealing. Saves to
    the store have their own."""
    held_s: float = 0.0
    """How long training was blocked in all: by saves, states in memory, and waiting."""
    elapsed_s: float = 0.0
    """Since the run was claimed, until it was released."""
    last: Timing | None = None
    """Where the time of the last committed save went."""
    usual: Timing | None = None
    """Medians over the last 50 committed saves, of each part by itself."""
    ranks: RankTimings | None = None
    """Of several ranks: where the time of the last committed save went on each of them."""
    disk_age_s: float | None = None
    """Of the newest committed state; None where there is none."""
    memory_age_s: float | None = None
    """Of the newest state that is whole in memory; None where there is none."""

    @property
    def in_flight(self) -> int:
        """Saves that have neither committed nor failed yet."""
        return self.taken - self.committed - self.failed

    @property
    def held_share(self) -> float:
        """The part of `elapsed_s` for which training was blocked, 0 to 1."""
        return min(self.held_s / self.elapsed_s, 1.0) if self.elapsed_s > 0 else 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second at which data files become durable, usually; None before the first commit."""
        return self.usual.bandwidth if self.usual is not None else None

    def __str__(self) -> str:
        facts = list(self._facts())
        wide = max(len(name) for name, _ in facts)
        lines = [f"{name:<{wide}}  {value}" for name, value in facts]
        if self.last is not None and self.usual is not None:
            lines += ["", *_table(self.last, self.usual)]
        if self.ranks is not None:
            lines += ["", *slowest_lines(self.ranks)]
        return "\n".join(lines)

    def _facts(self) -> Iterator[tuple[str, str]]:
        waited = f"{self.delayed} delayed by {seconds(self.delayed_s)}" if self.delayed else ""
        ends = (f"{self.committed} committed", _some(self.in_flight, "in flight"), _some(self.failed, "FAILED"))
        yield "saves", ", ".join(filter(None, (*ends, _some(self.skipped, "skipped"), waited)))
        if self.kept_in_memory or self.skipped_in_memory or self.cpu_in_memory_s:
            kept = f"{count(self.kept_in_memory, 'state')} kept"
            less = (_some(self.skipped_in_memory, "skipped"), _some(self.delayed_in_memory, "delayed"))
            fence = f"fence {seconds(self.fence_in_memory_s)}" if self.fence_in_memory_s else ""
            cpu = f"processor time {seconds(self.cpu_in_memory_s)}" if self.cpu_in_memory_s else ""
            yield "memory", ", ".join(filter(None, (kept, *less, fence, cpu)))
        yield "training blocked", f"{seconds(self.held_s)}, {self.held_share:.2%} of {seconds(self.elapsed_s)}"
        ages = (("on disk", self.disk_age_s), ("in memory", self.memory_age_s))
        known = [f"{where} {seconds(age)} old" for where, age in ages if age is not None]
        yield "newest state", ", ".join(known) or "none that a crash would leave"


def _some(number: int, what: str) -> str:
    return f"{number} {what}" if number else ""


def _table(last: Timing, usual: Timing) -> list[str]:
    rows = [
        (name, _cell(getattr(last, field)), _cell(getattr(usual, field)))
        for name, field in ROWS
        if getattr(last, field) or getattr(usual, field)
    ]
    rows.append(("bytes", size(last.bytes), size(usual.bytes)))
    if last.bandwidth is not None or usual.bandwidth is not None:
        rows.append(("written at", speed(last.bandwidth), speed(usual.bandwidth)))
    rows.insert(0, ("", "last save", "median"))
    wide = [max(len(row[place]) for row in rows) for place in range(3)]
    return [f"{name:<{wide[0]}}  {one:>{wide[1]}}  {other:>{wide[2]}}" for name, one, other in rows]


def slowest_lines(ranks: RankTimings) -> list[str]:
    """Returns for each part of a save the rank that took longest, and how the others are spread."""
    rows = [
        (name.strip(), f"rank {part.slowest[0][0]}", *map(say, (part.slowest[0][1], part.median, part.least)))
        for name, field, say in (*((name, field, _cell) for name, field in ROWS), ("bytes", "bytes", _bytes))
        if (part := ranks.parts.get(field)) is not None
    ]
    rows.insert(0, (f"of {ranks.ranks} ranks", "slowest", "most", "median", "least"))
    wide = [max(len(row[place]) for row in rows) for place in range(5)]
    return ["  ".join((f"{row[0]:<{wide[0]}}", *(f"{row[at]:>{wide[at]}}" for at in range(1, 5)))) for row in rows]


def _bytes(value: float) -> str:
    return size(round(value))


def _cell(value: float) -> str:
    return seconds(value) if value else "-"


def speed(bandwidth: float | None) -> str:
    return f"{size(round(bandwidth))}/s" if bandwidth is not None else "-"


RECENT_SAVES: Final = 50
"""Committed saves of which the medians are."""
RECENT_STALLS: Final = 5
"""Saves by whose cost that of the next one is estimated."""


class SaveTotals:
    """Counts the saves of one process. Used from the training thread only, which asks each handle how its save
    ended."""

    def __init__(self) -> None:
        self.durable_s: float | None = None
        """When the newest committed state was captured, by the monotonic clock."""
        self._taken = self._committed = self._failed = self._skipped = self._delayed = 0
        self._delayed_s = 0.0
        self._held_s = 0.0
        """The time for which skipped saves blocked training."""
        self._stalled_before_s = 0.0
        """The time for which the saves before those in `_stalls` blocked it."""
        self._stalls: deque[tuple[Save, float]] = deque(maxlen=RECENT_STALLS)
        self._persist_s = 0.0
        self._in_flight: list[tuple[Save, float]] = []
        self._timings: deque[Timing] = deque(maxlen=RECENT_SAVES)
        self._ranks: RankTimings | None = None
        self._began_s: float | None = None
        self._ended_s: float | None = None

    def begin(self) -> None:
        self._began_s = time.monotonic()

    def end(self) -> None:
        self._ended_s = time.monotonic()

    def take(self, save: Save, due_s: float) -> None:
        """Counts a save of the state as it was at `due_s`."""
        self._settle()
        self._taken += 1
        self._in_flight.append((save, due_s))

    def skip(self, held_s: float) -> None:
        """Counts a due save that was not taken, since as many as may be were in flight."""
        self._skipped += 1
        self._held_s += held_s

    def delay(self, seconds: float) -> None:
        """Counts a due save that has waited until one before was written."""
        self._delayed += 1
        self._delayed_s += seconds

    def hold(self, save: Save, held_s: float) -> None:
        """Adds the time for which a save blocked training, from when it was due until training continued. A fence is
        waited for after that, so its part is read from the handle each time."""
        if len(self._stalls) == RECENT_STALLS:
            oldest, held = self._stalls[0]
            self._stalled_before_s += held + oldest.fence_s
        self._stalls.append((save, held_s))

    @property
    def stalls_s(self) -> list[float]:
        """How long each of the last few saves blocked training, oldest first."""
        return [held + save.fence_s for save, held in self._stalls]

    @property
    def stalled_s(self) -> float:
        """How long all saves that were taken blocked it."""
        return self._stalled_before_s + sum(self.stalls_s)

    @property
    def persist_s(self) -> float:
        """How long writing a save takes: from begin to commit of the last committed one, or so far of the one that is
        being written, where that is more."""
        now, so_far = time.monotonic(), 0.0
        for save, _ in reversed(self._stalls):
            if save.committed:
                self._persist_s = save.seconds
                break
            if not save.done and save.begun_s is not None:
                so_far = max(so_far, now - save.begun_s)
        return max(self._persist_s, so_far)

    def stats(self, memory: MemoryCadence | None) -> Stats:
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
            held_s=self.stalled_s + self._held_s + (memory.held_s if memory is not None else 0.0),
            elapsed_s=until - self._began_s if self._began_s is not None else 0.0,
            last=self._timings[-1] if self._timings else None,
            usual=medians(self._timings) if self._timings else None,
            ranks=self._ranks,
            disk_age_s=now - self.durable_s if self.durable_s is not None else None,
            memory_age_s=now - newest_s if newest_s is not None else None,
        )

    def _settle(self) -> None:
        """Counts saves that have ended since."""
        running = []
        for save, due_s in self._in_flight:
            if not save.done:
                running.append((save, due_s))
            elif save.committed:
                self._committed += 1
                self._timings.append(save.timing)
                self._ranks = save.ranks
                self.durable_s = due_s
            else:
                self._failed += 1
        self._in_flight = running


def medians(timings: Sequence[Timing] | deque[Timing]) -> Timing:
    """Returns the median of each part by itself: they need not be those of one save."""
    middle: dict[str, Any] = {
        field.name: median(getattr(one, field.name) for one in timings) for field in fields(Timing)
    }
    middle["bytes"] = round(middle["bytes"])
    return Timing(**middle)
