"""Random histories of the whole product against a small model; and the model notices seeded bugs."""

from __future__ import annotations

import pytest

from campaigns.stateful.campaign import BUGS, Bug, caught, histories
from campaigns.stateful.directed import run_directed
from campaigns.stateful.operator_rules import counted
from campaigns.stateful.ranks import RankProduct
from tenuto.errors import TenutoError

QUICK = ("rm asks nobody", "the oldest step is the latest", "verify finds nothing", "retention takes what it wants")
SLOW = (QUICK[0], QUICK[3])
"""Found by so many histories that they run with the long tests."""


def test_i2_i3_i4_i5_i6_i7_i11_hold_in_random_histories() -> None:
    counted.clear()
    histories(6, None, steps=20)  # raises what contradicts the model
    assert counted["histories"] >= 6 and counted["steps"] >= 60, "and something has happened that could"


def test_i2_i3_i4_i6_i7_i11_hold_in_random_histories_of_several_ranks() -> None:
    counted.clear()
    histories(5, None, steps=9, product=RankProduct)
    assert counted["histories"] >= 5 and counted["race"] + counted["a rank dies"] >= 5, "and ranks were lost"


@pytest.mark.parametrize("name", ["rm asks nobody", "the oldest step is the latest"])
def test_a_seeded_bug_contradicts_the_model_of_several_ranks_too(name: str) -> None:
    assert caught(next(bug for bug in BUGS if bug.name == name), 12, 1, RankProduct)


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.long] * (one in SLOW)) for one in QUICK])
def test_a_seeded_bug_contradicts_the_model(name: str) -> None:
    assert caught(next(bug for bug in BUGS if bug.name == name), 40, 1)


def test_directed_histories_hold() -> None:
    run_directed()  # raises what contradicts the model


@pytest.mark.parametrize(
    "name",
    [
        "gc does not ask who rests on what",
        "retention does not ask who rests on what",
        "ages count from what was saved last",
        "a step is the newest attempt's",
        "a damaged note is passed over",
        "a missing manifest is a save that was cut off",
    ],
)
def test_a_seeded_bug_contradicts_a_directed_history(name: str) -> None:
    with next(bug for bug in BUGS if bug.name == name).patch(), pytest.raises((AssertionError, TenutoError)):
        run_directed()


def test_there_are_enough_seeded_bugs() -> None:
    assert len({bug.name for bug in BUGS}) >= 20


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_seeded_bug_finds_what_it_replaces(bug: Bug) -> None:
    with bug.patch():
        pass
