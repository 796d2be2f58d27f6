"""A few cells of the matrix of phases, and old jobs that come back: the place where ranks meet is struck too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from campaigns.rank_kills.processes import Ended
from campaigns.rank_phases import campaign, table
from campaigns.rank_phases.cells import BESIDE, ONLY_COORDINATOR, PHASES, Cell, Outcome, Struck, begun, cells, lost
from campaigns.rank_phases.deadlines import Promise, Times
from campaigns.rank_phases.old_job import CUTS, Cut, cuts
from tenuto.engine.group import group
from tenuto.engine.group.group import session_settings
from tenuto.ranks.contract import Settings

FEW = (
    Cell("server", "write", "SIGSTOP"),
    Cell("directory", "plan", "gone"),
    Cell("directory", "vote", "hung"),
    Cell(2, "claim", "SIGKILL"),
    Cell(0, "vote", "SIGSTOP", serves=True),
    Cell(2, "memory", "SIGKILL", serves=True),
    Cut("vote", whole=True),
    Cut("announce", whole=False),
)


def test_i8_i11_whoever_is_struck_the_others_say_so_and_who_comes_back_changes_nothing(tmp_path: Path) -> None:
    import torch.distributed  # noqa: F401 - once, before ranks are forked

    outcomes = list(campaign.play(FEW, tmp_path, at_once=6))
    assert [(str(one.cell), one.faults) for one in outcomes if one.faults] == []
    assert [one.cell for one in outcomes] == list(FEW)


def test_the_matrix_has_every_phase_for_every_victim() -> None:
    found = list(cells())
    assert len(set(found)) == len(found)
    for victim, hows in ((0, 2), (2, 2), ("server", 2), ("directory", 3)):
        told = [(cell.phase, cell.how) for cell in found if cell.victim == victim and not cell.serves]
        phases = [*PHASES, *(BESIDE if victim != "directory" else ()), *(ONLY_COORDINATOR if victim == 0 else ())]
        assert sorted(told) == sorted({(phase, how) for phase in phases for _, how in told})
        assert len(told) == hows * len(phases)
    served = [cell for cell in found if cell.serves]
    assert len(served) == 4 * (len(PHASES) + len(BESIDE))
    assert {cut.phase for cut in cuts() if cut.whole} == {cut.phase for cut in cuts() if not cut.whole} == set(CUTS)


def test_ranks_that_end_without_a_word_are_a_fault(tmp_path: Path) -> None:
    """The judge itself: nobody dies where the plan has no such point, and then each rank ends well."""
    start = begun(tmp_path / "begun")
    with Struck(Cell(2, "write", "SIGKILL"), start, tmp_path / "cell") as struck:
        assert struck.job.wait(60)
        struck.job.ended |= {rank: Ended(0, {"step": 18}, 1.0) for rank in (0, 2)}
        faults = list(struck.faults())
    assert any("rank 0 ended without naming a phase" in fault for fault in faults)
    assert any("rank 2 was to die" in fault for fault in faults)


@pytest.mark.parametrize(
    ("found", "gone"),
    [([], True), ([(1, 6)], False), ([(2, 9)], True), ([(1, 3), (2, 9)], True), ([(2, 9), (2, 12)], False)],
)
def test_what_retention_has_removed_is_not_lost(found: list[tuple[int, int]], gone: bool) -> None:
    assert lost(found) is gone


# -- in time ---

QUIET_S, QUICK_S = 0.8, 0.1
"""What a job that nobody disturbs takes on a machine that does nothing else, and what a rank there has to compute until
its error is raised."""
WAITS = sorted({cell.promise for cell in cells()}, key=str)


def times(promise: Promise, *, waits: float = 1.0, slower: float = 1.0) -> Times:
    """Where the wait takes `waits` times what is promised, on a machine that is so much `slower`."""
    raised_s = waits * promise.raised_s + slower * QUICK_S
    left_s = raised_s + promise.left_s - promise.raised_s + slower * QUICK_S
    return Times(promise, slower * QUIET_S, {0: raised_s}, {0: left_s})


@pytest.mark.parametrize("promise", WAITS, ids=str)
def test_r5_whoever_waits_three_times_as_long_is_late_and_a_slow_machine_is_not(promise: Promise) -> None:
    assert list(times(promise).late()) == []
    assert list(times(promise, slower=5).late()) == []
    assert list(times(promise, slower=30).late()) == []
    for slower in (1, 2, 10):
        found = list(times(promise, waits=3, slower=slower).late())
        assert len(found) == 2 and found[0].startswith("rank 0 raised"), found


def test_what_is_promised_follows_from_how_somebody_is_lost_alone() -> None:
    assert {(cell.how, cell.promise.raised_s) for cell in cells() if cell.how != "emptied"} == {
        ("SIGKILL", 5.0),
        ("SIGSTOP", 30.0),
        ("gone", 30.0),
        ("hung", 30.0),
    }


@pytest.mark.long
def test_r5_ranks_that_find_out_three_times_as_late_as_promised_are_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(timeout_s: float, silence_s: float) -> Settings:
        return replace(session_settings(timeout_s, silence_s), dead_after_s=50.0)

    monkeypatch.setattr(group, "session_settings", slowly)
    (outcome,) = campaign.play([Cell(2, "vote", "SIGSTOP")], tmp_path, at_once=1)
    assert len(outcome.faults) == 4 and all("after the strike" in fault for fault in outcome.faults), outcome


def test_r5_who_raises_in_time_and_does_not_leave_is_late() -> None:
    promise = Promise("vote", "SIGKILL")
    kept = times(promise)
    assert "rank 0 left" in next(replace(kept, left_s={0: promise.left_s + 9 * QUIET_S}).late())


def test_the_result_has_the_slowest_rank_of_each_cell() -> None:
    cell = Cell(2, "vote", "SIGSTOP")
    slow = Times(cell.promise, 1.0, {0: 16.04, 1: 3.0}, {0: 16.1, 1: 17.26})
    outcomes = [Outcome(cell, (), times=slow), Outcome(cell, (), times=Times(cell.promise, 1.0, {}, {}))]
    assert campaign.waits(outcomes) == [
        {"phase": "vote", "who": "rank 2", "how": "SIGSTOP", "promised_s": 30.0, "raised_s": 16.0, "left_s": 17.3}
    ]


def test_the_page_has_the_times_of_the_committed_result() -> None:
    waits = json.loads(table.RESULT.read_text())["waits"]
    text = table.PAGE.read_text()
    assert table.page(text, waits) == text and len(waits) > 100
    assert "| vote | 16.0 / 17.3 |" in table.tables([{**waits[0], "phase": "vote", "raised_s": 16.0, "left_s": 17.26}])
