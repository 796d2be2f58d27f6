"""How much work lies between saves, against closed forms, an independent search for the optimum, and simulation."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.errors import UsageError
from tenuto.policy import interval
from tenuto.policy.interval import SaveCosts

MINUTE = 60.0
HOUR = 3600.0


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 116.69), (6 * HOUR, 56.71), (15 * MINUTE, 9.17)])
def test_the_examples_of_dalys_paper(mtbf_s: float, minutes: float) -> None:
    assert interval.optimum(5 * MINUTE, mtbf_s) / MINUTE == pytest.approx(minutes, abs=0.01)


def searched(costs: SaveCosts, mtbf_s: float, restart_s: float) -> float:
    """The least waste, by a search that knows no formula."""
    low, high = 1e-6 * mtbf_s, 40 * mtbf_s
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(300):  # in logarithms: the optimum lies anywhere within many powers of ten
        a = math.exp(math.log(high) - golden * (math.log(high) - math.log(low)))
        b = math.exp(math.log(low) + golden * (math.log(high) - math.log(low)))
        if interval.waste(a, costs, mtbf_s, restart_s) <= interval.waste(b, costs, mtbf_s, restart_s):
            high = b
        else:
            low = a
    return interval.waste(math.sqrt(low * high), costs, mtbf_s, restart_s)


def test_the_optimum_wastes_within_a_hundredth_of_the_least_in_five_hundred_settings() -> None:
    source = random.Random(5)
    for _ in range(500):
        mtbf_s = 10 ** source.uniform(1.5, 6.5)
        stall_s = mtbf_s * 10 ** source.uniform(-8, 0.3)
        persist_s = mtbf_s * 10 ** source.uniform(-8, -0.5)
        costs = SaveCosts(stall_s, persist_s, source.uniform(0, 0.5))
        restart_s = mtbf_s * 10 ** source.uniform(-5, -0.5)
        least = searched(costs, mtbf_s, restart_s)
        found = interval.waste(interval.optimum(costs.cost_s, mtbf_s), costs, mtbf_s, restart_s)
        assert found <= least * 1.0001 + 1e-12, (costs, mtbf_s, restart_s)


def test_the_waste_is_that_of_simulated_failures() -> None:
    source = random.Random(3)
    costs, mtbf_s, restart_s, work_s = SaveCosts(20.0, 30.0, 0.2), 2000.0, 100.0, 300.0
    elapsed = done = 0.0
    while done < 3e6:
        begun, fails = elapsed, elapsed + source.expovariate(1 / mtbf_s)
        if begun + work_s + costs.cost_s <= fails:
            elapsed, done = begun + work_s + costs.cost_s, done + work_s
            continue
        elapsed = fails
        while True:  # a failure while it comes back starts that over
            back = elapsed + restart_s + costs.persist_s
            fails = elapsed + source.expovariate(1 / mtbf_s)
            if fails >= back:
                elapsed = back
                break
            elapsed = fails
    assert interval.waste(work_s, costs, mtbf_s, restart_s) == pytest.approx(1 - done / elapsed, rel=0.02)


@given(
    st.floats(1e-4, 100), st.floats(0, 1000), st.floats(0, 0.5), st.floats(60, 1e6), st.floats(0.001, 0.5),
    st.integers(1, 4),
)  # fmt: skip
def test_neither_budget_nor_disk_is_asked_for_more_than_they_have(
    stall_s: float, persist_s: float, slowdown: float, mtbf_s: float, budget: float, in_flight: int
) -> None:
    costs = SaveCosts(stall_s, persist_s, slowdown)
    work_s = interval.interval(costs, mtbf_s, budget=budget, in_flight=in_flight)
    assert stall_s / (work_s + stall_s) <= budget * 1.000001
    assert in_flight * (work_s + stall_s) >= persist_s * 0.999999
    assert work_s >= interval.optimum(costs.cost_s, mtbf_s)


def test_what_a_run_shows_replaces_what_was_believed() -> None:
    assert interval.time_between_failures(0, 0) == 86_400
    assert interval.time_between_failures(0, 10 * 86_400) == 11 * 86_400
    assert interval.time_between_failures(999, 999 * 3600) == pytest.approx(3600, rel=0.03)


@pytest.mark.parametrize(
    "call",
    [
        lambda: interval.optimum(-1, 60),
        lambda: interval.optimum(1, 0),
        lambda: interval.optimum(math.nan, 60),
        lambda: interval.waste(0, SaveCosts(1), 60),
        lambda: interval.interval(SaveCosts(1), 60, budget=0),
        lambda: interval.time_between_failures(-1, 60),
    ],
)
def test_what_makes_no_sense_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError):
        call()
