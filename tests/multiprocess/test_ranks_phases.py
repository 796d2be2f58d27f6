"""A few cells of the matrix of phases, and old jobs that come back: the place where ranks meet is struck too."""

from __future__ import annotations

from pathlib import Path

from holdfast.testing.rank_kills.processes import Ended
from holdfast.testing.rank_phases import campaign
from holdfast.testing.rank_phases.cells import ONLY_COORDINATOR, PHASES, Cell, Struck, begun, cells
from holdfast.testing.rank_phases.returning import CUTS, Cut, cuts

FEW = (
    Cell("server", "choose", "SIGKILL"),
    Cell("server", "write", "SIGSTOP"),
    Cell("server", "vote", "SIGKILL"),
    Cell("directory", "plan", "gone"),
    Cell("directory", "vote", "hung"),
    Cell("directory", "ready", "emptied"),
    Cell(0, "choose", "SIGSTOP"),
    Cell(2, "claim", "SIGKILL"),
    Cut("vote", whole=True),
    Cut("vote", whole=False, nth=2),
    Cut("begin", whole=True, nth=2),
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
        told = [(cell.phase, cell.how) for cell in found if cell.victim == victim]
        assert len(told) == hows * len(PHASES) + (hows * len(ONLY_COORDINATOR) if victim == 0 else 0)
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
