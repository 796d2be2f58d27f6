"""What must be found after a crash, told by the marks that the recorded program left between its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from holdfast.model.checkpoint import Json
from holdfast.model.names import CheckpointId
from holdfast.testing.recorder import Mark


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds if it exists: its tree, and the bytes of each leaf by path."""

    tree: Json
    leaves: Mapping[str, bytes]


class Presence(Enum):
    MAY = "may exist"
    MUST = "must exist"
    GONE = "must not exist"


PRESENCE: Final[Mapping[str, Presence]] = {
    "begun": Presence.MAY,
    "acknowledged": Presence.MUST,
    "removal begun": Presence.MAY,
    "removed": Presence.GONE,
    "undelete begun": Presence.MAY,
    "undeleted": Presence.MUST,
    "closed": Presence.GONE,
}
"""What a mark about a checkpoint says of it from then on."""

OPENED: Final = "repository opened"
CLAIMED: Final = "claimed"
"""Subject: (run, attempt number)."""


@dataclass
class Expected:
    """Folded marks. `acknowledged` holds checkpoints in the order in which they were reported as committed."""

    opened: bool = False
    presence: dict[CheckpointId, Presence] = field(default_factory=dict)
    saved: dict[CheckpointId, Saved] = field(default_factory=dict)
    begun: list[CheckpointId] = field(default_factory=list)
    acknowledged: list[CheckpointId] = field(default_factory=list)
    attempts: dict[str, int] = field(default_factory=dict)
    """The highest attempt of each run whose claim was reported."""

    @classmethod
    def after(cls, marks: Iterable[Mark]) -> Expected:
        expected = cls()
        for mark in marks:
            expected.add(mark)
        return expected

    def add(self, mark: Mark) -> None:
        if mark.label == OPENED:
            self.opened = True
        elif mark.label == CLAIMED:
            assert isinstance(mark.subject, tuple)
            run, number = mark.subject
            self.attempts[run] = max(number, self.attempts.get(run, 0))
        else:
            assert isinstance(mark.subject, CheckpointId)
            self._checkpoint(mark.subject, mark)

    def _checkpoint(self, id: CheckpointId, mark: Mark) -> None:
        self.presence[id] = PRESENCE[mark.label]
        if mark.label == "begun":
            assert isinstance(mark.detail, Saved)
            self.saved[id] = mark.detail
            self.begun.append(id)
        elif mark.label == "acknowledged":
            self.acknowledged.append(id)

    @property
    def runs(self) -> list[str]:
        return sorted({id.run for id in self.presence} | set(self.attempts))

    def newest(self, run: str) -> CheckpointId | None:
        """The last reported checkpoint of `run` that nobody has begun to remove."""
        held = [id for id in self.acknowledged if id.run == run and self.presence[id] is Presence.MUST]
        return held[-1] if held else None

    def as_new_as(self, run: str, id: CheckpointId) -> list[CheckpointId]:
        """`id`, and the checkpoints of `run` whose saves began after it did."""
        return [other for other in self.begun[self.begun.index(id) :] if other.run == run]
