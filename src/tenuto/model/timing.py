"""Where the time of one save goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

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


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of one save went, in seconds. What has not come yet, or does not occur, is 0.

    The training thread is held by the first group. The second runs beside training, unless the save is waited for.
    `late_s`, `digest_s` and `cpu_s` lie across the others.
    """

    look_s: float = 0.0
    """Finding what the state holds, and what there is to say about it."""
    wait_s: float = 0.0
    """Waiting until another save may be in flight."""
    prepare_s: float = 0.0
    """The check who owns the run, and the plan and the memory of the image."""
    capture_s: float = 0.0
    """Copying. Of a save that is waited for, or that does not fit into memory as a whole: the digests as well, and
    waiting for room."""
    fence_s: float = 0.0
    """An update that waited for what a fenced save had not copied yet."""
    join_s: float = 0.0
    """Waiting for the commit, where that was asked for."""
    late_s: float = 0.0
    """Of a fenced save: the copy beside training, from its begin until the image was whole, its pauses included. It may
    begin before the writing does, and is not part of `seconds`."""
    queue_s: float = 0.0
    """Until the saves before were written, where several are in flight. It is not part of `seconds`."""
    begin_s: float = 0.0
    """The question for space, and `begin.json` until it is durable."""
    seal_s: float = 0.0
    """Sealing the image in memory, where states are kept there. Digests and waiting for the capture are not in it."""
    write_s: float = 0.0
    """The packs, written and flushed until they are durable. Digests and waiting for the capture are not in it."""
    index_s: float = 0.0
    """The index, until it is durable."""
    commit_s: float = 0.0
    """The manifest, until it is durable."""
    digest_s: float = 0.0
    """Digests of the image, wherever they were made."""
    cpu_s: float = 0.0
    """Processor time of the thread that writes, and of the one that copies beside training. What a store does in
    threads of its own is not in it."""
    seconds: float = 0.0
    """From the begin of writing to the durable manifest."""
    bytes: int = 0
    """Of the packs."""

    @property
    def held_s(self) -> float:
        """How long the training thread was held."""
        return self.look_s + self.wait_s + self.prepare_s + self.capture_s + self.fence_s + self.join_s

    @property
    def bandwidth(self) -> float | None:
        """Bytes of the packs per second of `write_s`."""
        return self.bytes / self.write_s if self.write_s > 0 and self.bytes else None

    def told(self) -> dict[str, float]:
        """As a manifest says it: seconds, to the microsecond; what is 0 is left out, and so is what the manifest says
        elsewhere."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "bytes"}
        return {name: round(value, 6) for name, value in found.items() if value >= 5e-7}

    @classmethod
    def read(cls, told: Any, nbytes: int) -> Timing | None:
        """Of what a manifest says; None where it says nothing of the kind. What is no duration is passed over."""
        if not isinstance(told, Mapping):
            return None
        names = {field.name for field in fields(cls)} - {"bytes"}
        return cls(**{name: float(told[name]) for name in names if _is_duration(told.get(name))}, bytes=nbytes)


def _is_duration(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value < 1e9


# --------------------------------------------------------------------------------------------------
# Where the time of what several ranks do went on each of them, in a form that stays small for thousands.

FULL: Final = 64
"""So many ranks at most are told one by one; of more the slowest, and how the others are spread."""
SLOWEST: Final = 8
_OF_A_SAVE: Final = ("held_s", *(field.name for field in fields(Timing)))
_OF_A_RESTORE: Final = ("match_s", "read_s")
PARTS: Final = (*_OF_A_SAVE, *_OF_A_RESTORE)
_MOST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class RankSpread:
    """One part of a save or a restore over its ranks, in seconds (of `bytes`: in bytes). `quantiles`: the least, a
    quarter, half, three quarters, the most. `slowest`: rank and value, the largest first. `each`: by rank, where they
    are not too many to be told one by one; else empty."""

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


@dataclass(frozen=True, slots=True)
class RankTimings:
    """Where the time of one save went on each of its `ranks`, until that rank had put its part: by the names of
    `Timing`, `held_s` (how long training was held) and `bytes` among them. Of a restore, until the rank's part was
    there, verified: `match_s`, finding what it needs of the checkpoint, `read_s`, both together `seconds`; `wait_s`,
    for what its neighbours on the node ask for; and `bytes`. Parts that are 0 everywhere are left out."""

    ranks: int
    parts: Mapping[str, RankSpread]

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> RankTimings:
        """`timings[r]`: of rank r."""
        return cls.of_parts(len(timings), {name: [float(getattr(one, name)) for one in timings] for name in _OF_A_SAVE})

    @classmethod
    def of_parts(cls, ranks: int, parts: Mapping[str, Sequence[float]]) -> RankTimings:
        """`parts[name][r]`: of rank r."""
        return cls(ranks, {name: RankSpread.of(values) for name, values in parts.items() if any(values)})

    def told(self) -> dict[str, Any]:
        """As a manifest says it: whole microseconds, and bytes."""
        return {
            "ranks": self.ranks,
            "parts": {name: _told(part, 1 if name == "bytes" else 1e6) for name, part in self.parts.items()},
        }

    @classmethod
    def read(cls, told: Any) -> RankTimings | None:
        """Of what a manifest says; None where it says nothing of the kind. What makes no sense is passed over."""
        if not isinstance(told, Mapping) or not isinstance(told.get("parts"), Mapping) or not _is(told.get("ranks")):
            return None
        ranks = int(told["ranks"])
        found = {}
        for name, part in told["parts"].items():
            read = _read(part, ranks, 1 if name == "bytes" else 1e6) if name in PARTS else None
            if read is not None:
                found[name] = read
        return cls(ranks, found)


def _told(part: RankSpread, scale: float) -> Any:
    if part.each:
        return [round(value * scale) for value in part.each]
    return {
        "quantiles": [round(value * scale) for value in part.quantiles],
        "slowest": [[rank, round(value * scale)] for rank, value in part.slowest],
    }


def _read(told: Any, ranks: int, scale: float) -> RankSpread | None:
    if isinstance(told, list):
        return RankSpread.of([value / scale for value in told]) if len(told) == ranks and all(map(_is, told)) else None
    if not isinstance(told, Mapping):
        return None
    quantiles, slowest = told.get("quantiles"), told.get("slowest")
    if not isinstance(quantiles, list) or len(quantiles) != 5 or not all(map(_is, quantiles)):
        return None
    if not isinstance(slowest, list) or not all(
        isinstance(one, list) and len(one) == 2 and all(map(_is, one)) for one in slowest
    ):
        return None
    least, quarter, half, most_of, most = (value / scale for value in quantiles)
    return RankSpread(
        (least, quarter, half, most_of, most), tuple((rank, value / scale) for rank, value in slowest[:SLOWEST])
    )


def _is(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST
