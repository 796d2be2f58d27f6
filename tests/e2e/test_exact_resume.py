"""R8: N + M steps equal N steps, a new process, M steps, in every bit of the state. A slice of the matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from campaigns.exact_resume.campaign import MODULE, Outcome, fresh, outcome, summary
from campaigns.exact_resume.cases import CASES, CONTROLS, QUICK, End
from campaigns.exact_resume.data import own_order
from support.campaign_slices import outcome_of, reported

LEFT_OUT = (
    *("steps, generator of the loader", "steps, 2 workers", "steps, stateful loader"),
    *("epochs, in process", "epochs, stateful loader"),
)
"""Of the campaign's quick ones: each differs in one thing from two that are tried."""
FEW = [name for name in QUICK if name not in LEFT_OUT]
TOLD = ("a generator outside the state", "gradients kept from one step to the next")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("exact") / "out.json"
    return reported(MODULE, [*FEW, *TOLD], out, 280)


@pytest.mark.parametrize("name", FEW)
def test_r8_a_resumed_run_ends_in_the_state_of_an_uninterrupted_one(report: dict[str, Any], name: str) -> None:
    found = outcome_of(report, name)
    assert found["result"] == "equal"
    assert found["went_on_from"] == [end.goes_on_from for end in CASES[name].ends]
    assert found["leaves"] > 10


@pytest.mark.parametrize("name", TOLD)
def test_r8_the_comparison_tells_training_that_does_not_resume_exactly(report: dict[str, Any], name: str) -> None:
    assert outcome_of(report, name)["result"].startswith("model/0.weight: byte ")
    assert report["controls_told"] == report["controls"] == len(TOLD)


@pytest.mark.long
def test_r8_a_process_is_an_interpreter_of_its_own_unless_it_is_forked(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    assert fresh("stopped, killed, terminated", tmp_path / "place", "pieces", End(2)) == 0
    assert fresh("stopped, killed, terminated", tmp_path / "place", "pieces", End(5, "killed")) == -9


def test_r8_what_does_not_end_as_planned_is_no_equal(tmp_path: Path) -> None:
    def process(name: str, place: Path, run: str, end: End | None) -> int:
        (place / "output.txt").write_text("no room")
        return 0 if run == "whole" else 1

    found = outcome("steps, in process", tmp_path / "place", process)
    assert found.result == "the process to be stopped after step 4 ended with status 1: no room"


def test_r8_a_control_that_fails_has_told_nothing() -> None:
    name = next(iter(CONTROLS))
    assert summary([Outcome(name, "ended with status 1")])["controls_told"] == 0
    assert summary([Outcome(name, "equal", leaves=3)])["controls_told"] == 0
    assert summary([Outcome(name, "model: differs", leaves=3)])["controls_told"] == 1


def test_r8_every_case_ends_a_process_at_least_once_and_names_are_unique() -> None:
    assert not CASES.keys() & CONTROLS.keys()
    assert all(case.ends for case in (*CASES.values(), *CONTROLS.values()))
    for case in CONTROLS.values():
        assert case.left_out or case.keeps_gradients or case.loader is own_order, "nothing is wrong with it"
    assert not any(case.left_out or case.keeps_gradients for case in CASES.values())
