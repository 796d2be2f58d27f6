"""Policies by the clocks of the machines that saved, and by what a run has been through: hours to years, ages, and the
first checkpoint after an event."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from tenuto.policy.keep import LEFT_BEHIND, CheckpointFacts, KeepPolicy, Milestones, Opinion
from tenuto.record import record

Unit = Literal["hour", "day", "week", "month", "year"]
CALENDAR: Final[Mapping[Unit, str]] = {
    "hour": "hourly",
    "day": "daily",
    "week": "weekly",
    "month": "monthly",
    "year": "yearly",
}
"""What the policy of each unit is called."""
EVENTS: Final = ("attempt", "fork", "rollback")
_SECONDS: Final[Mapping[str, int]] = {"hours": 3600, "days": 86_400, "weeks": 7 * 86_400}


@record
class Calendar(Milestones):
    """The milestones of one unit of the calendar in UTC: for good, or of the `last` so many, counted back from the
    newest."""

    unit: Unit
    last: int | None

    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        opinions, newest = Milestones.judge(self, history), _newest_s(history)
        if self.last is None or newest is None:
            return opinions
        first = self._number(newest) - self.last + 1
        before = Opinion(False, f"before the last {self.last} {self.unit}{'s' * (self.last > 1)}")
        spans = map(self.span, history)
        return [
            before if span is not None and span < first else opinion
            for span, opinion in zip(spans, opinions, strict=True)
        ]

    def span(self, facts: CheckpointFacts) -> int | None:
        return None if facts.created_s is None else self._number(facts.created_s)

    def _number(self, seconds: float) -> int:
        if self.unit == "hour":
            return math.floor(seconds / 3600)
        day = math.floor(seconds / 86_400)
        if self.unit == "day":
            return day
        if self.unit == "week":
            return (day + 3) // 7  # 1970 began on a Thursday, a week begins on Monday
        return _months(day) if self.unit == "month" else _months(day) // 12

    def name(self, span: int) -> str:
        return f"the milestone of its {self.unit}"

    def outside(self) -> str:
        return "does not say when it was saved"

    def __repr__(self) -> str:
        return f"keep.{CALENDAR[self.unit]}({self.last or ''})"


@record
class Within(KeepPolicy):
    """What was saved at most so long before the newest one. `spans`: the units and how many of each."""

    spans: tuple[tuple[str, float], ...]

    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        newest = _newest_s(history)
        seconds = sum(_SECONDS[unit] * number for unit, number in self.spans)
        spans = " and ".join(f"{number:g} {unit[:-1] if number == 1 else unit}" for unit, number in self.spans)
        words = f"within {spans} of the newest"
        opinions = []
        for facts in history:
            if facts.created_s is None or newest is None:
                opinions.append(Opinion(False, "does not say when it was saved"))
            elif facts.created_s < newest - seconds:
                opinions.append(Opinion(False, f"not {words}"))
            else:
                opinions.append(Opinion(True, words if facts.walk is not None else f"{words}, {LEFT_BEHIND}"))
        return opinions

    def __repr__(self) -> str:
        return f"keep.within({', '.join(f'{unit}={number:g}' for unit, number in self.spans)})"


def _newest_s(history: Sequence[CheckpointFacts]) -> float | None:
    """Returns the time from which ages are counted: the older of the times of the two newest checkpoints. A single save
    by a clock that ran ahead would otherwise make all others look old, and remove them."""
    return min([facts.created_s for facts in history if facts.created_s is not None][:2], default=None)


@record
class After(Milestones):
    """The first checkpoint of each attempt, of each that continues another run, or of the first after each rollback."""

    event: str

    def span(self, facts: CheckpointFacts) -> int | None:
        happened = {"attempt": True, "fork": bool(facts.forked_from), "rollback": facts.rolled_back}
        return facts.id.attempt if happened[self.event] else None

    def name(self, span: int) -> str:
        return f"the first of attempt {span}{'' if self.event == 'attempt' else f' after a {self.event}'}"

    def outside(self) -> str:
        return f"its attempt {'continues no other run' if self.event == 'fork' else 'follows no rollback'}"

    def __repr__(self) -> str:
        return f"keep.after({self.event!r})"


def _months(day: int) -> int:
    """Returns the number of the month in which a day since 1970-01-01 lies, counted from the year 0, for any day: years
    begin in March here, so that the leap day is the last one (Hinnant, "chrono-compatible low-level date
    algorithms")."""
    era, day = divmod(day + 719_468, 146_097)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    of_year = day - (365 * year + year // 4 - year // 100)
    return (era * 400 + year) * 12 + (5 * of_year + 2) // 153 + 2
