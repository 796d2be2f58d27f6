"""Where the time of a save or a restore goes, in one process and over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, Literal

from tenuto.record import record

TimedPart = Literal[
    "look_s",
    "wait_s",
    "prepare_s",
    "capture_s",
    "join_s",
    "late_s",
    "queue_s",
    "begin_s",
    "seal_s",
    "digest_s",
    "write_s",
    "index_s",
    "commit_s",
    "cpu_s",
]


@record
class Timing:
    """Where the time of one save went, in seconds; 0 for what has not happened.

    The first group of fields blocks the training thread. The second runs in the background, unless the save is waited
    for. `late_s`, `digest_s` and `cpu_s` overlap the others.
    """

    look_s: float = 0.0
    """Inspecting the state and describing its leaves."""
    wait_s: float = 0.0
    """Waiting until another save may be in flight."""
    prepare_s: float = 0.0
    """Checking the owner of the run, planning, and allocating the image's memory."""
    capture_s: float = 0.0
    """Copying. A blocking save, or one that does not fit into memory, includes digests and waiting for buffer space."""
    fence_s: float = 0.0
    """Updates that waited for a fenced save to copy what it still needed."""
    join_s: float = 0.0
    """Waiting for the commit, where requested."""
    late_s: float = 0.0
    """Background copying of a fenced save until the image is complete, including pauses. It may begin before the
    writing does, and is not part of `seconds`."""
    queue_s: float = 0.0
    """Waiting for earlier saves to be written, with several in flight. Not part of `seconds`."""
    begin_s: float = 0.0
    """Checking free space and writing `begin.json` until it is durable."""
    seal_s: float = 0.0
    """Sealing the image in memory, where states are kept there; excludes digests and waiting for the capture."""
    write_s: float = 0.0
    """Writing and flushing the data files until they are durable; excludes digests and waiting for the capture."""
    index_s: float = 0.0
    """Writing the index until it is durable."""
    commit_s: float = 0.0
    """Writing the manifest until it is durable."""
    digest_s: float = 0.0
    """Digests of the image, wherever they were computed."""
    cpu_s: float = 0.0
    """Processor time of the writing thread and of the background copier, without a store's own threads."""
    seconds: float = 0.0
    """From the start of writing to the durable manifest."""
    bytes: int = 0
    """Bytes of the data files."""

    @property
    def held_s(self) -> float:
        """Seconds for which the training thread was blocked."""
        return self.look_s + self.wait_s + self.prepare_s + self.capture_s + self.fence_s + self.join_s

    @property
    def bandwidth(self) -> float | None:
        """Bytes of the data files per second of `write_s`."""
        return self.bytes / self.write_s if self.write_s > 0 and self.bytes else None

    def to_json(self) -> dict[str, float]:
        """Returns the seconds as a manifest stores them, to the microsecond, without zeros and what it stores
        elsewhere."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "bytes"}
        return {name: round(value, 6) for name, value in found.items() if value >= 5e-7}

    @classmethod
    def read(cls, told: Any, nbytes: int) -> Timing | None:
        """Reads what a manifest stores; None if that is no mapping. Values that are no durations are ignored."""
        if not isinstance(told, Mapping):
            return None
        names = {field.name for field in fields(cls)} - {"bytes"}
        return cls(**{name: float(told[name]) for name in names if _is_duration(told.get(name))}, bytes=nbytes)


def _is_duration(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value < 1e9


# Timings over ranks, in a form that stays small for thousands of them.

FULL: Final = 64
"""Up to this many ranks are listed one by one; beyond it, the slowest and the quantiles."""
SLOWEST: Final = 8
_OF_A_SAVE: Final = ("held_s", *(field.name for field in fields(Timing)))
_OF_A_RESTORE: Final = ("match_s", "read_s", "memory_bytes")
_BYTES: Final = ("bytes", "memory_bytes")
PARTS: Final = (*_OF_A_SAVE, *_OF_A_RESTORE)
_COUNT_LIMIT: Final = 1 << 62


@record
class RankSpread:
    """One part of a save or a restore over its ranks, in seconds (`bytes`: in bytes).

    quantiles: minimum, lower quartile, median, upper quartile, maximum.
    slowest: (rank, value) pairs, the largest value first.
    each: the values by rank; empty if there are more than FULL ranks.
    """

    quantiles: tuple[float, float, float, float, float]
    slowest: tuple[tuple[int, float], ...]
    each: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Sequence[float]) -> RankSpread:
        order = sorted(range(len(values)), key=lambda rank: (-values[rank], rank))
        rising = sorted(values)
        last = len(rising) - 1
        least, quarter, half, most_of, most = (rising[round(last * share)] for share in (0, 0.25, 0.5, 0.75, 1))
        slowest = tuple((rank, values[rank]) for rank in order[:SLOWEST])
        each = tuple(values) if len(values) <= FULL else ()
        return cls((least, quarter, half, most_of, most), slowest, each)

    @property
    def least(self) -> float:
        return self.quantiles[0]

    @property
    def median(self) -> float:
        return self.quantiles[2]


@record
class RankTimings:
    """Where the time of one save or restore went on each of its ranks; parts that are 0 everywhere are left out.

    ranks: the number of ranks.
    parts: for a save, the fields of `Timing`, `held_s` and `bytes`, until the rank had written its part. For a restore,
        until the rank's part was there and verified: `match_s` (finding what it needs of the checkpoint), `read_s`,
        their sum `seconds`, `wait_s` (for the reads of other ranks on the node), `bytes`, and `memory_bytes`, of
        them those that the rank had in its own memory.
    """

    ranks: int
    parts: Mapping[str, RankSpread]

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> RankTimings:
        """Builds the timings of a save; `timings[r]` is that of rank r."""
        return cls.of_parts(len(timings), {name: [float(getattr(one, name)) for one in timings] for name in _OF_A_SAVE})

    @classmethod
    def of_parts(cls, ranks: int, parts: Mapping[str, Sequence[float]]) -> RankTimings:
        """Builds timings from values; `parts[name][r]` is that of rank r."""
        return cls(ranks, {name: RankSpread.of(values) for name, values in parts.items() if any(values)})

    def to_json(self) -> dict[str, Any]:
        """Returns the timings as a manifest stores them: whole microseconds, and bytes."""
        return {
            "ranks": self.ranks,
            "parts": {name: _spread_to_json(part, 1 if name in _BYTES else 1e6) for name, part in self.parts.items()},
        }

    @classmethod
    def read(cls, told: Any) -> RankTimings | None:
        """Reads what a manifest stores; None if it has another form. Parts that make no sense are ignored."""
        if (
            not isinstance(told, Mapping)
            or not isinstance(told.get("parts"), Mapping)
            or not _is_count(told.get("ranks"))
        ):
            return None
        ranks = int(told["ranks"])
        found = {}
        for name, part in told["parts"].items():
            read = _spread_from_json(part, ranks, 1 if name in _BYTES else 1e6) if name in PARTS else None
            if read is not None:
                found[name] = read
        return cls(ranks, found)


def _spread_to_json(part: RankSpread, scale: float) -> Any:
    if part.each:
        return [round(value * scale) for value in part.each]
    return {
        "quantiles": [round(value * scale) for value in part.quantiles],
        "slowest": [[rank, round(value * scale)] for rank, value in part.slowest],
    }


def _spread_from_json(told: Any, ranks: int, scale: float) -> RankSpread | None:
    if isinstance(told, list):
        return (
            RankSpread.of([value / scale for value in told])
            if len(told) == ranks and all(map(_is_count, told))
            else None
        )
    if not isinstance(told, Mapping):
        return None
    quantiles, slowest = told.get("quantiles"), told.get("slowest")
    if not isinstance(quantiles, list) or len(quantiles) != 5 or not all(map(_is_count, quantiles)):
        return None
    if not isinstance(slowest, list) or not all(
        isinstance(one, list) and len(one) == 2 and all(map(_is_count, one)) for one in slowest
    ):
        return None
    least, quarter, half, most_of, most = (value / scale for value in quantiles)
    return RankSpread(
        (least, quarter, half, most_of, most), tuple((rank, value / scale) for rank, value in slowest[:SLOWEST])
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _COUNT_LIMIT
