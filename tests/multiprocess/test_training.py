"""Jobs of several ranks, as users start them: stopped, killed, and gone on with on as many ranks, or on others."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import tenuto
from support import forked_processes as forked
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WATCHED = Path(__file__).with_name("watched_example.py")
OF_RANKS = ["ranks_ddp", "ranks_fsdp2", "ranks_tp_fsdp2"]
PATIENCE_S = 180


def words(script: str, where: Path, steps: int) -> list[str]:
    return [str(EXAMPLES / f"{script}.py"), "--where", str(where), "--steps", str(steps)]


def command(ranks: int, *program: str) -> list[str]:
    if ranks == 1:
        return [sys.executable, *program]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def run(ranks: int, *program: str) -> str:
    """The last line of what it prints."""
    done = subprocess.run(
        command(ranks, *program), capture_output=True, text=True, timeout=PATIENCE_S, env=environment()
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

    walk(tenuto.load(where, step=step).state, "")
    return found


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
def test_a_job_that_is_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    assert run(2, *words("ranks_fsdp2", tmp_path / "whole", 30)).startswith("step 30 on 2 ranks")
    run(2, *words("ranks_fsdp2", tmp_path / "parts", 17))
    assert run(2, *words("ranks_fsdp2", tmp_path / "parts", 30)).startswith("step 30 on 2 ranks")
    whole, parts = state_of(tmp_path / "whole"), state_of(tmp_path / "parts")
    assert len(whole) > 10
    assert equal(whole, parts)


# -- the examples, on one number of ranks after another ----------------------------------------------------------------


class Lives:
    """One example's jobs, one after the other over the same checkpoints; each says what its ranks hold."""

    def __init__(self, script: str, place: Path) -> None:
        self.script = script
        self.where = place / "checkpoints"
        self._notes = [place / "notes"]
        self.saved: tuple[int, dict[str, str]] = (0, {})
        """The newest checkpoint, as one process reads it: its step, and of each tensor the digest of its bytes."""

    def watched(self, steps: int, killed: int = 0) -> list[str]:
        self._notes.append(self._notes[0].with_name(f"notes-{len(self._notes)}"))
        return [str(WATCHED), str(self._notes[-1]), str(killed), *words(self.script, self.where, steps)]

    def live(self, ranks: int, steps: int, killed: int = 0) -> str:
        """Without torchrun, and without loading torch again and again: what rank 0 has printed last."""
        program, *more = self.watched(steps, killed)
        log = self._notes[-1].with_name(f"log-{len(self._notes)}")
        status = forked.job(Path(program), ranks, *more, log=log, timeout=PATIENCE_S)
        assert -9 in status if killed else not any(status), forked.told(log, ranks)
        self.looked_at(ranks)
        return "" if killed else Path(f"{log}.0").read_text().strip().splitlines()[-1]

    def looked_at(self, ranks: int, *, cut_off: bool = False) -> None:
        """Every rank began with the checkpoint that was the newest before; and the newest now is what they held. Where
        they were `cut_off` anywhere they may not have come to say so."""
        step, digests = self.saved
        notes = [self._notes_of(rank) for rank in range(ranks)]
        for began, *_ in notes:
            assert (began["what"], began["step"]) == ("began", step)
            assert not step or began["digests"] == digests
        with tenuto.open(self.where) as opened:
            tensors = {path: leaf for path, leaf in opened.items() if path.startswith(("model/", "optimizer/"))}
            self.saved = opened.step, {path: digest(leaf.numpy()) for path, leaf in tensors.items()}
        assert self.saved[0] > step and len(self.saved[1]) >= 16
        for _, *held in notes:
            told = [one["digests"] for one in held if one["step"] == self.saved[0]]
            assert told == [self.saved[1]] or (cut_off and not told)

    def _notes_of(self, rank: int) -> list[dict[str, Any]]:
        lines = Path(f"{self._notes[-1]}.{rank}").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def parents(self) -> list[CheckpointId | None]:
        repo = Repo.open(open_store(self.where))
        return [repo.attempt("main", number).parent for number in repo.attempts("main")]


def digest(whole: Any) -> str:
    return hashlib.sha256(whole.tobytes()).hexdigest()


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=[pytest.mark.long] if script == "ranks_fsdp2" else []) for script in OF_RANKS],
)
def test_an_example_that_is_killed_goes_on_on_other_numbers_of_ranks(tmp_path: Path, script: str) -> None:
    """Two ranks, one process, three ranks."""
    lives = Lives(script, tmp_path)
    lives.live(2, 1000, killed=13)
    assert lives.saved[0] == 10
    lives.live(1, 1000, killed=24)
    assert lives.saved[0] == 20
    assert lives.live(3, 31).startswith("step 31 on 3 ranks")
    assert lives.saved[0] == 31
    assert lives.parents() == [None, CheckpointId("main", 1, 10), CheckpointId("main", 2, 20)]


@pytest.mark.long
def test_tensor_parallelism_inside_fsdp(tmp_path: Path) -> None:
    """Over a mesh with both, and over one with tensor parallelism alone."""
    lives = Lives("ranks_tp_fsdp2", tmp_path)
    assert lives.live(4, 20).startswith("step 20 on 4 ranks")
    with tenuto.open(lives.where) as opened:
        assert opened["model/0.0.weight"].shape == (256, 64) and opened.ranks == 4
        assert len(opened["model/0.0.weight"].parts) == 4
    assert lives.live(2, 32).startswith("step 32 on 2 ranks")
    assert lives.live(4, 41).startswith("step 41 on 4 ranks")


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "worlds"), list(zip(OF_RANKS, [(2, 1, 3), (3, 2, 1), (4, 2, 3)], strict=True)), ids=OF_RANKS
)
def test_an_example_under_torchrun_is_killed_and_goes_on(tmp_path: Path, script: str, worlds: Sequence[int]) -> None:
    lives = Lives(script, tmp_path)
    for ranks in worlds:
        kill_once_it_has_saved(command(ranks, *lives.watched(10**6)), lives)
        lives.looked_at(ranks, cut_off=True)
    step = lives.saved[0]
    said = run(worlds[0], *lives.watched(step + 13))
    lives.looked_at(worlds[0])
    assert said.startswith(f"step {step + 13} on {worlds[0]} ranks") and lives.saved[0] == step + 13


def kill_once_it_has_saved(words: Sequence[str], lives: Lives) -> None:
    job = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    try:
        wait_for_a_save(job, lives.where, lives.saved[0])
    finally:
        kill(job)


def wait_for_a_save(job: subprocess.Popen[Any], where: Path, before: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while max(committed(where), default=0) <= before:
        assert time.monotonic() < until and job.poll() is None
        time.sleep(0.05)


def kill(job: subprocess.Popen[Any]) -> None:
    """`kill -9` of all that it has started, unless it has ended."""
    if job.poll() is None:
        processes = [*psutil.Process(job.pid).children(recursive=True), job]  # ranks have sessions of their own
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes[:-1])
        job.wait()


def committed(where: Path) -> list[int]:
    try:
        repo = Repo.open(open_store(where))
    except tenuto.TenutoError:
        return []
    return [step for attempt in repo.attempts("main") for step in repo.committed("main", attempt)]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_commands_of_the_readme_for_many_ranks_run(tmp_path: Path) -> None:
    """As they stand there, one after the other."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = [line for block in blocks if "torchrun" in block for line in block.splitlines() if line]
    where = tmp_path / "checkpoints-fsdp2"
    (tmp_path / "examples").symlink_to(EXAMPLES)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    here = {**environment(), "PATH": path, "PET_STANDALONE": "1"}  # several of these tests may run at a time
    said: list[tuple[int, int]] = []
    for line in lines:
        job = subprocess.Popen(["bash", "-c", line], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=here)
        try:
            out, _ = job.communicate(timeout=PATIENCE_S)
        finally:
            kill(job)
        said += [(int(step), int(ranks)) for step, ranks in re.findall(r"^step (\d+) on (\d+) ranks", out, re.M)]
    repo = Repo.open(open_store(where))
    parents = [repo.attempt("main", number).parent for number in repo.attempts("main")]
    assert parents == [None, CheckpointId("main", 1, 60), CheckpointId("main", 2, 80)]
    assert said == [(60, 2), (80, 1), (120, 3)]
