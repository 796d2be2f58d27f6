"""A slice of the retention campaign: random histories against an oracle, and bugs that they must find."""

from __future__ import annotations

import pytest

from campaigns.retention_histories.bugs import BUGS, run_bugs
from campaigns.retention_histories.campaign import run_histories

QUICK = (
    "lines left behind go at once",
    "latest not protected",
    "tombstones stay",
    "foreign files go",
    "superseded attempts retain",
    "a damaged note is passed over",
    "copies count",
)


def test_i7_i11_random_histories_of_retention():
    counts, broken = run_histories(85, seed=8)
    assert broken == []
    assert counts.removed > 50 and counts.protected > 20 and counts.raced > 20 and counts.trashed > 5


def test_bugs_in_retention_are_found():
    chosen = [bug for bug in BUGS if bug.name in QUICK]
    found = run_bugs(1, chosen)
    assert [bug["name"] for bug in found if not bug["caught"]] == []
    assert len(found) == len(QUICK)


@pytest.mark.campaign
@pytest.mark.skipif("not config.getoption('-m')", reason="a campaign: run with -m campaign")
def test_every_bug_is_found():
    assert [bug["name"] for bug in run_bugs(2) if not bug["caught"]] == []
