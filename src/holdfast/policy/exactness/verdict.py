"""The verdict on a resume: exact, not exact, or not to be judged because the training does not repeat itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.model.trail import Trail
from holdfast.policy.exactness import causes
from holdfast.policy.exactness.causes import Cause
from holdfast.policy.exactness.differences import Difference, first_difference

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
    it points to, likely and no more."""

    kind: Kind
    difference: Difference | None = None
    cause: Cause | None = None


def differs(trails: Trails) -> bool:
    """Whether the interrupted and resumed training is anything but the uninterrupted one: then it is to be repeated."""
    return _interrupted(trails) is not None or _resumed(trails) is not None or not _did_resume(trails)


def judge(trails: Trails) -> Verdict:
    """The verdict; `repeated` must be there where the trails differ."""
    if not differs(trails):
        return Verdict("exact")
    assert trails.repeated is not None, "what does not repeat itself cannot be told from a faulty resume without it"
    by_itself = first_difference(trails.whole, trails.repeated)
    if by_itself is not None:
        return Verdict("unrepeatable", by_itself, causes.of_training(by_itself, trails.whole))
    if not _did_resume(trails):
        return Verdict("inexact", _resumed(trails), causes.no_resume(trails.interrupted.reached))
    before = _interrupted(trails)
    if before is not None:
        return Verdict("unrepeatable", before, causes.of_chance(before))
    resumed = _resumed(trails)
    assert resumed is not None
    return Verdict("inexact", resumed, causes.of_resume(resumed, trails.resumed))


def _interrupted(trails: Trails) -> Difference | None:
    return first_difference(trails.whole, trails.interrupted)


def _resumed(trails: Trails) -> Difference | None:
    return first_difference(trails.whole, trails.resumed)


def _did_resume(trails: Trails) -> bool:
    return bool(trails.resumed.began)
