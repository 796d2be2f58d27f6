"""Agreeing on a step that no rank has reached: decided without I/O, so every order of events can be tried."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.ranks.proposals import Proposal, Proposals


def test_who_has_passed_the_step_refuses_and_who_has_not_waits_there() -> None:
    rank = Proposals(1, 2, 1.0)
    assert rank.reached(5, 0.0) == []
    assert rank.new(Proposal(1, 5, "late", 0))
    assert rank.answer(Proposal(1, 5, "late", 0)) is False
    assert not rank.new(Proposal(1, 5, "late", 0))
    proposal = Proposal(2, 7, "in time", 0)
    assert rank.answer(proposal) is True
    assert rank.armed == proposal
    assert [rank.reached(step, float(step)) for step in (6, 7, 8)] == [[], [proposal], []]


def test_a_step_that_is_jumped_over_is_met_at_the_next() -> None:
    rank = Proposals(1, 2, 1.0)
    proposal = Proposal(1, 7, "", 0)
    assert rank.answer(proposal) is True
    assert rank.reached(10, 0.0) == [proposal]


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
    assert coordinator.reached(proposal.step, 0.0) == [proposal]
    coordinator.wish(0, "behind it")
    coordinator.decided(True)
    after = coordinator.next()
    assert after is not None and after.reason == "behind it"


def test_what_all_have_agreed_to_stands_when_another_is_proposed_before_its_step() -> None:
    """All have answered seconds before any of them is there, and another wish may be heard in between."""
    ranks = first, other = [Proposals(rank, 2, 3.0) for rank in (0, 1)]
    for rank in ranks:
        assert [rank.reached(step, float(step)) for step in range(3)] == [[], [], []]
    agreed = []
    for reason in ("the clock", "a signal"):
        first.wish(0, reason)
        proposal = first.next()
        assert proposal is not None
        assert [rank.answer(proposal) for rank in ranks] == [True, True]
        first.decided(True)
        agreed.append(proposal)
        assert [rank.reached(proposal.step - 2, proposal.step - 2.0) for rank in ranks] == [[], []]
    assert [one.step for one in agreed] == [5, 6]
    assert first.armed == agreed[1] == other.armed
    assert [rank.reached(5, 5.0) for rank in ranks] == [[agreed[0]]] * 2
    assert [rank.reached(6, 6.0) for rank in ranks] == [[agreed[1]]] * 2
    assert first.armed is None is other.armed


def test_what_has_come_to_nothing_is_forgotten_alone() -> None:
    coordinator = Proposals(0, 2, 1.0)
    proposals = [Proposal(number, step, "", 0) for number, step in ((1, 7), (2, 5), (3, 9), (4, 6))]
    assert all(map(coordinator.answer, proposals))
    coordinator.withdrawn(2)
    assert coordinator.reached(8, 0.0) == [proposals[0], proposals[3]]
    assert coordinator.reached(9, 1.0) == [proposals[2]]


def test_alone_a_wish_is_met_at_once() -> None:
    alone = Proposals(0, 1, 3.0)
    alone.wish(0, "a signal")
    assert alone.reached(4, 0.0) == [Proposal(1, 4, "a signal", 0)]
    assert alone.reached(5, 0.0) == []


EVENTS = st.tuples(st.sampled_from(["step", "step", "hear", "wish"]), st.integers(0, 3))


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.integers(2, 4))
def test_all_ranks_save_at_the_same_step_or_none_does(events: list[tuple[str, int]], world_size: int) -> None:
    """Ranks step, wish and hear of proposals in any order; who has promised stops at the step until all have answered.
    Where all have said yes each of them saves there, whatever else was proposed before they came to it."""
    ranks = [Proposals(rank, world_size, 3.0) for rank in range(world_size)]
    first, steps, waiting = ranks[0], [0] * world_size, dict[int, list[Proposal]]()
    proposed, answers, verdicts = list[Proposal](), dict[int, dict[int, bool]](), dict[int, bool]()
    met: dict[int, dict[int, int]] = {}
    settled = [("hear", rank) for _ in range(24) for rank in range(world_size)]  # a wish that is refused stands
    onward = [("step", rank) for _ in range(200) for rank in range(world_size)]
    for what, which in [("wish", 0), *events, *settled, *onward]:
        rank = which % world_size
        if what == "wish":
            first.wish(rank, "")
        elif what == "step":
            if rank not in waiting:
                steps[rank] += 1
                waiting[rank] = ranks[rank].reached(steps[rank], float(steps[rank]))
                for one in waiting[rank]:
                    met.setdefault(one.number, {})[rank] = steps[rank]
        else:
            proposed += [one for one in [first.next()] if one is not None]
            number = proposed[-1].number
            said = answers.setdefault(number, {})
            if ranks[rank].new(proposed[-1]):
                said[rank] = ranks[rank].answer(proposed[-1])
            if first.open() is not None and len(said) == world_size:
                verdicts[number] = all(said.values())
                if not verdicts[number]:
                    first.withdrawn(number)
                first.decided(verdicts[number])
        waiting = {rank: due for rank, due in waiting.items() if any(one.number not in verdicts for one in due)}
    assert any(verdicts.values()) and not waiting and first.open() is None
    for proposal in proposed:
        found = met.get(proposal.number, {})
        if verdicts[proposal.number]:
            assert found == dict.fromkeys(range(world_size), proposal.step)
        else:
            assert found.keys() <= {rank for rank, said in answers[proposal.number].items() if said}
