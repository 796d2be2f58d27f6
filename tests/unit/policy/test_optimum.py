"""every(auto=): as often as loses least, by what saves cost and how often the run has failed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto import every, on
from tenuto.errors import UsageError
from tenuto.policy.interval import SaveCosts, optimum, time_between_failures, waste
from tenuto.policy.save import EveryOptimum, Moment, SaveHistory

HOUR = 3600.0


class Machine:
    """A training whose saves block it for `stall_s` and are written in `persist_s`."""

    def __init__(
        self, policy: EveryOptimum, stall_s: float, persist_s: float = 0.0, failures: int = 0, trained_s: float = 0.0
    ) -> None:
        self.policy, self.stall_s, self.persist_s = policy, stall_s, persist_s
        self.failures, self.trained_s = failures, trained_s
        self.now, self.step = 0.0, 0
        self.last: tuple[int, float] | None = None
        self.stalls: list[float] = []
        self.written = 0.0
        self.reasons: list[str] = []

    def run(self, seconds: float) -> bool:
        self.now += seconds
        self.step += 1
        history = SaveHistory(
            started_s=0.0,
            last_saved_step=None if self.last is None else self.last[0],
            last_saved_s=None if self.last is None else self.last[1],
            stalls_s=self.stalls[-5:],
            stalled_s=sum(self.stalls),
            persist_s=self.persist_s if self.stalls else 0.0,
            waits=self.now < self.written,
            failures=self.failures,
            trained_s=self.trained_s,
        )
        decision = self.policy.decide(Moment(step=self.step, now_s=self.now), history)
        if decision.save:
            self.last = self.step, self.now
            self.now += self.stall_s
            self.stalls.append(self.stall_s)
            self.written = self.now + self.persist_s
            self.reasons.append(decision.reason)
        return decision.save


def policy(share: str = "1%", mtbf_hours: float | None = None) -> EveryOptimum:
    made = every(auto=share, mtbf_hours=mtbf_hours)
    assert isinstance(made, EveryOptimum)
    return made


def test_it_comes_to_the_optimal_interval() -> None:
    machine = Machine(policy("50%", mtbf_hours=3), stall_s=2.0)
    saved = [machine.now for _ in range(60_000) if machine.run(0.25)]
    between = saved[-1] - saved[-2]
    assert between == pytest.approx(optimum(2.0, 3 * HOUR) + 2.0, abs=0.5)


def test_a_run_that_fails_often_is_saved_more_often() -> None:
    seldom = Machine(policy(), stall_s=0.05, trained_s=30 * 24 * HOUR)
    often = Machine(policy(), stall_s=0.05, failures=60, trained_s=30 * 24 * HOUR)
    counts = [sum(machine.run(1.0) for _ in range(20_000)) for machine in (seldom, often)]
    assert counts[1] > 4 * counts[0] > 0
    assert "a failure every 12 h" in often.reasons[-1] and "60 failures so far" in often.reasons[-1]


@given(st.floats(0.001, 30), st.floats(0, 100), st.floats(0.05, 100), st.sampled_from(["0.5%", "1%", "10%"]))
def test_the_budget_is_never_exceeded_after_the_first_save(
    stall_s: float, persist_s: float, mtbf_hours: float, share: str
) -> None:
    machine = Machine(policy(share, mtbf_hours), stall_s, persist_s)
    for _ in range(1000):
        machine.run(stall_s)
        if len(machine.stalls) > 1:
            assert sum(machine.stalls) <= float(share[:-1]) / 100 * machine.now * 1.001
    assert machine.stalls


def test_what_it_wastes_is_within_a_hundredth_of_the_optimum_in_three_hundred_settings() -> None:
    source = random.Random(11)
    for _ in range(300):
        mtbf_hours = 10 ** source.uniform(-0.5, 2.5)
        stall_s, restart_s = 10 ** source.uniform(-2, 1.5), 10 ** source.uniform(0, 2.5)
        best_s = optimum(stall_s, mtbf_hours * HOUR)
        if stall_s / best_s > 0.45:
            continue  # beyond the largest budget
        machine = Machine(policy("50%", mtbf_hours), stall_s)
        step_s, saved = best_s / 50, []
        while len(saved) < 3:
            if machine.run(step_s):
                saved.append(machine.now)
        work_s = saved[-1] - saved[-2] - stall_s
        costs = SaveCosts(stall_s)
        least = waste(best_s, costs, mtbf_hours * HOUR, restart_s)
        assert waste(work_s, costs, mtbf_hours * HOUR, restart_s) <= least * 1.01


def test_nothing_is_asked_for_while_a_save_waits_or_faster_than_saves_are_written() -> None:
    machine = Machine(policy("50%", mtbf_hours=0.01), stall_s=0.01, persist_s=40.0)
    saved = [machine.now for _ in range(3000) if machine.run(0.1)]
    assert min(b - a for a, b in pairwise(saved)) >= 40.0


def test_how_it_is_written_and_combined() -> None:
    assert repr(every(auto=True)) == "every(auto='1%')"
    assert repr(every(auto="2%", mtbf_hours=3)) == "every(auto='2%', mtbf_hours=3)"
    assert repr(every(auto=True) | on.end()) == "every(auto='1%') | on.end()"
    assert time_between_failures(0, 0) == 24 * HOUR
    for wrong in (
        lambda: every(mtbf_hours=3),
        lambda: every(auto="1%", mtbf_hours=0),
        lambda: every(auto="90%"),
        lambda: every(auto="often"),
        lambda: every(auto=False),
    ):
        with pytest.raises(UsageError):
            wrong()
