"""Signals at lines of a save's way: a short slice of `campaigns.signals`, and bugs that it has to find."""

from __future__ import annotations

import pytest

from campaigns.signals.bugs import BUGS, run_bugs
from campaigns.signals.campaign import cases, play

pytestmark = pytest.mark.campaign

CASES = 12


def test_a_signal_at_any_line_ends_the_process_with_its_last_step_saved() -> None:
    outcomes = [play(case) for case in cases(1, CASES, ["counted"])]
    assert not [(str(one.case), one.faults) for one in outcomes if one.faults]
    assert any(one.watched for one in outcomes)


def test_seeded_bugs_are_found() -> None:
    assert [one["bug"] for one in run_bugs(1) if not one["caught"]] == []
    assert len({bug.name for bug in BUGS}) == len(BUGS)
