"""What a verification says: one finding for each thing that is not as it was saved, or that is worth a look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.errors import StoreError
from holdfast.model.names import CheckpointId

Severity = Literal["error", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`error`: an object of Holdfast is damaged or missing. `info`: unusual, and no harm: shown, never touched."""

    id: CheckpointId | None
    severity: Severity
    message: str
    leaf: str | None = None
    """Path of the first leaf concerned."""
    object: str | None = None
    offset: int | None = None
    """Bytes from the object's first byte."""
    harms_restore: bool = True
    """Whether the state cannot be restored bit for bit because of it (errors only)."""
    unseen: int = 0
    """How many packs it speaks of that were not looked at: they may lie on a node that is not found from here."""

    def __str__(self) -> str:
        where = [part for part in (str(self.id) if self.id else "", self.leaf or "") if part]
        place = self.object or ""
        if self.offset is not None:
            place += f" at byte {self.offset}"
        head = ", ".join([*where, *([place] if place else [])])
        return f"{self.severity}: {head}: {self.message}" if head else f"{self.severity}: {self.message}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found. `bytes_read` counts the bytes of packs and indexes; `every_byte` says whether packs were read."""

    findings: tuple[Finding, ...]
    checked: tuple[CheckpointId, ...]
    bytes_read: int
    objects: int
    every_byte: bool
    seconds: float = 0.0
    unnoted: StoreError | None = None
    """Why a note could not be put; what came after it was read, and has none."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def unseen(self) -> int:
        """How many packs were not looked at."""
        return sum(finding.unseen for finding in self.findings)

    def of(self, id: CheckpointId) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.id == id)

    def damaged(self) -> tuple[CheckpointId, ...]:
        """The checkpoints that cannot be restored bit for bit."""
        return tuple(
            sorted({finding.id for finding in self.errors if finding.id is not None and finding.harms_restore})
        )
