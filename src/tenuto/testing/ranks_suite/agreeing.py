"""Tests the agreement of two ranks on the key-value stores under test."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import pytest

from tenuto.errors import RankFailed, RanksDisagree, RanksMissing
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.contract import Settings
from tenuto.ranks.kv.in_process import ThreadRanks
from tenuto.testing.ranks_suite.base import ANSWER_S, Base, Boards

SETTINGS: Final = Settings(beat_s=0.05, dead_after_s=ANSWER_S, answer_s=ANSWER_S, probe_s=0.1)
Result = TypeVar("Result")


class Agreeing(Base):
    def test_two_ranks_meet_and_agree(self, boards: Boards) -> None:
        def take_part(ranks: Agreement) -> list[object]:
            heard: list[object] = [ranks.session.id]
            for size in (0, 10, 2 << 20):
                with ranks.round("gather") as round:
                    heard.append(round.all_gather(b"%d" % ranks.rank * size, ANSWER_S))
                with ranks.round("vote") as round:
                    heard.append(round.vote(size != 10 or ranks.rank == 0, "not this one", ANSWER_S))
            return heard

        first, second = both(boards, take_part)
        assert first == second
        assert first[1::2] == [[b"0" * size, b"1" * size] for size in (0, 10, 2 << 20)]
        assert [bool(verdict) for verdict in first[2::2]] == [True, False, True]

    def test_a_failure_is_everybodys(self, boards: Boards) -> None:
        def take_part(ranks: Agreement) -> str:
            with ranks.round("save") as round:
                if ranks.rank == 1:
                    assert round.fail("the disk is on fire")
                with pytest.raises(RankFailed, match="save 0: rank 1 has failed: the disk is on fire") as caught:
                    round.all_gather(b"", ANSWER_S)
                assert (caught.value.ranks, caught.value.phase) == ((1,), "save 0")
            with ranks.round("save") as round:
                return round.all_gather(b"next", ANSWER_S)[1].decode()

        assert both(boards, take_part) == ("next", "next")

    def test_who_gives_up_gives_up_for_all(self, boards: Boards) -> None:
        def take_part(ranks: Agreement) -> tuple[int, ...]:
            round = ranks.round("save")
            if ranks.rank == 1:
                with ranks.round("late") as late:
                    late.receive(ANSWER_S)  # until the other has given up
            round.send(b"")
            with pytest.raises(RanksMissing) as caught:
                round.gather(0.2) if ranks.rank == 0 else round.receive(ANSWER_S)
            if ranks.rank == 0:
                with ranks.round("late") as late:
                    late.broadcast(b"now")
            return caught.value.ranks

        assert both(boards, take_part) == ((1,), (1,))

    def test_ranks_that_disagree_all_learn_it(self, boards: Boards) -> None:
        def meet(rank: int) -> RanksDisagree:
            with pytest.raises(RanksDisagree, match=r"repository is 'r0' on rank 0 .* and 'r1' on rank 1") as caught:
                Agreement.open(ThreadRanks(rank, 2, boards[rank]), {"repository": f"r{rank}"}, ANSWER_S, SETTINGS)
            return caught.value

        with ThreadPoolExecutor(2) as pool:
            assert [error.ranks for error in pool.map(meet, range(2))] == [(0, 1)] * 2

    def test_they_meet_again_over_what_is_left(self, boards: Boards) -> None:
        def take_part(ranks: Agreement) -> tuple[str, list[bytes]]:
            data = f"{ranks.session.id} {ranks.rank}".encode()
            with ranks.round("save") as round:
                return ranks.session.id, round.all_gather(data, ANSWER_S)

        met = set()
        for _ in range(3):
            (session, heard), other = both(boards, take_part)
            assert heard == [f"{session} 0".encode(), f"{session} 1".encode()] and other == (session, heard)
            met.add(session)
        assert len(met) == 3


def both(boards: Boards, take_part: Callable[[Agreement], Result]) -> tuple[Result, Result]:
    """Returns the results of `take_part` on each of two ranks, which are threads."""

    def run(rank: int) -> Result:
        with Agreement.open(ThreadRanks(rank, 2, boards[rank]), {"run": "main"}, ANSWER_S, SETTINGS) as ranks:
            return take_part(ranks)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    return first, second
