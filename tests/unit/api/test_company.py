"""Saves that one rank of several wishes for: once for each reason, and never for one that is just being taken."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.api.company import Company
from holdfast.api.turns import Turns
from holdfast.errors import DeadlineExceeded, RanksDisagree
from holdfast.events import Emitter
from holdfast.model import canonical
from holdfast.policy import every, on
from holdfast.policy.saving import Moment, SaveHistory
from holdfast.ranks.proposals import Proposal


class Agreed:
    """The first rank's side of an agreement on what is proposed for given steps; takes down what is wished for."""

    is_coordinator, rank, world_size = True, 0, 2

    def __init__(self, *proposals: Proposal) -> None:
        self._proposals = {one.step: one for one in proposals}
        self.wishes: list[str] = []

    def at(self, step: int, deadline: float) -> Proposal | None:
        return self._proposals.get(step)

    def want(self, reason: str) -> None:
        self.wishes.append(reason)


def test_a_save_that_is_agreed_on_is_not_wished_for_again_at_its_own_step() -> None:
    """That of the policy's clock runs anew only once the save is taken."""
    agreement = Agreed(Proposal(1, 3, "10 min have passed", 0))
    company = Company(agreement, "main", Emitter())  # type: ignore[arg-type]
    last_s, saved = 0.0, []
    for step in range(1, 7):
        company.completed(step, None, ending=False)
        now_s = 601.0 + step
        history = SaveHistory(started_s=0.0, first_step=0, last_saved_step=None, last_saved_s=last_s)
        moment = Moment(step=step, now_s=now_s)
        if company.decide(on.end(), every(minutes=10), moment, history, None).save:
            saved.append(step)
            last_s = now_s
    assert saved == [3]
    assert len(agreement.wishes) == 1, "at step 1, and never again"


class Board:
    """What the first rank announces about saves that may be skipped, topic by topic."""

    is_coordinator, rank, world_size = False, 1, 2

    def __init__(self, *announced: tuple[int, bool]) -> None:
        self._announced = list(announced)

    def topic(self, kind: str) -> Any:
        assert kind == "turn"
        announced = self._announced.pop(0)

        class Topic:
            def __enter__(self) -> Topic:
                return self

            def __exit__(self, *words: object) -> None: ...

            def hear(self, deadline: float, phase: str) -> bytes:
                return canonical.dumps(list(announced))

        return Topic()


class Free:
    free, in_flight = True, ()


class Busy:
    """A writer that does not get on."""

    free, in_flight = False, ()

    class repo:
        url = "elsewhere"

    def await_free(self, timeout: float) -> bool:
        return False


def turns(saver: Any, agreement: Any, *, skip: bool) -> tuple[Turns, list[int]]:
    missed: list[int] = []
    company = Company(agreement, "main", Emitter())
    found = Turns(saver, "main", Emitter(), skip=skip, company=company, missed=lambda step, _: missed.append(step))
    return found, missed


def test_a_save_that_the_first_rank_takes_and_this_one_never_comes_to_is_told_as_missed() -> None:
    found, missed = turns(Free(), Board((10, False), (15, False), (20, True), (25, False)), skip=True)
    with pytest.raises(RanksDisagree):
        found.await_for(5, must=False)
    assert missed == []
    assert found.await_for(15, must=False) == 0.0
    assert missed == [10]
    assert found.await_for(25, must=False) == 0.0
    assert missed == [10], "what is skipped nobody waits for"


def test_who_cannot_begin_a_save_since_the_one_before_hangs_tells_the_others() -> None:
    found, missed = turns(Busy(), Agreed(), skip=False)
    with pytest.raises(DeadlineExceeded):
        found.await_for(7, must=True)
    assert missed == [7]
