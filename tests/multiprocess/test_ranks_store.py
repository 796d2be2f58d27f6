"""A job whose store server dies, with the process of the first rank or with torchrun's agent: all survivors say so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import tenuto
from campaigns.ports import free_port
from support.loaded_interpreter import Program
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

PROGRAM = Path(__file__).with_name("store_program.py")
RESTARTED = Path(__file__).with_name("restart_program.py")
SIGTERM_TO_SIGKILL_S = 30.0
"""How long torchrun waits, by default, for ranks to leave."""
PATIENCE_S = 150.0


def until(what: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@contextmanager
def running(place: Path, commands: list[tuple[list[str], dict[str, str]]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Their processes; all that is below them is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command, more in commands:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **more}
            with (place / "log").open("ab") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        yield started
    finally:
        pids = [int(path.read_text()) for path in place.glob("pid-*")] + [one.pid for one in started]
        for pid in pids:
            try:
                process = psutil.Process(pid)
                if str(place) in " ".join(process.cmdline()):
                    process.kill()
            except psutil.Error:
                continue
        for one in started:
            one.wait()


def commits(place: Path) -> int:
    try:
        repo = Repo.open(open_store(place / "checkpoints"))
    except tenuto.TenutoError:
        return 0
    return sum(len(list(repo.committed("main", attempt))) for attempt in repo.attempts("main"))


def said(place: Path, rank: int) -> dict[str, Any]:
    path = place / f"said-{rank}.json"
    until(path.exists)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_first_rank_dies_and_the_store_with_it(tmp_path: Path) -> None:
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "3",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    environments = [{**os.environ, **shared, "RANK": str(rank)} for rank in range(3)]
    ranks = [Program([str(PROGRAM), str(tmp_path)], torch=True, env=one) for one in environments]
    try:
        until(lambda: commits(tmp_path))
        ranks[0].kill()
        for rank in (1, 2):
            found = said(tmp_path, rank)
            assert found["behind"] == "RankStoreLost", found
            assert found["ranks"] == [0] and "rank 0 serves it" in found["message"] and found["phase"], found
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    tenuto.load(tmp_path / "checkpoints")


def test_the_agent_of_torchrun_dies_and_the_store_with_it(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with running(tmp_path, [([*torchrun, str(PROGRAM), str(tmp_path)], {})]) as (agent,):
        until(lambda: commits(tmp_path))
        os.kill(agent.pid, signal.SIGKILL)
        for rank in (0, 1):
            found = said(tmp_path, rank)
            assert found["behind"] == "RankStoreLost", found
            assert "where the ranks meet, is lost" in found["message"] and found["phase"], found
    tenuto.load(tmp_path / "checkpoints")


@pytest.mark.long  # gloo does not always connect again at the first start
def test_torchrun_starts_a_job_anew_without_waiting_for_the_survivors(tmp_path: Path) -> None:
    """The survivor waits for the dead rank in a save, and neither a step nor the end of its `with` block waits on.
    More than one restart is allowed, since gloo may fail to connect on a machine that is busy."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with running(tmp_path, [([*torchrun, "--max-restarts", "3", str(RESTARTED), str(tmp_path)], {})]) as (agent,):
        assert agent.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()[-3000:]
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in (0, 1)] == ["30", "30"]
    restarted_s = float((tmp_path / "began-1-0").read_text()) - float((tmp_path / "struck").read_text())
    assert restarted_s < SIGTERM_TO_SIGKILL_S / 2
