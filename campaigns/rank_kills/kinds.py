"""The kinds of training that are killed: what their ranks do, and what tells whether they end as if nobody had been."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from campaigns.rank_kills.processes import Plan, Work, train
from campaigns.rank_kills.training import untouched
from tenuto.api.save_load import load


@dataclass(frozen=True)
class Judged:
    """`faults`: where a training differs from the untouched one. `compared`: what was looked at, bit for bit."""

    faults: tuple[str, ...] = ()
    compared: Mapping[str, int] = field(default_factory=dict)


class Kind(Protocol):
    """One kind of training. `timeout_s`: how long its ranks wait for each other. `own_errors`: those that it raises by
    itself, without Tenuto, where a rank is gone. `controls`: what can be broken in it, each to be told. `points`:
    crash points that only its ranks come by."""

    name: str
    work: Work
    steps: int
    save_every: int
    step_s: float
    timeout_s: float
    own_errors: frozenset[str]
    controls: tuple[str, ...]
    points: tuple[str, ...]

    def worlds(self, chance: random.Random) -> tuple[int, ...]:
        """How many ranks the jobs of one training may have."""
        ...

    def lasts_s(self, world: int) -> float:
        """A rank is killed within so long of the start of its job."""
        ...

    def more(self, life: int, wrong: str = "") -> dict[str, Any]:
        """For the plan of the job that is the `life`th of its training. `wrong`: one of the controls."""
        ...

    def judge(self, plan: Plan) -> Judged:
        """The training of which `plan` was the last job, and which has come to its end."""
        ...


class OfNumbers:
    """Numbers that depend on the step alone, on any number of ranks: each life may have another one."""

    name = "numbers"
    save_every = 2
    step_s = 0.01
    timeout_s = 5.0
    own_errors: frozenset[str] = frozenset()
    controls: tuple[str, ...] = ()
    points: tuple[str, ...] = ()

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.work: Work = train
        self._wanted = untouched(steps)

    def worlds(self, chance: random.Random) -> tuple[int, ...]:
        return (2, 3, 3)

    def lasts_s(self, world: int) -> float:
        return 0.8

    def more(self, life: int, wrong: str = "") -> dict[str, Any]:
        return {}

    def judge(self, plan: Plan) -> Judged:
        found = load(plan.where)
        if found.step != plan.steps:
            return Judged((f"step {found.step} is the last",))
        wrong = [name for name, value in self._wanted.items() if not np.array_equal(found.state[name], value)]
        return Judged(tuple(f"another {name}" for name in wrong), {"tensors of the last checkpoint": len(self._wanted)})


class OnNodes(OfNumbers):
    """The same with packs on the disks of two nodes. From life to life ranks change their nodes, so that much has to be
    handed on."""

    name = "numbers, packs on their nodes"
    points = ("packs copied, checkpoint not looked for again",) * 4

    def more(self, life: int, wrong: str = "") -> dict[str, Any]:
        return {"node": partial(_node, life)}


def _node(life: int, rank: int) -> str:
    return f"node-{(rank + life) % 2}"
