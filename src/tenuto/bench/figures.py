"""The numbers of a measurement."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto.bench.place import FileSystemFacts

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
    STALL: "save: training held",
    DURABLE: "save: until durable",
    SYNC: "save(wait=True)",
    RESTORE_COLD: "restore, cold",
    RESTORE_HOT: "restore, from the page cache",
}
"""The measurements in the order in which they are shown. All but the flush move the complete state."""


@dataclass(frozen=True, slots=True)
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
