"""Agreeing on a step that no rank has reached: decided without I/O, so every order of events can be tried."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ranks.proposals import Proposal, Proposals


def test_who_has_passed_the_step_refuses_and_who_has_not_waits_there() -> None:
    rank = Proposals(1, 2, 1.0)
    assert rank.reached(5, 0.0) is None
    assert rank.new(Proposal(1, 5, "late", 0))
    assert rank.answer(Proposal(1, 5, "late", 0)) is False
    assert not rank.new(Proposal(1, 5, "late", 0))
    proposal = Proposal(2, 7, "in time", 0)
    assert rank.answer(proposal) is True
    assert rank.armed == proposal
    assert [rank.reached(step, float(step)) for step in (6, 7, 8)] == [None, proposal, None]


def test_a_step_that_is_jumped_over_is_met_at_the_next() -> None:
    rank = Proposals(1, 2, 1.0)
    proposal = Proposal(1, 7, "", 0)
    assert rank.answer(proposal) is True
    assert rank.reached(10, 0.0) == proposal


def test_the_step_proposed_is_as_far_ahead_as_answers_take() -> None:
    coordinator = Proposals(0, 2, 3.0)
    for step in range(4):
        coordinator.reached(step, step * 0.5)
    coordinator.wish(1, "a signal")
    assert coordinator.next() == Proposal(1, 3 + 6, "a signal", 1)
    assert coordinator.next() is None


def test_a_wish_that_was_refused_stands_and_is_tried_further_ahead() -> None:
    coordinator = Proposals(0, 2, 1.0)
    coordinator.wish(0, "a signal")
    leads = []
    for _ in range(4):
        proposal = coordinator.next()
        assert proposal is not None
        coordinator.answer(proposal)
        leads.append(proposal.step)
        coordinator.withdrawn(proposal.number)
        assert coordinator.armed is None
        coordinator.decided(False)
    assert leads == [1, 2, 4, 8]
    coordinator.next()
    coordinator.decided(True)
    assert coordinator.next() is None


def test_what_is_wished_for_behind_the_step_that_is_saved_stands() -> None:
    """Training may be past the step before it is noted that all have agreed to it."""
    coordinator = Proposals(0, 2, 1.0)
    coordinator.wish(0, "before it")
    proposal = coordinator.next()
    assert proposal is not None
    coordinator.answer(proposal)
    coordinator.wish(0, "before it too")
    assert coordinator.reached(proposal.step, 0.0) == proposal
    coordinator.wish(0, "behind it")
    coordinator.decided(True)
    after = coordinator.next()
    assert after is not None and after.reason == "behind it"


def test_alone_a_wish_is_met_at_once() -> None:
    alone = Proposals(0, 1, 3.0)
    alone.wish(0, "a signal")
    assert alone.reached(4, 0.0) == Proposal(1, 4, "a signal", 0)
    assert alone.reached(5, 0.0) is None


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["step", "hear"]), st.integers(0, 3)), max_size=60), st.integers(2, 4))
def test_all_ranks_save_at_the_same_step_or_none_does(events: list[tuple[str, int]], world_size: int) -> None:
    """Ranks step and hear of the proposal in any order; who has promised stops at the step until all have answered."""
    ranks = [Proposals(rank, world_size, 1.0) for rank in range(world_size)]
    ranks[0].wish(0, "")
    proposal = ranks[0].next()
    assert proposal is not None
    steps, answers, waiting = [0] * world_size, dict[int, bool](), dict[int, int]()
    for what, which in [*events, *(("hear", rank) for rank in range(world_size))]:
        rank = which % world_size
        if what == "hear":
            if ranks[rank].new(proposal):
                answers[rank] = ranks[rank].answer(proposal)
        elif rank not in waiting:
            steps[rank] += 1
            if ranks[rank].reached(steps[rank], 0.0) is not None:
                waiting[rank] = steps[rank]
    for rank in range(world_size):  # all go on to the step, and past it where they do not wait
        while rank not in waiting and steps[rank] <= proposal.step:
            steps[rank] += 1
            if ranks[rank].reached(steps[rank], 0.0) is not None:
                waiting[rank] = steps[rank]
    assert set(answers) == set(range(world_size))
    if all(answers.values()):
        assert waiting == dict.fromkeys(range(world_size), proposal.step)
    else:
        assert set(waiting) == {rank for rank, answer in answers.items() if answer}
