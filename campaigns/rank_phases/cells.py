"""One cell of the matrix: who is struck, in which phase, how; what all others have to do then; how the job goes on."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest import mock

import numpy as np

from campaigns.ports import free_port
from campaigns.rank_kills.processes import Death, Job, Plan
from campaigns.rank_kills.training import untouched
from campaigns.rank_phases.deadlines import SHORT_TIMEOUT_S, TIMEOUT_S, Promise, Times
from campaigns.rank_phases.places import DirectoryDeath, MetAt, Server, StoreDeath, restored
from tenuto.api.save_load import load
from tenuto.engine.save.rank_group import RESTORE_TIMES
from tenuto.engine.staging import slots
from tenuto.errors import TenutoError
from tenuto.policy import every, on
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

WORLD: Final = 3
BEGUN: Final = 6
STEPS: Final = 18
KEPT: Final = 2
"""Checkpoints; an older one is gone where so many are newer."""
PATIENCE_S: Final = 60.0
"""Who has not ended so long after all of its deadlines hangs."""
OLD_TIMEOUT_S: Final = 60.0

PHASES: Final = {
    "meet": "ranks met, repository not yet opened",
    "choose": "repository opened, nothing chosen yet",
    "restore": "part restored, not yet voted for",
    "claim": "restore voted for, run not yet claimed",
    "plan": "structure told, plan not yet heard",
    "capture": "image captured",
    "ready": "ready told, not yet begun",
    "write": "pack durable, index not yet",
    "vote": "parts put and told, manifest not yet",
    "commit": "commit heard, not yet reported",
}
"""Phases, and the crash point in each. Every rank passes each of them."""
ONLY_COORDINATOR: Final = {
    "claimed": "attempt claimed",
    "begin": "save begun",
    "announce": "manifest durable, not yet announced",
}
BESIDE: Final = {"train": "", "memory": "memory image sealed", "exit": "begun, nothing written"}
"""Phases of jobs of their own: no save is in flight; each step is kept in memory, and no save is in flight; the only
save is the last one, for which the others wait while they leave the `with` block."""


@dataclass(frozen=True, slots=True)
class Cell:
    """`victim`: a rank, or "server" or "directory"; `how`: a signal, or what becomes of the directory. `serves`: rank 0
    serves the TCP store where the ranks meet; else a process of its own does ("server"), as that of torchrun, or they
    meet in a directory."""

    victim: int | str
    phase: str
    how: str
    serves: bool = False

    def __str__(self) -> str:
        return f"{self.who}, {self.phase}, {self.how}"

    @property
    def promise(self) -> Promise:
        return Promise(self.phase, self.how)

    @property
    def timeout_s(self) -> float:
        return SHORT_TIMEOUT_S if self.how == "emptied" else TIMEOUT_S

    @property
    def who(self) -> str:
        if isinstance(self.victim, str):
            return f"the {self.victim}"
        serves = (" that serves the store" if self.victim == 0 else ", rank 0 serves the store") * self.serves
        return (f"rank {self.victim}" if self.victim else "the coordinator") + serves


def cells() -> Iterator[Cell]:
    """All of them."""
    for phase in PHASES | BESIDE:
        for how in ("SIGKILL", "SIGSTOP"):
            yield from (Cell(0, phase, how), Cell(2, phase, how), Cell("server", phase, how))
            yield from (Cell(0, phase, how, serves=True), Cell(2, phase, how, serves=True))
    for phase in PHASES:
        yield from (Cell("directory", phase, how) for how in ("gone", "emptied", "hung"))
    for phase in ONLY_COORDINATOR:
        yield from (Cell(0, phase, how) for how in ("SIGKILL", "SIGSTOP"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """`cell`: what was played. `faults`: what is not as it must be. `said`: the errors behind what the other ranks
    raised. `times`: how long after the strike."""

    cell: object
    faults: tuple[str, ...]
    errors_behind: tuple[str, ...] = ()
    times: Times | None = None


def begun(place: Path) -> Path:
    """What three ranks have left after some steps: each cell goes on from a copy of it."""
    with Job(Plan(place, WORLD, BEGUN, timeout_s=OLD_TIMEOUT_S)) as job:
        if not job.wait(2 * OLD_TIMEOUT_S) or any(ended.status for ended in job.ended.values()):
            raise AssertionError(f"the first job did not come to its end: {job.ended}")
    return place


class Struck:
    """A job in which what the cell says happens. As a context manager it leaves no process."""

    def __init__(self, cell: Cell, start: Path, place: Path) -> None:
        self.cell = cell
        self.place = Path(shutil.copytree(start, place))
        shutil.rmtree(self.place / "ranks", ignore_errors=True)
        self._stack = ExitStack()
        point = (PHASES | ONLY_COORDINATOR | BESIDE)[cell.phase]
        when: Any = {"point": point, "nth": 4 if cell.phase == "memory" else 1, "step": 0 if point else BEGUN + 3}
        plan = MetAt(self.place, WORLD, STEPS, timeout_s=cell.timeout_s, port=free_port() if cell.serves else 0)
        if cell.phase in BESIDE:
            more = {"memory": every(steps=1)} if cell.phase == "memory" else {}
            step_s = 0.0 if cell.phase == "exit" else 0.4
            plan = replace(plan, step_s=step_s, more={"save": on.end(), **more})
            memory = self._stack.enter_context(TemporaryDirectory(prefix="tenuto-phases-", dir="/dev/shm"))
            self._stack.enter_context(mock.patch.object(slots, "SHARED_MEMORY", memory))
        if cell.victim == "server":
            server = self._stack.enter_context(Server())
            death: Death = StoreDeath(1, **when, number=signal.Signals[cell.how], pid=server.pid)
            plan = replace(plan, server=server)
        elif cell.victim == "directory":
            death = DirectoryDeath(1, point, place=self.place, how=cell.how)
        else:
            assert isinstance(cell.victim, int)
            death = Death(cell.victim, **when, number=signal.Signals[cell.how])
        self.job = self._stack.enter_context(Job(replace(plan, death=death)))
        self.following_s = 0.0
        """How long the job took that followed."""

    def __enter__(self) -> Struck:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def faults(self) -> Iterator[str]:
        """What the ranks did not do that they have to, once they had time for it."""
        job, cell = self.job, self.cell
        stopped = [cell.victim] if isinstance(cell.victim, int) and cell.how == "SIGSTOP" else []
        hangs_s = RESTORE_TIMES * cell.timeout_s + PATIENCE_S
        if not job.wait(hangs_s, without=stopped):
            yield f"{sorted(set(range(WORLD)) - job.ended.keys())} have not raised within {hangs_s:g} s"
            return
        for rank, ended in sorted(job.ended.items()):
            told = ended.told
            if rank == cell.victim:
                if cell.how == "SIGKILL" and ended.status != -signal.SIGKILL:
                    yield f"rank {rank} was to die and ended with {ended}"
            elif cell.how == "emptied" and (ended.status, told.get("step")) == (0, STEPS):
                continue  # nobody had to read there again what was gone
            elif ended.status <= 0 or not told.get("phase"):
                yield f"rank {rank} ended without naming a phase: {ended}"
            elif isinstance(cell.victim, int) and (
                told["ranks"] != [cell.victim] or f"rank {cell.victim}" not in told["message"]
            ):
                yield f"rank {rank} does not name rank {cell.victim}: {ended}"
            elif cell.victim == "server" and told["behind"] != "RankStoreLost":
                yield f"rank {rank} does not say that the store is lost: {ended}"

    def times(self) -> Times | None:
        """Before the next job begins at the same place. `pace_s` is what it took to come to the strike. None where
        nothing was struck."""
        job, struck_at = self.job, self.job.struck_at
        if struck_at is None:
            return None
        others = [rank for rank, ended in job.ended.items() if rank != self.cell.victim and ended.status > 0]
        raised_s = {rank: job.met_error_at(rank) - struck_at for rank in others}
        left_s = {rank: job.began + job.ended[rank].seconds - struck_at for rank in others}
        return Times(self.cell.promise, struck_at - job.began, raised_s, left_s)

    def errors_behind(self) -> tuple[str, ...]:
        return tuple(sorted({str(ended.told["behind"]) for ended in self.job.ended.values() if "behind" in ended.told}))

    def goes_on(self, world: int) -> Iterator[str]:
        """What is wrong with the job that follows, on so many ranks; and with who was stopped and comes back."""
        if {ended.status for ended in self.job.ended.values()} == {0}:
            yield from differences(self.place)  # it lost nothing that it needed
            return
        before = committed(self.place)
        if lost(before):
            yield f"step {BEGUN} was committed and is gone: {before}"
            return
        restored(self.place)
        following = Plan(self.place, world, STEPS, timeout_s=OLD_TIMEOUT_S, more={"takeover": True})
        with Job(following) as job:
            if not job.wait(2 * OLD_TIMEOUT_S) or any(ended.status for ended in job.ended.values()):
                yield f"the job does not go on: {job.ended}"
                return
            self.following_s = max(ended.seconds for ended in job.ended.values())
        yield from differences(self.place)
        after = committed(self.place)
        for rank in set(range(WORLD)) - self.job.ended.keys():
            self.job.send(rank, signal.SIGCONT)
        if not self.job.wait(RESTORE_TIMES * self.cell.timeout_s + PATIENCE_S):
            yield "a rank that was stopped and goes on does not end"
        if isinstance(self.cell.victim, int) and self.job.ended[self.cell.victim].status == 0:
            yield "a rank that was stopped, and superseded, ended well"
        if committed(self.place) != after:
            yield f"{committed(self.place)} are committed, and {after} were before the old job came back"
        yield from differences(self.place)


def lost(found: Sequence[tuple[int, int]]) -> bool:
    """Whether what was committed before the strike is gone, and not by retention: fewer newer ones are there than it
    keeps."""
    return (1, BEGUN) not in found and sum(each > (1, BEGUN) for each in found) < KEPT


def committed(place: Path) -> list[tuple[int, int]]:
    """(attempt, step) of every checkpoint; none where there is no repository."""
    try:
        repo = Repo.open(open_store(place / "checkpoints"))
    except TenutoError:
        return []
    return [(attempt, step) for attempt in repo.attempts("main") for step in repo.committed("main", attempt)]


def differences(place: Path) -> Iterator[str]:
    """What of the newest checkpoint, and of every other one of its attempt, is not as untouched training has it."""
    found = committed(place)
    if max(found, default=(0, 0))[1] != STEPS:
        yield f"the job came to {max(found, default=(0, 0))}, not to step {STEPS}"
    for attempt, step in found:
        state, wanted = load(place / "checkpoints", step=f"a{attempt:04d}/{step}").state, untouched(step)
        if not all(np.array_equal(state[name], wanted[name]) for name in wanted):
            yield f"step {step} of attempt {attempt} is not what untouched training has there"


def judge(cell: Cell, start: Path, place: Path, world: int) -> Outcome:
    """Plays one cell to its end."""
    with Struck(cell, start, place) as struck:
        faults = [*struck.faults()]
        times = struck.times()
        if not faults:
            faults += struck.goes_on(world)
        errors_behind = struck.errors_behind()
        if times is not None:
            times = replace(times, pace_s=max(times.pace_s, struck.following_s))
            faults += times.late()
    shutil.rmtree(place, ignore_errors=True)
    return Outcome(cell, tuple(faults), errors_behind, times)
