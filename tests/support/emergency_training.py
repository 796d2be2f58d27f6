"""Trainings with an emergency place whose own store is full, or hangs, on command, in real processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

from support import loaded_interpreter
from support.troubled_store import SITE

TRAIN = """
import os, pathlib, signal, sys, time, numpy as np, tenuto
from tenuto import every, on
from tenuto.crashpoints import armed
np.random.seed(0)
state = {"w": np.zeros(1000)}
def step_of(state):
    state["w"] += np.random.rand(1000)
def trouble(kind):
    if kind == "gone":  # not mounted any more
        os.rename("ckpts", "away")
    pathlib.Path("trouble.new").write_text(kind)
    os.rename("trouble.new", "trouble")
# A store that answers, at once or by an error, is given all the time that a busy machine takes for it.
patience_s = 3.0 if os.environ.get("KIND") == "hung" else 60.0
more = dict(save=every(steps=1000) | on.signal() | on.end(), emergency=["other"], emergency_after=patience_s)
"""
LOOP = """
with tenuto.Checkpointer("ckpts", state, **more) as ckpt:
    for step in ckpt.steps(20):
        step_of(state)
        if step == 7 and (kind := os.environ.get("KIND")):
            trouble(kind)
            os.kill(os.getpid(), signal.SIGTERM)
print(ckpt.step, state["w"].tobytes().hex()[:64])
"""


def ran(
    directory: Path, script: str, environment: dict[str, str], *, status: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    (directory / "train.py").write_text(SITE + TRAIN + script)
    done = loaded_interpreter.run(["train.py"], cwd=directory, env={**environment, **more}, timeout=100)
    assert done.returncode == status, done.stderr
    return done


def weights(step: int) -> bytes:
    """Returns what the parameters of the training are at a step."""
    generator, w = np.random.RandomState(0), np.zeros(1000)
    for _ in range(step):
        w += generator.rand(1000)
    return w.tobytes()


def untouched() -> str:
    """Returns what LOOP prints where nothing happens to it."""
    return f"20 {weights(20).hex()[:64]}\n"


def answers(tmp_path: Path) -> None:
    (tmp_path / "trouble").unlink()
    if (tmp_path / "away").exists():
        (tmp_path / "away").rename(tmp_path / "ckpts")


def place(tmp_path: Path, name: str = "other") -> Path:
    (found,) = (tmp_path / name).iterdir()
    return found


KEPT_IN_MEMORY = """
with tenuto.Checkpointer("ckpts", state, memory=every(steps=1), **more) as ckpt:
    for step in ckpt.steps(20):
        step_of(state)
        if step == 7 and (kind := os.environ.get("KIND")):
            while ckpt.stats.kept_in_memory < 7:
                time.sleep(0.01)
            kind == "ok" or trouble(kind)
            raise ValueError("bad data")
print(ckpt.step, state["w"].tobytes().hex()[:64])
"""

RANKS = """
rank = int(sys.argv[1])
more |= dict(ranks=tenuto.SharedFiles("meet", rank=rank, world_size=2), ranks_timeout=30.0)
if os.environ.get("OWN"):
    more["emergency"] = os.path.realpath("node-0/other")
    if rank:  # another disk under the same path
        from tenuto.maintenance import emergency
        whole = emergency.open_place
        emergency.open_place = lambda url, repo: whole(url.replace("node-0", "node-1"), repo)
with tenuto.Checkpointer("ckpts", state, **more) as ckpt:
    for step in ckpt.steps(int(os.environ["STEPS"])):
        step_of(state)
        time.sleep(0.005 if "KIND" in os.environ else 0)
        if step == 7 and rank == 1 and (kind := os.environ.get("KIND")):
            trouble(kind)
            os.kill(os.getpid(), signal.SIGTERM)
print(ckpt.step, state["w"].tobytes().hex()[:64])
"""


def ranks_ran(directory: Path, environment: dict[str, str], **more: str) -> list[tuple[int, str, str]]:
    (directory / "train.py").write_text(SITE + TRAIN + RANKS)
    programs = [
        loaded_interpreter.Program(["train.py", str(rank)], cwd=directory, env={**environment, **more})
        for rank in (0, 1)
    ]
    said = [program.communicate(timeout=100) for program in programs]
    return [(program.wait(), out, err) for program, (out, err) in zip(programs, said, strict=True)]
