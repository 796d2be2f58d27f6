"""The suite for adapters of trainers: one that is right passes, and three that leave something out do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.loaded_interpreter import Program
from tenuto.testing.trainer_suite import TrainerSuite

SCRIPT = Path(__file__).with_name("trainer_scripts") / "train_plain.py"
PRELOAD = ("torch", "tenuto.training.checkpointer", "tenuto.torch")


class TestATrainerThatOwnsItsLoop(TrainerSuite):
    """A slice: the last steps of epochs and one inside. The processes are forked from an interpreter that has loaded
    torch; those of `TestEachWayThroughIt` load it themselves."""

    script = SCRIPT
    preload = PRELOAD
    kills = 1
    every = 10
    again = (0.5,)
    certify_steps = ()

    def start(self, command: Sequence[str], *, errors: int, directory: Path) -> Program:
        return Program(command[1:], torch=True, env=self._environ(), cwd=directory, stderr=errors, session=True)


@pytest.mark.long
class TestEachWayThroughIt(TrainerSuite):
    script = SCRIPT
    preload = PRELOAD
    kills = 5
    certify_steps = (3, 5, 8)


class Broken(TrainerSuite):
    script = SCRIPT
    preload = PRELOAD


@pytest.fixture
def trained(tmp_path: Path, broken: str) -> dict[str, tuple[Path, dict[str, Any]]]:
    """A plain training, and one by the broken adapter that nothing interrupts, each with what it saved."""
    directory = tmp_path / "trained"
    directory.mkdir()
    plain = ["--where", "", "--out", str(directory / "plain.json")]
    where, out = str(directory / broken), str(directory / f"{broken}.json")
    jobs = [plain, ["--where", where, "--out", out, "--every-step", "--broken", broken]]
    assert Broken().forked(jobs, directory) == ["", ""]
    return {path.stem: (path.with_suffix(""), json.loads(path.read_text())) for path in directory.glob("*.json")}


@pytest.mark.parametrize(
    ("broken", "step", "shown"),
    [
        pytest.param("random", 4, "model/0.weight differs", marks=pytest.mark.long),
        pytest.param("position", 3, "it failed: .*step 8 is not above the last completed one", marks=pytest.mark.long),
        pytest.param("callback", 10, "history/stopping/", marks=pytest.mark.long),
    ],
)
def test_an_adapter_that_leaves_something_out_does_not_pass(
    trained: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path, broken: str, step: int, shown: str
) -> None:
    suite = Broken()
    suite.options = ("--broken", broken)  # type: ignore[misc]
    saved, found = trained[broken]
    plain = {"steps": 20, **trained["plain"][1]}
    suite.same(found, plain, "uninterrupted, it shows nothing")
    for other in {int(one.name[5:]) for one in saved.glob("runs/main/a0001/step-*")} - {step}:
        shutil.rmtree(saved / f"runs/main/a0001/step-{other:08d}")
    with pytest.raises(AssertionError, match=rf"(?s)1 of 1 resumes differ.*{shown}"):
        suite.test_it_resumes_from_each_step(plain, (saved, found), tmp_path)
