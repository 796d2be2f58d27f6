"""Runs a round: a training that is killed in every phase of its protocol, with flushes that are killed between."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, cast

from campaigns.kills.trace import ORDER, POINTS, Death, Place, Trace
from tenuto.demo.processes import Child, Life, start
from tenuto.demo.runner import UNTOUCHED, Kill, Outcome, Plan, Runner, draw_kills
from tenuto.maintenance.flush import execute, plan_flush
from tenuto.model.ids import CheckpointId, run_key
from tenuto.policy.encoding import Preset
from tenuto.record import record
from tenuto.repo.lineage import latest, resolve

Capture = Literal["eager", "fenced"]
PLACES: Final[tuple[Place, ...]] = ("capture", "seal", "adopt", "write")
"""Phases in which a training with a memory tier kills itself."""
SIZES: Final[Mapping[str, int]] = {"CONTEXT": 32, "WIDTH": 64, "LAYERS": 1, "HEADS": 2, "BATCH": 4}
"""Constants of the training script, smaller than the demo's."""
ROOM: Final = 4
"""Steps after the last kill, in addition to those until the next save."""
LATE_STEPS: Final = 3
SELDOM_S: Final = 0.005
"""Poll interval for a child that kills itself."""
WITH_STARTS: Final = ("save", "step", "save", "step", "start", "step", "save", "step", "save", "start")


@record
class Flush:
    """A flush of memory by another process: killed at a named point or a moment (in [0, 1), a share of its time), or
    not killed."""

    point: str | None = None
    moment: float | None = None


@record
class PlacedKill(Kill):
    """A kill during a "save", a "step", a "start" (before the first step) or a phase of the protocol.

    "adopt" happens at the start, or in the first step if nothing is adopted there.


    point: a named point of the phase, instead of a moment.
    then: a flush before the process is started again.
    """

    point: str | None = None
    then: Flush | None = None


@record
class RoundPlan(Plan):
    """The plan of a round. `capture`, `encoding`: the Checkpointer's arguments."""

    capture: Capture = "eager"
    encoding: Preset = "plain"


@record
class Ending:
    """The phase in which a process ended, according to its trace, and the point where it killed itself."""

    place: Place | None = None
    point: str | None = None


@record
class Flushed:
    """A flush of the memory that life number `after` left. `written`: whether it added a checkpoint."""

    after: int
    killed: bool
    ending: Ending
    written: bool


@record
class Round:
    """The outcome of a round, with the ending of each of its processes."""

    run: str
    outcome: Outcome
    endings: tuple[Ending, ...]
    flushes: tuple[Flushed, ...] = ()
    capture: Capture = "eager"
    encoding: Preset = "plain"

    @property
    def kills(self) -> int:
        return self.outcome.kills + sum(flush.killed for flush in self.flushes)


def draw_round(*, kills: int, steps: int, save_every: int, seed: int) -> RoundPlan:
    """Draws a round without a memory tier: two kills in ten happen at a process's start."""
    drawn = draw_kills(kills, steps=steps, save_every=save_every, seed=seed, during=WITH_STARTS)
    return RoundPlan(steps, save_every, drawn, seed)


def draw_everywhere(*, kills: int, steps: int, save_every: int, seed: int, capture: Capture = "eager") -> RoundPlan:
    """Draws a round with a memory tier: kills in every phase in turn, half at named points, half at random moments.

    One in five happens in a step or at a start. A flush follows about every third, and most flushes are killed as well.
    """
    draw = random.Random(seed)
    cycle = [*PLACES, "step", *PLACES, "start"]
    kinds = [cycle[number % len(cycle)] for number in range(kills)]
    draw.shuffle(kinds)
    last = max(steps - save_every - ROOM, 2)
    drawn = []
    for after, during in zip(sorted(draw.randrange(1, last) for _ in range(kills)), kinds, strict=True):
        named = during in PLACES and draw.random() < 0.5
        point = draw.choice(POINTS[cast(Place, during)]) if named else None
        drawn.append(PlacedKill(after, during, draw.random(), point, _flush(draw) if draw.random() < 1 / 3 else None))
    return RoundPlan(steps, save_every, drawn, seed, memory=True, capture=capture)


def _flush(draw: random.Random) -> Flush:
    kind = draw.random()
    if kind < 0.5:
        return Flush(point=draw.choice(POINTS["flush"]))
    return Flush(moment=draw.random()) if kind < 0.85 else Flush()


@dataclass
class RoundRunner(Runner):
    """Runs rounds. With a memory tier the processes trace their phases, and kill themselves there."""

    _start_s: float = 0.5
    _usual_s: dict[Place, float] = field(default_factory=dict)
    """Seconds of the last passage through each phase of the protocol."""
    _endings: list[Ending] = field(default_factory=list)
    _flushes: list[Flushed] = field(default_factory=list)

    def untouched(self, plan: Plan) -> Life:
        """Runs the training without kills; with a memory tier, its life names the content of every step."""
        life = super().untouched(plan)
        if not plan.memory:
            return life
        # The last step goes to the store, and no event reports it as kept in memory.
        repo = self.repository()
        last = repo.manifest(resolve(repo, UNTOUCHED, "latest"))
        return replace(life, sealed={**life.sealed, last.id.step: last.content})

    def round(self, plan: RoundPlan, untouched: Life, run: str) -> Round:
        self._endings, self._flushes = [], []
        outcome = self.killed(plan, untouched, run)
        return Round(run, outcome, tuple(self._endings), tuple(self._flushes), plan.capture, plan.encoding)

    def _life(self, plan: Plan, run: str, number: int, kill: Kill | None) -> Life:
        trace = Trace()
        events = self.place / f"events-{run}-{number:03d}.jsonl"
        child = start(partial(self._traced, trace, plan, run, kill), events, self.output)
        if run == UNTOUCHED and child.wait_until(lambda: child.step > 0):
            self._start_s = time.monotonic() - child.started
        life = self._end(child, plan, run, number, kill)
        self._note(trace)
        self._endings.append(Ending(trace.place, trace.point))
        if life.killed and isinstance(kill, PlacedKill) and kill.then is not None:
            self._flushes.append(self._flush(run, number, kill.then))
        return life

    def _traced(  # noqa: PLR0917 - bound in this order by `partial`
        self, trace: Trace, plan: Plan, run: str, kill: Kill | None, events: Path, on_step: Callable[[int, float], None]
    ) -> None:
        """Trains, in the child, with the script's sizes of a campaign."""
        from tenuto.demo import train_gpt

        for name, value in SIZES.items():
            setattr(train_gpt, name, value)
        options = {"capture": plan.capture, "encoding": plan.encoding} if isinstance(plan, RoundPlan) else {}
        if not plan.memory:
            self._train(plan, run, events, on_step, **options)
            return
        done = 0

        def on_step_done(step: int, loss: float) -> None:
            nonlocal done
            done = step
            on_step(step, loss)

        with trace.traced(_death(kill, lambda: done), usual_s=self._usual_s):
            self._train(plan, run, events, on_step_done, **options)

    def _flush(self, run: str, after: int, flush: Flush) -> Flushed:
        """Flushes memory in a process of its own, until that is killed or ends."""
        trace, before = Trace(), self._durable(run)
        dies = flush.point is not None or flush.moment is not None
        death = Death("flush", flush.point, flush.moment or 0.0) if dies else None

        def work(events: Path, on_step: Callable[[int, float], None]) -> None:
            with trace.traced(death), trace.inside("flush", death, usual_s=self._usual_s.get("flush", 0.0)):
                repo = self.repository()
                execute(repo, plan_flush(repo, run_key(run)))

        child = start(work, self.place / "no-events.jsonl", self.output)
        life = self._checked(child.end())
        self._note(trace)
        return Flushed(after, life.killed, Ending(trace.place, trace.point), self._durable(run) != before)

    def _durable(self, run: str) -> CheckpointId | None:
        """Returns the newest checkpoint in the store."""
        return latest(self.repository(), run)

    def _note(self, trace: Trace) -> None:
        for place in ORDER:
            if trace.passages[place]:
                self._usual_s[place] = trace.seconds(place)

    def _wait_for(self, kill: Kill, child: Child, plan: Plan, report: Callable[[], None]) -> bool:
        if kill.during == "start":
            time.sleep(kill.moment * self._start_s)
            return child.running()
        if kill.during in PLACES:
            # The child kills itself there; one that never gets there is killed some steps later.
            late = kill.after + LATE_STEPS + (plan.save_every if kill.during == "write" else 0)
            return child.wait_until(lambda: child.step >= (1 if kill.during == "adopt" else late), SELDOM_S)
        return super()._wait_for(kill, child, plan, report)


def _death(kill: Kill | None, done: Callable[[], int]) -> Death | None:
    """Returns how a child kills itself, if it is to."""
    if not isinstance(kill, PlacedKill) or kill.during not in PLACES:
        return None
    place, after = kill.during, kill.after
    return Death(place, kill.point, kill.moment, lambda: place == "adopt" or done() >= after)
