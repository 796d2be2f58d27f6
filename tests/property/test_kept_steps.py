"""Ranks that keep two steps each: whichever order they tell, hear and are killed in, all have one step in common."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from tenuto.ranks.common_step import NONE, StepDecision, StepReport, decide


@dataclass
class Rank:
    """What one rank holds, what it has said, what it has heard. `on_board` is what others can read of it."""

    held: set[int] = field(default_factory=set)
    told: StepReport = field(default_factory=StepReport)
    on_board: StepReport = field(default_factory=StepReport)
    heard: StepDecision = field(default_factory=StepDecision)

    def reach(self, step: int, *, whole: bool) -> bool:
        """Comes to a step that is due; False where it must wait, or leave the step out."""
        if self.heard.open(self.told):
            return False
        kept = {self.heard.common} & self.held
        self.held = kept
        if whole:
            self.held = kept | {step}
            self.told = replace(self.told, complete=step, past=step)
        else:
            self.told = replace(self.told, past=step)
        return True

    def leave_out(self, step: int) -> None:
        self.told = replace(self.told, past=max(step, self.told.past))


ACTIONS = st.tuples(
    st.sampled_from(["step", "step", "step", "fail", "skip", "post", "post", "decide", "decide", "hear", "hear"]),
    st.integers(0, 3),
)


@given(st.integers(2, 4), st.lists(ACTIONS, max_size=120))
def test_all_ranks_have_a_step_in_common_from_the_first_on(count: int, actions: list[tuple[str, int]]) -> None:
    ranks = [Rank() for _ in range(count)]
    steps = [0] * count
    seen = [StepReport()] * count
    kv_store, coordinator, began = StepDecision(), StepDecision(), False
    for action, number in actions:
        one, rank = ranks[number % count], number % count
        if action in ("step", "fail"):
            if one.reach(steps[rank] + 1, whole=action == "step"):
                steps[rank] += 1
        elif action == "skip":
            steps[rank] += 1
            one.leave_out(steps[rank])
        elif action == "post":
            one.on_board = one.told
        elif action == "decide":
            seen[rank] = one.on_board
            seen[0] = ranks[0].told
            coordinator = decide(coordinator, seen)
            kv_store = coordinator
        else:
            one.heard = kv_store
        common = set.intersection(*(each.held for each in ranks))
        began = began or coordinator.common != NONE
        assert not began or coordinator.common in common


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_ranks_that_take_the_same_steps_never_come_to_a_standstill(order: list[int]) -> None:
    """After any confusion: once every rank tells, decides and hears in turn, each next step becomes the common one."""
    ranks = [Rank() for _ in range(3)]
    step, coordinator = 0, StepDecision()
    for number in order:
        step += 1
        for rank, one in enumerate(ranks):
            if (number >> rank) & 1 or not one.reach(step, whole=True):
                one.leave_out(step)
    for _ in range(3):
        step += 1
        for _ in range(2):
            coordinator = decide(coordinator, [one.told for one in ranks])
            for one in ranks:
                one.heard = coordinator
        for one in ranks:
            if not one.reach(step, whole=True):
                one.leave_out(step)
    coordinator = decide(coordinator, [one.told for one in ranks])
    assert coordinator.common == step


def test_a_rank_that_keeps_none_any_more_is_named() -> None:
    told = [StepReport(3, 3), StepReport(3, 3), StepReport(2, 3, "no room")]
    assert decide(StepDecision(2, 2), told) == StepDecision(2, 3, NONE, "rank 2: no room")
    assert decide(StepDecision(off="rank 1: first"), told).off == "rank 1: first"


def test_a_step_that_one_rank_has_missed_is_given_up() -> None:
    before = StepDecision(4, 4)
    assert decide(before, [StepReport(5, 5), StepReport(4, 4)]) == StepDecision(4, 5, 5), "the other may still get it"
    assert decide(before, [StepReport(5, 8), StepReport(4, 4)]) == StepDecision(4, 8, 5), (
        "who has it has left out others since"
    )
    assert decide(before, [StepReport(5, 5), StepReport(4, 5)]) == StepDecision(4, 5)
    assert decide(before, [StepReport(5, 5), StepReport(6, 6)]) == StepDecision(4, 6, 6)
    assert decide(before, [StepReport(5, 6), StepReport(6, 6)]) == StepDecision(4, 6)
    assert decide(before, [StepReport(5, 8), StepReport(5, 5)]) == StepDecision(5, 8)
