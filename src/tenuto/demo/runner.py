"""Runs a demo: an uninterrupted training, then the same training killed and restarted."""

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
"""A kill aimed at a save follows one of these events, by at most this many seconds:"""
INSIDE_SAVE_S: Final = 0.003
LONG_STEP_S: Final = 0.2
LATE_STEPS: Final = 3
SELDOM_S: Final = 0.005
"""Poll interval for a child that kills itself."""

ReportProgress = Callable[[str, int, int], None]
"""Called with the activity, the steps done and the steps in total."""


def ignore_progress(what: str, done: int, total: int) -> None:
    """Ignores progress."""


@dataclass
class Runner:
    """Runs plans in `place`, which receives checkpoints, events and the children's output."""

    place: Path
    on_progress: ReportProgress = ignore_progress
    _start_s: float = 0.5
    _usual_s: dict[Place, float] = field(default_factory=dict)
    """Seconds of the last passage through each phase of the protocol."""

    def untouched(self, plan: Plan) -> Life:
        """Runs the training without kills, in one process."""
        self.place.mkdir(parents=True, exist_ok=True)
        child = self._start(plan, UNTOUCHED, 0, None, Trace())
        if child.wait_until(lambda: child.step > 0):
            self._start_s = time.monotonic() - child.started
        while child.running():
            self.on_progress("training untouched", child.step, plan.steps)
            time.sleep(0.02)
        life = self._checked(child.life())
        if not plan.memory:
            return life
        # The last step goes to the store, and no event reports it as kept in memory.
        repo = Repo.open(open_store(self.checkpoints))
        last = repo.manifest(resolve(repo, UNTOUCHED, "latest"))
        return replace(life, remembered={**life.remembered, last.id.step: last.content})

    def killed(self, plan: Plan, untouched: Life, run: str = KILLED) -> Account:
        """Runs the training again as `run`, killed as planned, and compares it with the untouched one."""
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
        on_step_done = partial(self._report, plan, number)
        child = self._start(plan, run, number, kill, trace)
        if kill is not None and self._until(child, kill, plan, on_step_done):
            child.kill()
        while child.running():
            on_step_done(child.step)
            time.sleep(0.02)
        life = self._checked(child.life())
        self._note(trace)
        newest = self._durable(run)
        return replace(life, place=trace.place, point=trace.point, durable=newest.step if newest is not None else 0)

    def _flush(self, run: str, after: int, flush: Flush) -> Flushing:
        """Flushes memory in a process of its own, until that is killed or ends."""
        trace, before = Trace(), self._durable(run)
        dies = flush.point is not None or flush.moment is not None
        death = Death("flush", flush.point, flush.moment or 0.0) if dies else None

        def work(events: Path, on_step: Callable[[int, float], None]) -> None:
            with trace.traced(death), trace.inside("flush", death, usual_s=self._usual_s.get("flush", 0.0)):
                repo = Repo.open(open_store(self.checkpoints))
                execute(repo, plan_flush(repo, run_key(run)))

        child = start(work, self.place / "no-events.jsonl", self.output)
        life = self._checked(child.end())
        self._note(trace)
        written = self._durable(run) != before
        return Flushing(after, life.status, trace.point, trace.place == "flush", written)

    def _note(self, trace: Trace) -> None:
        for place in ORDER:
            if trace.passages[place]:
                self._usual_s[place] = trace.seconds(place)

    def _durable(self, run: str) -> CheckpointId | None:
        """Returns the newest checkpoint in the store."""
        return latest(Repo.open(open_store(self.checkpoints)), run)

    def _until(self, child: Child, kill: Kill, plan: Plan, on_step_done: Callable[[int], None]) -> bool:
        """Waits for the kill's moment; returns whether the child is still alive."""
        if kill.during == "start":
            time.sleep(kill.moment * self._start_s)
            return child.running()
        if kill.during in PLACES:
            # The child kills itself there; one that never gets there is killed some steps later.
            late = kill.after + LATE_STEPS + (plan.save_every if kill.during == "write" else 0)
            return child.wait_until(lambda: child.step >= (1 if kill.during == "adopt" else late), SELDOM_S)

        def far_enough() -> bool:
            on_step_done(child.step)
            return child.step >= kill.after

        if not child.wait_until(far_enough):
            return False
        if kill.during == "step":
            step_s = (time.monotonic() - child.started) / max(child.step, 1)
            time.sleep(kill.moment * min(step_s, LONG_STEP_S))
            return child.running()
        phase, rest = divmod(kill.moment * len(SAVE_PHASES), 1)
        name = SAVE_PHASES[int(phase)]
        before = count_events(child, name)
        if not child.wait_until(lambda: count_events(child, name) > before):
            return False
        time.sleep(rest * INSIDE_SAVE_S)
        return child.running()

    def _report(self, plan: Plan, kills: int, done: int) -> None:
        self.on_progress(f"training, {kills} of {len(plan.kills)} kills", done, plan.steps)

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

            # One thread: two wait for each other ever longer if something else runs on the machine.
            torch.set_num_threads(1)
            # Forking reseeds Python's generator; the script, which does not use it, seeds only torch's.
            random.seed(0)
            np.random.seed(0)
            for name, value in plan.sizes.items():
                setattr(train_gpt, name, value)
            done = 0

            def on_step_done(step: int, loss: float) -> None:
                nonlocal done
                done = step
                on_step(step, loss)

            with ExitStack() as stack:
                if plan.traced:
                    death = _death(kill, lambda: done)
                    stack.enter_context(trace.traced(death, usual_s=self._usual_s))
                train_gpt.train(
                    str(self.checkpoints),
                    run=run,
                    steps=plan.steps,
                    save_every=plan.save_every,
                    memory=every(steps=1) if plan.memory else None,
                    capture=plan.capture,
                    sinks=[JsonLines(events)],
                    on_step=on_step_done,
                )

        return train

    def _checked(self, life: Life) -> Life:
        """Returns a process that was killed or succeeded; raises TrainingFailed otherwise."""
        if life.status not in (0, -9):
            last_line = self.output.read_text(errors="replace").strip().rpartition("\n")[2]
            raise TrainingFailed(
                f"the training process ended with status {life.status} after step {life.reached}: {last_line}",
                subject=str(self.output),
                hint=f"see what it said: {typed('tail', self.output)}",
            )
        return life


def _death(kill: Kill | None, done: Callable[[], int]) -> Death | None:
    """Returns how a child kills itself, if it is to."""
    if kill is None or kill.during not in PLACES:
        return None
    place, after = kill.during, kill.after
    return Death(place, kill.point, kill.moment, lambda: place == "adopt" or done() >= after)


class TrainingFailed(TenutoError):
    """A child of the demo failed, for a reason of its own."""


def count_events(child: Child, event: str) -> int:
    """Returns the number of such events in the child's stream so far."""
    return sum(one["event"] == event for one in child.seen())


def load_framework() -> None:
    """Imports what the children need, without running any of it."""
    try:
        import torch._dynamo  # a process's first optimizer imports it, which takes over a second

        from tenuto.demo import train_gpt
        from tenuto.integrations.torch import certificate, rng
        from tenuto.integrations.torch.data import loaders
        from tenuto.state.frameworks import adapter_of
        from tenuto.training import checkpointer
    except ModuleNotFoundError as error:
        raise MissingExtra(f"the demo trains with torch: {error}", hint=install("torch")) from error
    assert all((torch._dynamo, checkpointer, train_gpt, certificate, loaders, rng, adapter_of("torch")))


def copy_seconds(nbytes: int, repeats: int = 30) -> float:
    """Returns the median seconds of copying `nbytes` into warm memory on one thread, as the training has."""
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
