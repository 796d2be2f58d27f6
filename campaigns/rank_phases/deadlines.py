"""Bounds the time that the other ranks may take to raise after a strike, as promised for `ranks_timeout=`.

A rank that is dead or stopped is detected in half of that time. Where the ranks' key-value store is lost, each rank
gives up when its own wait reaches its deadline, after the request that was under way has been given up. A busy machine
adds some of the time that an undisturbed job takes there, which each cell measures before its strike and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

TIMEOUT_S: Final = 8.0
FOUND_OUT: Final = 0.5
"""Of `ranks_timeout`: a rank without a sign of life is found out within so much."""
BEATS: Final = 0.1
"""Signs of life come each twentieth of it, and are looked at as often."""
LONG: Final = {"choose": 3.0, "restore": 3.0, "claim": 3.0}
"""So many times `ranks_timeout` a wait for a rank that restores may take; any other one takes one."""
ASKING: Final = 0.5
"""In so much a question is given up that was on its way to the place when that was lost."""
LEAVING: Final = 1.05
"""Who leaves a place that does not answer ends the beats of his life, one of which may just be asking, and asks a last
time himself: half of `ranks_timeout` each."""
PACES: Final = 0.5
"""So much of the time of a job that nobody disturbs, which opens, restores, saves and ends, may come on top."""
PAUSE_S: Final = 2.0
"""That is the least: a machine may stand still for a moment in which nothing else is measured."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a cell has to keep. `lost`: the place where ranks meet is struck, and not a rank."""

    phase: str
    lost: bool

    @property
    def raised_s(self) -> float:
        return TIMEOUT_S * (ASKING + LONG.get(self.phase, 1.0) if self.lost else FOUND_OUT + BEATS)

    @property
    def left_s(self) -> float:
        return self.raised_s + TIMEOUT_S * LEAVING * self.lost


@dataclass(frozen=True, slots=True)
class Times:
    """Of one cell. `raised_s`, `left_s`: for each of the others, from the strike until its training met its error, and
    until that had left the `with` block. `pace_s`: what a job that nobody disturbs took."""

    promise: Promise
    pace_s: float
    raised_s: Mapping[int, float]
    left_s: Mapping[int, float]

    @property
    def slack_s(self) -> float:
        return max(PACES * self.pace_s, PAUSE_S)

    @property
    def bound_s(self) -> float:
        return self.promise.raised_s + self.slack_s

    def late(self) -> Iterator[str]:
        """Who has raised too late, and by which bound."""
        for what, found, promised_s in (
            ("raised", self.raised_s, self.promise.raised_s),
            ("left", self.left_s, self.promise.left_s),
        ):
            for rank, seconds in sorted(found.items()):
                if seconds > promised_s + self.slack_s:
                    bound = f"{promised_s:.1f} s, and {self.slack_s:.1f} s for a machine that is as busy as this one"
                    yield f"rank {rank} {what} {seconds:.1f} s after the strike: {bound}"

    def json(self) -> dict[str, Any]:
        return {
            "raised_s": {str(rank): round(seconds, 2) for rank, seconds in sorted(self.raised_s.items())},
            "left_s": {str(rank): round(seconds, 2) for rank, seconds in sorted(self.left_s.items())},
            "undisturbed_s": round(self.pace_s, 2),
            "bound_s": round(self.bound_s, 2),
        }


def by_phase(all_times: Sequence[Times]) -> dict[str, Any]:
    """For each phase, where a rank was struck and where the place was: what is promised, the slowest that raised, and
    the narrowest bound that any of its cells had to keep."""
    found: dict[str, Any] = {}
    for times in all_times:
        if not times.raised_s:
            continue  # it lost nothing that it needed
        what = "the place where ranks meet" if times.promise.lost else "a rank"
        row = found.setdefault(times.promise.phase, {}).setdefault(
            what, {"promised_s": times.promise.raised_s, "slowest_s": 0.0, "bound_s": times.bound_s}
        )
        row["slowest_s"] = round(max(row["slowest_s"], *times.raised_s.values()), 2)
        row["bound_s"] = round(min(row["bound_s"], times.bound_s), 2)
    return found
