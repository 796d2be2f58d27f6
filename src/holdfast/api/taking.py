"""Taking a save of the state: as it is now, or as it was at a moment since which nothing has changed it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from holdfast.api.claiming import Claiming
from holdfast.api.position import Position
from holdfast.api.saving import Saving
from holdfast.api.snapshot import Moment, Snapshots
from holdfast.engine.handle import Save
from holdfast.model.names import CheckpointId
from holdfast.policy import saving as asking


class Taking:
    """What one training saves. `metrics` are those of the step that is open, or of the last completed one."""

    def __init__(self, saving: Saving, snapshots: Snapshots, claiming: Claiming, position: Position) -> None:
        self._saving = saving
        self._snapshots = snapshots
        self._claiming = claiming
        self._position = position
        self.metrics: dict[str, float] = {}

    @property
    def parent(self) -> CheckpointId | None:
        last = self._saving.last
        return last.id if last is not None and last.committed else self._claiming.parent

    @property
    def step(self) -> int:
        """The last completed step, which is what is saved."""
        return self._position.counters.step

    @property
    def unsaved(self) -> bool:
        last = self._saving.last
        return last is None or last.step < self.step

    def take(
        self, reason: str, *, wait: bool, must: bool = False, handle: Save | None = None, eager: bool = False
    ) -> Save | None:
        """Of the state as it is now; as `Saving.take`."""
        due_s = time.monotonic()
        flattened = self._snapshots.now()
        about = self._snapshots.about(parent=self.parent, metrics=self.metrics, reason=reason)
        return self._saving.take(
            flattened, self.step, about, wait=wait, must=must, handle=handle, eager=eager, due_s=due_s
        )

    def requested(self, handle: Save, *, wait: bool, must: bool, eager: bool) -> None:
        """What `save` has asked for inside the step. Where it is skipped, its handle tells."""
        handle.inside_step = False
        if self.take(handle.reason, wait=wait, must=must, handle=handle, eager=eager) is None:
            handle.end(self._saving.turns.skipped(handle.step))
        if wait:
            handle.wait()

    def tagged(self, tags: Sequence[str], reason: str = "", *, wait: bool = False) -> None:
        """A tag asks for a save of its step, which is never skipped."""
        reason = "; ".join([*([reason] if reason else []), f"tagged {', '.join(tags)}"])
        handle = self._saving.saver.plan_save(self.step, reason=reason)
        self._saving.tag(handle, tags)
        if self.take(reason, wait=wait, must=True, handle=handle) is None:
            handle.end(self._saving.turns.skipped(handle.step))

    def as_it_was(self, moment: Moment, reason: str) -> None:
        """Of the last completed step, if it is the one of `moment`, is not saved yet, and nothing has changed its
        tensors; else that is said."""
        if moment.step != self.step or not self.unsaved:
            return
        if not self._snapshots.untouched(moment, plain=False):
            self._saving.warn(
                f"step {moment.step} is not saved, though {reason}: the state has changed since that step"
            )
            return
        about = self._snapshots.about(parent=self.parent, metrics=self.metrics, reason=reason, progress=moment.progress)
        self._saving.take(moment.flattened, moment.step, about, wait=True, must=True)

    def in_memory(self, moment: asking.Moment) -> None:
        """Keeps the step in memory, where that is due and no save has just done it."""
        memory = self._saving.memory
        if memory is None or moment.signal is not None:
            return
        decision = memory.decide(moment)
        if decision.save and not memory.skips(self.step):
            due_s = time.monotonic()
            about = self._snapshots.about(parent=self.parent, metrics=self.metrics, reason=decision.reason)
            memory.take(self._snapshots.now(), self.step, about, due_s=due_s, eager=moment.ending)
