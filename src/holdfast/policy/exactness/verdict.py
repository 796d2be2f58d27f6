"""The verdict on a resume: exact, not exact, or not to be judged because the training does not repeat itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.model.trail import Trail
from holdfast.policy.exactness import causes
from holdfast.policy.exactness.causes import Cause
from holdfast.policy.exactness.differences import Difference, compare, drawn_from, first_difference, unseeded

Kind = Literal["exact", "inexact", "unrepeatable"]


@dataclass(frozen=True, slots=True)
class Trails:
    """whole: never interrupted. interrupted: saved after some step, and killed. resumed: gone on from there in a new
    process. repeated: uninterrupted once more; None as long as nobody needed it."""

    whole: Trail
    interrupted: Trail
    resumed: Trail
    repeated: Trail | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`difference`: the first one, if there is any; a run that began from nothing again may end the same. `cause`: what
    it points to, likely and no more. `unseeded`: generators that each run begins with in another state. What they do
    not change is not their fault: they are restored, and compared with what was saved alone. `rank`: of several, the
    one that differs first."""

    kind: Kind
    difference: Difference | None = None
    cause: Cause | None = None
    unseeded: tuple[str, ...] = ()
    rank: int | None = None


def differs(trails: Trails) -> bool:
    """Whether the interrupted and resumed training is anything but the uninterrupted one: then it is to be repeated."""
    return (
        not trails.resumed.began
        or _apart(trails.whole, trails.interrupted) is not None
        or _not_restored(trails) is not None
        or _resumed(trails) is not None
    )


def judge(trails: Trails) -> Verdict:
    """The verdict; `repeated` must be there where the trails differ."""
    if not differs(trails):
        return Verdict("exact", unseeded=tuple(sorted(unseeded(trails.whole, trails.interrupted))))
    assert trails.repeated is not None, "what does not repeat itself cannot be told from a faulty resume without it"
    by_itself = _apart(trails.whole, trails.repeated)
    if by_itself is not None:
        guilty = _guilty(trails.whole, trails.repeated, by_itself)
        return Verdict("unrepeatable", by_itself, causes.of_training(by_itself, trails.whole, guilty), guilty)
    if not trails.resumed.began:
        return Verdict("inexact", _resumed(trails), causes.no_resume(trails.interrupted.reached))
    before = _apart(trails.whole, trails.interrupted)
    if before is not None:
        return Verdict("unrepeatable", before, causes.of_chance(before))
    difference = _not_restored(trails) or _resumed(trails)
    assert difference is not None
    return Verdict("inexact", difference, causes.of_resume(difference, trails.resumed))


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Of the ranks of one training: what does not repeat itself on one of them cannot be judged on any; else where the
    earliest difference is."""
    if len(verdicts) == 1:
        return verdicts[0]
    for kind in ("unrepeatable", "inexact"):
        found = [(one.difference, rank) for rank, one in enumerate(verdicts) if one.kind == kind]
        if found:
            _, rank = min(found, key=lambda one: _when(one[0]))
            return replace(verdicts[rank], rank=rank)
    return replace(verdicts[0], unseeded=tuple(sorted({name for one in verdicts for name in one.unseeded})))


def _when(difference: Difference | None) -> tuple[int, bool]:
    """A start comes before what is done from there."""
    return (-1, False) if difference is None else (difference.step, not difference.start)


def _apart(one: Trail, other: Trail) -> Difference | None:
    """Where two runs differ that both began from nothing."""
    return first_difference(one, other, unseeded(one, other))


def _resumed(trails: Trails) -> Difference | None:
    return first_difference(trails.whole, trails.resumed, unseeded(trails.whole, trails.interrupted))


def _not_restored(trails: Trails) -> Difference | None:
    """What the new process did not begin with as the killed one had saved it."""
    start = trails.resumed.rows[0]
    saved = next((row for row in trails.interrupted.rows if row.step == start.step), None)
    if saved is None or not start.start:
        return None
    found = compare(saved, start)
    return Difference(start.step, True, found) if found else None


def _guilty(one: Trail, other: Trail, difference: Difference) -> tuple[str, ...]:
    """The generators that may have made it: not seeded, and drawn from (before the start, as far as can be known)."""
    names = unseeded(one, other)
    return tuple(sorted(names if difference.start else names & drawn_from(one, difference.step)))
