"""The figures of a measurement, and expectations in words: simple arithmetic on what was measured, and nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Final

from tenuto.bench.place import FileSystemFacts
from tenuto.errors import typed
from tenuto.record import record
from tenuto.units import count, seconds, size

COPY = "copy"
DIGEST = "digest"
FLUSH = "flush"
WRITE_DIRECT = "write_direct"
WRITE_BUFFERED = "write_buffered"
READ_COLD = "read_cold"
READ_HOT = "read_hot"
STALL = "save_stall"
DURABLE = "save_durable"
SYNC = "save_wait"
RESTORE_COLD = "restore_cold"
RESTORE_HOT = "restore_hot"

WORDS: Mapping[str, str] = {
    COPY: "copy in memory",
    DIGEST: "digest, one thread",
    WRITE_DIRECT: "write, direct, flushed",
    WRITE_BUFFERED: "write, buffered, flushed",
    READ_COLD: "read, cold",
    READ_HOT: "read, from the page cache",
    FLUSH: "small file, flushed",
    STALL: "save: training blocked",
    DURABLE: "save: until durable",
    SYNC: "save(wait=True)",
    RESTORE_COLD: "restore, cold",
    RESTORE_HOT: "restore, from the page cache",
}
"""The measurements in the order in which they are shown. All but the flush move the complete state."""


@record
class Figures:
    """The figures of one measurement.

    seconds: one figure a round for each measurement; absent if it could not be measured.
    spread: the largest ratio of slowest to fastest round.
    prewarm_s: seconds to construct a Checkpointer.
    arena: where images were allocated.
    """

    where: str
    file_system: FileSystemFacts
    nbytes: int
    leaves: int
    made_of: str
    seconds: Mapping[str, Sequence[float]]
    prewarm_s: float
    arena: str
    direct: bool
    links: bool
    cold: bool
    """Whether the page cache had dropped the files before the "cold" reads."""
    notes: Sequence[str] = ()
    """Warnings of the saves."""
    leftovers: Sequence[str] = field(default=())

    def median(self, what: str) -> float | None:
        found = self.seconds.get(what)
        return statistics.median(found) if found else None

    @property
    def spread(self) -> float:
        moved = [found for what, found in self.seconds.items() if what != FLUSH and found]
        return max((max(found) / min(found) for found in moved), default=1.0)

    def json(self) -> dict[str, Any]:
        return {
            "where": self.where,
            "file_system": self.file_system.name,
            "bytes": self.nbytes,
            "leaves": self.leaves,
            "state": self.made_of,
            "median_s": {what: self.median(what) for what in WORDS if self.seconds.get(what)},
            "rounds_s": {what: list(found) for what, found in self.seconds.items()},
            "prewarm_s": self.prewarm_s,
            "image_in": self.arena,
            "direct_io": self.direct,
            "hard_links": self.links,
            "cold_was_cold": self.cold,
        }


SHARES: Final = (0.05, 0.01, 0.001)
"""Shares of training time that saves may block."""
SLOW_FLUSH_S: Final = 0.020
BUSY: Final = 1.5
"""A ratio of slowest to fastest round from which the machine was busy with something else."""
SLOW_SHARE: Final = 0.6
"""A save below this share of the place's raw speed is reported."""


def interval(figures_: Figures, share: float) -> float:
    """Returns the seconds between saves that block at most `share` of training time; at least what a save takes."""
    stall, durable = _of(figures_, STALL), _of(figures_, DURABLE)
    return max(stall / share - stall, durable)


def rows(found: Figures) -> list[tuple[str, str, str, str]]:
    """Returns a row for each measurement: words, median, range, speed."""
    out = []
    for what, words in WORDS.items():
        rounds = found.seconds.get(what)
        if not rounds:
            continue
        middle = _of(found, what)
        speed = "" if what == FLUSH or not middle else f"{size(round(found.nbytes / middle))}/s"
        out.append((words, seconds(middle), f"{seconds(min(rounds))} to {seconds(max(rounds))}", speed))
    return out


def expectations(found: Figures) -> list[str]:
    """Returns what to expect of a training that saves this much in this place."""
    stall, durable = _of(found, STALL), _of(found, DURABLE)
    cold, hot = _of(found, RESTORE_COLD), _of(found, RESTORE_HOT)
    often = ", ".join(f"every {seconds(interval(found, share))} for {share * 100:g} %" for share in SHARES)
    first = f"the first {seconds(found.prewarm_s)} of a Checkpointer go into taking and touching memory"
    return [
        f"Each save blocks training for about {seconds(stall)}; the checkpoint is durable {seconds(durable)} after it "
        f"began, and until then training shares processor, memory and disk with it.",
        f"Saves block training for at most a given share of its time if they are taken {often} (no more often than a "
        f"save takes; what training loses while a save is written depends on the training and is not included).",
        f"A save that is waited for takes {seconds(_of(found, SYNC))}; {first}.",
        f"A restore takes about {seconds(cold)} {'from a cold disk' if found.cold else 'as measured'}, "
        f"{seconds(hot)} if the page cache still holds it, every byte verified.",
    ]


def warnings(found: Figures) -> list[str]:
    """Returns findings that make saves slower or weaker than they could be, each with advice."""
    out = [*_of_place(found), *_of_speed(found)]
    out += [f"The saves said: {text}." for text in found.notes]
    out += [f"{path} is left from a measurement that was killed: {typed('rm', '-r', path)}" for path in found.leftovers]
    return out


def _of_place(found: Figures) -> list[str]:
    out = []
    if found.file_system.volatile:
        out.append(f"{found.where} lies in memory ({found.file_system.name}): nothing there outlives the machine.")
    elif not found.direct:
        out.append(
            f"No direct I/O on this file system ({found.file_system.name}): saves go through the page cache and are "
            "flushed as they go, slower and with more memory in use."
        )
    if not found.links:
        out.append(
            "No hard links here: commits rest on renames that refuse to replace, which were found to work; keep "
            "checkpoints on a file system with hard links if there is one."
        )
    if found.file_system.network:
        out.append(
            f"This is a network file system ({found.file_system.name}): its server has a cache of its own, so that a "
            "cold restore may be slower than measured."
        )
    if not found.cold and not found.file_system.volatile:
        out.append(
            "The page cache did not drop the files, or this system does not say: what is called cold may have "
            "been read from memory."
        )
    if found.arena == "anonymous":
        out.append(
            "The image lies in anonymous memory, not in /dev/shm: saves are as fast, but a larger /dev/shm (in a "
            "container: --shm-size, or a memory volume) is what restarts from memory will need."
        )
    return out


def _of_speed(found: Figures) -> list[str]:
    out = []
    flush = _of(found, FLUSH)
    if flush > SLOW_FLUSH_S:
        out.append(
            f"A flush takes {seconds(flush)}: each save makes several, one after another, so that small states take "
            "about as long as large ones."
        )
    best = min(figure for what in (WRITE_DIRECT, WRITE_BUFFERED) if (figure := found.median(what)))
    reached = best / _of(found, SYNC)
    if reached < SLOW_SHARE:
        out.append(
            f"A save that is waited for reaches {reached:.0%} of the raw speed of this file system: with a state this "
            "small flushes and processor count for more than the disk does, or the machine is busy."
        )
    if found.spread > BUSY:
        out.append(
            f"The machine was busy, or the disk is shared: the slowest round took {found.spread:.1f} times the "
            "fastest. Measure again when it is quiet."
        )
    return out


def document(found: Figures) -> dict[str, Any]:
    """Returns everything as a JSON object."""
    return {
        **found.json(),
        "save_every_s": {f"{share:g}": interval(found, share) for share in SHARES},
        "warnings": warnings(found),
    }


def heading(found: Figures) -> Sequence[str]:
    return [
        f"{found.where}  ({found.file_system.name})",
        f"{size(found.nbytes)} in {count(found.leaves, 'leaf')}, {found.made_of}",
    ]


def _of(found: Figures, what: str) -> float:
    middle = found.median(what)
    assert middle is not None, f"{what} is always measured"
    return middle
