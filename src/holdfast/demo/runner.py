"""The demo's plan and its execution: an uninterrupted run, then the same training killed and started again."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.demo.children import Child, Life, Train, ask, start
from holdfast.demo.comparison import Comparison, compare, read
from holdfast.errors import HoldfastError, MissingExtra
from holdfast.repo.repository import Repo
from holdfast.store.registry import open_store

UNTOUCHED: Final = "untouched"
KILLED: Final = "killed"
FIRST_GUESS_S: Final = 0.02
"""How long a save may take, before the first one has been seen."""

Tell = Callable[[str, int, int], None]
"""Told how far the demo is: what it does, steps done, steps in all."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Once `after` steps are done: at a random moment of a step, or (`aimed`) of the next save. `moment`: in [0, 1)."""

    after: int
    aimed: bool
    moment: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the demo will do, so that one seed tells the whole story."""

    steps: int
    save_every: int
    kills: tuple[Kill, ...]
    seed: int


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
        return tuple(
            max(before.reached - after.began, 0)
            for before, after in zip(self.lives, self.lives[1:], strict=False)
            if before.killed
        )

    @property
    def stall_s(self) -> float | None:
        stalls = [stall for life in (self.untouched, *self.lives) for stall in life.stalls_s]
        return statistics.median(stalls) if stalls else None

    @property
    def proven(self) -> bool:
        """Equal in every bit, and not because nothing was killed."""
        return self.comparison.equal and self.kills >= 1


def plan(*, kills: int, steps: int, save_every: int, seed: int) -> Plan:
    """Kills at random steps; every other one, in random order, is aimed at a save."""
    draw = random.Random(seed)
    aims = [number % 2 == 0 for number in range(kills)]
    draw.shuffle(aims)
    moments = sorted(draw.randrange(1, max(steps - save_every, 2)) for _ in range(kills))
    return Plan(
        steps,
        save_every,
        tuple(Kill(after, aim, draw.random()) for after, aim in zip(moments, aims, strict=True)),
        seed,
    )


@dataclass
class Runner:
    """Executes a plan in `place`, which then holds checkpoints, events and what the children printed."""

    plan: Plan
    place: Path
    tell: Tell = lambda what, done, total: None
    _save_s: list[float] = field(default_factory=list)

    def execute(self) -> Account:
        began = time.monotonic()
        self.place.mkdir(parents=True, exist_ok=True)
        untouched = self._untouched()
        lives = self._killed()
        repo = Repo.open(open_store(self.checkpoints))
        one, other = read(repo, UNTOUCHED), read(repo, KILLED)
        return Account(
            plan=self.plan,
            untouched=untouched,
            lives=tuple(lives),
            comparison=compare(one, other),
            loss=repo.manifest(other.id).metrics.get("loss"),
            copy_s=ask(lambda: copy_seconds(other.bytes), self.output),
            seconds=time.monotonic() - began,
            bytes=other.bytes,
        )

    @property
    def checkpoints(self) -> Path:
        return self.place / "checkpoints"

    @property
    def output(self) -> Path:
        return self.place / "output.txt"

    def _untouched(self) -> Life:
        child = self._start(UNTOUCHED, 0)
        while child.running():
            self.tell("training untouched", child.step, self.plan.steps)
            time.sleep(0.02)
        return self._well(child.life())

    def _killed(self) -> list[Life]:
        lives: list[Life] = []
        for kill in self.plan.kills:
            child = self._start(KILLED, len(lives))
            if self._until(child, kill):
                child.kill()
            lives.append(self._well(child.life()))
            self._save_s.extend(lives[-1].saves_s)
            if not lives[-1].killed:
                return lives
        child = self._start(KILLED, len(lives))
        while child.running():
            self._told(child, len(self.plan.kills))
            time.sleep(0.02)
        return [*lives, self._well(child.life())]

    def _until(self, child: Child, kill: Kill) -> bool:
        """Whether the moment came before the child ended."""
        number = self.plan.kills.index(kill)
        step_s = time.monotonic()

        def far_enough() -> bool:
            self._told(child, number)
            return child.step >= kill.after

        if not child.wait_until(far_enough):
            return False
        if not kill.aimed:
            per_step = (time.monotonic() - step_s) / max(child.step, 1)
            time.sleep(kill.moment * min(per_step, 0.2))
            return child.running()
        begun = saves_begun(child)
        if not child.wait_until(lambda: saves_begun(child) > begun):
            return False
        time.sleep(kill.moment * (statistics.median(self._save_s) if self._save_s else FIRST_GUESS_S))
        return child.running()

    def _told(self, child: Child, kills: int) -> None:
        self.tell(f"training, {kills} of {len(self.plan.kills)} kills", child.step, self.plan.steps)

    def _start(self, run: str, life: int) -> Child:
        return start(self._training(run), self.place / f"events-{run}-{life:03d}.jsonl", self.output)

    def _training(self, run: str) -> Train:
        def train(events: Path, on_step: Callable[[int, float], None]) -> None:
            from holdfast.demo import train_gpt
            from holdfast.report import JsonLines

            train_gpt.train(
                str(self.checkpoints),
                run=run,
                steps=self.plan.steps,
                save_every=self.plan.save_every,
                sinks=[JsonLines(events)],
                on_step=on_step,
            )

        return train

    def _well(self, life: Life) -> Life:
        """A life that ended by itself must have ended well."""
        if life.status not in (0, -9):
            raise TrainingFailed(
                f"the training process ended with status {life.status} after step {life.reached}",
                subject=str(self.output),
                hint=f"see what it said: tail {self.output}",
            )
        return life


class TrainingFailed(HoldfastError):
    """A child of the demo failed, for a reason of its own."""


def saves_begun(child: Child) -> int:
    return sum(event["event"] == "SaveStarted" for event in child.seen())


def load_framework() -> None:
    """Imports what the children need, once, and runs none of it."""
    try:
        import torch._dynamo  # the first optimizer of a process imports it, for more than a second

        from holdfast.demo import train_gpt
        from holdfast.integrations.torch import data
    except ModuleNotFoundError as error:
        raise MissingExtra(f"the demo trains with torch: {error}", hint="pip install 'holdfast[torch]'") from error
    assert torch._dynamo and train_gpt and data


def copy_seconds(nbytes: int, repeats: int = 30) -> float:
    """The median time of one copy of `nbytes` of tensors into a warm buffer, with torch's default threads."""
    import torch

    source = torch.zeros(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    times: list[Any] = []
    for _ in range(repeats):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return float(statistics.median(times))
