"""Milestones: one checkpoint of each span of steps or hours, kept for good."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.policy.keeping import LEFT_BEHIND, CheckpointFacts, KeepPolicy, Opinion


class Milestones(KeepPolicy):
    """The first whole checkpoint of each span, and damaged ones before it: those may be repaired."""

    @abstractmethod
    def span(self, facts: CheckpointFacts) -> int | None:
        """The number of the span that the checkpoint lies in; None where it can be no milestone."""

    @abstractmethod
    def name(self, span: int) -> str:
        """What a milestone of this span is called, in words."""

    @abstractmethod
    def outside(self) -> str:
        """Why a checkpoint lies in no span."""

    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        taken: dict[int, CheckpointFacts] = {}
        kept: dict[object, Opinion] = {}
        for facts in sorted(history, key=_first_comes_first):
            span = self.span(facts)
            if span is None or span in taken:
                continue
            words = f"{'damaged, but ' if facts.suspect else ''}{self.name(span)}"
            kept[facts.id] = Opinion(True, words if facts.walk is not None else f"{words}, {LEFT_BEHIND}")
            if not facts.suspect:
                taken[span] = facts
        return [kept.get(facts.id) or Opinion(False, self._lost(facts, taken)) for facts in history]

    def _lost(self, facts: CheckpointFacts, taken: dict[int, CheckpointFacts]) -> str:
        span = self.span(facts)
        return self.outside() if span is None else f"{self.name(span)} is step {taken[span].id.step}"


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


def _first_comes_first(facts: CheckpointFacts) -> tuple[int, int, int]:
    """The line of training that goes on, in the order in which it was saved; then what was left behind, of later
    attempts first. No clock takes part."""
    if facts.walk is not None:
        return (0, -facts.walk, 0)
    return (1, -facts.id.attempt, facts.id.step)
