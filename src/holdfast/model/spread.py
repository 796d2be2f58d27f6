"""Where the time of what several ranks do went on each of them, in a form that stays small for thousands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from holdfast.model.timing import Timing

FULL: Final = 64
"""So many ranks at most are told one by one; of more the slowest, and how the others are spread."""
SLOWEST: Final = 8
_OF_A_SAVE: Final = ("held_s", *(field.name for field in fields(Timing)))
_OF_A_RESTORE: Final = ("match_s", "read_s")
PARTS: Final = (*_OF_A_SAVE, *_OF_A_RESTORE)
_MOST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a save or a restore over its ranks, in seconds (of `bytes`: in bytes). `quantiles`: the least, a
    quarter, half, three quarters, the most. `slowest`: rank and value, the largest first. `each`: by rank, where they
    are not too many to be told one by one; else empty."""

    quantiles: tuple[float, float, float, float, float]
    slowest: tuple[tuple[int, float], ...]
    each: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Sequence[float]) -> Part:
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
    parts: Mapping[str, Part]

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> RankTimings:
        """`timings[r]`: of rank r."""
        return cls.of_parts(len(timings), {name: [float(getattr(one, name)) for one in timings] for name in _OF_A_SAVE})

    @classmethod
    def of_parts(cls, ranks: int, parts: Mapping[str, Sequence[float]]) -> RankTimings:
        """`parts[name][r]`: of rank r."""
        return cls(ranks, {name: Part.of(values) for name, values in parts.items() if any(values)})

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


def _told(part: Part, scale: float) -> Any:
    if part.each:
        return [round(value * scale) for value in part.each]
    return {
        "quantiles": [round(value * scale) for value in part.quantiles],
        "slowest": [[rank, round(value * scale)] for rank, value in part.slowest],
    }


def _read(told: Any, ranks: int, scale: float) -> Part | None:
    if isinstance(told, list):
        return Part.of([value / scale for value in told]) if len(told) == ranks and all(map(_is, told)) else None
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
    return Part(
        (least, quarter, half, most_of, most), tuple((rank, value / scale) for rank, value in slowest[:SLOWEST])
    )


def _is(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST
