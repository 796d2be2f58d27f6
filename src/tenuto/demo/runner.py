"""Runs a demo: a training that nothing disturbs, then the same training killed at planned moments and restarted."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from tenuto.demo.comparison import Comparison, compare, read
from tenuto.demo.processes import Child, Life, start
from tenuto.engine.staging import slots
from tenuto.errors import MissingExtra, TenutoError, install, typed
from tenuto.record import record
from tenuto.repo.lineage import latest
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

UNTOUCHED: Final = "untouched"
SAVE_PHASES: Final = ("SaveStarted", "Captured", "PackWritten")
"""A kill aimed at a save follows one of these events, by at most this many seconds:"""
INSIDE_SAVE_S: Final = 0.003
LONG_STEP_S: Final = 0.2

ReportProgress = Callable[[str, int, int], None]
"""Called with the activity, the steps done and the steps in total."""


def ignore_progress(activity: str, done: int, total: int) -> None:
    """Ignores progress."""


@record
class Kill:
    """A kill.

    after: completed steps before it is due.
    during: the phase to interrupt: the next "save", or a "step".
    moment: in [0, 1), a share of the phase's time.
    """

    after: int
    during: str
    moment: float


@record
class Plan:
    """Everything that a demo will do. `memory`: whether every step is also kept in memory."""

    steps: int
    save_every: int
    kills: Sequence[Kill]
    seed: int
    memory: bool = False


def draw_kills(
    number: int, *, steps: int, save_every: int, seed: int, during: Sequence[str] = ("save", "step")
) -> tuple[Kill, ...]:
    """Draws kills at random steps, in order, and divides the phases among them evenly."""
    draw = random.Random(seed)
    phases = [during[index % len(during)] for index in range(number)]
    draw.shuffle(phases)
    after = sorted(draw.randrange(1, max(steps - save_every, 2)) for _ in range(number))
    return tuple(Kill(step, phase, draw.random()) for step, phase in zip(after, phases, strict=True))


@record
class Outcome:
    """The processes of a killed training, and the comparison of its last state with the untouched run's."""

    plan: Plan
    untouched: Life
    lives: Sequence[Life]
    comparison: Comparison
    loss: float | None
    copy_s: float | None
    """Median seconds of one copy of the state's bytes within warm memory."""
    seconds: float
    bytes: int = 0

    @property
    def kills(self) -> int:
        return sum(life.killed for life in self.lives)

    @property
    def kills_while_saving(self) -> int:
        return sum(life.killed and life.saving for life in self.lives)

    @property
    def lost(self) -> list[int]:
        """Steps repeated after each kill."""
        return [self.lost_by(number) for number, life in enumerate(self.lives) if life.killed]

    @property
    def lost_from_disk(self) -> list[int]:
        """Steps that would have been repeated after each kill with checkpoints on disk only."""
        return [max(life.at - life.durable, 0) for life in self.lives if life.killed]

    def lost_by(self, number: int) -> int:
        """Returns the steps of this process that the next one to start training repeated."""
        begins = [later.began for later in self.lives[number + 1 :] if later.began is not None]
        return max(self.lives[number].at - begins[0], 0) if begins else 0

    def restarts(self, source: str) -> int:
        """Returns the number of processes after the first that resumed from "memory", "disk" or "scratch"."""
        return sum(life.source == source for life in self.lives[1:])

    @property
    def memory_off(self) -> str:
        """Why not everything was kept in memory; empty if it was, or was not meant to be."""
        return next((life.memory_off for life in self.lives if life.memory_off), "")

    @property
    def stalls_s(self) -> list[float]:
        """Stalls of the saves to the store."""
        return [stall for life in (self.untouched, *self.lives) for stall in life.stalls_s]

    @property
    def memory_stalls_s(self) -> list[float]:
        """Stalls of the steps kept in memory only."""
        return [stall for life in self.lives for stall in life.memory_stalls_s]


class TrainingFailed(TenutoError):
    """A child of the demo failed, for a reason of its own."""


@dataclass
class Runner:
    """Runs plans in `place`, which receives checkpoints, events and the children's output."""

    place: Path
    on_progress: ReportProgress = ignore_progress

    @property
    def checkpoints(self) -> Path:
        return self.place / "checkpoints"

    @property
    def output(self) -> Path:
        return self.place / "output.txt"

    def repository(self) -> Repo:
        return Repo.open(open_store(self.checkpoints))

    def untouched(self, plan: Plan) -> Life:
        """Runs the training without kills, in one process."""
        self.place.mkdir(parents=True, exist_ok=True)
        return self._life(plan, UNTOUCHED, 0, None)

    def killed(self, plan: Plan, untouched: Life, run: str = "killed") -> Outcome:
        """Runs the training again as `run`, killed as planned, and compares it with the untouched one."""
        began = time.monotonic()
        lives: list[Life] = []
        for number, kill in enumerate((*plan.kills, None)):
            lives.append(self._life(plan, run, number, kill))
            if not lives[-1].killed:
                break
        repo = self.repository()
        one, other = read(repo, UNTOUCHED), read(repo, run)
        return Outcome(
            plan=plan,
            untouched=untouched,
            lives=lives,
            comparison=compare(one, other),
            loss=repo.manifest(other.id).metrics.get("loss"),
            copy_s=copy_seconds(other.bytes),
            seconds=untouched.seconds + time.monotonic() - began,
            bytes=other.bytes,
        )

    def _life(self, plan: Plan, run: str, number: int, kill: Kill | None) -> Life:
        """Trains in a process of its own, until it is killed or ends."""
        child = start(partial(self._train, plan, run), self.place / f"events-{run}-{number:03d}.jsonl", self.output)
        return self._end(child, plan, run, number, kill)

    def _end(self, child: Child, plan: Plan, run: str, number: int, kill: Kill | None) -> Life:
        """Kills a child as planned, or waits until it ends. Raises TrainingFailed if it failed by itself."""
        activity = "training untouched" if run == UNTOUCHED else f"training, {number} of {len(plan.kills)} kills"

        def report() -> None:
            self.on_progress(activity, child.step, plan.steps)

        if kill is not None and self._wait_for(kill, child, plan, report):
            child.kill()
        while child.running():
            report()
            time.sleep(0.02)
        newest = latest(self.repository(), run)
        return replace(self._checked(child.life()), durable=newest.step if newest is not None else 0)

    def _wait_for(self, kill: Kill, child: Child, plan: Plan, report: Callable[[], None]) -> bool:
        """Waits for the kill's moment; returns whether the child is still alive."""

        def far_enough() -> bool:
            report()
            return child.step >= kill.after

        if not child.wait_until(far_enough):
            return False
        if kill.during == "step":
            step_s = (time.monotonic() - child.started) / max(child.step, 1)
            time.sleep(kill.moment * min(step_s, LONG_STEP_S))
            return child.running()
        phase, rest = divmod(kill.moment * len(SAVE_PHASES), 1)
        name = SAVE_PHASES[int(phase)]
        before = child.count(name)
        if not child.wait_until(lambda: child.count(name) > before):
            return False
        time.sleep(rest * INSIDE_SAVE_S)
        return child.running()

    def _train(self, plan: Plan, run: str, events: Path, on_step: Callable[[int, float], None], **options: Any) -> None:
        """Trains, in the child. `options`: further arguments of the Checkpointer."""
        import torch

        from tenuto import every
        from tenuto.demo import train_gpt
        from tenuto.telemetry import JsonLines

        # One thread: two wait for each other ever longer if something else runs on the machine.
        torch.set_num_threads(1)
        # Forking reseeds Python's generator; the script, which does not use it, seeds only torch's.
        random.seed(0)
        np.random.seed(0)
        train_gpt.train(
            str(self.checkpoints),
            run=run,
            steps=plan.steps,
            save_every=plan.save_every,
            memory=every(steps=1) if plan.memory else None,
            sinks=[JsonLines(events)],
            on_step=on_step,
            **options,
        )

    def _checked(self, life: Life) -> Life:
        """Returns a process that was killed or succeeded; raises TrainingFailed otherwise."""
        if life.status not in (0, -9):
            last_line = self.output.read_text(errors="replace").strip().rpartition("\n")[2]
            raise TrainingFailed(
                f"the training process ended with status {life.status} after step {life.reached}: {last_line}",
                subject=str(self.output),
                hint=f"see its output: {typed('tail', self.output)}",
            )
        return life


def load_framework() -> None:
    """Imports what the children need, without running any of it, and finds out once what each of them would."""
    try:
        import torch._dynamo  # a process's first optimizer imports it, which takes over a second

        from tenuto.demo import train_gpt
        from tenuto.integrations.torch import certificate, rng
        from tenuto.integrations.torch.data import loaders
        from tenuto.state.frameworks import adapter_of, declared
        from tenuto.training import checkpointer, snapshot
    except ModuleNotFoundError as error:
        raise MissingExtra(f"the demo trains with torch: {error}", hint=install("torch")) from error
    assert all((torch._dynamo, checkpointer, train_gpt, certificate, loaders, rng, adapter_of("torch"), declared()))
    snapshot.code_identity()


@contextmanager
def own_shared_memory() -> Iterator[Path | None]:
    """Puts images into a directory of shared memory that is removed after the block: they displace nobody else's.
    Yields it; None where there is no shared memory."""
    if os.access(slots.SHARED_MEMORY, os.W_OK):
        with tempfile.TemporaryDirectory(prefix="tenuto-demo-", dir=slots.SHARED_MEMORY) as root:
            with mock.patch.object(slots, "SHARED_MEMORY", root):
                yield Path(root)
    else:
        yield None


def copy_seconds(nbytes: int, repeats: int = 30) -> float:
    """Returns the median seconds of copying `nbytes` within warm memory on one thread."""
    source, target = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    return statistics.median(timeit.repeat(partial(np.copyto, target, source), number=1, repeat=repeats))
