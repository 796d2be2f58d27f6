"""What counts as progress under `tenuto run`, with real processes: steps of each run by itself, and healthy ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenuto
from support.supervised import events, finished


def test_each_run_of_a_script_makes_its_own_progress(tmp_path: Path) -> None:
    script = """
import numpy as np, os, signal, tenuto
from tenuto import every
state = {"w": np.zeros(4)}
with tenuto.Checkpointer("ckpts", state, run="pretrain", save=every(steps=10)) as ckpt:
    for step in ckpt.steps(40):
        state["w"] += 1
with tenuto.Checkpointer("ckpts", state, run="finetune", save=every(steps=1)) as ckpt:
    ckpt.restore()
    began = ckpt.step
    for step in ckpt.steps(10):
        state["w"] += 1
        if step == began + 2:
            ckpt.wait()
            os.kill(os.getpid(), signal.SIGKILL)
"""
    done = finished(tmp_path, script, "--in-vain", "1")
    assert done.returncode == 0, done.stderr
    assert tenuto.load(tmp_path / "ckpts", run="finetune").checkpoint.step == 10
    assert "status 0; step 10;" in done.stderr


def test_values_that_go_wrong_at_the_same_step_each_time_are_given_up_after_as_many_starts_as_promised(
    tmp_path: Path,
) -> None:
    script = """
import numpy as np, tenuto
from tenuto import every
state = {"w": np.zeros(4)}
with tenuto.Checkpointer("ckpts", state, save=every(steps=5), on_unhealthy="stop") as ckpt:
    for step in ckpt.steps(30):
        state["w"] += 1
        ckpt.log(loss=np.nan if step + 1 >= 10 else 1.0)
"""
    done = finished(tmp_path, script, "--in-vain", "3")
    assert done.returncode == 1
    starts = [one for one in events(tmp_path) if one["event"] == "died"]
    assert [one["kind"] for one in starts] == ["unhealthy"] * 4, "the first came to new healthy steps, three did not"
    assert [one["new"] for one in starts] == [True, False, False, False]
    assert done.stderr.count("started again from step 5, before what went wrong") == 3, done.stderr
    assert "3 starts in a row ended without a new step" in done.stderr


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A directory that stays where it is when something is mounted over `/dev/shm`: pytest's own may lie there."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        yield Path(made)


def test_where_shared_memory_is_full_the_heartbeats_go_elsewhere(on_disk: Path) -> None:
    (on_disk / "train.py").write_text(
        "import numpy as np, tenuto\n"
        "state = {'w': np.zeros(4)}\n"
        "with tenuto.Checkpointer('ckpts', state, save=tenuto.every(steps=5)) as ckpt:\n"
        "    for step in ckpt.steps(10):\n"
        "        state['w'] += 1\n"
    )
    full = (
        'mount -t tmpfs -o size=8k tmpfs /dev/shm && { head -c 1M /dev/zero > /dev/shm/full 2>/dev/null; exec "$@"; }'
    )
    inside = [str(shutil.which("unshare")), "--mount", "sh", "-c", full, "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("this process may mount nothing")
    command = [sys.executable, "-m", "tenuto", "run", "--journal", "journal.jsonl", "--", sys.executable, "train.py"]
    done = subprocess.run([*inside, *command], cwd=on_disk, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "/dev/shm has no room for heartbeats (No space left on device): they go to" in done.stderr
    (end,) = [one for one in events(on_disk) if one["event"] == "ended"]
    assert (end["status"], end["step"]) == (0, 10), "its steps were heard of"
    assert tenuto.load(on_disk / "ckpts").checkpoint.step == 10
