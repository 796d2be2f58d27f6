"""What saving has done and cost in one process: counts, medians, ages; and a table of them for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from holdfast.model.spread import RankTimings
from holdfast.model.timing import Timing
from holdfast.report.measures import count, seconds, size

ROWS: Final = (
    ("training held", "held_s"),
    ("  look at the state", "look_s"),
    ("  save before", "wait_s"),
    ("  prepare", "prepare_s"),
    ("  copy", "capture_s"),
    ("  fence", "fence_s"),
    ("  until committed", "join_s"),
    ("copy beside training", "late_s"),
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
"""What a table of timings says, and where it is in a `Timing`; rows that say nothing are left out."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What saving has done and cost since this process began to train. `str` is a table.

    Ages are those of the states themselves, in seconds: training that a crash would lose now. A checkpoint that
    training went on from counts as made when it did. After `close` the ages go on, the rest stands.
    """

    taken: int = 0
    """Saves that were begun: `committed`, `failed`, or still `in_flight`."""
    committed: int = 0
    failed: int = 0
    skipped: int = 0
    """Saves that were due and not taken, for as many as may be in flight were still being written."""
    delayed: int = 0
    """Saves that had to wait until one before was written, `delayed_s` seconds together."""
    delayed_s: float = 0.0
    kept_in_memory: int = 0
    """States that were sealed in memory between saves."""
    skipped_in_memory: int = 0
    """States that were due in memory and not taken, for the one before was not sealed."""
    delayed_in_memory: int = 0
    """States that had to wait for the one before to be sealed."""
    fence_in_memory_s: float = 0.0
    """How long updates waited for copies of states in memory, where these are fenced."""
    cpu_in_memory_s: float = 0.0
    """Processor time that states in memory took beside training: copying behind a fence, digesting, sealing. Saves to
    the store tell their own."""
    held_s: float = 0.0
    """How long training was held altogether: by saves, states in memory, and waiting."""
    elapsed_s: float = 0.0
    """Since the run was claimed, until it was given back."""
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
        """The part of `elapsed_s` for which training was held, 0 to 1."""
        return min(self.held_s / self.elapsed_s, 1.0) if self.elapsed_s > 0 else 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second at which packs become durable, usually; None before the first commit."""
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
        yield "training held", f"{seconds(self.held_s)}, {self.held_share:.2%} of {seconds(self.elapsed_s)}"
        ages = (("on disk", self.disk_age_s), ("in memory", self.memory_age_s))
        known = [f"{where} {seconds(age)} old" for where, age in ages if age is not None]
        yield "newest state", ", ".join(known) or "none that a crash would leave"


def _some(number: int, what: str) -> str:
    return f"{number} {what}" if number else ""


def _table(last: Timing, usual: Timing) -> list[str]:
    """The parts of the last save and of a usual one."""
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
    """For each part of a save of several ranks the one that took longest, and how the others are spread."""
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
    """Bytes per second, in words."""
    return f"{size(round(bandwidth))}/s" if bandwidth is not None else "-"
