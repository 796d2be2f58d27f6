"""R8 across numbers of ranks: what was saved comes back bit for bit, and the data goes on in the same order. A slice of
the campaign, in processes."""

from __future__ import annotations

from typing import Any

import pytest

from campaigns.exact_resume.cases import End
from campaigns.resume_ranks.campaign import MODULE, Outcome, summary
from campaigns.resume_ranks.cases import CASES, CONTROLS, QUICK, QUICK_CONTROLS, Case
from campaigns.resume_ranks.judge import Life, differences, drawn, lives_of, order_of
from support.campaign_slices import outcome_of, reported

FEW = [name for name in QUICK if not CASES[name].same_ranks or CASES[name].repacked]
"""Another number of ranks each time; the same one again is for the campaign, but where `repack` comes between."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("resume") / "out.json"
    return reported(MODULE, [*FEW, *QUICK_CONTROLS], out, 900)


@pytest.mark.parametrize("name", FEW)
def test_r8_any_number_of_ranks_goes_on_with_what_was_saved(report: dict[str, Any], name: str) -> None:
    found = outcome_of(report, name)
    assert found["result"] == "as it has to be"
    assert found["steps"] >= 13 and found["tensors"] > 50
    if CASES[name].repeats:
        assert 0 < found["last_states_apart_by"] < 1e-4, "another order of sums, and nothing else"
    assert CASES[name].same_ranks != any("sums over ranks" in one for one in found["certificate_says"])


@pytest.mark.parametrize("name", QUICK_CONTROLS)
def test_r8_a_job_that_does_not_go_on_as_it_has_to_is_told(report: dict[str, Any], name: str) -> None:
    assert outcome_of(report, name)["result"].startswith(
        "step 4 took samples" if "cursor" in name else "rank 0 of 2 began"
    )
    assert report["controls_told"] == report["controls"] == len(QUICK_CONTROLS)


def test_r8_a_control_whose_jobs_fail_has_told_nothing() -> None:
    name = next(iter(CONTROLS))
    assert summary([Outcome(name, ("life 0 ended",), ended=False)])["controls_told"] == 0
    assert summary([Outcome(name, ())])["controls_told"] == 0
    assert summary([Outcome(name, ("step 4 took samples",))])["controls_told"] == 1


def test_r8_controls_break_something_and_cases_do_not() -> None:
    assert all(case.wrong for case in CONTROLS.values()) and not any(case.wrong for case in CASES.values())
    assert all(len(case.worlds) == len(case.ends) + 1 for case in (*CASES.values(), *CONTROLS.values()))
    assert not CASES.keys() & CONTROLS.keys()


# -- the judge itself ------------------------------------------------------------------------------------------


def _line(step: int, indices: list[int], **more: Any) -> dict[str, Any]:
    marks = {"python": f"p{step}", "numpy": f"n{step}"}
    return {"step": step, "indices": indices, "digests": {"w": f"w{step}"}, "marks": marks, "loss": "0x1p0", **more}


def _began(step: int, **more: Any) -> dict[str, Any]:
    said = {"exact": False, "reasons": ["saved by 1 and resumed by 2: sums over ranks add up"], "caveats": []}
    line = _line(step, [], certificate=said, life=2)
    return {**line, **more}


CASE = Case((1, 2), (End(1),), streams="alike")


def _judged(*second: dict[str, Any]) -> list[str]:
    whole = Life(1, [], {1: [_line(1, [4, 7])], 2: [_line(2, [1, 9])]})
    first = Life(1, [], {1: [_line(1, [4, 7])]})
    began, steps = list(second[:2]), list(second[2:])
    return list(differences(CASE, whole, [first, Life(2, began, {2: steps})]))


def test_r8_the_judge_sees_each_thing_that_is_not_as_it_has_to_be() -> None:
    right = (_began(1), _began(1), _line(2, [1]), _line(2, [9]))
    assert _judged(*right) == []
    assert "the ranks resumed from steps [1, 0]" in _judged(right[0], _began(0), *right[2:])[0]
    assert "another w" in _judged(right[0], _began(1, digests={"w": "x"}), *right[2:])[0]
    assert "took samples [9, 1]" in _judged(*right[:2], _line(2, [9]), _line(2, [1]))[0]
    assert "another state of numpy" in _judged(right[0], _began(1, marks={"numpy": "y", "python": "p1"}), *right[2:])[0]
    assert "drew otherwise" in _judged(*right[:3], _line(2, [9], marks={"python": "p9", "numpy": "n2"}))[0]
    silent = {"exact": True, "reasons": [], "caveats": []}
    assert "does not say" in _judged(right[0], _began(1, certificate=silent), *right[2:])[0]


def test_r8_what_fills_up_the_end_of_an_epoch_is_left_out() -> None:
    assert drawn([_line(1, [0, 2]), _line(1, [1, 3])]) == [0, 1, 2, 3]
    assert drawn([_line(1, [0, 2]), _line(1, [1])]) == [0, 1, 2]
    steps = {1: list(range(48)), 2: [48, 49, 0, 1], 3: [5, 6]}
    assert order_of(steps) == {1: list(range(48)), 2: [48, 49], 3: [5, 6]}
    assert order_of({1: [1, 2], 2: [2, 3]})[2] == [2, 3], "what comes twice within an epoch is seen"


def test_r8_trails_are_cut_into_lives() -> None:
    began = {"life": 2, "step": 1}
    trails = [[_line(1, [0]), {**began}, _line(2, [1])], [{**began}, _line(2, [2])]]
    first, second = lives_of(trails, (1, 2))
    assert list(first.steps) == [1] and len(first.began) == 0
    assert len(second.began) == 2 and [line["indices"] for line in second.steps[2]] == [[1], [2]]
