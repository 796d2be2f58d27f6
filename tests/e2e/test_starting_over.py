"""Who starts over, on purpose or by mistake, is told what that leaves, and can go back to it for a day."""

from __future__ import annotations

from pathlib import Path

import pytest

import tenuto
from support import loaded_interpreter

SCRIPT = """
import sys

import numpy as np

import tenuto
from tenuto import every

state = {"weights": np.zeros(1000)}
options = eval(sys.argv[2])
with tenuto.Checkpointer("ckpts", state, save=every(steps=1), **options) as ckpt:
    for step in ckpt.steps(int(sys.argv[1])):
        state["weights"] += 1
print(int(state["weights"][0]))
"""


@pytest.fixture
def train(tmp_path: Path):
    """Runs a plain script to a step; returns the value of its weights at the end, and its stderr."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(steps: int, options: str = "{}") -> tuple[int, str]:
        done = loaded_interpreter.run([str(tmp_path / "train.py"), str(steps), options], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return int(done.stdout), done.stderr

    return run


@pytest.fixture
def command(tmp_path: Path):
    def run(*words: str) -> str:
        done = loaded_interpreter.run(["-c", "from tenuto.cli import main; main()", *words], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def line_of(stderr: str, words: str) -> str:
    (line,) = [line for line in stderr.splitlines() if words in line]
    return line


def test_starting_over_says_what_it_leaves_and_it_can_be_brought_back(train, command, tmp_path: Path) -> None:
    assert train(5) == (5, "")
    value, stderr = train(4, "{'resume_from': None}")
    assert value == 4
    assert line_of(stderr, "starts over") == (
        "tenuto: run main starts over and leaves step 5 behind, main/a0001/5: it is kept until keep= drops it, and "
        f"then for 24 h in the trash (`tenuto undelete {tmp_path / 'ckpts'} main/a0001/5`); "
        "resume_from='a0001/5' goes back to it"
    )
    assert [id.step for id in tenuto.Repository(tmp_path / "ckpts").checkpoints()] == [4, 3, 2]
    assert "main/a0001/5 is back" in command("undelete", "ckpts", "main/a0001/5")
    value, stderr = train(6, "{'resume_from': 'a0001/5'}")
    assert value == 6
    assert "goes back to step 5 and leaves step 4 behind, main/a0002/4" in line_of(stderr, "leaves step")
    value, stderr = train(7)
    assert value == 7 and "behind" not in stderr


def test_with_everything_kept_nothing_goes_into_the_trash(train, command, tmp_path: Path) -> None:
    train(2, "{'keep': tenuto.keep.all()}")
    stderr = train(1, "{'keep': tenuto.keep.all(), 'resume_from': None}")[1]
    assert line_of(stderr, "starts over").endswith(
        "behind, main/a0001/2: it is kept; resume_from='a0001/2' goes back to it"
    )
    assert command("ls", "ckpts", "--trash") == ""
