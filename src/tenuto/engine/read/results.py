"""What a restore and a one-off save give back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tenuto.engine.read.choose import RestoreResult
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json
from tenuto.model.timing import RankTimings
from tenuto.state.contract import LoadReport
from tenuto.units import seconds


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: where it lies and what it holds. `content` is the SHA-256 of all it holds."""

    where: str
    id: CheckpointId
    bytes: int
    leaves: int
    content: str
    metrics: Mapping[str, float]

    @property
    def run(self) -> str:
        return self.id.run

    @property
    def attempt(self) -> int:
        return self.id.attempt

    @property
    def step(self) -> int:
        return self.id.step


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored state. `report` names what matched and what did not, by path; `certificate` says what could make a
    resume from it inexact; `skipped` are damaged checkpoints that were passed over, with the reason. `memory_s`: for
    how many seconds the state had lain in this node's memory, where it came from there; else None."""

    state: Any
    report: LoadReport
    certificate: Mapping[str, Json]
    checkpoint: Checkpoint
    progress: Mapping[str, Json]
    seconds: float
    skipped: tuple[tuple[CheckpointId, str], ...] = ()
    memory_s: float | None = None
    ranks: RankTimings | None = None

    @property
    def source(self) -> str:
        """Where the state came from, in words."""
        if self.memory_s is None:
            return f"from {self.checkpoint.where}, step {self.step}"
        return f"from memory, step {self.step}, sealed {seconds(self.memory_s)} ago"

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @classmethod
    def of(cls, result: RestoreResult, where: str, memory_s: float | None = None) -> Restored:
        manifest = result.manifest
        checkpoint = Checkpoint(where, result.id, manifest.bytes, manifest.leaves, manifest.content, manifest.metrics)
        return cls(
            state=result.state,
            report=result.report,
            certificate=manifest.certificate,
            checkpoint=checkpoint,
            progress=manifest.progress,
            seconds=result.seconds,
            skipped=result.skipped,
            memory_s=memory_s,
            ranks=result.ranks,
        )
