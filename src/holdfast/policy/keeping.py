"""The keep side: what a policy is told, what it answers, how policies combine, and what none of them may remove.

Retention (I7) never removes the checkpoint that `latest` means, the last verified one on the walk of I4, one that is
pinned, tagged, held, needed by something else or being copied, whatever the policy says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from holdfast.errors import UsageError
from holdfast.model.names import CheckpointId

LEFT_BEHIND = "on a line of training that was left behind"


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """One checkpoint of the run that is judged; checkpoints of other runs are not offered."""

    id: CheckpointId
    walk: int | None = None
    """Position on the walk of I4, `latest` lowest; None: on a line of training that was left behind."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """As logged with the step and as noted later, the later one counting."""
    verified: bool = False
    """Every byte was read and found good, and nothing suspect was noted since."""
    suspect: bool = False
    """Damage was noted, and no verification since."""
    created_s: float | None = None
    """When it was saved, in seconds since 1970 by the clock of the machine that saved it; None if nothing says it.
    Two clocks disagree, and one may run backward: by this alone nothing is ever newer."""
    pinned: bool = False
    tags: tuple[str, ...] = ()
    held: bool = False
    being_copied: bool = False
    needed_by: tuple[str, ...] = ()
    """What else relies on it, in words: "run b was started from it"."""

    @property
    def age_key(self) -> tuple[int, int]:
        """Higher is newer: attempts are claimed one after another, and steps only grow inside one."""
        return (self.id.attempt, self.id.step)


@dataclass(frozen=True, slots=True)
class Verdict:
    id: CheckpointId
    keep: bool
    reason: str
    """In words that follow "kept: " or "removed: "."""

    def __str__(self) -> str:
        return f"{'kept' if self.keep else 'removed'}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one policy alone thinks of one checkpoint."""

    keep: bool
    reason: str


class KeepPolicy(ABC):
    """What to keep. Policies combine with `|`: what any of them keeps is kept.

    To write one, implement `judge`. It must be a function of its arguments alone. What I7 protects is kept around it.
    """

    @abstractmethod
    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        """One opinion for each of `history`, which is newest first."""

    def metrics(self) -> frozenset[str]:
        """Names of the metrics that this policy judges by, so that one that is never logged can be warned of."""
        return frozenset()

    @final
    def decide(self, history: Sequence[CheckpointFacts]) -> list[Verdict]:
        """One verdict for each checkpoint, in the order given. Raises UsageError if one is given twice."""
        if len({facts.id for facts in history}) != len(history):
            raise UsageError("the history names a checkpoint twice")
        newest_first = sorted(history, key=lambda facts: facts.age_key, reverse=True)
        opinions = self.judge(newest_first)
        assert len(opinions) == len(newest_first), f"{self!r} did not judge every checkpoint"
        protected = protections(newest_first)
        verdicts = {}
        for facts, opinion in zip(newest_first, opinions, strict=True):
            reasons = [*protected[facts.id], *([opinion.reason] if opinion.keep else [])]
            keep = bool(reasons)
            verdicts[facts.id] = Verdict(facts.id, keep, "; ".join(reasons) if keep else opinion.reason)
        return [verdicts[facts.id] for facts in history]

    @final
    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        second: object = other  # a checker refuses what is none; not everybody runs one
        if not isinstance(second, KeepPolicy):
            raise UsageError(
                f"{self!r} | {other!r} does not combine: the second one does not say what to keep",
                hint="combine keep.latest(n), keep.best(n, metric) and keep.every(...) with |; on.end() goes to save=",
            )
        return Union(_parts(self) + _parts(other))


@dataclass(frozen=True, slots=True)
class Union(KeepPolicy):
    """Keeps what any of `parts` keeps; all reasons are told."""

    parts: tuple[KeepPolicy, ...]

    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        judged = [part.judge(history) for part in self.parts]
        return [_joined(opinions) for opinions in zip(*judged, strict=True)]

    def metrics(self) -> frozenset[str]:
        return frozenset().union(*(part.metrics() for part in self.parts))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def protections(history: Sequence[CheckpointFacts]) -> dict[CheckpointId, list[str]]:
    """Why I7 keeps each checkpoint; an empty list where it does not."""
    walk = sorted((facts for facts in history if facts.walk is not None), key=lambda facts: facts.walk or 0)
    # Where the run goes on from another run's checkpoint, that one is what `latest` means; its own newest stays too.
    latest = walk[0].id if walk else None
    newest = "what latest means" if walk and walk[0].walk == 0 else "the newest of this run that leads to latest"
    # What a restore would fall back to: latest itself, unless it is known to be damaged.
    whole = next((facts.id for facts in walk if not facts.suspect), None)
    last_verified = next((facts.id for facts in walk if facts.verified), None)
    return {
        facts.id: [
            *([newest] if facts.id == latest else []),
            *(["the newest not known to be damaged"] if facts.id == whole != latest else []),
            *(["the last one verified"] if facts.id == last_verified else []),
            *(["pinned"] if facts.pinned else []),
            *([f"tagged {', '.join(facts.tags)}"] if facts.tags else []),
            *(["held"] if facts.held else []),
            *(["being copied to another tier"] if facts.being_copied else []),
            *facts.needed_by,
        ]
        for facts in history
    }


def _parts(policy: KeepPolicy) -> tuple[KeepPolicy, ...]:
    return policy.parts if isinstance(policy, Union) else (policy,)


def _joined(opinions: Sequence[Opinion]) -> Opinion:
    keep = any(opinion.keep for opinion in opinions)
    reasons = [opinion.reason for opinion in opinions if opinion.keep == keep]
    return Opinion(keep, "; ".join(dict.fromkeys(reasons)))
