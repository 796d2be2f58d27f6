"""Two operators at the command line, a training that retains, and one repository: whoever meets whom, nothing breaks.

Each command is a process of its own. Which commands, and on what, is drawn from fixed seeds; how they meet is the
machine's affair. The training goes on by some steps with each command, so that it lasts as long as they do.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import tenuto
from support import loaded_interpreter
from tenuto import every, keep
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.repo.refs import list_refs

COMMANDS: Final = 24
"""Of each operator."""
PATIENCE_S: Final = 240.0
CLEAR: Final = {0: "done", 2: "refused", 11: "not there", 13: "in use", 16: "needed"}
"""With what a command may end. Damage, a fault of ours and a store that fails are not among them."""
TRAINING: Final = """
import sys, numpy as np, tenuto
from tenuto import every, keep

state = {"w": np.zeros(3000)}
kept = keep.latest(9) | keep.best(1, "loss") | keep.every(steps=20)
with tenuto.Checkpointer(sys.argv[1], state, run="live", save=every(steps=1), keep=kept) as ckpt:
    for step in ckpt.steps(int(sys.argv[2])):
        state["w"] += 1
        ckpt.log(loss=(step * 7) % 11)
        if step == 2:
            ckpt.wait()
            print("trains", flush=True)
        if step % 3 == 2:
            sys.stdin.readline()
"""


@dataclass
class Doings:
    """What the operators have done so far, by what the commands themselves say."""

    where: Path
    training: loaded_interpreter.Program
    lock: threading.Lock = field(default_factory=threading.Lock)
    pinned: set[CheckpointId] = field(default_factory=set)
    removed: set[CheckpointId] = field(default_factory=set)
    ended: dict[str, list[int]] = field(default_factory=dict)
    unclear: list[str] = field(default_factory=list)

    def command(self, *words: str) -> Any:
        """Runs a command, and returns the document that it ends with; None unless it ended well."""
        command = ["-m", "tenuto", words[0], str(self.where), *words[1:], "--json"]
        found = loaded_interpreter.run(command, timeout=PATIENCE_S)
        with self.lock:
            self.ended.setdefault(words[0], []).append(found.returncode)
            clear = found.returncode in CLEAR or "is being removed by another process" in found.stderr
            if not clear or "Traceback" in found.stderr or "a fault in Tenuto" in found.stderr:
                self.unclear.append(f"{' '.join(words)}: {found.returncode}\n{found.stdout}{found.stderr}")
            self.training.stdin.write("go\n")
            self.training.stdin.flush()
        return json.loads(found.stdout) if found.returncode == 0 else None


def ids_in(document: Any) -> set[CheckpointId]:
    """Returns the checkpoints that a document names, wherever it does."""
    if isinstance(document, dict):
        if document.keys() >= {"run", "attempt", "step"}:
            return {CheckpointId(document["run"], document["attempt"], document["step"])}
        return set().union(*map(ids_in, document.values()))
    return set().union(*map(ids_in, document)) if isinstance(document, list) else set()


class Operator:
    def __init__(self, doings: Doings, name: str) -> None:
        self.doings = doings
        self.name = name
        self.random = random.Random(name)
        self.forks = 0
        self.binned: list[CheckpointId] = []

    def work(self) -> None:
        draws: dict[Callable[[], None], int] = {
            self.tag: 3,
            self.pin: 2,
            self.rm: 4,
            self.undelete: 3,
            self.gc: 2,
            self.keep: 2,
            self.verify: 2,
            self.rollback: 2,
            self.fork: 2,
            self.repack: 1,
        }
        # Each once, and then by chance.
        chosen = [*draws, *self.random.choices(list(draws), list(draws.values()), k=COMMANDS - len(draws))]
        self.random.shuffle(chosen)
        for doing in chosen:
            doing()

    def run(self) -> str:
        return self.random.choice(("live", "done", "older"))

    def one(self) -> CheckpointId:
        """A checkpoint that was there just now."""
        run = self.run()
        there = list(tenuto.Repository(self.doings.where).checkpoints(run))
        assert there, f"run {run} has no checkpoint any more"
        return self.random.choice(there)

    def tag(self) -> None:
        id = self.one()
        self.doings.command("tag", self.random.choice("abc"), "--step", str(id), "--run", id.run)

    def pin(self) -> None:
        id = self.one()
        if self.doings.command("pin", str(id)) is not None:
            self.doings.pinned.add(id)

    def rm(self) -> None:
        id = self.one()
        found = self.doings.command("rm", str(id), "--yes", *(["--force"] if self.random.random() < 0.3 else []))
        if found is not None:
            self.binned.append(id)
            self.doings.removed.add(id)

    def undelete(self) -> None:
        self.doings.command("undelete", str(self.binned.pop() if self.binned else self.one()))

    def gc(self) -> None:
        self.doings.command("gc", *(["--now"] if self.random.random() < 0.5 else []), "--yes")

    def keep(self) -> None:
        what = self.random.choice((("--latest", "6"), ("--every-steps", "3"), ("--after", "attempt", "--latest", "4")))
        found = self.doings.command("keep", "--run", self.run(), *what, "--yes")
        if found is not None:
            self.doings.removed |= ids_in(found["removed"])

    def verify(self) -> None:
        self.doings.command("verify", *(["--note"] if self.random.random() < 0.5 else []))

    def rollback(self) -> None:
        id = self.one()
        self.doings.command("rollback", str(id), "--run", id.run, "--dry-run")

    def fork(self) -> None:
        self.forks += 1
        self.doings.command("fork", str(self.one()), f"{self.name}-{self.forks}")

    def repack(self) -> None:
        found = self.doings.command("repack", "--run", self.run(), "--encoding", "dedupe", "--yes")
        if found is not None:
            self.doings.removed |= ids_in(found)


def trained(where: Path, run: str) -> None:
    state = {"w": np.zeros(3000)}
    with tenuto.Checkpointer(where, state, run=run, save=every(steps=1), keep=keep.all()) as ckpt:
        for _ in ckpt.steps(10):
            state["w"] += 1


@pytest.mark.long  # an undelete that meets `gc --now` may call damaged what is being freed
@pytest.mark.parametrize("names", [("ada", "grace")], ids="-".join)
def test_two_operators_and_a_training_do_whatever_they_like_at_once(tmp_path: Path, names: tuple[str, str]) -> None:
    where = tmp_path / "ckpts"
    trained(where, "done")
    trained(where, "older")
    steps = 3 * 2 * COMMANDS
    training = loaded_interpreter.Program(["-c", TRAINING, str(where), str(steps)])
    assert training.stdout.readline() == "trains\n"
    doings = Doings(where, training)
    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(Operator(doings, name).work) for name in names]:
            ended.result()
    _, told = training.communicate(timeout=PATIENCE_S)
    assert training.wait(PATIENCE_S) == 0, told
    assert not doings.unclear, "\n".join(doings.unclear)
    assert len(doings.ended) == 10 and sum(map(len, doings.ended.values())) == 2 * COMMANDS
    assert sum(statuses.count(0) for statuses in doings.ended.values()) > COMMANDS / 2, doings.ended

    repository = tenuto.Repository(where)
    assert_whole(repository.repo)
    assert tenuto.load(where, run="live").step == steps
    there = {id for run in ("live", "done", "older") for id in repository.checkpoints(run)}
    before = {CheckpointId(run, 1, step) for run in ("done", "older") for step in range(1, 11)}
    assert before - there <= doings.removed, "nobody has removed these"
    assert doings.pinned <= there, "a pinned one is gone"
    assert {ref.id for ref in list_refs(repository.repo)} <= there, "what somebody named is gone"
    for id in there:
        assert (tenuto.load(where, step=id).state["w"] == id.step).all()
