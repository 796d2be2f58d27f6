"""Divides the budget of a campaign, states and time, among its scenarios."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from campaigns.crash_states import BugResult, Campaign, Result, run

Unit = TypeVar("Unit")
Hunted = tuple[str, BugResult]
"""A scenario, and what came of one seeded bug in it."""
LEAST_S: Final = 1.0
"""Enough for the first units to be begun, however late it is: no scenario goes without."""


@dataclass
class Shares:
    """`whole`: the sums; `each`: what every scenario has found, and how long it took."""

    whole: Campaign
    each: dict[str, tuple[Campaign, float]] = field(default_factory=dict)

    def json(self, hunts: Sequence[Hunted]) -> dict[str, Any]:
        """A line for each scenario, with the bugs that were looked for in it."""
        return {name: {**_counts(*found), **_bugs(name, hunts)} for name, found in self.each.items()}

    @property
    def without_states(self) -> list[str]:
        return [name for name, (found, _) in self.each.items() if not found.distinct]


def split_by_agreement(
    states: int,
    seconds: float,
    names: Iterable[str],
    units: Callable[[str], Iterator[Unit]],
    judge: Callable[[Unit], Result],
    *,
    workers: int,
    log: Callable[[str], None],
) -> Shares:
    """One scenario after the other: each gets an equal part of what the ones before have left. One in which little can
    happen leaves more to those behind it, and so does one that comes to its number of states early."""
    names, began = list(names), time.monotonic()
    shares = Shares(Campaign(states))
    for number, name in enumerate(names):
        now, left = time.monotonic(), len(names) - number
        wanted = max(-(-(states - len(shares.whole.distinct)) // left), 1)
        limit = max((seconds - (now - began)) / left, LEAST_S)
        found = run(
            wanted,
            units(name),
            judge,
            workers=workers,
            seconds=limit,
            log=partial(_log, log, name),
        )
        shares.each[name] = found, time.monotonic() - now
        shares.whole.distinct |= found.distinct
        shares.whole.families |= found.families
        shares.whole.recordings += found.recordings
    return shares


def _log(log: Callable[[str], None], name: str, line: str) -> None:
    log(f"{name}: {line}")


def _counts(found: Campaign, seconds: float) -> dict[str, Any]:
    results = found.families.values()
    return {
        "states": len(found.distinct),
        "recordings": found.recordings,
        "judged": sum(result.judged for result in results),
        "restarts": sum(result.restarts for result in results),
        "violations": len(found.violations),
        "seconds": round(seconds, 1),
    }


def _bugs(name: str, hunts: Sequence[Hunted]) -> dict[str, Any]:
    here = [found for scenario, found in hunts if scenario == name]
    missed = [found.name for found in here if not found.caught]
    return {"bugs_seeded": len(here), "bugs_caught": len(here) - len(missed), "bugs_not_seen_here": missed}


def by_bug(hunts: Sequence[Hunted]) -> list[BugResult]:
    """What came of each bug in all scenarios together: it is caught where one of them shows it."""
    found: dict[str, BugResult] = {}
    for _, one in hunts:
        before = found.get(one.name)
        if before is None:
            found[one.name] = one
        else:
            shown = before if before.caught else one
            found[one.name] = replace(shown, states=before.states + one.states)
    return list(found.values())
