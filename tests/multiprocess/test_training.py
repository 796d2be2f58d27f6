"""Jobs of several ranks, as users start them: stopped, killed, and gone on with on as many ranks, or on others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import forked
import holdfast
from holdfast.model.names import CheckpointId
from holdfast.repo.repository import Repo
from holdfast.store.registry import open_store

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 180


def command(script: str, where: Path, ranks: int, steps: int) -> list[str]:
    program = [str(EXAMPLES / f"{script}.py"), "--where", str(where), "--steps", str(steps)]
    if ranks == 1:
        return [sys.executable, *program]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def run_forked(script: str, where: Path, ranks: int, steps: int) -> str:
    """The same without torchrun, and without loading torch again and again."""
    program, log = EXAMPLES / f"{script}.py", where.with_name(f"log-{steps}")
    words = ["--where", str(where), "--steps", str(steps)]
    status = forked.job(program, ranks, *words, log=log, timeout=PATIENCE_S)
    assert not any(status), forked.told(log, ranks)
    return Path(f"{log}.0").read_text().strip().splitlines()[-1]


def run(script: str, where: Path, ranks: int, steps: int) -> str:
    done = subprocess.run(
        command(script, where, ranks, steps), capture_output=True, text=True, timeout=PATIENCE_S, env=environment()
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1]


def state_of(where: Path, step: int | str = "latest") -> dict[str, Any]:
    """Every tensor of a checkpoint, whole, by path."""
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value
        elif isinstance(value, dict):
            for key, one in value.items():
                walk(one, f"{path}/{key}")
        elif isinstance(value, list | tuple):
            for number, one in enumerate(value):
                walk(one, f"{path}/{number}")

    walk(holdfast.load(where, step=step).state, "")
    return found


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
def test_a_job_that_is_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    assert run("ranks_fsdp2", tmp_path / "whole", 2, 30).startswith("step 30 on 2 ranks")
    run("ranks_fsdp2", tmp_path / "parts", 2, 17)
    assert run("ranks_fsdp2", tmp_path / "parts", 2, 30).startswith("step 30 on 2 ranks")
    whole, parts = state_of(tmp_path / "whole"), state_of(tmp_path / "parts")
    assert len(whole) > 10
    assert equal(whole, parts)


def test_any_number_of_ranks_goes_on_from_what_others_have_saved(tmp_path: Path) -> None:
    """Two ranks, one process, three ranks: each begins with what was saved, whole, and saves it on."""
    where = tmp_path / "checkpoints"
    for ranks, steps in ((2, 10), (1, 15), (3, 20)):
        assert run_forked("ranks_fsdp2", where, ranks, steps).startswith(f"step {steps} on {ranks} rank")
    repo = Repo.open(open_store(where))
    parents = [repo.attempt("main", number).parent for number in repo.attempts("main")]
    assert parents == [None, CheckpointId("main", 1, 10), CheckpointId("main", 2, 15)]


@pytest.mark.long
def test_tensor_parallelism_inside_fsdp(tmp_path: Path) -> None:
    run("ranks_tp_fsdp2", tmp_path / "tp", 4, 10)
    before = state_of(tmp_path / "tp", 10)
    assert before["/model/0.0.weight"].shape == (256, 64)
    assert run("ranks_tp_fsdp2", tmp_path / "tp", 2, 12).startswith("step 12 on 2 ranks")
    assert equal(before, state_of(tmp_path / "tp", 10))


@pytest.mark.long
def test_a_job_that_is_killed_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    where = tmp_path / "checkpoints"
    job = subprocess.Popen(
        command("ranks_ddp", where, 2, 100_000),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    try:
        until = time.monotonic() + PATIENCE_S
        while not committed(where):
            assert time.monotonic() < until and job.poll() is None
            time.sleep(0.05)
    finally:
        processes = [*psutil.Process(job.pid).children(recursive=True), job]  # ranks have sessions of their own
        for process in processes:
            process.kill()
        psutil.wait_procs(processes[:-1])
        job.wait()
    last = max(committed(where))
    assert run("ranks_ddp", where, 2, last + 3).startswith(f"step {last + 3} on 2 ranks")
    holdfast.load(where)


def committed(where: Path) -> list[int]:
    try:
        repo = Repo.open(open_store(where))
    except holdfast.HoldfastError:
        return []
    return [step for attempt in repo.attempts("main") for step in repo.committed("main", attempt)]
