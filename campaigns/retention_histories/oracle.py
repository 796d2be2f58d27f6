"""What retention must keep, worked out anew from what was done: no code of the policies, the walk or the facts is used.

Slow and plain on purpose. A history tells it everything that it does; the store is never asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tenuto.model.ids import CheckpointId

Attempts = tuple[str, int]


@dataclass(slots=True)
class Known:
    """One committed checkpoint. `verdict`: what the last verification noted. `damaged`: its manifest cannot be read;
    `unread`: one of its notes cannot be."""

    id: CheckpointId
    metrics: dict[str, float]
    created_s: float | None
    noted: dict[str, float] = field(default_factory=dict)
    verdict: str = ""
    damaged: bool = False
    unread: bool = False

    @property
    def whole(self) -> bool:
        return not self.damaged and not self.unread and self.verdict != "suspect"

    def metric(self, name: str) -> float | None:
        """NaN counts as one."""
        if name in self.noted:
            return self.noted[name]
        return None if self.damaged else self.metrics.get(name)


@dataclass(slots=True)
class Oracle:
    parents: dict[Attempts, CheckpointId | None] = field(default_factory=dict)
    there: dict[CheckpointId, Known] = field(default_factory=dict)
    rollbacks: set[Attempts] = field(default_factory=set)
    """Attempts that no training has claimed."""
    refs: dict[tuple[str, str], CheckpointId] = field(default_factory=dict)
    """By kind and name."""
    unnoticed: bool = False
    """Whether a manifest was damaged that the process remembers as whole: policies then judge by what it said."""

    def runs(self) -> list[str]:
        return sorted({run for run, _ in self.parents})

    def highest(self, run: str) -> int:
        return max((number for name, number in self.parents if name == run), default=0)

    def walk(self, run: str) -> list[CheckpointId]:
        """I4, word by word."""
        for number in sorted((n for name, n in self.parents if name == run), reverse=True):
            own = [id for id in self.there if (id.run, id.attempt) == (run, number)]
            if own or self.parents[run, number] is not None:
                return self._line(run, number, math.inf)
        return []

    def _line(self, run: str, number: int, top: float) -> list[CheckpointId]:
        own = [id for id in self.there if (id.run, id.attempt) == (run, number) and id.step <= top]
        line = sorted(own, key=lambda id: -id.step)
        parent = self.parents.get((run, number))
        return line if parent is None else line + self._line(parent.run, parent.attempt, parent.step)

    def protected(self) -> dict[CheckpointId, str]:
        """I7, over all runs, with one reason each."""
        out: dict[CheckpointId, str] = {}
        for run in self.runs():
            line = self.walk(run)
            whole = [id for id in line if self.there[id].whole]
            verified = [id for id in line if self.there[id].verdict == "verified" and self.there[id].whole]
            for what, found in (("latest", line), ("whole", whole), ("verified", verified)):
                out.update({id: f"the {what} of run {run}" for id in found[:1]})
        out.update({id: f"{kind} {name}" for (kind, name), id in self.refs.items()})
        unread = (id for id, known in self.there.items() if known.unread or (known.damaged and not self.unnoticed))
        out.update(dict.fromkeys(unread, "not judged"))
        return out

    def worth_a_day(self, run: str, bests: Sequence[tuple[str, str]]) -> set[CheckpointId]:
        """What of the lines that `run` has left behind goes into the trash first. `bests`: the metrics that the policy
        keeps the best by, each with its mode. The line of a checkpoint that was left behind is what it came from."""
        left = {id for id in self.there if id.run == run} - set(self.walk(run))
        out: set[CheckpointId] = set()
        while left:
            newest = max(left, key=_age)
            line = [self.there[id] for id in self._line(run, newest.attempt, newest.step) if id in left]
            left -= {known.id for known in line}
            whole = [known for known in line if known.whole]
            out |= {known.id for known in whole[:1]}
            out |= {known.id for known in [known for known in whole if known.verdict == "verified"][:1]}
            for name, mode in bests:
                values = [(known.metric(name), known.id) for known in whole]
                scored = [(value, id) for value, id in values if value is not None and not math.isnan(value)]
                if scored:
                    bar = (min if mode == "min" else max)(value for value, _ in scored)
                    out.add(next(id for value, id in scored if value == bar))
        return out


Judge = Callable[[Oracle, str], set[CheckpointId]]
"""Which checkpoints of a run a policy keeps."""


def nothing(oracle: Oracle, run: str) -> set[CheckpointId]:
    return set()


def latest(n: int) -> Judge:
    def judge(oracle: Oracle, run: str) -> set[CheckpointId]:
        live, left = _lines(oracle, run)
        return _until(n, oracle, [*live, *left])

    return judge


def best(n: int, metric: str, mode: str) -> Judge:
    def judge(oracle: Oracle, run: str) -> set[CheckpointId]:
        live, left = _lines(oracle, run)
        everything = sorted([*live, *left], key=_age, reverse=True)
        having = [id for id in everything if oracle.there[id].metric(metric) is not None]
        kept = {id for id in everything if not having or _age(id) > _age(having[0])}
        for candidates in (having, [id for id in having if id in live]):
            scored = [(oracle.there[id].metric(metric) or 0.0, id) for id in candidates]
            scored = [(value, id) for value, id in scored if not math.isnan(value)]
            # Python's sort keeps the order of equals, and the newest come first.
            ranked = [id for _, id in sorted(scored, key=lambda one: one[0] if mode == "min" else -one[0])]
            kept |= _until(n, oracle, ranked)
        return kept

    return judge


def every_steps(n: int) -> Judge:
    return _milestones(lambda known: None if 0 < known.id.step < n else known.id.step // n)


def every_hours(hours: float) -> Judge:
    def span(known: Known) -> int | None:
        if known.created_s is None or known.damaged:
            return None
        return int(known.created_s // (hours * 3600))

    return _milestones(span)


def calendar(unit: str, last: int | None) -> Judge:
    """The first of each hour, day, week, month or year, of the `last` so many."""

    def number(known: Known) -> int | None:
        if known.created_s is None or known.damaged:
            return None
        when = datetime.fromtimestamp(known.created_s, UTC)
        if unit == "month":
            return when.year * 12 + when.month - 1
        if unit == "year":
            return when.year
        if unit == "week":
            return (when.toordinal() - 1) // 7
        return when.toordinal() * 24 + when.hour if unit == "hour" else when.toordinal()

    def judge(oracle: Oracle, run: str) -> set[CheckpointId]:
        kept = _milestones(number)(oracle, run)
        newest = _newest_s(oracle, run)
        if last is None or newest is None:
            return kept
        now = number(Known(CheckpointId(run, 1, 1), {}, newest))
        assert now is not None
        return {id for id in kept if (number(oracle.there[id]) or 0) > now - last}

    return judge


def within(hours: float) -> Judge:
    def judge(oracle: Oracle, run: str) -> set[CheckpointId]:
        newest, times = _newest_s(oracle, run), _times(oracle, run)
        return set() if newest is None else {id for id, time in times.items() if time >= newest - hours * 3600}

    return judge


def after_attempts() -> Judge:
    return _milestones(lambda known: known.id.attempt)


def after_rollbacks() -> Judge:
    """The first of what was saved next after a rollback. Attempts in between have saved nothing, and continue the same
    checkpoint."""

    def judge(oracle: Oracle, run: str) -> set[CheckpointId]:
        there = {id.attempt for id in oracle.there if id.run == run}
        found = set()
        for attempt in there:
            readable = any(
                not oracle.there[id].damaged for id in oracle.there if (id.run, id.attempt) == (run, attempt)
            )
            parent = oracle.parents[run, attempt] if readable else None
            below = attempt - 1
            while (run, below) not in oracle.rollbacks and below not in there:
                if (run, below) in oracle.parents and oracle.parents[run, below] != parent:
                    break
                below -= 1
                if below < 1:
                    break
            if (run, below) in oracle.rollbacks:
                found.add(attempt)
        return _milestones(lambda known: known.id.attempt if known.id.attempt in found else None)(oracle, run)

    return judge


def _times(oracle: Oracle, run: str) -> dict[CheckpointId, float]:
    there = {id: oracle.there[id] for id in oracle.there if id.run == run}
    return {id: one.created_s for id, one in there.items() if one.created_s is not None and not one.damaged}


def _newest_s(oracle: Oracle, run: str) -> float | None:
    """The older of the times of the two newest: one clock that ran ahead does not count."""
    times = _times(oracle, run)
    return min([times[id] for id in sorted(times, key=_age, reverse=True)[:2]], default=None)


def either(*judges: Judge) -> Judge:
    return lambda oracle, run: set().union(*(judge(oracle, run) for judge in judges))


def _milestones(span: Callable[[Known], int | None]) -> Judge:
    def judge(oracle: Oracle, run: str) -> set[CheckpointId]:
        live, left = _lines(oracle, run)
        in_order = [*reversed(live), *sorted(left, key=lambda id: (-id.attempt, id.step))]
        kept: set[CheckpointId] = set()
        for number in {span(oracle.there[id]) for id in in_order} - {None}:
            kept |= _until(1, oracle, [id for id in in_order if span(oracle.there[id]) == number])
        return kept

    return judge


def _lines(oracle: Oracle, run: str) -> tuple[list[CheckpointId], list[CheckpointId]]:
    """The run's checkpoints on the walk, newest first, and those left behind."""
    live = [id for id in oracle.walk(run) if id.run == run]
    left = [id for id in oracle.there if id.run == run and id not in live]
    return live, sorted(left, key=_age, reverse=True)


def _until(n: int, oracle: Oracle, ids: Iterable[CheckpointId]) -> set[CheckpointId]:
    """The first of `ids` up to the nth whole one."""
    kept: set[CheckpointId] = set()
    found = 0
    for id in ids:
        if found < n:
            kept.add(id)
            found += oracle.there[id].whole
    return kept


def _age(id: CheckpointId) -> tuple[int, int]:
    return (id.attempt, id.step)
