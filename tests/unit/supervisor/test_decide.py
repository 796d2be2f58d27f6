"""Whether a training is started again: by how it ended, how often, and whether it came any further."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.supervisor.decide import Ending, Kind, Limits, Pace, decide, silence_allowed


def ending(kind: Kind = "killed", *, at: float = 0.0, ran: float = 10.0, **facts: Any) -> Ending:
    known = {"step": 5, "new": True, "evidence": "SIGKILL"} | facts
    return Ending(kind, 137, at - ran, at, **known)


@pytest.mark.parametrize("kind", ["killed", "failed", "hung", "out of memory"])
def test_a_training_that_came_further_is_started_again_at_once(kind: Kind) -> None:
    found = decide([ending(kind)], Limits())
    assert (found.restart, found.after_s) == (True, 0.0)
    assert found.reason == f"{kind} (SIGKILL)"


def test_one_that_is_done_or_was_asked_to_leave_is_not() -> None:
    assert decide([ending("finished")], Limits()).reason == "the training is done"
    assert not decide([ending("asked to leave", evidence="SIGTERM")], Limits()).restart


def test_one_that_comes_no_further_is_given_up_and_waits_longer_each_time() -> None:
    endings = [ending(), ending(new=False)]
    waits = []
    while (found := decide(endings, Limits(in_vain=5, first_wait_s=1, longest_wait_s=4))).restart:
        waits.append(found.after_s)
        endings.append(ending(new=False))
    assert waits == [1, 2, 4, 4]
    assert found.reason == "5 starts in a row ended without a new step (SIGKILL)"


def test_a_new_step_forgives_what_was_in_vain() -> None:
    endings = [ending(new=False), ending(new=False), ending(new=True)]
    assert decide(endings, Limits(in_vain=3)).after_s == 0


def test_a_program_without_steps_has_to_last_a_minute() -> None:
    short, long = ending(step=None, new=False, ran=59), ending(step=None, new=False, ran=61)
    assert not decide([short] * 3, Limits(in_vain=3)).restart
    assert decide([short, short, long], Limits(in_vain=3)).after_s == 0


def test_the_budgets_of_all_restarts_and_of_an_hour() -> None:
    slow = [ending(at=4000.0 * n) for n in range(4)]
    assert decide(slow, Limits(restarts=4)).restart
    assert "3 times, as often as allowed" in decide(slow, Limits(restarts=3)).reason
    assert decide(slow, Limits(per_hour=1)).restart
    quick = [ending(at=100.0 * n) for n in range(4)]
    assert "4 times within an hour" in decide(quick, Limits(per_hour=3)).reason


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 20), st.integers(1, 20), st.integers(1, 5))
def test_no_history_is_restarted_without_end(new: list[bool], restarts: int, per_hour: int, in_vain: int) -> None:
    limits = Limits(restarts=restarts, per_hour=per_hour, in_vain=in_vain)
    endings: list[Ending] = []
    for one in new:
        endings.append(ending(new=one, at=float(len(endings))))
        if not decide(endings, limits).restart:
            break
    else:
        return
    assert len(endings) <= min(restarts + 1, per_hour + 1)


LIMITS = {"least_s": 60.0, "unknown_s": 1800.0}


def test_silence_is_judged_by_the_trainings_own_steps() -> None:
    assert silence_allowed(Pace(2, 9.0, 1.0, 1.0), Pace(), **LIMITS) == 1800
    assert silence_allowed(Pace(50, 9.0, 0.1, 0.1), Pace(), **LIMITS) == 60
    assert silence_allowed(Pace(50, 9.0, 10.0, 10.0), Pace(), **LIMITS) == 200
    assert silence_allowed(Pace(50, 9.0, 300.0, 10.0), Pace(), **LIMITS) == 1200


def test_silence_soon_after_a_restart_is_judged_by_the_starts_before() -> None:
    earlier = Pace(50, 2.0, 1.0, 0.5)
    assert silence_allowed(Pace(), earlier, **LIMITS) == 60
    assert silence_allowed(Pace(1, 30.0), earlier, **LIMITS) == 120, "this first step took longer"
    compiled = Pace(50, 100.0, 1.0, 0.5)
    assert silence_allowed(Pace(), compiled, **LIMITS) == 400, "a first step may compile again"
    assert silence_allowed(Pace(3, 100.0, 1.0, 0.5), compiled, **LIMITS) == 60
