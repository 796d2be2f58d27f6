"""every(stall=): as often as the machine can bear, never beyond the share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto import every
from tenuto.errors import UsageError
from tenuto.policy.save import Moment, SaveHistory


class Machine:
    """A training of steps whose saves cost what they cost. `write_s`: how long each takes to be written, the last of
    them for ever; one at a time is."""

    def __init__(self, share: str, write_s: Sequence[float] = (0.0,)) -> None:
        self.write_s = list(write_s)
        self.written: list[tuple[float, float]] = []
        """When each save began to be written, and when it was."""
        self.policy = every(stall=share)
        self.now = 0.0
        self.stalls: list[float] = []
        self.last: float | None = None
        self.last_step: int | None = None
        self.step = 0

    def history(self) -> SaveHistory:
        persist = max((end - begin for begin, end in self.written[-1:] if end <= self.now), default=0.0)
        return SaveHistory(
            started_s=0.0,
            last_saved_step=self.last_step,
            last_saved_s=self.last,
            stalls_s=self.stalls[-5:],
            stalled_s=sum(self.stalls),
            persist_s=persist,
            waits=self.waits,
        )

    @property
    def waits(self) -> bool:
        return bool(self.written) and self.now < self.written[-1][1]

    def run(self, seconds: float, stall: float) -> bool:
        """One step of so many seconds; whether it was saved."""
        self.now += seconds
        self.step += 1
        decision = self.policy.decide(Moment(step=self.step, now_s=self.now), self.history())
        if decision.save:
            assert not self.waits, "it would be held until the one before is written"
            self.last, self.last_step = self.now, self.step
            self.now += stall
            number = min(len(self.written), len(self.write_s) - 1)
            self.written.append((self.now, self.now + self.write_s[number]))
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
    machine = Machine("50%", write_s=[0.5, 0.5, 3.5, 0.5])
    assert [machine.run(1.0, 0.001) for _ in range(8)] == [True, True, True, False, False, False, True, True]


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=20), st.sampled_from(["1%", "50%"]))
def test_it_never_waits_on_a_place_that_is_fast_at_one_time_and_slow_at_another(
    write_s: list[float], share: str
) -> None:
    machine = Machine(share, write_s=write_s)
    assert sum(machine.run(1.0, 0.001) for _ in range(400)) >= len(write_s) // 2


def test_what_takes_long_to_be_written_is_not_taken_faster_though_more_could_be_in_flight() -> None:
    history = SaveHistory(started_s=0.0, last_saved_step=1, last_saved_s=10.0, stalls_s=[0.001], persist_s=3.5)
    policy = every(stall="50%")
    assert not policy.decide(Moment(step=2, now_s=13.0), history).save
    assert policy.decide(Moment(step=2, now_s=13.6), history).save


@pytest.mark.parametrize("wrong", ["1", "", "a%", "0%", "51%", 0, -0.1, True, 0.6, float("nan"), b"1%", [1]])
def test_what_is_no_share_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="is not a share"):
        every(stall=wrong)  # type: ignore[arg-type]


def test_a_share_is_told_as_it_was_meant() -> None:
    assert repr(every(stall=0.01)) == repr(every(stall="1%")) == "every(stall='1%')"
