"""The demo and the script to take home, as a reader runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import loaded_interpreter

SCRIPT = Path(__file__).parents[2] / "examples/train_gpt.py"


def tenuto(*arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    code = "from tenuto.cli import main; main()"
    return loaded_interpreter.run(["-c", code, *arguments], torch=True, timeout=timeout)


def assert_nothing_sealed_is_lost(kept: Path, lost: list[int]) -> None:
    """After each kill training goes on from the newest state that the killed process is known to have sealed, or from a
    newer one. That is behind by the step under way and by the one that was still to be sealed, at most. Beside a save
    to the store, which holds one of the two images, it may also be the state that is being written."""
    lives = [
        [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        for path in sorted(kept.glob("events-killed-*.jsonl"))
    ]
    assert len(lives) == len(lost) + 1 and any(steps(life, "SavedToMemory") for life in lives)
    for life, after, again in zip(lives, lives[1:], lost, strict=False):
        whole = max(steps(life, "Restored") + steps(life, "SavedToMemory") + steps(life, "Committed"), default=0)
        began = max(steps(after, "Restored"), default=0)
        writing = sorted(set(steps(life, "SaveStarted")) - set(steps(life, "Committed")))
        assert began >= whole or began in writing
        if steps(life, "SavedToMemory") and steps(after, "RestoredFromMemory") and not writing:
            assert again <= 2


def steps(life: list[dict[str, Any]], event: str) -> list[int]:
    return [one["id"]["step"] for one in life if one["event"] == event]


def test_the_demo_kills_resumes_and_proves(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = tenuto("demo", "--kills", "2", "--steps", "16", "--save-every", "4", "--json", "--keep", str(kept))
    assert done.returncode == 0, done.stderr
    account = json.loads(done.stdout)
    assert account["schema"] == "tenuto.demo/1"
    assert account["equal"] is True and account["kills"] == 2 and account["difference"] is None
    assert account["stall_median_s"] > 0 and account["one_copy_s"] > 0 and account["leaves"] > 100
    assert_nothing_sealed_is_lost(kept, account["steps_done_again"])
    assert account["restarts_from_memory"] + account["restarts_from_disk"] + account["restarts_from_scratch"] == 2
    assert account["restarts_from_memory"] >= 1 and account["stall_in_memory_median_s"] > 0
    assert sum(account["steps_done_again"]) <= sum(account["steps_done_again_from_disk_alone"])
    assert account["not_kept_in_memory"] is None
    assert "training untouched" in done.stderr
    assert tenuto("verify", str(kept / "checkpoints")).returncode == 0
    again = tenuto("demo", "--keep", str(kept))
    assert again.returncode == 2 and "not empty" in again.stderr


@pytest.mark.long
def test_without_shared_memory_the_demo_says_so_and_comes_back_from_disk(tmp_path: Path) -> None:
    code = (
        "from tenuto.engine.staging import slots; from tenuto.cli import main; "
        f"slots.SHARED_MEMORY = {str(tmp_path / 'none')!r}; main()"
    )
    command = [sys.executable, "-c", code, "demo", "--kills", "1", "--steps", "10", "--save-every", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "EQUAL" in done.stdout and "from memory" not in done.stdout
    assert "not in memory" in done.stdout and "shared memory cannot be used" in done.stdout


def test_a_storm_of_a_few_faults_ends_bit_for_bit_as_a_training_without_them(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    arguments = ("--steps", "40", "--save-every", "4", "--json", "--keep", str(kept))
    done = tenuto("demo", "--storm", *arguments, timeout=600)  # five starts of an interpreter with torch
    assert done.returncode == 0, done.stderr
    account = json.loads(done.stdout)
    assert account["schema"] == "tenuto.demo.storm/1" and account["equal"] is True and account["leaves"] > 100
    assert [one["kind"] for one in account["faults"]] == ["kill", "nan", "flipped byte"]
    assert all(one["lost_s"] > 0 for one in account["faults"]) and 0 < account["ettr"] < 1
    said = (kept / "output.txt").read_text()
    assert "from memory" in said and "damaged" in said


def test_the_script_to_take_home_goes_on_where_it_was(tmp_path: Path) -> None:
    def run(steps: int) -> str:
        words = [str(SCRIPT), str(tmp_path), "--steps", str(steps), "--save-every", "2"]
        done = loaded_interpreter.run(words, torch=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "step    20" in run(20)
    assert run(20) == ""
    listed = json.loads(tenuto("ls", str(tmp_path), "--json").stdout)
    assert [one["step"] for one in listed["runs"][0]["checkpoints"]][:3] == [20, 18, 16]
