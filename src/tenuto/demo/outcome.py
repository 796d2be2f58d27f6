"""The outcome of a demo: the processes of a killed training, the flushes between them, and the comparison."""

from __future__ import annotations

import signal
import statistics
from dataclasses import dataclass

from tenuto.demo.children import Life
from tenuto.demo.comparison import Comparison
from tenuto.demo.plan import Plan


@dataclass(frozen=True, slots=True)
class Flushing:
    """A flush, by another process, of the memory that life number `after` left.

    point: where it killed itself.
    inside: whether it was interrupted.
    written: whether it added a checkpoint.
    """

    after: int
    status: int
    point: str | None
    inside: bool
    written: bool

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Account:
    """The outcome. `untouched`: the single process of the uninterrupted run."""

    plan: Plan
    untouched: Life
    lives: tuple[Life, ...]
    comparison: Comparison
    loss: float | None
    copy_s: float | None
    """Median seconds of one copy of the state's bytes within warm memory."""
    seconds: float
    bytes: int = 0
    run: str = "killed"
    flushes: tuple[Flushing, ...] = ()

    @property
    def kills(self) -> int:
        return sum(life.killed for life in self.lives)

    @property
    def kills_while_saving(self) -> int:
        return sum(life.killed and life.saving for life in self.lives)

    @property
    def lost(self) -> tuple[int, ...]:
        """Steps repeated after each kill."""
        return tuple(self.lost_by(number) for number, life in enumerate(self.lives) if life.killed)

    @property
    def lost_from_disk(self) -> tuple[int, ...]:
        """Steps that would have been repeated after each kill with checkpoints on disk only."""
        return tuple(max(life.at - life.durable, 0) for life in self.lives if life.killed)

    def lost_by(self, number: int) -> int:
        """Returns the steps of this process that the next one to start training repeated."""
        begins = [later.began for later in self.lives[number + 1 :] if later.began is not None]
        return max(self.lives[number].at - begins[0], 0) if begins else 0

    @property
    def from_memory(self) -> int:
        return sum(life.adopted for life in self.lives)

    @property
    def from_disk(self) -> int:
        return sum(life.restored is not None and not life.adopted for life in self.lives)

    @property
    def from_scratch(self) -> int:
        """Processes, after the first, that started over."""
        return sum(life.began == 0 and life.restored is None for life in self.lives[1:])

    @property
    def memory_off(self) -> str:
        """Why not everything was kept in memory; empty if it was, or was not meant to be."""
        return next((life.memory_off for life in self.lives if life.memory_off), "")

    @property
    def stalls_s(self) -> list[float]:
        """Stalls of the saves to the store."""
        return [stall for life in (self.untouched, *self.lives) for stall in life.stalls_s]

    @property
    def stall_s(self) -> float | None:
        return _median(self.stalls_s)

    @property
    def memory_stalls_s(self) -> list[float]:
        """Stalls of the steps kept in memory only."""
        return [stall for life in self.lives for stall in life.memory_stalls_s]

    @property
    def memory_stall_s(self) -> float | None:
        return _median(self.memory_stalls_s)

    @property
    def proven(self) -> bool:
        """Whether the states are equal in every bit after at least one kill."""
        return self.comparison.equal and self.kills >= 1


def _median(found: list[float]) -> float | None:
    return statistics.median(found) if found else None
