"""The campaign that kills single ranks, under torch: a slice of it, and its judge."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from campaigns.rank_kills.__main__ import MODULE
from campaigns.rank_kills.campaign import Tally, _knew, campaign, summary
from campaigns.rank_kills.kinds import Judged, OfNumbers
from campaigns.rank_kills.processes import Death, Ended, Plan
from campaigns.rank_kills.torch_training import CONTROLS, differences, lines
from support import loaded_interpreter

TIMEOUT_S = 600


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A few kills, in an interpreter that has run nothing of torch."""
    out = tmp_path_factory.mktemp("kills") / "out.json"
    words = ["--training", "torch", "--kills", "2", "--torch-steps", "8", "--seed", "5", "--json", str(out)]
    done = loaded_interpreter.run(["-m", MODULE, *words], torch=True, timeout=TIMEOUT_S)
    assert out.exists(), done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    assert done.returncode == 0, found
    return found


# Long: `test_memory_torch` kills a rank of either wrapper, and `test_ranks_trust` ranks of any kind.
@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_r2_single_ranks_killed_under_torch_go_on_to_the_very_bits(report: dict[str, Any], wrapper: str) -> None:
    found = report["trainings"][wrapper]
    assert (found["kills"], found["faults"]) == (1, [])
    assert found["rounds"] == found["rounds_equal_to_the_untouched_training"] >= 1
    compared = found["compared_bit_for_bit"]
    assert compared["steps of a rank"] >= 16 and compared["checkpoints"] >= 1


@pytest.mark.long
def test_r2_what_is_broken_in_a_training_under_torch_is_told(report: dict[str, Any]) -> None:
    """Parameters, optimizer, random generators, data order."""
    told = {name: seen for one in report["trainings"].values() for name, seen in one["controls_told"].items()}
    assert told == dict.fromkeys(CONTROLS, True)


class Broken(OfNumbers):
    def judge(self, plan: Plan) -> Judged:
        return Judged(("another cut",))


def test_a_round_that_ends_otherwise_is_a_fault(tmp_path: Path) -> None:
    *_, tallies = campaign(1, 1, tmp_path, [Broken(6)])
    tally = tallies["numbers"]
    assert (tally.kills, tally.rounds, tally.equal) == (1, 1, 0)
    assert not tally.as_it_has_to_be and "another cut" in summary(tallies)["faults"][0]


def test_a_control_that_is_not_told_fails_the_campaign() -> None:
    assert Tally(controls={"one bit": True}).as_it_has_to_be
    assert not Tally(controls={"one bit": True, "the cursor": False}).as_it_has_to_be


# -- the judge itself ---


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "digests": {"w": f"w{step}"}, "marks": {"torch": f"t{step}"}, "indices": [step], **more}


WHOLE = {step: line(step, loss=f"l{step}") for step in range(1, 6)}


@pytest.mark.parametrize(
    ("trail", "words"),
    [
        ([line(1), line(2)], []),
        ([{**line(2), "life": 3}, line(3)], []),
        ([], []),
        ([{**line(2), "life": 3}, line(4)], ["went on from step 2 with step 4"]),
        ([line(2)], ["went on from step 0 with step 2"]),
        ([line(1), line(2, digests={"w": "x"})], ["after step 2 with other parameters and optimizer"]),
        ([{**line(2), "life": 3, "marks": {}}], ["restored step 2 with other random generators"]),
        ([line(1, indices=[7])], ["after step 1 with other samples"]),
        ([line(1, loss="l7")], ["after step 1 with other loss"]),
    ],
)
def test_the_judge_sees_each_thing_that_differs_from_the_untouched_training(
    trail: list[dict[str, Any]], words: list[str]
) -> None:
    assert list(differences(trail, WHOLE)) == words


def test_half_a_line_of_who_was_killed_is_none(tmp_path: Path) -> None:
    path = tmp_path / "trail"
    path.write_text(json.dumps(line(1)) + "\n" + json.dumps(line(2))[:-4])
    assert lines(path) == [line(1)]


def test_a_rank_that_is_left_alone_names_who_was_killed_or_who_found_it_out() -> None:
    plan = Plan(Path(), 3, 10, death=Death(1, number=signal.SIGKILL))

    def knew(status: int, told: dict[str, Any], by_itself: set[int]) -> bool:
        return _knew(Ended(status, told, 1.0), 0, plan, by_itself)

    assert knew(0, {"step": 10}, set()) and not knew(0, {"step": 8}, set())
    assert knew(1, {"ranks": [1]}, set()) and not knew(1, {"ranks": [2]}, set())
    assert knew(1, {"ranks": [2]}, {2}) and knew(1, {"ranks": []}, {0})
    assert not knew(1, {}, set()) and not knew(-6, {"ranks": [1]}, set())
    assert knew(1, {"step": 10, "unsaved": ["rank 0 waited for rank 1, which is dead"]}, set())
    assert not knew(1, {"step": 10, "unsaved": ["no space left"]}, set()) and not knew(1, {"step": 10}, set())
