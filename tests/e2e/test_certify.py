"""`tenuto certify` with real scripts, each of them a way in which a resume is exact, or is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import loaded_interpreter

SCRIPTS = Path(__file__).with_name("certify_scripts")
CASES = Path(__file__).with_name("certify_cases.py")
UNINTERRUPTED, KILLED, RESUMED = [0, 9, False], [0, 4, True], [3, 9, False]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for script in ("training", "torch_training"):
        done = loaded_interpreter.run([str(CASES), script], torch=script == "torch_training", timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        found |= json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "case",
    [
        *("training.exact", "training.epochs", "training.epochs_end", "training.step_done", "training.saves_too"),
        *("torch_training.exact", "torch_training.epochs_end", "torch_training.epochs_end_accumulated"),
        *("torch_training.epochs_end_stateful", "torch_training.epochs_end_stateful_order"),
    ],
)
def test_a_training_that_resumes_exactly_is_certified(outcomes: dict[str, Any], case: str) -> None:
    found = outcomes[case]
    assert (found["kind"], found["cause"], found["step"]) == ("exact", None, None)
    assert (found["saved"], found["last"], found["unseeded"], found["uncovered"]) == (3, 9, [], [])
    assert found["lives"] == [UNINTERRUPTED, KILLED, RESUMED]


def test_a_metric_that_a_policy_goes_by_and_the_script_never_logs_is_named(outcomes: dict[str, Any]) -> None:
    assert outcomes["training.exact"]["unlogged"] == {}
    assert outcomes["training.step_done"]["unlogged"] == {"val_loss": "keep.best(1, 'val_loss', mode='min')"}


def test_a_generator_that_nobody_seeds_and_nobody_uses_harms_nothing(outcomes: dict[str, Any]) -> None:
    found = outcomes["training.unseeded_unused"]
    assert (found["kind"], found["unseeded"]) == ("exact", ["python"])


def test_what_is_lost_without_a_trace_is_named_all_the_same(outcomes: dict[str, Any]) -> None:
    found = outcomes["training.harmless_average"]
    assert (found["kind"], found["uncovered"]) == ("exact", ["average (training.Average) is not in `state`"])


@pytest.mark.parametrize(
    ("case", "cause", "step", "first"),
    [
        ("training.unseeded", "unseeded", 0, "weights"),
        ("training.augmented", "unseeded data", 1, "weights"),
        ("training.nondeterministic", "nondeterministic step", 5, "weights"),
        ("torch_training.workers", "unseeded data", 1, "model/weight"),
    ],
)
def test_a_training_that_does_not_repeat_itself(
    outcomes: dict[str, Any], case: str, cause: str, step: int, first: str
) -> None:
    found = outcomes[case]
    assert (found["kind"], found["cause"], found["step"], found["first"]) == ("unrepeatable", cause, step, first)


@pytest.mark.parametrize(
    ("case", "cause", "step", "first", "advice"),
    [
        ("training.average", "uncovered state", 4, "momentum", "average (training.Average) is not in"),
        ("training.generator", "uncovered state", 4, "weights", "own (numpy.random._generator.Generator) is not in"),
        ("training.scheduler", "learning rate", 4, "optimizer/param_groups/0/lr", "put the scheduler into `state`"),
        ("training.data", "data position", 3, "#private/data/delivered", "the data cannot be positioned"),
        ("training.forgetful", "restore", 3, "average/weights", "state_dict"),
        ("training.broken_restore", "restore", 3, "#private/random/numpy/state/pos", ""),
        ("training.warm_up", "random draws", 4, "weights", "before ckpt.restore()"),
        ("torch_training.scheduler", "learning rate", 4, "optimizer/param_groups/0/lr", "StepLR) is not in"),
    ],
)
def test_a_resume_that_is_not_exact(
    outcomes: dict[str, Any], case: str, cause: str, step: int, first: str, advice: str
) -> None:
    found = outcomes[case]
    assert (found["kind"], found["cause"], found["step"], found["first"]) == ("inexact", cause, step, first)
    assert found["lives"] == [UNINTERRUPTED, KILLED, RESUMED, UNINTERRUPTED]
    assert advice in " ".join(found["advice"])


def test_a_script_that_does_not_resume(outcomes: dict[str, Any]) -> None:
    found = outcomes["training.no_restore"]
    assert (found["kind"], found["cause"], found["first"]) == ("inexact", "no resume", None)


def test_the_place_that_the_script_was_told_is_never_touched(outcomes: dict[str, Any]) -> None:
    assert not any(found["touched"] for found in outcomes.values())


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("ends_early", "ended with status 0 after 5 steps, and 9 were wanted"),
        ("crashes", "ended with status 1 after 2 steps; its output ends:\n  | about to divide"),
        ("no_checkpointer", "without building a Checkpointer; its output ends:\n  | trained without saving"),
        ("elsewhere", "ckpts-other, and not for the WHERE that was given"),
        ("two", "more than one Checkpointer"),
        ("asks", "EOFError"),
    ],
)
def test_a_script_that_cannot_be_certified(outcomes: dict[str, Any], case: str, said: str) -> None:
    found = outcomes[f"training.{case}"]
    assert found["error"] == "ScriptFailed" and said in found["message"] and found["hint"]


def test_a_script_that_hangs(outcomes: dict[str, Any]) -> None:
    found = outcomes["training.hangs"]
    assert found["error"] == "DeadlineExceeded" and "reported nothing for 1 s, after 0 steps" in found["message"]


def test_a_script_that_catches_everything_is_ended_all_the_same(outcomes: dict[str, Any]) -> None:
    found = outcomes["training.catches"]
    assert (found["kind"], found["last"]) == ("exact", 11)


def command(tmp_path: Path, name: str, *options: str) -> list[str]:
    main = [sys.executable, "-c", "from tenuto.cli import main; main()", "certify", *options]
    script = [sys.executable, str(SCRIPTS / "training.py"), name]
    return [*main, str(tmp_path / "ckpts"), "--", *script, str(tmp_path / "ckpts")]


def test_the_command_tells_and_cleans_up(tmp_path: Path) -> None:
    options = ("--steps", "2", "--more", "2")
    done = subprocess.run(
        command(tmp_path, "average", *options, "--json"), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 20, done.stderr
    found = json.loads(done.stdout)
    assert (found["schema"], found["verdict"], found["saved"], found["last"]) == (
        "tenuto.certify/1",
        "inexact",
        2,
        4,
    )
    assert found["difference"]["first"] == "momentum" and found["difference"]["step"] == 3
    assert found["cause"]["name"] == "uncovered state" and found["certificate"]["leaves_out"]
    assert "running, resumed: 4 steps" in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = subprocess.run(
        command(tmp_path, "crashes", *options, "--keep"), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 22 and "ZeroDivisionError" in done.stderr and done.stdout == ""
    (kept,) = tmp_path.iterdir()
    assert f"kept in {kept}" in done.stderr and "about to divide" in (kept / "output-1.txt").read_text()


def test_a_relative_scratch_directory_serves_a_script_that_changes_its_own(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    words = command(tmp_path, "moves", "--scratch", "scratch", "--steps", "1", "--more", "1")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout[:6]) == (0, "EXACT:"), done.stderr
    assert list((tmp_path / "scratch").iterdir()) == []


def test_an_interrupt_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = command(tmp_path, "children", "--scratch", str(scratch), "--steps", "500", "--more", "400")
    env = {**os.environ, "CHILDREN": str(pids), "SLOWLY": "1"}
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env) as process:
        place = _first_row(scratch, process)
        started = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        trainer = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    gone, alive = psutil.wait_procs([*started, *trainer], timeout=30)
    assert alive == [] and len(gone) == 3
    assert not place.exists() and not (tmp_path / "ckpts").exists()


def _first_row(scratch: Path, process: subprocess.Popen[bytes]) -> Path:
    """Waits until the script has told a step; where it works."""
    while process.poll() is None:
        for trail in scratch.glob("*/trail-1.jsonl"):
            if b'"row"' in trail.read_bytes():
                return trail.parent
    raise AssertionError("certify ended by itself")
