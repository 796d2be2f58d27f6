"""A job of several ranks whose newest checkpoint is damaged in the primary, and whole in a tier that stores it in
another way: all ranks go on from there, in real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tenuto
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

PROGRAM = """
import hashlib, sys, numpy as np, tenuto
from tenuto import Tier, Tiers, every, keep, on
rank, steps, encoding = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
where = Tiers(Tier("fast", keep=keep.all()), Tier("slow", keep=keep.all(), encoding="small"))
mine = np.zeros((50_000, 2), np.float32)
state = {"w": tenuto.shard(mine, whole=(100_000, 2), offsets=(50_000 * rank, 0)), "both": np.zeros(30_000), "n": 0}
def shown(word):
    data = mine.tobytes() + state["both"].tobytes() + str(state["n"]).encode()
    print(word, ckpt.step, hashlib.sha256(data).hexdigest())
with tenuto.Checkpointer(
    where, state, save=every(steps=2) | on.end(), encoding=encoding,
    ranks=tenuto.SharedFiles("meet", rank=rank, world_size=2), ranks_timeout=40.0,
) as ckpt:
    ckpt.restore()
    shown("began")
    for step in ckpt.steps(steps):
        mine += np.random.default_rng(step).standard_normal(mine.shape, np.float32) * (rank + 1)
        state["both"] += step
        state["n"] += 1
        ckpt.wait()
shown("ended")
"""


def ran(directory: Path, steps: int, encoding: str = "plain") -> list[tuple[str, str]]:
    """Returns what each of two ranks has said."""
    (directory / "train.py").write_text(PROGRAM)
    src = str(Path(tenuto.__file__).parents[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "train.py", str(rank), str(steps), encoding], cwd=directory, text=True,
            env={**os.environ, "PYTHONPATH": src}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return said


def lines(said: list[tuple[str, str]], word: str) -> list[str]:
    """Returns the step and the digest that each rank has printed behind a word."""
    return [line.partition(" ")[2] for out, _ in said for line in out.splitlines() if line.startswith(word)]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for part in (0.2, 0.5, 0.99):
        data[int(part * len(data))] ^= 1
    path.write_bytes(data)


def parts(suffix: str, *ranks: int) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        for rank in ranks:
            for found in checkpoint.glob(f"rank-{rank:05d}*{suffix}"):
                flip(found)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(parts(".safetensors", 0, 1), id="packs of both"),
        pytest.param(parts(".safetensors", 1), id="packs of one", marks=pytest.mark.long),
        pytest.param(parts(".index", 1), id="index", marks=pytest.mark.long),
        pytest.param(lambda checkpoint: flip(checkpoint / "manifest.json"), id="manifest"),
        pytest.param(
            lambda checkpoint: (checkpoint / "rank-00000.safetensors").unlink(), id="lost pack", marks=pytest.mark.long
        ),
    ],
)
def test_all_ranks_go_on_from_the_tier_at_the_newest_step(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    first = ran(tmp_path, 4)
    newest = CheckpointId("main", 1, 4)
    damage(tmp_path / "fast" / newest.directory)
    before = {file: file.read_bytes() for file in (tmp_path / "fast" / newest.directory).glob("*")}
    second = ran(tmp_path, 6, "dedupe")
    assert lines(second, "began") == lines(first, "ended"), "every bit, on each rank"
    told = rf"{newest} is damaged in \S+fast: restored|{newest.manifest} in \S+fast is damaged: read"
    assert re.search(rf"({told}) from \S+slow", second[0][1]), second[0][1]
    now = {file: file.read_bytes() for file in before}
    assert now == before, "what is whole there is not taken for damaged by the tier's tables"
    assert not [err for _, err in second if "passed over" in err]
    (tmp_path / "alone").mkdir()
    assert lines(second, "ended") == lines(ran(tmp_path / "alone", 6), "ended")
    for where in ("fast", "slow"):
        repo = Repo.open(open_store(tmp_path / where))
        last = repo.manifest(repo.checkpoints()[-1])
        assert last.id.step == 6 and (where == "slow" or newest not in last.bases), "nothing rests on what is damaged"
    (tmp_path / "fast").rename(tmp_path / "gone")
    assert_whole(Repo.open(open_store(tmp_path / "slow")))


def test_what_is_damaged_there_as_well_is_passed_over_by_all(tmp_path: Path) -> None:
    ran(tmp_path, 4)
    newest = CheckpointId("main", 1, 4)
    for where, suffix in (("fast", ".safetensors"), ("slow", ".pack")):
        parts(suffix, 1)(tmp_path / where / newest.directory)
    second = ran(tmp_path, 6)
    assert [one.split()[0] for one in lines(second, "began")] == ["2", "2"]
    assert not [err for _, err in second if "restored from" in err]
    (tmp_path / "alone").mkdir()
    assert lines(second, "ended") == lines(ran(tmp_path / "alone", 6), "ended")
