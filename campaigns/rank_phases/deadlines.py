"""Bounds the time that other ranks may take to raise, and to leave, after a loss, as `docs/design/waits.md` promises.

None of them depends on `ranks_timeout`, which is for ranks that are alive and late, but one: where the directory in
which ranks meet is emptied, every rank is alive, and what they wait for is gone. A busy machine adds some of the time
that an undisturbed job takes there, which each cell measures before its strike and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

TIMEOUT_S: Final = 60.0
"""`ranks_timeout` of the jobs; signs of life and silence are then what they are by default."""
SHORT_TIMEOUT_S: Final = 8.0
"""Where the timeout is what ends a wait."""
KILLED_S: Final = 5.0
SILENT_S: Final = 30.0
LONG: Final = {"choose": 3.0, "restore": 3.0, "claim": 3.0}
"""So many times `ranks_timeout` a wait for a rank that restores may take; any other one takes one."""
LEAVING_S: Final = SHORT_TIMEOUT_S
PACES: Final = 0.5
"""So much of the time of a job that nobody disturbs, which opens, restores, saves and ends, may come on top."""
PAUSE_S: Final = 2.0
"""That is the least: a machine may stand still for a moment in which nothing else is measured."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a cell has to keep. `how`: a signal, or what becomes of the directory."""

    phase: str
    how: str

    @property
    def raised_s(self) -> float:
        if self.how == "emptied":
            return SHORT_TIMEOUT_S * (0.5 + LONG.get(self.phase, 1.0))
        return KILLED_S if self.how == "SIGKILL" else SILENT_S

    @property
    def left_s(self) -> float:
        return self.raised_s + LEAVING_S * (self.how == "emptied")


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
            "promised_s": self.promise.raised_s,
            "raised_s": {str(rank): round(seconds, 2) for rank, seconds in sorted(self.raised_s.items())},
            "left_s": {str(rank): round(seconds, 2) for rank, seconds in sorted(self.left_s.items())},
            "undisturbed_s": round(self.pace_s, 2),
        }
