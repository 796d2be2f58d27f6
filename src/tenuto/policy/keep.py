"""What to keep: `keep.latest(n)`, `keep.best(n, metric)`, `keep.every(steps=, hours=)`, `keep.hourly(hours)`, `daily`,
`weekly`, `monthly`, `yearly`, `keep.within(hours=, days=, weeks=)`, `keep.after(event)`, `keep.all()`, and
`keep.limit(policy, bytes=)`, what of those fits into a budget.

Whatever the policy decides, retention (I7) never removes the checkpoint that `latest` means, the last verified one and
the last healthy one on the walk of I4, or one that is pinned, tagged, on hold, being copied or needed by something
else.
"""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Final, Literal, final

from tenuto.errors import UsageError
from tenuto.model.ids import CheckpointId
from tenuto.policy.numbers import direction_of, duration, metric_name, min_or_max, whole_number
from tenuto.record import record
from tenuto.units import ordinal

if TYPE_CHECKING:
    from tenuto.policy.calendar import Unit

KEEP: Final = "keep"
"""The key of a certificate under which a training records its policy, as text."""
LEFT_BEHIND = "on a line of training that was left behind"


@record
class CheckpointFacts:
    """One checkpoint of the run under judgement. Checkpoints of other runs are never judged."""

    id: CheckpointId
    walk: int | None = None
    """Position on the walk of I4, `latest` lowest; None on an abandoned line of training."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics logged with the step or noted later; the later value wins."""
    verified: bool = False
    """Whether every byte was read and found good, with no damage noted since."""
    suspect: bool = False
    """Whether damage was noted, with no verification since."""
    healthy: bool = True
    """Whether no leaf had become NaN or infinite, as far as its save has looked."""
    created_s: float | None = None
    """Save time by the saving machine's clock, in seconds since 1970; None if unknown.

    Clocks disagree and may run backward, so this alone never makes a checkpoint newer.
    """
    pinned: bool = False
    tags: tuple[str, ...] = ()
    held: bool = False
    copied_to: str = ""
    """The tier that it is being copied to, or is the next to be."""
    needed_by: tuple[str, ...] = ()
    """What else relies on the checkpoint, in words: "run b was started from it"."""
    bytes: int = 0
    """Bytes of its own data files, as stored; 0 if unknown."""
    bases: tuple[CheckpointId, ...] = ()
    """The checkpoints in whose data files some of its bytes lie: those stay as long as it does."""
    forked_from: str = ""
    """The other run that its attempt continues; empty where that began in its own run, or from nothing."""
    rolled_back: bool = False
    """Whether its attempt is the first with checkpoints since the run was rolled back."""
    unread: str = ""
    """What of it cannot be read, in words: then it is not judged, and stays."""

    @property
    def counts(self) -> bool:
        """Returns whether others may go because it stays: it is not known to be damaged, and all of what judges it
        could be read."""
        return not self.suspect and not self.unread

    @property
    def doubt(self) -> str:
        """Returns words before what it is kept as, where it is damaged."""
        return "damaged, but " if self.suspect else ""

    @property
    def age_key(self) -> tuple[int, int]:
        """Returns a sort key, higher is newer: attempts are claimed in order, and steps only grow within one."""
        return (self.id.attempt, self.id.step)


@record
class KeepVerdict:
    id: CheckpointId
    keep: bool
    reason: str
    """The reason, in words that follow "kept: " or "removed: "."""

    def __str__(self) -> str:
        return f"{'kept' if self.keep else 'removed'}: {self.reason}"


@record
class Opinion:
    """One policy's verdict on one checkpoint, before protections."""

    keep: bool
    reason: str


class KeepPolicy(ABC):
    """Decides what to keep. Policies combine with `|`: a checkpoint that any of them keeps is kept.

    To write one, implement `judge` as a function of its arguments alone. What I7 protects is kept in any case.
    """

    @abstractmethod
    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        """Returns one opinion for each checkpoint of `history`, which is newest first."""

    def metrics(self) -> frozenset[str]:
        """Returns the names of the metrics that this policy reads, so that a metric nobody logs can be reported."""
        return frozenset()

    def keeps_all(self) -> bool:
        """Returns whether the policy keeps every checkpoint, whatever the history: then nothing has to be judged."""
        return False

    def parts(self) -> tuple[KeepPolicy, ...]:
        """Returns the policies that it combines or limits; itself where it is a single one."""
        return (self,)

    def warnings(self, history: Sequence[CheckpointFacts]) -> list[str]:
        """Returns what of the policy cannot be met, in words: a budget that is smaller than what may not go."""
        return []

    @final
    def decide(self, history: Sequence[CheckpointFacts]) -> list[KeepVerdict]:
        """Returns one verdict for each checkpoint, in the order given. Raises UsageError if one is given twice."""
        if len({facts.id for facts in history}) != len(history):
            raise UsageError("the history names a checkpoint twice")
        newest_first = sorted(history, key=lambda facts: facts.age_key, reverse=True)
        opinions = self.judge(newest_first)
        assert len(opinions) == len(newest_first), f"{self!r} did not decide on every checkpoint"
        protected = protections(newest_first)
        verdicts = {}
        for facts, opinion in zip(newest_first, opinions, strict=True):
            reasons = [*protected[facts.id], *([opinion.reason] if opinion.keep else [])]
            keep = bool(reasons)
            verdicts[facts.id] = KeepVerdict(facts.id, keep, "; ".join(reasons) if keep else opinion.reason)
        return [verdicts[facts.id] for facts in history]

    @final
    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        second: object = other  # type checkers reject other types, but not everybody runs one
        if not isinstance(second, KeepPolicy):
            raise UsageError(
                f"{self!r} | {other!r} does not combine: the second one does not say what to keep",
                hint="combine keep.latest(n), keep.best(n, metric) and keep.every(...) with |; on.end() goes to save=",
            )
        return Union(_members(self) + _members(other))


@record
class Union(KeepPolicy):
    """Keeps what any of `members` keeps, and reports all reasons."""

    members: tuple[KeepPolicy, ...]

    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        judged = [member.judge(history) for member in self.members]
        return [_joined(opinions) for opinions in zip(*judged, strict=True)]

    def metrics(self) -> frozenset[str]:
        return frozenset().union(*(member.metrics() for member in self.members))

    def keeps_all(self) -> bool:
        return any(member.keeps_all() for member in self.members)

    def parts(self) -> tuple[KeepPolicy, ...]:
        return tuple(part for member in self.members for part in member.parts())

    def warnings(self, history: Sequence[CheckpointFacts]) -> list[str]:
        return [warning for member in self.members for warning in member.warnings(history)]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.members))


def protections(history: Sequence[CheckpointFacts]) -> dict[CheckpointId, list[str]]:
    """Returns why I7 protects each checkpoint; an empty list if it does not."""
    walk = sorted((facts for facts in history if facts.walk is not None), key=lambda facts: facts.walk or 0)
    # In a run that continues another run's checkpoint, `latest` means that checkpoint; the run's own newest stays too.
    latest = walk[0].id if walk else None
    newest = "what latest means" if walk and walk[0].walk == 0 else "the newest of this run that leads to latest"
    # A restore falls back to this checkpoint: latest itself, unless it is known to be damaged.
    whole = next((facts.id for facts in walk if facts.counts), None)
    last_verified = next((facts.id for facts in walk if facts.verified and facts.counts), None)
    last_healthy = next((facts.id for facts in walk if facts.healthy and facts.counts), None)
    return {
        facts.id: [
            *([newest] if facts.id == latest else []),
            *(["the newest not known to be damaged"] if facts.id == whole != latest else []),
            *(["the last one verified"] if facts.id == last_verified else []),
            *(["the last healthy one"] if facts.id == last_healthy != whole else []),
            *(["pinned"] if facts.pinned else []),
            *([f"tagged {', '.join(facts.tags)}"] if facts.tags else []),
            *(["held"] if facts.held else []),
            *([f"being copied to {facts.copied_to}"] if facts.copied_to else []),
            *facts.needed_by,
            *([f"undecided: {facts.unread}"] if facts.unread else []),
        ]
        for facts in history
    }


def worth_a_grace(line: Sequence[CheckpointFacts], policy: KeepPolicy) -> set[CheckpointId]:
    """Returns what of a line of training that was left behind must not go at once: whoever left it may want to go back.

    line: newest first. Of those not known to be damaged: the newest, the last one verified, and the best by each metric
    that a `keep.best` of `policy` names.
    """
    whole = [facts for facts in line if facts.counts]
    firsts = [whole, [facts for facts in whole if facts.verified]]
    firsts += [Best(1, part.metric, part.mode).ranked(whole) for part in policy.parts() if isinstance(part, Best)]
    return {found[0].id for found in firsts if found}


def _members(policy: KeepPolicy) -> tuple[KeepPolicy, ...]:
    return policy.members if isinstance(policy, Union) else (policy,)


def _joined(opinions: Sequence[Opinion]) -> Opinion:
    keep = any(opinion.keep for opinion in opinions)
    reasons = [opinion.reason for opinion in opinions if opinion.keep == keep]
    return Opinion(keep, "; ".join(dict.fromkeys(reasons)))


# Milestones: one checkpoint of each span of steps or hours, kept for good.


class Milestones(KeepPolicy):
    """Keeps the first undamaged checkpoint of each span, and damaged ones before it, since those may be repaired."""

    @abstractmethod
    def span(self, facts: CheckpointFacts) -> int | None:
        """Returns the number of the checkpoint's span; None if it cannot be a milestone."""

    @abstractmethod
    def name(self, span: int) -> str:
        """Returns the name of a milestone of this span, in words."""

    @abstractmethod
    def outside(self) -> str:
        """Returns why a checkpoint lies in no span, in words."""

    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        taken: dict[int, CheckpointFacts] = {}
        kept: dict[object, Opinion] = {}
        for facts in sorted(history, key=_milestone_order):
            span = self.span(facts)
            if span is None or span in taken:
                continue
            words = f"{facts.doubt}{self.name(span)}"
            kept[facts.id] = Opinion(True, words if facts.walk is not None else f"{words}, {LEFT_BEHIND}")
            if facts.counts:
                taken[span] = facts
        return [kept.get(facts.id) or Opinion(False, self._lost(facts, taken)) for facts in history]

    def _lost(self, facts: CheckpointFacts, taken: dict[int, CheckpointFacts]) -> str:
        span = self.span(facts)
        return self.outside() if span is None else f"{self.name(span)} is step {taken[span].id.step}"


@record
class EverySteps(Milestones):
    steps: int

    def span(self, facts: CheckpointFacts) -> int | None:
        return None if 0 < facts.id.step < self.steps else facts.id.step // self.steps

    def name(self, span: int) -> str:
        return f"the milestone of step {span * self.steps}"

    def outside(self) -> str:
        return f"before the first milestone, step {self.steps}"

    def __repr__(self) -> str:
        return f"keep.every(steps={self.steps})"


@record
class EveryHours(Milestones):
    hours: float

    def span(self, facts: CheckpointFacts) -> int | None:
        return None if facts.created_s is None else math.floor(facts.created_s / (self.hours * 3600))

    def name(self, span: int) -> str:
        return f"the milestone of its {self.hours:g} hours"

    def outside(self) -> str:
        return "does not say when it was saved"

    def __repr__(self) -> str:
        return f"keep.every(hours={self.hours:g})"


def _milestone_order(facts: CheckpointFacts) -> tuple[int, int, int]:
    """Orders the current line of training first, as saved, then abandoned checkpoints, later attempts first. Uses no
    clock."""
    if facts.walk is not None:
        return (0, -facts.walk, 0)
    return (1, -facts.id.attempt, facts.id.step)


def latest(n: int) -> KeepPolicy:
    """Keeps the newest `n` checkpoints: those on the line of training that leads to `latest` first, then abandoned
    ones.

    A checkpoint known to be damaged does not count, and stays as long as an older, undamaged one does.
    """
    return Latest(whole_number(n, "keep.latest({})"))


def best(n: int, metric: str, mode: Literal["min", "max"] | None = None) -> KeepPolicy:
    """Keeps the `n` checkpoints with the lowest `metric` (highest with `mode="max"`); ties go to the newer one.

    Without a mode it is the highest of metrics of which everybody knows that more is better, by the words of their
    names (acc, accuracy, f1, auc, map, bleu, iou, r2, reward …), which training says once; of all others the lowest.

    NaN is never best. A checkpoint without the metric stays until a newer one has it, because its metric may still be
    noted. A damaged checkpoint does not count. After a rollback, both the best of the whole run and the best of the
    current line are kept.
    """
    name = metric_name(metric, 'keep.best(3, "val_loss")')
    many = whole_number(n, f"keep.best({{}}, {name!r})")
    if mode is not None:
        return Best(many, name, min_or_max(mode, name))
    found = direction_of(name)
    return Best(many, name, found or "min", by_name=found == "max")


def every(*, steps: int | None = None, hours: float | None = None) -> KeepPolicy:
    """Keeps milestones for good; with both arguments given, the milestones of either.

    steps: keeps the first checkpoint at or after each multiple of `steps` and before the next multiple. Step 0 counts;
        checkpoints between it and the first multiple do not.
    hours: keeps the first checkpoint of each span of `hours`, counted from 1970-01-01 00:00 UTC (24: each day) on the
        saving machine's clock.

    "First" means first saved. A clock that runs backward only puts a checkpoint into a span that already has its
    milestone; a clock that ran ahead makes a milestone of its own. A checkpoint without a save time is not a milestone
    of hours. A checkpoint known to be damaged does not count, and stays where it would be the milestone. After a
    rollback the current line of training has precedence; an abandoned milestone stays until that line has reached it.
    """
    parts: list[KeepPolicy] = []
    if steps is not None:
        parts.append(EverySteps(whole_number(steps, "keep.every(steps={})")))
    if hours is not None:
        parts.append(EveryHours(duration(hours, "keep.every(hours={})")))
    if not parts:
        raise UsageError("keep.every() of what?", hint="write keep.every(steps=1000) or keep.every(hours=24)")
    return parts[0] if len(parts) == 1 else Union(tuple(parts))


def hourly(hours: int | None = None) -> KeepPolicy:
    """Keeps the first checkpoint of each hour in UTC: of the last `hours` hours that lead to the newest checkpoint, or
    for good. See `daily`."""
    return _calendar("hour", hours)


def daily(days: int | None = None) -> KeepPolicy:
    """Keeps the first checkpoint of each day in UTC: of the last `days` days that lead to the newest checkpoint, or for
    good.

    The same as `keep.every(hours=24)` but for `days`, and as careful about clocks. Ages count from the older one of the
    two newest checkpoints, so that one save by a clock that ran ahead removes nothing.
    """
    return _calendar("day", days)


def weekly(weeks: int | None = None) -> KeepPolicy:
    """Keeps the first checkpoint of each week, which begins on Monday in UTC: of the last `weeks` weeks, or for good.
    See `daily`."""
    return _calendar("week", weeks)


def monthly(months: int | None = None) -> KeepPolicy:
    """Keeps the first checkpoint of each month of the calendar in UTC: of the last `months` months, or for good. See
    `daily`."""
    return _calendar("month", months)


def yearly(years: int | None = None) -> KeepPolicy:
    """Keeps the first checkpoint of each year in UTC: of the last `years` years, or for good. See `daily`."""
    return _calendar("year", years)


def _calendar(unit: Unit, last: int | None) -> KeepPolicy:
    from tenuto.policy.calendar import CALENDAR, Calendar  # a load of the latest needs no policies

    return Calendar(unit, None if last is None else whole_number(last, f"keep.{CALENDAR[unit]}({{}})"))


def within(*, hours: float | None = None, days: float | None = None, weeks: float | None = None) -> KeepPolicy:
    """Keeps every checkpoint saved at most so long (`days=1, hours=12`: 36 hours) before the newest one, by the clocks
    of the machines that saved, also one that a rollback left behind. Ages count as in `daily`.

    No age passes while nothing is saved: a training that pauses loses nothing.
    """
    from tenuto.policy.calendar import Within

    given = {"weeks": weeks, "days": days, "hours": hours}
    spans = {unit: duration(value, f"keep.within({unit}={{}})") for unit, value in given.items() if value is not None}
    if not spans:
        raise UsageError("keep.within() of what?", hint="write keep.within(hours=36), keep.within(days=2)")
    return Within(tuple(spans.items()))


def after(event: Literal["attempt", "fork", "rollback"]) -> KeepPolicy:
    """Keeps the first checkpoint after each event that a repository records, for good.

    "attempt": a process began to train: at the start, after each restart and after each rollback.
    "fork": a process began to train from a checkpoint of another run.
    "rollback": a process began to train where `tenuto rollback` had put the run.
    """
    from tenuto.policy.calendar import EVENTS, After

    if event not in EVENTS:
        known = " and ".join(map(repr, EVENTS))
        raise UsageError(
            f"{event!r} is not an event that a repository records; there are {known}",
            subject=str(event),
            hint="'attempt': each start, restart and rollback",
        )
    return After(event)


def limit(
    policy: KeepPolicy,
    *,
    bytes: int | str | None = None,
    cost: float | None = None,
    per_gib_month: float | None = None,
) -> KeepPolicy:
    """Keeps of what `policy` keeps as much as fits into a budget: the least worth goes until the rest does.

    bytes: what the data files of the run may take: a number, or text such as "2TB".
    cost, per_gib_month: or what they may cost in a month, and what a GiB costs in one, in any currency.

    What goes first: the oldest of the milestones and of what else is kept by age; then the oldest of `latest`; then the
    worst of `best`. What is never removed counts, and stays even where it alone is more than the budget, which is a
    warning. So does what one of those rests on: removing that would free nothing. What lies in the trash is not
    counted.
    """
    from tenuto.policy.budget import Limit, budget_of

    inner: object = policy
    if not isinstance(inner, KeepPolicy):
        raise UsageError(
            f"keep.limit({policy!r}) does not say what to keep", hint='keep.limit(keep.all(), bytes="2TB")'
        )
    return Limit(inner, budget_of(bytes, cost, per_gib_month))


def all() -> KeepPolicy:
    """Keeps everything."""
    return All()


def recorded(certificate: Mapping[str, object]) -> KeepPolicy | None:
    """Returns the policy of the training that wrote a certificate; None if it records none, or one of its own.

    The text is read, not run: it may call the functions of this module, with plain values.
    """
    text = certificate.get(KEEP)
    try:
        return _read(ast.parse(text, mode="eval").body) if isinstance(text, str) and len(text) <= 2000 else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, UsageError):
        return None


def _read(node: ast.expr) -> KeepPolicy:
    match node:
        case ast.BinOp(left, ast.BitOr(), right):
            return _read(left) | _read(right)
        case ast.Call(ast.Attribute(ast.Name("keep"), name), arguments, keywords) if name in _READABLE:
            values = {one.arg: ast.literal_eval(one.value) for one in keywords if one.arg is not None}
            if name == "limit":
                return limit(*map(_read, arguments), **values)
            return _READABLE[name](*map(ast.literal_eval, arguments), **values)
        case _:
            raise ValueError("not a policy of this module")


@record
class All(KeepPolicy):
    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        return [Opinion(True, "everything is kept") for _ in history]

    def keeps_all(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "keep.all()"


@record
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
                elif not facts.counts:
                    what = "damaged" if facts.suspect else "undecided"
                    opinions[facts.id] = Opinion(True, f"{what}, and newer than the last of {words}{suffix}")
                else:
                    free -= 1
                    opinions[facts.id] = Opinion(True, f"{self._place(self.n - free)}{suffix}")
        return [opinions[facts.id] for facts in history]

    def _place(self, place: int) -> str:
        if place == 1:
            return "the newest" if self.n == 1 else f"newest of {self.n}"
        return f"{ordinal(place)} newest of {self.n}"

    def __repr__(self) -> str:
        return f"keep.latest({self.n})"


@record
class Best(KeepPolicy):
    n: int
    metric: str
    mode: Literal["min", "max"]
    by_name: bool = field(default=False, compare=False)
    """Whether `max` was taken because of the metric's name."""

    def metrics(self) -> frozenset[str]:
        return frozenset({self.metric})

    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        ranked = self.ranked(history)
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

    def ranked(self, history: Sequence[CheckpointFacts]) -> list[CheckpointFacts]:
        """Returns the checkpoints of `history`, which is newest first, that have the metric: best first, the newer of
        equals first. NaN is no value, and what is unhealthy is never best."""
        sign = 1.0 if self.mode == "min" else -1.0
        with_metric = [facts for facts in history if facts.healthy and not math.isnan(self._value(facts))]
        return sorted(with_metric, key=lambda facts: sign * self._value(facts))

    def _first(self, ranked: Sequence[CheckpointFacts]) -> list[CheckpointFacts]:
        """Returns the first n undamaged ones and damaged ones among them, which may be repaired and do not count."""
        first: list[CheckpointFacts] = []
        places = self.n
        for facts in ranked:
            if not places:
                break
            first.append(facts)
            places -= facts.counts
        return first

    def _value(self, facts: CheckpointFacts) -> float:
        return float(facts.metrics.get(self.metric, math.nan))

    def _won(self, facts: CheckpointFacts, of_run: Sequence[CheckpointFacts]) -> str:
        reason = f"{facts.doubt}{self._words()} ({self._value(facts):g})"
        if facts.walk is None:
            return f"{reason}, {LEFT_BEHIND}"
        return reason if facts in of_run else f"{reason} of the current line of training"

    def _lost(self, facts: CheckpointFacts, of_run: Sequence[CheckpointFacts]) -> str:
        if self.metric not in facts.metrics:
            return f"has no {self.metric}, and a newer one has"
        if math.isnan(self._value(facts)):
            return f"{self.metric} is nan"
        if not facts.healthy:
            return "has NaN or infinite values, so it is not the best by any metric"
        value, last = self._value(facts), self._value(of_run[-1])
        if value == last:
            return f"not {self._words()} ({value:g}, and a newer one has the same)"
        bar = "the best" if self.n == 1 else f"{ordinal(self.n)} best"
        return f"not {self._words()} ({value:g}; {bar} is {last:g})"

    def _words(self) -> str:
        return f"the best by {self.metric}" if self.n == 1 else f"among the best {self.n} by {self.metric}"

    def __repr__(self) -> str:
        return f"keep.best({self.n}, {self.metric!r}, mode={self.mode!r})"


_READABLE: Final[Mapping[str, Callable[..., KeepPolicy]]] = {
    "latest": latest,
    "best": best,
    "every": every,
    "hourly": hourly,
    "daily": daily,
    "weekly": weekly,
    "monthly": monthly,
    "yearly": yearly,
    "within": within,
    "after": after,
    "limit": limit,
    "all": all,
}
