"""The completed step that a metric which comes late may yet ask to save."""

from __future__ import annotations

import time

from holdfast.api.saving import Saving
from holdfast.api.snapshot import Moment, Snapshots
from holdfast.api.taking import Taking
from holdfast.policy import saving as asking


class Belated:
    """Remembers how the state was at the end of a step, while a metric that the policy goes by is still to come."""

    def __init__(self, saving: Saving, snapshots: Snapshots, taking: Taking) -> None:
        self._saving = saving
        self._taking = taking
        self._snapshots = snapshots
        self._completed: Moment | None = None

    def forget(self) -> None:
        """Another step has begun, or is done."""
        self._completed = None

    def remember(self) -> None:
        """A step is done, with the metrics that there are so far."""
        missing = self._saving.policy.metrics() - self._taking.metrics.keys()
        if missing and self._taking.unsaved and self._saving.attempt is not None:
            self._completed = self._snapshots.passing_moment()

    def reason(self) -> str:
        """Why that step is to be saved now that more metrics have come; empty where it is not."""
        before, step = self._completed, self._taking.step
        if before is None or before.step != step or not self._taking.unsaved:
            return ""
        decision = self._saving.decide(asking.Moment(step, time.monotonic(), metrics=self._taking.metrics))
        return decision.reason if decision.save else ""

    def still_there(self, reason: str) -> bool:
        """Whether the state is as it was at the end of that step; said where it has gone on, and asked no more."""
        before = self._completed
        assert before is not None, "there is a reason to save it"
        if self._snapshots.untouched(before):
            return True
        self._completed = None
        self._saving.warn(
            f"step {before.step} is not saved, though {reason}: the state has changed since that step; "
            "log what belongs to a step before training goes on"
        )
        return False
