"""When to kill: everything that a demo will do, drawn from one seed before it begins."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

During = Literal["save", "step", "start"]

SMALL: Final[Mapping[str, int]] = {"CONTEXT": 32, "WIDTH": 64, "LAYERS": 1, "HEADS": 2, "BATCH": 4}
"""Sizes of the training script with which a campaign of many kills is soon done."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Once `after` steps are done: at a random moment of the next save, or of a step; or of the process's start, before
    its first step. `moment`: in [0, 1), how far into it."""

    after: int
    during: During
    moment: float


@dataclass(frozen=True, slots=True)
class Plan:
    """`kills` in the order in which they come; `sizes`: constants of the training script to replace."""

    steps: int
    save_every: int
    kills: tuple[Kill, ...]
    seed: int
    sizes: Mapping[str, int] = field(default_factory=dict)


def draw_plan(
    *, kills: int, steps: int, save_every: int, seed: int, starts: bool = False, sizes: Mapping[str, int] | None = None
) -> Plan:
    """Kills at random steps, half of them aimed at a save; with `starts`, every fifth at the start of a process."""
    draw = random.Random(seed)
    kinds: list[During] = [
        "start" if starts and number % 5 == 4 else ("save", "step")[number % 2] for number in range(kills)
    ]
    draw.shuffle(kinds)
    steps_of_kills = sorted(draw.randrange(1, max(steps - save_every, 2)) for _ in range(kills))
    drawn = (Kill(after, kind, draw.random()) for after, kind in zip(steps_of_kills, kinds, strict=True))
    return Plan(steps, save_every, tuple(drawn), seed, dict(sizes or {}))
