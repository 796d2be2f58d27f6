"""Which step all ranks keep, over a board: told beside training, waited for only where a step would be let go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from support.rank_threads import on_ranks
from tenuto.errors import DeadlineExceeded
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.common_step import NONE, CommonStep


def _soon(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 30
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    return condition()


def test_every_step_becomes_the_common_one() -> None:
    def work(agreement: Agreement) -> list[int]:
        kept, found = CommonStep(agreement.session), []
        try:
            for step in range(1, 30):
                found.append(kept.settle(30))
                kept.sealed(step)
            found.append(kept.settle(30))
        finally:
            with agreement.round("end") as round:
                round.all_gather(b"", 30)
            kept.close()
        return found

    for found in on_ranks(3, work):
        assert found == [NONE, *range(1, 30)]


def test_who_waits_for_a_rank_that_does_not_tell_gives_up_once_and_goes_on_when_it_does() -> None:
    late, given_up = threading.Event(), threading.Event()

    def work(agreement: Agreement) -> int:
        kept = CommonStep(agreement.session, 4)
        try:
            if agreement.rank == 1:
                given_up.wait(30)
                assert kept.settle(1) == 4, "it has nothing that waits"
                kept.sealed(5)
                late.set()
                return kept.settle(30)
            kept.sealed(5)
            with pytest.raises(DeadlineExceeded, match="step 5"):
                kept.settle(0.05)
            with pytest.raises(DeadlineExceeded):
                kept.settle(3600)  # no second wait for the same step
            given_up.set()
            late.wait(30)
            assert _soon(lambda: kept.common == 5)
            return kept.settle(0)
        finally:
            with agreement.round("end") as round:
                round.all_gather(b"", 30)
            kept.close()

    assert on_ranks(2, work) == [5, 5]


def test_a_step_that_another_rank_has_missed_may_go_before_the_common_one() -> None:
    def work(agreement: Agreement) -> int:
        kept = CommonStep(agreement.session, 4)
        try:
            if agreement.rank == 2:
                kept.missed(5)
            else:
                kept.sealed(5)
            return kept.settle(30)
        finally:
            with agreement.round("end") as round:
                round.all_gather(b"", 30)
            kept.close()

    assert on_ranks(3, work) == [4, 4, 4]


@pytest.mark.parametrize("off", [0, 1])
def test_all_hear_of_one_that_keeps_none_any_more(off: int) -> None:
    def work(agreement: Agreement) -> str:
        kept = CommonStep(agreement.session)
        try:
            if agreement.rank == off:
                kept.turn_off("no room")
            else:
                kept.sealed(1)
                kept.settle(30)
            return kept.off
        finally:
            with agreement.round("end") as round:
                round.all_gather(b"", 30)
            kept.close()

    assert on_ranks(2, work)[1 - off] == f"rank {off}: no room"
