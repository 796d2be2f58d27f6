"""Bugs of a repair that are seeded one at a time: `python -m campaigns.corruption --repair` has to notice each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

from campaigns.corruption.bugs import BugResult
from campaigns.corruption.repairs import run_repairs
from tenuto.maintenance import repair, repair_plan

CASES: Final = 200
EACH: Final = 20


@dataclass(frozen=True)
class RepairBug:
    """`names`: the redundancies in which it can be seen."""

    name: str
    breaks: str
    names: tuple[str, ...]
    patch: Callable[[], AbstractContextManager[Any]]


REPAIR_BUGS: Final = (
    RepairBug(
        "a repair replaces what fits its own place's manifest",
        "another line of training in a tier is lost (I2)",
        ("set back",),
        lambda: mock.patch.object(repair_plan._Search, "_leave_out", lambda *rest: None),
    ),
    RepairBug(
        "what was put is not read back",
        "what arrived altered counts as repaired",
        ("lying",),
        lambda: mock.patch.object(repair, "_read_back", lambda *rest: None),
    ),
    RepairBug(
        "a repair takes another line's claim",
        "a claim of another line of training counts here",
        ("set back",),
        lambda: mock.patch.object(repair_plan._Search, "_is_claim", lambda *rest: True),
    ),
)


def hunt(bug: RepairBug, seed: int) -> BugResult:
    """Seeds one bug and looks for it, in at most `CASES` cases."""
    cases = 0
    with bug.patch():
        while cases < CASES:
            tally = run_repairs(EACH, seed + cases, names=bug.names, log=lambda text: None)
            cases += tally.cases
            if tally.violations:
                return BugResult(bug.name, bug.breaks, True, cases, tally.violations[0])
    return BugResult(bug.name, bug.breaks, False, cases, "")
