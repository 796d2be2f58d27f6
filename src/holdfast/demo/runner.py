"""The demo's execution: an uninterrupted run, then the same training killed and started again."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.crashpoints import armed
from holdfast.demo.children import Child, Life, Train, ask, start
from holdfast.demo.comparison import Comparison, compare, read
from holdfast.demo.plan import POINTS, Kill, Plan
from holdfast.errors import HoldfastError, MissingExtra
from holdfast.repo.repository import Repo
from holdfast.store.registry import open_store

UNTOUCHED: Final = "untouched"
KILLED: Final = "killed"
SAVE_PHASES: Final = ("SaveStarted", "Captured", "PackWritten")
"""A kill aimed at a save comes after one of these events of it, and at most so much later:"""
INSIDE_SAVE_S: Final = 0.003
LONG_STEP_S: Final = 0.2
LATE_STEPS: Final = 3

Tell = Callable[[str, int, int], None]
"""Told how far the demo is: what it does, steps done, steps in all."""


@dataclass(frozen=True, slots=True)
class Account:
    """What happened. `untouched` is the one life of the uninterrupted run."""

    plan: Plan
    untouched: Life
    lives: tuple[Life, ...]
    comparison: Comparison
    loss: float | None
    copy_s: float | None
    """One copy of the state's bytes within warm memory, median of many."""
    seconds: float
    bytes: int = 0

    @property
    def kills(self) -> int:
        return sum(life.killed for life in self.lives)

    @property
    def kills_while_saving(self) -> int:
        return sum(life.killed and life.saving for life in self.lives)

    @property
    def lost(self) -> tuple[int, ...]:
        """Steps that had to be done again after each kill."""
        out = []
        for number, life in enumerate(self.lives):
            begins = [later.began for later in self.lives[number + 1 :] if later.began is not None]
            if life.killed:
                out.append(max(life.reached - begins[0], 0) if begins else 0)
        return tuple(out)

    @property
    def stall_s(self) -> float | None:
        stalls = [stall for life in (self.untouched, *self.lives) for stall in life.stalls_s]
        return statistics.median(stalls) if stalls else None

    @property
    def proven(self) -> bool:
        """Equal in every bit, and not because nothing was killed."""
        return self.comparison.equal and self.kills >= 1


@dataclass
class Runner:
    """Executes plans in `place`, which then holds checkpoints, events and what the children printed."""

    place: Path
    tell: Tell = lambda what, done, total: None
    _start_s: float = 0.5

    def untouched(self, plan: Plan) -> Life:
        """The run that nobody kills, in one life."""
        self.place.mkdir(parents=True, exist_ok=True)
        child = self._start(plan, UNTOUCHED, 0)
        if child.wait_until(lambda: child.step > 0):
            self._start_s = time.monotonic() - child.started
        while child.running():
            self.tell("training untouched", child.step, plan.steps)
            time.sleep(0.02)
        return self._well(child.life())

    def killed(self, plan: Plan, untouched: Life, run: str = KILLED) -> Account:
        """The same training again as `run`, killed as planned, and compared with the untouched one."""
        began = time.monotonic()
        lives = self._lives(plan, run)
        repo = Repo.open(open_store(self.checkpoints))
        one, other = read(repo, UNTOUCHED), read(repo, run)
        return Account(
            plan=plan,
            untouched=untouched,
            lives=tuple(lives),
            comparison=compare(one, other),
            loss=repo.manifest(other.id).metrics.get("loss"),
            copy_s=ask(lambda: copy_seconds(other.bytes), self.output),
            seconds=untouched.seconds + time.monotonic() - began,
            bytes=other.bytes,
        )

    @property
    def checkpoints(self) -> Path:
        return self.place / "checkpoints"

    @property
    def output(self) -> Path:
        return self.place / "output.txt"

    def _lives(self, plan: Plan, run: str) -> list[Life]:
        lives: list[Life] = []
        for number, kill in enumerate(plan.kills):
            child = self._start(plan, run, number, kill)
            if self._until(child, kill, partial(self._told, plan, number)):
                child.kill()
            lives.append(self._well(child.life()))
            if not lives[-1].killed:
                return lives
        child = self._start(plan, run, len(lives))
        while child.running():
            self._told(plan, len(lives), child.step)
            time.sleep(0.02)
        return [*lives, self._well(child.life())]

    def _until(self, child: Child, kill: Kill, told: Callable[[int], None]) -> bool:
        """Waits for the moment; whether the child has lived to see it."""
        if kill.during == "start":
            time.sleep(kill.moment * self._start_s)
            return child.running()
        if kill.during in POINTS:
            # It ends itself there; what never comes there, or is the last to, is killed a while later.
            late = 1 if kill.during in ("adopt", "reseal") else kill.after + LATE_STEPS
            return child.wait_until(lambda: child.step >= max(late, 1))

        def far_enough() -> bool:
            told(child.step)
            return child.step >= kill.after

        if not child.wait_until(far_enough):
            return False
        if kill.during == "step":
            step_s = (time.monotonic() - child.started) / max(child.step, 1)
            time.sleep(kill.moment * min(step_s, LONG_STEP_S))
            return child.running()
        phase, rest = divmod(kill.moment * len(SAVE_PHASES), 1)
        name = SAVE_PHASES[int(phase)]
        before = told_of(child, name)
        if not child.wait_until(lambda: told_of(child, name) > before):
            return False
        time.sleep(rest * INSIDE_SAVE_S)
        return child.running()

    def _told(self, plan: Plan, kills: int, done: int) -> None:
        self.tell(f"training, {kills} of {len(plan.kills)} kills", done, plan.steps)

    def _start(self, plan: Plan, run: str, life: int, kill: Kill | None = None) -> Child:
        return start(self._training(plan, run, kill), self.place / f"events-{run}-{life:03d}.jsonl", self.output)

    def _training(self, plan: Plan, run: str, kill: Kill | None = None) -> Train:
        def train(events: Path, on_step: Callable[[int, float], None]) -> None:
            import numpy as np
            import torch

            from holdfast import every
            from holdfast.demo import train_gpt
            from holdfast.report import JsonLines

            # One thread: two of them wait for each other for ever longer when something else runs on the machine.
            torch.set_num_threads(1)
            # Forking seeds Python's generator anew; the script, which does not use it, seeds torch's alone.
            random.seed(0)
            np.random.seed(0)
            for name, value in plan.sizes.items():
                setattr(train_gpt, name, value)
            with _killing_itself(kill, on_step) as told:
                train_gpt.train(
                    str(self.checkpoints),
                    run=run,
                    steps=plan.steps,
                    save_every=plan.save_every,
                    memory=every(steps=1) if plan.memory else None,
                    sinks=[JsonLines(events)],
                    on_step=told,
                )

        return train

    def _well(self, life: Life) -> Life:
        """A life that ended by itself must have ended well."""
        if life.status not in (0, -9):
            said = self.output.read_text(errors="replace").strip().rpartition("\n")[2]
            raise TrainingFailed(
                f"the training process ended with status {life.status} after step {life.reached}: {said}",
                subject=str(self.output),
                hint=f"see what it said: tail {self.output}",
            )
        return life


@contextmanager
def _killing_itself(kill: Kill | None, on_step: Callable[[int, float], None]) -> Iterator[Callable[[int, float], None]]:
    """In the child: it ends by SIGKILL at the point where it is to, if at one. Gives what to call after each step."""
    if kill is None or kill.during not in POINTS:
        yield on_step
        return
    done = 0

    def told(step: int, loss: float) -> None:
        nonlocal done
        done = step
        on_step(step, loss)

    def passed() -> None:
        if kill.during in ("adopt", "reseal") or done >= kill.after:
            os.kill(os.getpid(), signal.SIGKILL)

    with armed(POINTS[kill.during], passed):
        yield told


class TrainingFailed(HoldfastError):
    """A child of the demo failed, for a reason of its own."""


def told_of(child: Child, event: str) -> int:
    """How many such events its stream holds so far."""
    return sum(one["event"] == event for one in child.seen())


def load_framework() -> None:
    """Imports what the children need, once, and runs none of it."""
    try:
        import torch._dynamo  # the first optimizer of a process imports it, for more than a second

        from holdfast.api import checkpointer
        from holdfast.demo import train_gpt
        from holdfast.integrations.torch import certificate, data, rng
        from holdfast.state.registry import home
    except ModuleNotFoundError as error:
        raise MissingExtra(f"the demo trains with torch: {error}", hint="pip install 'holdfast[torch]'") from error
    assert all((torch._dynamo, checkpointer, train_gpt, certificate, data, rng, home("torch")))


def copy_seconds(nbytes: int, repeats: int = 30) -> float:
    """The median time of one copy of `nbytes` into warm memory, with one thread, as the training has."""
    import torch

    torch.set_num_threads(1)
    source = torch.zeros(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    times: list[Any] = []
    for _ in range(repeats):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return float(statistics.median(times))
