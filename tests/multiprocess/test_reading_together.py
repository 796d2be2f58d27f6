"""Processes of one node that restore together, from a store that is far away: read once, also where some are killed."""

from __future__ import annotations

from pathlib import Path

from support.far_away_ranks import NBYTES, job, windows


def test_four_ranks_read_what_all_of_them_want_once(tmp_path: Path) -> None:
    job(tmp_path, 2, save=True)
    session, said = job(tmp_path, 4)
    assert {(how, right) for how, _, right in said.values()} == {("restored", True)}
    read = [nbytes for _, nbytes, _ in said.values()]
    assert NBYTES <= sum(read) <= 1.05 * NBYTES
    assert max(read) < 0.4 * NBYTES
    assert session not in windows()


def test_a_rank_that_is_killed_while_it_reads_for_others_is_named_by_them(tmp_path: Path) -> None:
    job(tmp_path, 2, save=True)
    session, said = job(tmp_path, 3, killed={1: 3})
    assert set(said) == {0, 2}
    for name, ranks, message in said.values():
        assert name in ("RankFailed", "RanksMissing") and 1 in ranks, message
        assert "rank 1" in message
    session_after, said = job(tmp_path, 2)
    assert {one[0] for one in said.values()} == {"restored"}
    assert not {session, session_after} & windows()


def test_what_killed_jobs_leave_in_memory_goes_with_the_next_start(tmp_path: Path) -> None:
    job(tmp_path, 2, save=True)
    session, said = job(tmp_path, 3, killed={0: 2, 1: 2, 2: 2})
    assert not said
    assert session in windows()
    session_after, said = job(tmp_path, 3)
    assert {(one[0], one[2]) for one in said.values()} == {("restored", True)}
    assert not {session, session_after} & windows()
