"""A slice of the forgeries in a sealed repository, and the bugs that they have to find."""

from __future__ import annotations

import pytest

from campaigns.corruption.forgeries import ATTACKS, BUGS, ForgeryBug, caught, run_forgeries

SEED = 5


def test_nothing_forged_is_acted_on() -> None:
    tally = run_forgeries(len(ATTACKS), SEED, log=lambda line: None)
    assert tally.violations == []
    assert tally.attacks.keys() == ATTACKS.keys(), "each was done"
    assert tally.refused and tally.genuine > tally.refused


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_seeded_bug_is_found(bug: ForgeryBug) -> None:
    assert caught(bug, SEED)
