"""Random histories of the whole product against a small model; and the model notices seeded bugs."""

from __future__ import annotations

import pytest

from holdfast.testing.stateful.campaign import BUGS, caught, histories
from holdfast.testing.stateful.machine import counted

QUICK = ("rm asks nobody", "the oldest step is the latest", "verify finds nothing", "retention takes what it wants")


def test_i2_i3_i4_i5_i6_i7_i11_hold_in_random_histories() -> None:
    counted.clear()
    histories(12, None, steps=20)  # raises what contradicts the model
    assert counted["histories"] >= 12 and counted["steps"] >= 120, "and something has happened that could"


@pytest.mark.parametrize("name", QUICK)
def test_a_seeded_bug_contradicts_the_model(name: str) -> None:
    assert caught(next(bug for bug in BUGS if bug.name == name), 20, 1)


def test_there_are_enough_seeded_bugs() -> None:
    assert len({bug.name for bug in BUGS}) >= 6
