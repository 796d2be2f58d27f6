"""The trail of a training: its state step by step, by which two runs of one script are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """The state after a completed step (`start`: before the first one, as this process built or restored it).

    entries: the digest of each leaf and the spelling of each plain value, by path; those of this process alone are
        below `#private`.
    batches: a digest for each batch since the previous row; None for one that has no representation.
    """

    step: int
    epoch: int
    batch: int
    entries: Mapping[str, str]
    batches: tuple[str | None, ...] = ()
    start: bool = False

    def record(self) -> dict[str, Any]:
        """Returns the row as JSON."""
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
    """One process's rows in order, its certificate, state found outside `state`, and names of logged metrics."""

    rows: tuple[Row, ...] = ()
    certificate: Mapping[str, Any] = field(default_factory=dict)
    uncovered: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()

    @property
    def began(self) -> int | None:
        """The step that it was restored to, 0 if to none; None if it has recorded nothing."""
        if not self.rows:
            return None
        return self.rows[0].step if self.rows[0].start else 0

    @property
    def reached(self) -> int:
        return self.rows[-1].step if self.rows else 0

    def at(self, step: int) -> tuple[Row, ...]:
        """Returns the rows of one step: one, or two if the step ended an epoch."""
        return tuple(row for row in self.rows if row.step == step)
