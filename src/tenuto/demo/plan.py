"""Plans the kills: everything a demo will do, drawn from one seed before it begins."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from tenuto.demo.trace import POINTS, Place

During = Literal["save", "step", "start"] | Place
Capture = Literal["eager", "fenced"]
PLACES: Final[tuple[Place, ...]] = ("capture", "seal", "adopt", "write")
"""Phases in which a training with a memory tier kills itself."""

SMALL: Final[Mapping[str, int]] = {"CONTEXT": 32, "WIDTH": 64, "LAYERS": 1, "HEADS": 2, "BATCH": 4}
"""Sizes of the training script for fast campaigns of many kills."""
ROOM: Final = 4
"""Steps after the last kill, in addition to those until the next save."""


@dataclass(frozen=True, slots=True)
class Flush:
    """A flush of memory by another process: killed at a named point or a moment (in [0, 1), a share of its time), or
    not killed."""

    point: str | None = None
    moment: float | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill.

    after: completed steps before it is due.
    during: the phase to interrupt: the next save, a step, the process's start before its first step, or a phase of the
        protocol. "adopt" happens at the start, or in the first step if nothing is adopted there.
    moment: in [0, 1), a share of the phase's time.
    point: a named point of the phase, instead of a moment.
    then: a flush before the process is started again.
    """

    after: int
    during: During
    moment: float
    point: str | None = None
    then: Flush | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A demo's plan.

    kills: in the order in which they happen.
    sizes: constants to replace in the training script.
    memory: whether every step is also kept in memory.
    capture: the Checkpointer's argument.
    traced: whether each process records its phase.
    """

    steps: int
    save_every: int
    kills: tuple[Kill, ...]
    seed: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    memory: bool = False
    capture: Capture = "eager"
    traced: bool = False


def draw_plan(
    *,
    kills: int,
    steps: int,
    save_every: int,
    seed: int,
    starts: bool = False,
    sizes: Mapping[str, int] | None = None,
    memory: bool = False,
) -> Plan:
    """Draws kills at random steps, half of them during a save; with `starts`, every fifth at a process's start."""
    draw = random.Random(seed)
    kinds: list[During] = [
        "start" if starts and number % 5 == 4 else ("save", "step")[number % 2] for number in range(kills)
    ]
    draw.shuffle(kinds)
    steps_of_kills = sorted(draw.randrange(1, max(steps - save_every, 2)) for _ in range(kills))
    drawn = (Kill(after, kind, draw.random()) for after, kind in zip(steps_of_kills, kinds, strict=True))
    return Plan(steps, save_every, tuple(drawn), seed, dict(sizes or {}), memory)


def draw_everywhere(
    *, kills: int, steps: int, save_every: int, seed: int, sizes: Mapping[str, int], capture: Capture = "eager"
) -> Plan:
    """Draws kills for a training with a memory tier: in every phase in turn, half at named points, half at random
    moments.

    One in five happens in a step or at a start. A flush follows about every third, and most flushes are killed as well.
    """
    draw = random.Random(seed)
    cycle: list[During] = [*PLACES, "step", *PLACES, "start"]
    kinds = [cycle[number % len(cycle)] for number in range(kills)]
    draw.shuffle(kinds)
    last = max(steps - save_every - ROOM, 2)
    drawn = []
    for after, during in zip(sorted(draw.randrange(1, last) for _ in range(kills)), kinds, strict=True):
        named = during in PLACES and draw.random() < 0.5
        point = draw.choice(POINTS[during]) if named and during in get_args(Place) else None  # type: ignore[index]
        drawn.append(Kill(after, during, draw.random(), point, _flush(draw) if draw.random() < 1 / 3 else None))
    return Plan(steps, save_every, tuple(drawn), seed, dict(sizes), memory=True, capture=capture, traced=True)


def _flush(draw: random.Random) -> Flush:
    kind = draw.random()
    if kind < 0.5:
        return Flush(point=draw.choice(POINTS["flush"]))
    return Flush(moment=draw.random()) if kind < 0.85 else Flush()
