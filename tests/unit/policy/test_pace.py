"""every(stall=): as often as the machine can bear, never beyond the share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import every
from holdfast.errors import UsageError
from holdfast.policy.saving import Moment, SaveHistory


class Machine:
    """A training of steps whose saves cost what they cost."""

    def __init__(self, share: str) -> None:
        self.policy = every(stall=share)
        self.now = 0.0
        self.stalls: list[float] = []
        self.last: float | None = None
        self.last_step: int | None = None
        self.step = 0

    def history(self, persist: float) -> SaveHistory:
        return SaveHistory(
            started_s=0.0,
            last_saved_step=self.last_step,
            last_saved_s=self.last,
            stalls_s=self.stalls[-5:],
            stalled_s=sum(self.stalls),
            persist_s=persist,
        )

    def run(self, seconds: float, stall: float, *, persist: float = 0.0) -> bool:
        """One step of so many seconds; whether it was saved."""
        self.now += seconds
        self.step += 1
        decision = self.policy.decide(Moment(step=self.step, now_s=self.now), self.history(persist))
        if decision.save:
            self.last, self.last_step = self.now, self.step
            self.now += stall
            self.stalls.append(stall)
        return decision.save


def test_it_saves_as_often_as_the_share_allows() -> None:
    machine = Machine("1%")
    saved = [step for step in range(10_000) if machine.run(0.1, 0.05)]
    spent = sum(machine.stalls) / machine.now
    assert len(saved) > 150
    assert 0.009 < spent <= 0.01


@given(
    steps=st.lists(st.tuples(st.floats(0.01, 10.0), st.floats(0.001, 1.0)), min_size=50, max_size=200),
    percent=st.sampled_from(["1%", "5%", "20%"]),
)
def test_saves_that_cost_no_more_than_those_before_never_exceed_the_share(
    steps: list[tuple[float, float]], percent: str
) -> None:
    machine, share = Machine(percent), float(percent[:-1]) / 100
    worst = max(stall for _, stall in steps)
    machine.run(0.1, worst)  # the first save, which nothing is known of
    for seconds, stall in steps:
        if machine.run(seconds, min(stall, machine.stalls[-1])):
            assert sum(machine.stalls) <= share * machine.now


def test_it_never_begins_a_save_that_would_wait_for_the_one_before() -> None:
    machine = Machine("50%")
    machine.run(1.0, 0.001)
    assert [machine.run(1.0, 0.001, persist=3.5) for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("wrong", ["1", "", "a%", "0%", "51%", 0, -0.1, True, 0.6, float("nan"), b"1%", [1]])
def test_what_is_no_share_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="is no share"):
        every(stall=wrong)  # type: ignore[arg-type]


def test_a_share_is_told_as_it_was_meant() -> None:
    assert repr(every(stall=0.01)) == repr(every(stall="1%")) == "every(stall='1%')"
