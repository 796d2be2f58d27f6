"""What must be found after a crash, derived from the marks that the recorded program left between its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.testing.recorder import Mark


@record
class Saved:
    """A checkpoint's content if it exists: its tree, and the bytes of each leaf by path."""

    tree: Json
    leaves: Mapping[str, bytes]


class Presence(Enum):
    MAY = "may exist"
    MUST = "must exist"
    GONE = "must not exist"
    TRASHED = "must not exist, and lie in the trash"
    MOVING = "must exist or lie in the trash"


PRESENCE: Final[Mapping[str, Presence]] = {
    "begun": Presence.MAY,
    "acknowledged": Presence.MUST,
    "removal begun": Presence.MAY,
    "removed": Presence.GONE,
    "kept": Presence.MUST,
    "rm begun": Presence.MOVING,
    "rm done": Presence.TRASHED,
    "undelete begun": Presence.MOVING,
    "undeleted": Presence.MUST,
    "gc begun": Presence.GONE,
    "closed": Presence.GONE,
}
"""The presence of a checkpoint after each mark about it."""

OPENED: Final = "repository opened"
CLAIMED: Final = "claimed"
"""Subject: (run, attempt number); detail: the parent."""
CLAIMING: Final = "claim begun"
"""Subject: the run; detail: the parent."""


@dataclass
class Expected:
    """Folded marks.

    line: each run's reported checkpoints, oldest first, without those abandoned by a later claim of an older one.
    """

    opened: bool = False
    presence: dict[CheckpointId, Presence] = field(default_factory=dict)
    saved: dict[CheckpointId, Saved] = field(default_factory=dict)
    begun: list[CheckpointId] = field(default_factory=list)
    line: dict[str, list[CheckpointId]] = field(default_factory=dict)
    claiming: dict[str, CheckpointId | None] = field(default_factory=dict)
    """The parent of a claim in progress."""
    attempts: dict[str, int] = field(default_factory=dict)
    """The highest reported attempt of each run."""

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
            self.claiming.pop(run, None)
            line = self.line.setdefault(run, [])
            if mark.detail in line:
                del line[line.index(mark.detail) + 1 :]
        elif mark.label == CLAIMING:
            assert isinstance(mark.subject, str) and isinstance(mark.detail, CheckpointId | None)
            self.claiming[mark.subject] = mark.detail
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
            self.line.setdefault(id.run, []).append(id)

    @property
    def runs(self) -> list[str]:
        return sorted({id.run for id in self.presence} | set(self.attempts))

    def newest(self, run: str) -> CheckpointId | None:
        """Returns the last reported checkpoint of `run` that is not being removed."""
        committed = [id for id in self.line.get(run, []) if self.presence[id] is Presence.MUST]
        return committed[-1] if committed else None

    def may_be_latest(self, run: str, reported: CheckpointId) -> list[CheckpointId | None]:
        """Returns `reported`, the saves begun after it, and the parent of a claim in progress."""
        newer = [other for other in self.begun[self.begun.index(reported) :] if other.run == run]
        return [*newer, *([self.claiming[run]] if run in self.claiming else [])]
