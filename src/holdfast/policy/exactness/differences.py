"""Where two trails first differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from holdfast.model.trail import Row, Trail

Group = Literal["data", "batches", "random", "state"]
GROUPS: Final[tuple[Group, ...]] = ("data", "batches", "random", "state")
RANDOM: Final = "#private/random/"
EPOCH_RANDOM: Final = "#private/data/start/global/"
DATA: Final = "#private/data"


@dataclass(frozen=True, slots=True)
class Differing:
    """One entry that is not the same in both; None: it is not there."""

    path: str
    one: str | None
    other: str | None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first row in which two trails differ. `start`: the second run had done no step yet since it began."""

    step: int
    start: bool
    found: Mapping[Group, tuple[Differing, ...]]

    def of(self, group: Group) -> tuple[Differing, ...]:
        return self.found.get(group, ())

    @property
    def first(self) -> Differing:
        """In the order of the state; where the state is the same, of the random generators, then of the data."""
        return next(found for group in reversed(GROUPS) for found in self.of(group))


def first_difference(one: Trail, other: Trail, ignoring: Set[str] = frozenset()) -> Difference | None:
    """The first step that both have done in which they differ, in the order of `other`. `ignoring`: generators that
    are not compared, by name."""
    last = min(one.reached, other.reached)
    for step in dict.fromkeys(row.step for row in other.rows):
        if step > last:
            return None
        theirs, ours = one.at(step), other.at(step)
        # Whoever was ended between the step and its epoch's end has the first of the two rows only.
        for mine, his in zip(ours, theirs, strict=False):
            found = compare(his, mine, ignoring)
            if found:
                return Difference(step, mine.start, found)
        if not theirs:
            return Difference(step, ours[0].start, {"data": (Differing("steps that were counted", None, str(step)),)})
    return None


def compare(one: Row, other: Row, ignoring: Set[str] = frozenset()) -> dict[Group, tuple[Differing, ...]]:
    """What differs between two rows of one step, by group; empty where they are equal in every bit."""
    found: dict[Group, list[Differing]] = {group: [] for group in GROUPS}
    for name in ("epoch", "batch"):
        mine, his = getattr(one, name), getattr(other, name)
        if mine != his:
            found["data"].append(Differing(name, str(mine), str(his)))
    if not (one.start or other.start) and one.batches != other.batches:
        found["batches"].append(Differing("batches", _shown(one.batches), _shown(other.batches)))
    for differing in _entries(one.entries, other.entries):
        if _generator(differing.path) not in ignoring:
            found[group_of(differing.path)].append(differing)
    return {group: tuple(entries) for group, entries in found.items() if entries}


def unseeded(one: Trail, other: Trail) -> frozenset[str]:
    """The generators that two runs began with in different states, by name, such as "numpy"."""
    starts = [row for trail in (one, other) for row in trail.rows[:1] if row.start and row.step == 0]
    if len(starts) < 2:
        return frozenset()
    differing = (_generator(one.path) for one in _entries(starts[0].entries, starts[1].entries))
    return frozenset(name for name in differing if name)


def drawn_from(trail: Trail, step: int) -> frozenset[str]:
    """The generators whose state changed in the steps up to this one."""
    rows = [row for row in trail.rows if row.step <= step]
    changed = (one.path for a, b in pairwise(rows) for one in _entries(a.entries, b.entries))
    return frozenset(_generator(path) for path in changed if path.startswith(RANDOM))


def _generator(path: str) -> str:
    """The name of the generator that an entry belongs to; "" for any other entry. A position in the data may hold the
    state that the generators had when its epoch began."""
    for beginning in (RANDOM, EPOCH_RANDOM):
        if path.startswith(beginning):
            return path[len(beginning) :].partition("/")[0]
    return ""


def group_of(path: str) -> Group:
    if path.startswith(RANDOM):
        return "random"
    return "data" if path.startswith(DATA) else "state"


def _entries(one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[Differing]:
    for path in dict.fromkeys([*one, *other]):
        if one.get(path) != other.get(path):
            yield Differing(path, one.get(path), other.get(path))


def _shown(batches: tuple[str | None, ...]) -> str:
    return ", ".join(batch or "unknown" for batch in batches) or "none"
