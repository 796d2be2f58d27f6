"""Saves that are agreed on in the background, over a board that fails for one call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tenuto.errors import RankStoreLost
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.contract import Settings
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks
from tenuto.ranks.proposals import Proposal

QUICK = Settings(beat_s=0.01, dead_after_s=30.0, answer_s=5.0, probe_s=0.05)
PATIENT_S = 30.0


class Failing(InProcessKVStore):
    """Fails once, where a key is put that `which` chooses; `late`: it is put all the same."""

    def __init__(self, which: Callable[[str], bool], *, late: bool = False) -> None:
        super().__init__()
        self._which, self._late = which, late
        self.failed = 0

    def _meddle(self, put: Callable[[], Any], key: str) -> Any:
        if self.failed or not self._which(key):
            return put()
        self.failed += 1
        if self._late:
            put()
        lost = RankStoreLost("the board does not answer")
        lost.lasting = True  # asked again at the next beat, not within this one
        raise lost

    def put(self, key: str, value: bytes, *, timeout: float) -> None:
        self._meddle(lambda: InProcessKVStore.put(self, key, value, timeout=timeout), key)

    def put_if_absent(self, key: str, value: bytes, *, timeout: float) -> bytes:
        found: bytes = self._meddle(lambda: InProcessKVStore.put_if_absent(self, key, value, timeout=timeout), key)
        return found


FAULTS: dict[str, Callable[[], Failing]] = {
    "the proposal": lambda: Failing(lambda key: key.endswith("/proposal")),
    "the proposal, which comes all the same": lambda: Failing(lambda key: key.endswith("/proposal"), late=True),
    "the first rank's answer": lambda: Failing(lambda key: key.endswith("proposal/1/posts/0")),
    "another rank's answer": lambda: Failing(lambda key: key.endswith("proposal/1/posts/1")),
    "the announcement": lambda: Failing(lambda key: key.endswith("proposal/1/outcome")),
    "the announcement, which comes all the same": lambda: Failing(
        lambda key: key.endswith("proposal/1/outcome"), late=True
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_call_that_the_board_does_not_answer_is_made_again(fault: str) -> None:
    kv_store, together = FAULTS[fault](), threading.Barrier(2)

    def run(rank: int) -> list[Proposal | None]:
        with Agreement.open(ThreadRanks(rank, 2, kv_store), {"run": "main"}, PATIENT_S, QUICK) as agreement:
            if rank == 0:
                agreement.request_save("the clock")
            found: list[Proposal | None] = []
            for step in range(1, 100_000):
                together.wait(PATIENT_S)  # as training's own collectives
                found.append(agreement.at(step, PATIENT_S))
                if found[-1] is not None:
                    break
            together.wait(PATIENT_S)
            return found

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, (0, 1))
    assert kv_store.failed == 1
    assert len(first) == len(second) and first[-1] == second[-1]
    assert first[-1] is not None and first[-1].reason == "the clock"


def test_a_proposal_that_came_to_nothing_at_its_very_step_is_no_save() -> None:
    """The background of the first rank may end the topic between the two looks of the training thread."""

    def run(rank: int) -> Proposal | None:
        with Agreement.open(ThreadRanks(rank, 2, kv_store), {"run": "main"}, PATIENT_S, QUICK) as agreement:
            agreement._proposals.answer(Proposal(1, 3, "the clock", 0))
            return agreement.at(3, PATIENT_S)

    kv_store = InProcessKVStore()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, (0, 1))) == [None, None]


def test_of_two_saves_at_one_step_both_are_heard_and_the_newest_counts() -> None:
    """The second is asked for when all have agreed to the first, and none of them is there yet."""
    kv_store, together, second = InProcessKVStore(), threading.Barrier(2), [False, False]

    def run(rank: int) -> tuple[Proposal | None, Proposal | None, dict[str, list[int]]]:
        with Agreement.open(ThreadRanks(rank, 2, kv_store), {"run": "main"}, PATIENT_S, QUICK) as agreement:
            asked = False
            if rank == 0:
                agreement.request_save("the clock")
            for _ in range(100_000):
                coming = agreement.agreed_save
                if rank == 0 and not asked and coming is not None and agreement._proposals.open() is None:
                    agreement.request_save("a signal")
                    asked = True
                second[rank] = coming is not None and coming.number == 2
                together.wait(PATIENT_S)
                both = all(second)
                together.wait(PATIENT_S)
                if both:
                    break
            found = [agreement.at(step, PATIENT_S) for step in (1, 2)]
            together.wait(PATIENT_S)
            return found[0], found[1], agreement._leftovers.live()

    with ThreadPoolExecutor(2) as pool:
        (first, after, _), other = pool.map(run, (0, 1))
    assert first == Proposal(2, 1, "a signal", 0) and after is None
    assert other == (first, None, {}), "no topic is left open"
