"""Saves that wait: those requested inside a body, for its end, and a completed step that a late metric may ask for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tenuto.engine.save.handle import Save
from tenuto.errors import SaveFailed
from tenuto.policy.save import Decision, Moment
from tenuto.training.saves import RunSaver
from tenuto.training.snapshot import Snapshots, StateMark

if TYPE_CHECKING:
    from tenuto.training.training_session import TrainingSession


class PendingRequests:
    """What a body has requested to be saved at its end: by `save`, by tags, or by both.

    Behind the batches of an epoch the rest of its body runs. A save taken there would say that the batches are used and
    the rest is still to come, so a resume would run all of that once more, the scheduler's step among it. It is taken
    where the body ends, as inside a step.

    `between`, as an argument: whether no step is open, so that the last completed one is meant.
    """

    def __init__(self, session: TrainingSession, saving: RunSaver, snapshots: Snapshots) -> None:
        self._session = session
        self._saving = saving
        self._snapshots = snapshots
        self._requested: tuple[Save, bool] | None = None
        self._tags: list[str] = []
        self._mark: StateMark | None = None
        """How the state was when the last completed step was requested."""

    def tag(self, names: Sequence[str], *, between: bool) -> None:
        self._tags.extend(names)
        self._mark_state(between)

    def save(self, *, wait: bool, between: bool, reason: str = "asked for", mark: StateMark | None = None) -> Save:
        """Returns the handle of the save that will be taken. `wait`: the end of the body waits until it is committed.
        `mark`: how the state was behind the last completed step; None: as it is now."""
        if self._requested is None:
            handle = self._saving.saver.plan_save(self._session.step + (not between), reason=reason)
            handle.inside_step = True
            self._mark = self._mark or mark
            self._mark_state(between)
        else:
            handle, before = self._requested
            wait = wait or before
        self._requested = (handle, wait)
        return handle

    def take(self, decision: Decision, moment: Moment) -> bool:
        """Takes what the body, which has ended, has requested; returns whether that was anything. `decision`: of the
        policy."""
        requested, tags = self._clear()
        if requested is not None:
            self._saving.tag(requested[0], tags)
            must = bool(tags) or moment.ending
            self._session.take_requested(requested[0], wait=requested[1], must=must, eager=moment.ending)
        elif tags:
            self._session.take_tagged(tags, decision.reason if decision.save else "", wait=moment.signal is not None)
        return requested is not None or bool(tags)

    def leave(self) -> None:
        """Takes what was requested behind the batches of a loop that was broken out of, if the state is still what it
        was then; a step that was left incomplete is never saved."""
        mark = self._mark
        if mark is None:
            return
        requested, tags = self._clear()
        if not self._snapshots.untouched(mark):
            missed = f"step {mark.step} is not saved, though it was asked for: the state has changed since"
            self._saving.report(f"{missed} its loop was left")
            if requested is not None:
                requested[0].end(
                    SaveFailed(
                        missed,
                        subject=str(requested[0].id),
                        hint="change nothing in the state between asking for a save and leaving the loop",
                    )
                )
        elif requested is not None:
            self._saving.tag(requested[0], tags)
            self._session.take_requested(requested[0], wait=requested[1], must=True, eager=True)
        else:
            self._session.take_tagged(tags)

    def _mark_state(self, between: bool) -> None:
        if between and self._mark is None:
            self._mark = self._snapshots.mark()

    def _clear(self) -> tuple[tuple[Save, bool] | None, list[str]]:
        requested, tags = self._requested, self._tags
        self._requested, self._tags, self._mark = None, [], None
        return requested, tags


class LateMetricTrigger:
    """Marks how the state was at the end of a step, while a metric that the policy reads is still to come."""

    def __init__(self, session: TrainingSession, saving: RunSaver, snapshots: Snapshots) -> None:
        self._session = session
        self._saving = saving
        self._snapshots = snapshots
        self._mark: StateMark | None = None

    def clear(self) -> None:
        """Drops the mark: another step has begun, or is done."""
        self._mark = None

    def mark(self) -> None:
        """Marks the state of a step that is done, with the metrics that there are so far."""
        session, wanted = self._session, self._saving.policy_metrics
        if wanted and wanted - session.metrics.keys() and session.unsaved and self._saving.attempt is not None:
            self._mark = self._snapshots.passing_mark()

    def reason(self) -> str:
        """Returns why that step is to be saved now that more metrics have come; empty where it is not."""
        mark, session = self._mark, self._session
        if mark is None or mark.step != session.step or not session.unsaved:
            return ""
        decision = self._saving.decide(Moment(session.step, time.monotonic(), metrics=session.metrics))
        return decision.reason if decision.save else ""

    def still_there(self, reason: str) -> bool:
        """Returns whether the state is as it was at the end of that step; else warns, and drops the mark."""
        mark = self._mark
        assert mark is not None, "there is a reason to save it"
        if self._snapshots.untouched(mark):
            return True
        self._mark = None
        self._saving.report(
            f"step {mark.step} is not saved, though {reason}: the state has changed since that step; "
            "log what belongs to a step before training continues"
        )
        return False
