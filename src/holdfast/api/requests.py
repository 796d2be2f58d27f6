"""What a body has asked to be saved at its end: by `save`, by tags, or by both.

Behind the batches of an epoch the rest of its body runs. A save taken there would say that the batches are used and the
rest is still to come, so a resume would run all of that once more, the scheduler's step among it. It is taken where the
body ends, as inside a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.api.saving import Saving
from holdfast.api.snapshot import Moment, Snapshots
from holdfast.api.taking import Taking
from holdfast.engine.handle import Save
from holdfast.errors import SaveFailed
from holdfast.policy import saving as asking


class Requests:
    """Of one training. `between`, as an argument: whether no step is open, so that the last completed one is meant."""

    def __init__(self, saving: Saving, snapshots: Snapshots, taking: Taking) -> None:
        self._saving = saving
        self._snapshots = snapshots
        self._taking = taking
        self._requested: tuple[Save, bool] | None = None
        self._tags: list[str] = []
        self._then: Moment | None = None
        """How the state was when the last completed step was asked for."""

    def tag(self, names: Sequence[str], *, between: bool) -> None:
        self._tags.extend(names)
        self._remember(between)

    def save(self, *, wait: bool, between: bool) -> Save:
        """The handle of the save that will be taken. `wait`: the end of the body waits until it is committed."""
        if self._requested is None:
            step = self._taking.step + (not between)
            handle = self._saving.saver.plan_save(step, reason="asked for")
            handle.inside_step = True
            self._remember(between)
        else:
            handle, before = self._requested
            wait = wait or before
        self._requested = (handle, wait)
        return handle

    def take(self, decision: asking.Decision, moment: asking.Moment) -> bool:
        """The body has ended: takes what it asked for; whether that was anything. `decision`: of the policy."""
        requested, tags = self._forget()
        if requested is not None:
            self._saving.tag(requested[0], tags)
            must = bool(tags) or moment.ending
            self._taking.requested(requested[0], wait=requested[1], must=must, eager=moment.ending)
        elif tags:
            self._taking.tagged(tags, decision.reason if decision.save else "", wait=moment.signal is not None)
        return requested is not None or bool(tags)

    def leave(self) -> None:
        """The loop was broken out of. What was asked for behind the batches is taken now, if the state is still what it
        was then; a step that was left incomplete is never saved."""
        then = self._then
        if then is None:
            return
        requested, tags = self._forget()
        if not self._snapshots.untouched(then):
            missed = f"step {then.step} is not saved, though it was asked for: the state has changed since"
            self._saving.warn(f"{missed} its loop was left")
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
            self._taking.requested(requested[0], wait=requested[1], must=True, eager=True)
        else:
            self._taking.tagged(tags)

    def _remember(self, between: bool) -> None:
        if between and self._then is None:
            self._then = self._snapshots.moment()

    def _forget(self) -> tuple[tuple[Save, bool] | None, list[str]]:
        requested, tags = self._requested, self._tags
        self._requested, self._tags, self._then = None, [], None
        return requested, tags
