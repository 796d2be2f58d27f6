"""What a training held, step by step: the trail that two runs of one script are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """After a completed step (`start`: before the first one, as this process found or restored it).

    entries: path -> the digest of a leaf, or a plain value as it is spelled in a checkpoint; those of this process
    alone lie below `#private`. batches: a digest for each batch that training was given since the row before, None for
    one that has no representation.
    """

    step: int
    epoch: int
    batch: int
    entries: Mapping[str, str]
    batches: tuple[str | None, ...] = ()
    start: bool = False

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch": self.batch,
            "entries": dict(self.entries),
            "batches": list(self.batches),
            "start": self.start,
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Row:
        return cls(**{**record, "batches": tuple(record["batches"])})


@dataclass(frozen=True, slots=True)
class Trail:
    """One process's rows in order, and what it says of itself: its certificate, what it found outside the state, and
    the names of the metrics that it logged."""

    rows: tuple[Row, ...] = ()
    certificate: Mapping[str, Any] = field(default_factory=dict)
    uncovered: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()

    @property
    def began(self) -> int | None:
        """The step that it was restored to, 0 if to none; None where it has told nothing."""
        if not self.rows:
            return None
        return self.rows[0].step if self.rows[0].start else 0

    @property
    def reached(self) -> int:
        return self.rows[-1].step if self.rows else 0

    def at(self, step: int) -> tuple[Row, ...]:
        """The rows of one step: one, or two where the step ended an epoch."""
        return tuple(row for row in self.rows if row.step == step)
