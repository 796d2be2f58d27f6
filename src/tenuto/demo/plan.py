"""When to kill: everything that a demo will do, drawn from one seed before it begins."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from tenuto.demo.trace import POINTS, Place

During = Literal["save", "step", "start"] | Place
Capture = Literal["eager", "fenced"]
PLACES: Final[tuple[Place, ...]] = ("capture", "seal", "adopt", "write")
"""Where a training with a memory tier kills itself."""

SMALL: Final[Mapping[str, int]] = {"CONTEXT": 32, "WIDTH": 64, "LAYERS": 1, "HEADS": 2, "BATCH": 4}
"""Sizes of the training script with which a campaign of many kills is soon done."""
ROOM: Final = 4
"""Steps behind the last kill, beside those to the next save."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Another process flushes what memory holds: killed at a named point, or at a moment (in [0, 1), how far into it),
    or left alone."""

    point: str | None = None
    moment: float | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """Once `after` steps are done: at a random moment of the next save, or of a step; or of the process's start, before
    its first step. `moment`: in [0, 1), how far into it. In a place of the protocol: at the named `point`, or at a
    moment of it; "adopt" comes at the process's start, or in its first step where that adopts nothing. `then`: what
    comes before the process is started again."""

    after: int
    during: During
    moment: float
    point: str | None = None
    then: Flush | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """`kills` in the order in which they come; `sizes`: constants of the training script to replace; `memory`: every
    step is kept in memory too; `capture`: as the Checkpointer's; `traced`: each process tells where it is."""

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
    """Kills at random steps, half of them aimed at a save; with `starts`, every fifth at the start of a process."""
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
    """For a training with a memory tier: kills in every place in turn, half of them at a named point and half at any
    moment; one in five in a step or at a start. After every third comes a flush, of which most are killed as well."""
    draw = random.Random(seed)
    turn: list[During] = [*PLACES, "step", *PLACES, "start"]
    kinds = [turn[number % len(turn)] for number in range(kills)]
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
