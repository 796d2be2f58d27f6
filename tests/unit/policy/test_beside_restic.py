"""Policies of the calendar beside restic's, by what `restic forget` kept of the same times (tests/golden/policy).

Both count hours, days, weeks, months and years of the calendar in UTC. They differ in three things, on purpose: restic
keeps the last snapshot of each span, and Tenuto the first checkpoint, which so stays a milestone for good; restic's n
counts the spans that have a snapshot, Tenuto's the spans since the newest, as an age does; and restic counts ages from
the newest snapshot, Tenuto from the older one of the two newest, in case a clock ran ahead.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.policy.keep import CheckpointFacts, KeepPolicy

FOUND = json.loads((Path(__file__).parents[2] / "golden/policy/restic.json").read_text())
TIMES = [datetime.fromisoformat(text) for text in FOUND["times"]]
HISTORY = [
    CheckpointFacts(CheckpointId("r", 1, place + 1), len(TIMES) - 1 - place, created_s=when.timestamp())
    for place, when in reversed(list(enumerate(TIMES)))
]
SPANS: dict[str, tuple[Callable[[int], KeepPolicy], Callable[[datetime], Any]]] = {
    "--keep-hourly": (keep.hourly, lambda when: when.strftime("%F %H")),
    "--keep-daily": (keep.daily, lambda when: when.date()),
    "--keep-weekly": (keep.weekly, lambda when: when.isocalendar()[:2]),
    "--keep-monthly": (keep.monthly, lambda when: (when.year, when.month)),
    "--keep-yearly": (keep.yearly, lambda when: when.year),
}
STEP = {"--keep-hourly": timedelta(hours=1), "--keep-daily": timedelta(days=1), "--keep-weekly": timedelta(weeks=1)}


def kept(policy: KeepPolicy) -> list[int]:
    """Places in TIMES of what the policy keeps of itself, without what is protected."""
    opinions = zip(HISTORY, policy.judge(HISTORY), strict=True)
    return sorted(facts.id.step - 1 for facts, opinion in opinions if opinion.keep)


def last_spans(rule: str, n: int) -> set[Any]:
    """The last n spans of the calendar up to the second newest time, and that of the newest."""
    span, when = SPANS[rule][1], TIMES[-2]
    found, newest = {span(when)}, {span(TIMES[-1])}
    while len(found) < n:
        step = STEP.get(rule)
        when = when - step if step is not None else when.replace(day=1) - timedelta(days=1)
        found.add(span(when))
    return found | newest


@pytest.mark.parametrize("rules", [rule for rule in FOUND["forget"] if "-within" not in rule and "-last" not in rule])
def test_the_same_spans_are_kept(rules: str) -> None:
    words = rules.split()
    theirs, ours, expected, last = set(FOUND["forget"][rules]), set(), set(), set()
    for rule, number in zip(words[::2], map(int, words[1::2]), strict=True):
        make, span = SPANS[rule]
        places: dict[Any, list[int]] = {}
        for place, when in enumerate(TIMES):
            places.setdefault(span(when), []).append(place)
        recent = last_spans(rule, number)
        ours |= set(kept(make(number)))
        expected |= {one[0] for name, one in places.items() if name in recent}
        last |= {one[-1] for one in list(places.values())[-number:]}
        assert {span(TIMES[place]) for place in kept(make(number))} == recent & set(places)
    assert ours == expected, "the first of each of the last n spans of the calendar"
    assert theirs == last, "restic: the last of each of the last n spans that have one"


def test_the_same_ages_are_kept() -> None:
    for rule, hours in (("--keep-within 36h", 36), ("--keep-within 40d", 40 * 24)):
        ours, theirs = kept(keep.within(hours=hours)), FOUND["forget"][rule]
        assert ours[-len(theirs) :] == theirs
        more = ours[: -len(theirs)]
        assert all(TIMES[-2] - TIMES[place] <= timedelta(hours=hours) for place in more)
    assert kept(keep.latest(3)) == FOUND["forget"]["--keep-last 3"]
