"""Pieces of the corruption campaign: so many faults on one shape, drawn by the piece's own number.

So a campaign judges the same faults however many processes it runs in.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from campaigns.corruption.directories import CHANGES as DISPLACEMENTS
from campaigns.corruption.directories import displaced
from campaigns.corruption.faults import Fault, Target, draw, targets
from campaigns.corruption.harmless import CHANGES, false_alarms, unharmed
from campaigns.corruption.judge import Verdict, judge
from campaigns.corruption.known import known
from campaigns.corruption.shapes import Shape, build_shape

FAULTS: Final = 1000
"""Of one unit."""
HARMLESS_ONE_IN: Final = 200
"""A harmless change for so many faults."""
DISPLACED_ONE_IN: Final = 50
"""A directory in the wrong place for so many faults."""
WALK_ONE_IN: Final = 4
WHOLE_ONE_IN: Final = 250
AGAIN_ONE_IN: Final = 500
"""Judged a second time, without the fast path."""
_ROUND: Final = ("steps", "chunks", "loader", "chunks", "steps", "loader", "chunks", "many", "encoded")
_WEIGHTS: Final[Mapping[str, int]] = {"pack": 16, "index": 8, "manifest": 8, "begin": 2}


@dataclass(frozen=True)
class Unit:
    shape: str
    seed: int
    number: int
    faults: int = FAULTS
    kinds: tuple[str, ...] = ()
    """Only objects of these kinds are struck, where any are given."""


@dataclass
class Tally:
    """Counts of one unit or many. `told`: (kind of object, kind of fault, reading, verify)."""

    told: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    """Faults by byte class, where one was aimed at."""
    harmless: Counter[str] = field(default_factory=Counter)
    directories: Counter[str] = field(default_factory=Counter)
    """Directories in the wrong place, by kind."""
    untouched: int = 0
    """How often an untouched store was verified and read."""
    again: int = 0
    violations: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """Those that verify has to report; where nothing can tell, a fault is counted apart."""
        return sum(count for (_, _, _, verify), count in self.told.items() if verify != "legal")

    @property
    def legal(self) -> int:
        return self.told.total() - self.faults

    def add(self, other: Tally) -> None:
        self.told.update(other.told)
        self.classes.update(other.classes)
        self.harmless.update(other.harmless)
        self.directories.update(other.directories)
        self.untouched += other.untouched
        self.again += other.again
        self.violations += other.violations
        self.alarms += other.alarms

    def count(self, verdict: Verdict) -> None:
        fault = verdict.fault
        self.told[fault.target.kind, fault.kind, verdict.reading, verdict.verify] += 1
        if fault.data is not None and ":" in fault.what:
            self.classes[f"{fault.target.kind}, {fault.what.partition(':')[0]}"] += 1
        self.violations += [f"{fault}: {problem}" for problem in verdict.problems]


def units(seed: int, faults: int = FAULTS) -> Iterator[Unit]:
    """Without end."""
    number = 0
    while True:
        yield Unit(_ROUND[number % len(_ROUND)], seed, number, faults)
        number += 1


@cache
def shape_of(name: str, seed: int) -> tuple[Shape, Sequence[Target]]:
    """Built once in a process; a unit leaves it as it was."""
    shape = build_shape(name, seed)
    return shape, targets(shape)


def run_unit(unit: Unit) -> Tally:
    """Judges the unit's faults and harmless changes."""
    shape, everything = shape_of(unit.shape, unit.seed)
    found = [target for target in everything if not unit.kinds or target.kind in unit.kinds]
    weights = [_WEIGHTS.get(target.kind, 1) for target in found]
    source = random.Random(f"{unit.seed} {unit.shape} {unit.number}")
    tally = Tally()
    shape.heal()
    with known(shape.objects.values()):
        again = list(_strike(unit, shape, source.choices(found, weights, k=unit.faults), source, tally))
        kinds = list(CHANGES)
        for _ in range(max(1, unit.faults // HARMLESS_ONE_IN)):
            kind = source.choice(kinds)
            tally.alarms += unharmed(shape, kind, source)
            tally.harmless[kind] += 1
        for _ in range(max(1, unit.faults // DISPLACED_ONE_IN)):
            kind = source.choice(list(DISPLACEMENTS))
            tally.violations += displaced(shape, kind, source)
            tally.directories[kind] += 1
    for fault, walk, first in again:
        second = judge(shape, fault, walk=walk, whole=True)
        tally.again += 1
        if (second.reading, second.verify, second.problems) != (first.reading, first.verify, first.problems):
            tally.violations.append(f"{fault}: {first} with the fast path, {second} without")
    tally.untouched += 1
    tally.alarms += [f"{unit.shape}, untouched: {problem}" for problem in false_alarms(shape)]
    return tally


def _strike(
    unit: Unit, shape: Shape, aims: Sequence[Target], source: random.Random, tally: Tally
) -> Iterator[tuple[Fault, bool, Verdict]]:
    """Judges one fault on each target; yields those that are to be judged again."""
    for number, target in enumerate(aims, 1):
        fault = draw(shape, target, source)
        walk = number % WALK_ONE_IN == 0
        verdict = judge(shape, fault, walk=walk, whole=number % WHOLE_ONE_IN == 0)
        tally.count(verdict)
        if number % AGAIN_ONE_IN == 0:
            yield fault, walk, verdict
