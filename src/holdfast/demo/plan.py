"""When to kill: everything that a demo will do, drawn from one seed before it begins."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

During = Literal["save", "step", "start", "capture", "seal", "adopt", "reseal"]
POINTS: Final[Mapping[During, str]] = {
    "capture": "memory image captured, not sealed",
    "seal": "memory image sealed",
    "adopt": "memory image adopted, not yet claimed",
    "reseal": "claimed, memory image not yet resealed",
}
"""Kills that come when the process passes a named point, and not after some time."""

SMALL: Final[Mapping[str, int]] = {"CONTEXT": 32, "WIDTH": 64, "LAYERS": 1, "HEADS": 2, "BATCH": 4}
"""Sizes of the training script with which a campaign of many kills is soon done."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Once `after` steps are done: at a random moment of the next save, or of a step; or of the process's start, before
    its first step. `moment`: in [0, 1), how far into it. The others come at one of POINTS: "capture" and "seal" once
    `after` steps are done, "adopt" and "reseal" at the process's start, or in its first step where that adopts none."""

    after: int
    during: During
    moment: float


@dataclass(frozen=True, slots=True)
class Plan:
    """`kills` in the order in which they come; `sizes`: constants of the training script to replace; `memory`: every
    step is kept in memory too."""

    steps: int
    save_every: int
    kills: tuple[Kill, ...]
    seed: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    memory: bool = False


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
    """Kills at random steps, half of them aimed at a save; with `starts`, every fifth at the start of a process. With
    `memory`, half of all are at one of POINTS, in turn."""
    draw = random.Random(seed)
    kinds: list[During] = [
        "start" if starts and number % 5 == 4 else ("save", "step")[number % 2] for number in range(kills)
    ]
    if memory:
        points = list(POINTS)
        kinds = [points[number // 2 % len(points)] if number % 2 else kind for number, kind in enumerate(kinds)]
    draw.shuffle(kinds)
    steps_of_kills = sorted(draw.randrange(1, max(steps - save_every, 2)) for _ in range(kills))
    drawn = (Kill(after, kind, draw.random()) for after, kind in zip(steps_of_kills, kinds, strict=True))
    return Plan(steps, save_every, tuple(drawn), seed, dict(sizes or {}), memory)
