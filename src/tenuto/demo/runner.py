"""The demo's execution: an uninterrupted run, then the same training killed and started again."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from tenuto.demo.children import Child, Life, Train, ask, start
from tenuto.demo.comparison import compare, read
from tenuto.demo.outcome import Account, Flushing
from tenuto.demo.plan import PLACES, Flush, Kill, Plan
from tenuto.demo.trace import ORDER, Death, Place, Trace
from tenuto.errors import MissingExtra, TenutoError, install, typed
from tenuto.maintenance.flush import execute, plan_flush
from tenuto.model.ids import CheckpointId, run_key
from tenuto.repo.lineage import latest, resolve
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

UNTOUCHED: Final = "untouched"
KILLED: Final = "killed"
SAVE_PHASES: Final = ("SaveStarted", "Captured", "PackWritten")
"""A kill aimed at a save comes after one of these events of it, and at most so much later:"""
INSIDE_SAVE_S: Final = 0.003
LONG_STEP_S: Final = 0.2
LATE_STEPS: Final = 3
SELDOM_S: Final = 0.005
"""How often a child is looked at that ends itself."""

Tell = Callable[[str, int, int], None]
"""Told how far the demo is: what it does, steps done, steps in all."""


def tell_nobody(what: str, done: int, total: int) -> None:
    """For those who do not watch."""


@dataclass
class Runner:
    """Executes plans in `place`, which then holds checkpoints, events and what the children printed."""

    place: Path
    tell: Tell = tell_nobody
    _start_s: float = 0.5
    _usual_s: dict[Place, float] = field(default_factory=dict)
    """How long a passage through each place of the protocol took last."""

    def untouched(self, plan: Plan) -> Life:
        """The run that nobody kills, in one life."""
        self.place.mkdir(parents=True, exist_ok=True)
        child = self._start(plan, UNTOUCHED, 0, None, Trace())
        if child.wait_until(lambda: child.step > 0):
            self._start_s = time.monotonic() - child.started
        while child.running():
            self.tell("training untouched", child.step, plan.steps)
            time.sleep(0.02)
        life = self._well(child.life())
        if not plan.memory:
            return life
        # The last step goes to the store, and is not told of as one that memory holds.
        repo = Repo.open(open_store(self.checkpoints))
        last = repo.manifest(resolve(repo, UNTOUCHED, "latest"))
        return replace(life, remembered={**life.remembered, last.id.step: last.content})

    def killed(self, plan: Plan, untouched: Life, run: str = KILLED) -> Account:
        """The same training again as `run`, killed as planned, and compared with the untouched one."""
        began = time.monotonic()
        lives, flushes = self._lives(plan, run)
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
            run=run,
            flushes=tuple(flushes),
        )

    @property
    def checkpoints(self) -> Path:
        return self.place / "checkpoints"

    @property
    def output(self) -> Path:
        return self.place / "output.txt"

    def _lives(self, plan: Plan, run: str) -> tuple[list[Life], list[Flushing]]:
        lives: list[Life] = []
        flushes: list[Flushing] = []
        for kill in plan.kills:
            lives.append(self._life(plan, run, len(lives), kill))
            if not lives[-1].killed:
                return lives, flushes
            if kill.then is not None:
                flushes.append(self._flush(run, len(lives) - 1, kill.then))
        return [*lives, self._life(plan, run, len(lives), None)], flushes

    def _life(self, plan: Plan, run: str, number: int, kill: Kill | None) -> Life:
        """Trains in a process of its own, until it is killed or ends."""
        trace = Trace()
        told = partial(self._told, plan, number)
        child = self._start(plan, run, number, kill, trace)
        if kill is not None and self._until(child, kill, plan, told):
            child.kill()
        while child.running():
            told(child.step)
            time.sleep(0.02)
        life = self._well(child.life())
        self._note(trace)
        newest = self._durable(run)
        return replace(life, place=trace.place, point=trace.point, durable=newest.step if newest is not None else 0)

    def _flush(self, run: str, after: int, flush: Flush) -> Flushing:
        """Flushes what is left in memory in a process of its own, until that is killed or ends."""
        trace, before = Trace(), self._durable(run)
        dies = flush.point is not None or flush.moment is not None
        death = Death("flush", flush.point, flush.moment or 0.0) if dies else None

        def work(events: Path, on_step: Callable[[int, float], None]) -> None:
            with trace.followed(death), trace.inside("flush", death, usual_s=self._usual_s.get("flush", 0.0)):
                repo = Repo.open(open_store(self.checkpoints))
                execute(repo, plan_flush(repo, run_key(run)))

        child = start(work, self.place / "no-events.jsonl", self.output)
        life = self._well(child.end())
        self._note(trace)
        written = self._durable(run) != before
        return Flushing(after, life.status, trace.point, trace.place == "flush", written)

    def _note(self, trace: Trace) -> None:
        for place in ORDER:
            if trace.passages[place]:
                self._usual_s[place] = trace.seconds(place)

    def _durable(self, run: str) -> CheckpointId | None:
        """The newest checkpoint in the store."""
        return latest(Repo.open(open_store(self.checkpoints)), run)

    def _until(self, child: Child, kill: Kill, plan: Plan, told: Callable[[int], None]) -> bool:
        """Waits for the moment; whether the child has lived to see it."""
        if kill.during == "start":
            time.sleep(kill.moment * self._start_s)
            return child.running()
        if kill.during in PLACES:
            # It ends itself there; what never comes there, or is the last to, is killed a while later.
            late = kill.after + LATE_STEPS + (plan.save_every if kill.during == "write" else 0)
            return child.wait_until(lambda: child.step >= (1 if kill.during == "adopt" else late), SELDOM_S)

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

    def _start(self, plan: Plan, run: str, life: int, kill: Kill | None, trace: Trace) -> Child:
        events = self.place / f"events-{run}-{life:03d}.jsonl"
        return start(self._training(plan, run, kill, trace), events, self.output)

    def _training(self, plan: Plan, run: str, kill: Kill | None, trace: Trace) -> Train:
        def train(events: Path, on_step: Callable[[int, float], None]) -> None:
            import numpy as np
            import torch

            from tenuto import every
            from tenuto.demo import train_gpt
            from tenuto.telemetry import JsonLines

            # One thread: two of them wait for each other for ever longer when something else runs on the machine.
            torch.set_num_threads(1)
            # Forking seeds Python's generator anew; the script, which does not use it, seeds torch's alone.
            random.seed(0)
            np.random.seed(0)
            for name, value in plan.sizes.items():
                setattr(train_gpt, name, value)
            done = 0

            def told(step: int, loss: float) -> None:
                nonlocal done
                done = step
                on_step(step, loss)

            with ExitStack() as stack:
                if plan.traced:
                    death = _death(kill, lambda: done)
                    stack.enter_context(trace.followed(death, usual_s=self._usual_s))
                train_gpt.train(
                    str(self.checkpoints),
                    run=run,
                    steps=plan.steps,
                    save_every=plan.save_every,
                    memory=every(steps=1) if plan.memory else None,
                    capture=plan.capture,
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
                hint=f"see what it said: {typed('tail', self.output)}",
            )
        return life


def _death(kill: Kill | None, done: Callable[[], int]) -> Death | None:
    """How a child ends itself, if it is to."""
    if kill is None or kill.during not in PLACES:
        return None
    place, after = kill.during, kill.after
    return Death(place, kill.point, kill.moment, lambda: place == "adopt" or done() >= after)


class TrainingFailed(TenutoError):
    """A child of the demo failed, for a reason of its own."""


def told_of(child: Child, event: str) -> int:
    """How many such events its stream holds so far."""
    return sum(one["event"] == event for one in child.seen())


def load_framework() -> None:
    """Imports what the children need, once, and runs none of it."""
    try:
        import torch._dynamo  # the first optimizer of a process imports it, for more than a second

        from tenuto.demo import train_gpt
        from tenuto.integrations.torch import certificate, rng
        from tenuto.integrations.torch.data import loaders
        from tenuto.state.frameworks import adapter_of
        from tenuto.training import checkpointer
    except ModuleNotFoundError as error:
        raise MissingExtra(f"the demo trains with torch: {error}", hint=install("torch")) from error
    assert all((torch._dynamo, checkpointer, train_gpt, certificate, loaders, rng, adapter_of("torch")))


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
