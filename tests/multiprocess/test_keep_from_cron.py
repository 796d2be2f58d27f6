"""`tenuto keep --yes` as cron runs it: two operators at once, and a training in the same repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import tenuto
from tenuto import every, keep
from tenuto.maintenance.verify import assert_whole

TRAINING = """
import sys, numpy as np, tenuto
from tenuto import every, keep

state = {"w": np.zeros(1000)}
with tenuto.Checkpointer(sys.argv[1], state, run="live", save=every(steps=1), keep=keep.latest(5)) as ckpt:
    for step in ckpt.steps(40):
        state["w"] += 1
        if step == 3:
            ckpt.wait()
            print("trains", flush=True)
            sys.stdin.readline()
"""


def tenuto_keep(where: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tenuto", "keep", str(where), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_operators_and_a_training_at_once(tmp_path: Path) -> None:
    where = tmp_path / "ckpts"
    with tenuto.Checkpointer(where, {"w": np.zeros(1000)}, run="done", save=every(steps=1), keep=keep.all()) as ckpt:
        for _ in ckpt.steps(12):
            pass
    tenuto.Repository(where).tag("paper", 4, run="done")
    command = [sys.executable, "-c", TRAINING, str(where)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None and training.stdin is not None
        assert training.stdout.readline() == "trains\n"
        refused = tenuto_keep(where, "--run", "live", "--latest", "1", "--yes")
        said = {refused: refused.communicate(timeout=60)}  # while the training waits, and has its run
        one = tenuto_keep(where, "--run", "done", "--latest", "2", "--daily", "7", "--yes", "--json")
        other = tenuto_keep(where, "--run", "done", "--latest", "2", "--daily", "7", "--yes", "--json")
        training.stdin.write("go on\n")
        training.stdin.flush()
        said |= {process: process.communicate(timeout=60) for process in (one, other)}
        assert training.wait(60) == 0
    # 13: its run is in use. 14: another one was faster, and does the same.
    assert refused.returncode == 13, said[refused]
    assert {one.returncode, other.returncode} <= {0, 13, 14} and 0 in {one.returncode, other.returncode}, said
    repository = tenuto.Repository(where)
    assert [id.step for id in repository.checkpoints("done")] == [12, 11, 4, 1]
    assert [id.step for id in repository.checkpoints("live")] == [40, 39, 38, 37, 36]
    assert tenuto.load(where, run="done").step == 12 and tenuto.load(where, run="live").step == 40
    assert_whole(repository.repo)
