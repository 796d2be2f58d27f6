"""What to keep: `keep.latest(n)`, `keep.best(n, metric)`, `keep.every(steps=, hours=)`, `keep.all()`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import UsageError
from holdfast.policy.keeping import LEFT_BEHIND, CheckpointFacts, KeepPolicy, Opinion, Union
from holdfast.policy.milestones import EveryHours, EverySteps
from holdfast.policy.numbers import duration, metric_name, min_or_max, whole_number


def latest(n: int) -> KeepPolicy:
    """Keeps the newest `n`, first of the line of training that leads to `latest`, then, where places are free, of lines
    that were left behind. One known to be damaged takes no place, and stays while a whole one older than it does."""
    return Latest(whole_number(n, "keep.latest({})"))


def best(n: int, metric: str, mode: Literal["min", "max"] = "min") -> KeepPolicy:
    """Keeps the `n` with the lowest (`mode="max"`: highest) `metric`; of equal ones the newer. NaN is never best.

    A checkpoint that lacks the metric is judged only if a newer one has it; until then it is kept, as its metric may
    still be noted. A damaged one takes no place. After a rollback both the best of the whole run and the best of the
    line that goes on are kept.
    """
    name = metric_name(metric, 'keep.best(3, "val_loss")')
    return Best(whole_number(n, f"keep.best({{}}, {name!r})"), name, min_or_max(mode, name))


def every(*, steps: int | None = None, hours: float | None = None) -> KeepPolicy:
    """Keeps milestones for good; of both given, those of either.

    steps: the first checkpoint at or after each multiple of so many steps, and before the next (step 0 counts; what
    lies between it and the first multiple does not). hours: the first of each span of so many hours, counted from
    1970-01-01 00:00 UTC (24: of each day), by the time that the saving machine's clock said. "First" means first
    saved. A clock that runs backward only puts a checkpoint into a span that has its milestone already; one that ran
    ahead makes a milestone of its own. One that does not say when it was saved is no milestone of hours.

    One known to be damaged takes no place, and stays where it would be the milestone. After a rollback the line of
    training that goes on comes first; a milestone that was left behind stays until that line has reached its place.
    """
    parts: list[KeepPolicy] = []
    if steps is not None:
        parts.append(EverySteps(whole_number(steps, "keep.every(steps={})")))
    if hours is not None:
        parts.append(EveryHours(duration(hours, "keep.every(hours={})")))
    if not parts:
        raise UsageError("keep.every() of what?", hint="write keep.every(steps=1000) or keep.every(hours=24)")
    return parts[0] if len(parts) == 1 else Union(tuple(parts))


def all() -> KeepPolicy:
    """Keeps everything."""
    return All()


@dataclass(frozen=True, slots=True)
class All(KeepPolicy):
    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        return [Opinion(True, "everything is kept") for _ in history]

    def __repr__(self) -> str:
        return "keep.all()"


@dataclass(frozen=True, slots=True)
class Latest(KeepPolicy):
    n: int

    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        words = "the newest" if self.n == 1 else f"the newest {self.n}"
        live = [facts for facts in history if facts.walk is not None]
        left = [facts for facts in history if facts.walk is None]
        opinions: dict[object, Opinion] = {}
        free = self.n
        for line, suffix in ((live, ""), (left, f", {LEFT_BEHIND}")):
            for facts in line:
                if free == 0:
                    opinions[facts.id] = Opinion(False, f"not among {words}{suffix}")
                elif facts.suspect:
                    opinions[facts.id] = Opinion(True, f"damaged, and newer than the last of {words}{suffix}")
                else:
                    free -= 1
                    opinions[facts.id] = Opinion(True, f"{self._place(self.n - free)}{suffix}")
        return [opinions[facts.id] for facts in history]

    def _place(self, place: int) -> str:
        if place == 1:
            return "the newest" if self.n == 1 else f"newest of {self.n}"
        return f"{_ordinal(place)} newest of {self.n}"

    def __repr__(self) -> str:
        return f"keep.latest({self.n})"


@dataclass(frozen=True, slots=True)
class Best(KeepPolicy):
    n: int
    metric: str
    mode: Literal["min", "max"]

    def metrics(self) -> frozenset[str]:
        return frozenset({self.metric})

    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        ranked = self._ranked(history)
        of_run, of_line = self._first(ranked), self._first([facts for facts in ranked if facts.walk is not None])
        winners = {facts.id for facts in (*of_run, *of_line)}
        newest_with = next((facts.age_key for facts in history if self.metric in facts.metrics), None)
        opinions = []
        for facts in history:
            if facts.id in winners:
                opinions.append(Opinion(True, self._won(facts, of_run)))
            elif newest_with is None or facts.age_key > newest_with:
                opinions.append(Opinion(True, f"{self.metric} may still be noted for it"))
            else:
                opinions.append(Opinion(False, self._lost(facts, of_run)))
        return opinions

    def _ranked(self, history: Sequence[CheckpointFacts]) -> list[CheckpointFacts]:
        """Those that have the metric, best first, the newer of equals first."""
        sign = 1.0 if self.mode == "min" else -1.0
        with_metric = [facts for facts in history if not math.isnan(self._value(facts))]
        return sorted(with_metric, key=lambda facts: sign * self._value(facts))

    def _first(self, ranked: Sequence[CheckpointFacts]) -> list[CheckpointFacts]:
        """The first n whole ones, and the damaged ones among them: those may be repaired, and take no place."""
        first: list[CheckpointFacts] = []
        places = self.n
        for facts in ranked:
            if not places:
                break
            first.append(facts)
            places -= not facts.suspect
        return first

    def _value(self, facts: CheckpointFacts) -> float:
        return float(facts.metrics.get(self.metric, math.nan))

    def _won(self, facts: CheckpointFacts, of_run: Sequence[CheckpointFacts]) -> str:
        reason = f"{'damaged, but ' if facts.suspect else ''}{self._words()} ({self._value(facts):g})"
        if facts.walk is None:
            return f"{reason}, {LEFT_BEHIND}"
        return reason if facts in of_run else f"{reason} of the line of training that goes on"

    def _lost(self, facts: CheckpointFacts, of_run: Sequence[CheckpointFacts]) -> str:
        if self.metric not in facts.metrics:
            return f"has no {self.metric}, and a newer one has"
        if math.isnan(self._value(facts)):
            return f"{self.metric} is nan"
        value, last = self._value(facts), self._value(of_run[-1])
        if value == last:
            return f"not {self._words()} ({value:g}, and a newer one has the same)"
        bar = "the best" if self.n == 1 else f"{_ordinal(self.n)} best"
        return f"not {self._words()} ({value:g}; {bar} is {last:g})"

    def _words(self) -> str:
        return f"the best by {self.metric}" if self.n == 1 else f"among the best {self.n} by {self.metric}"

    def __repr__(self) -> str:
        return f"keep.best({self.n}, {self.metric!r}, mode={self.mode!r})"


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number % 10, 'th')}"
