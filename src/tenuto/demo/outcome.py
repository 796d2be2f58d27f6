"""What happened: the lives of a killed training, the flushes between them, and what it was compared with."""

from __future__ import annotations

import signal
import statistics
from dataclasses import dataclass

from tenuto.demo.children import Life
from tenuto.demo.comparison import Comparison
from tenuto.demo.plan import Plan


@dataclass(frozen=True, slots=True)
class Flushing:
    """What another process did that flushed what life number `after` had left in memory. `point`: where it killed
    itself; `inside`: it had not come to its end; `written`: there is a checkpoint now that was not there before."""

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
    """What happened. `untouched` is the one life of the uninterrupted run."""

    plan: Plan
    untouched: Life
    lives: tuple[Life, ...]
    comparison: Comparison
    loss: float | None
    copy_s: float | None
    """One copy of the state's bytes within warm memory, median of many."""
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
        """Steps that had to be done again after each kill."""
        return tuple(self.lost_by(number) for number, life in enumerate(self.lives) if life.killed)

    @property
    def lost_from_disk(self) -> tuple[int, ...]:
        """Steps that would have had to be done again after each kill, had there been the disk alone."""
        return tuple(max(life.at - life.durable, 0) for life in self.lives if life.killed)

    def lost_by(self, number: int) -> int:
        """Steps of this life that the next one that came so far has done again."""
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
        """Processes that began anew, but for the first."""
        return sum(life.began == 0 and life.restored is None for life in self.lives[1:])

    @property
    def memory_off(self) -> str:
        """Why nothing, or not all, was kept in memory; empty if all was, or nothing was to be."""
        return next((life.memory_off for life in self.lives if life.memory_off), "")

    @property
    def stalls_s(self) -> list[float]:
        """Of each save to the store."""
        return [stall for life in (self.untouched, *self.lives) for stall in life.stalls_s]

    @property
    def stall_s(self) -> float | None:
        return _median(self.stalls_s)

    @property
    def memory_stalls_s(self) -> list[float]:
        """Of each step that was kept in memory alone."""
        return [stall for life in self.lives for stall in life.memory_stalls_s]

    @property
    def memory_stall_s(self) -> float | None:
        return _median(self.memory_stalls_s)

    @property
    def proven(self) -> bool:
        """Equal in every bit, and not because nothing was killed."""
        return self.comparison.equal and self.kills >= 1


def _median(found: list[float]) -> float | None:
    return statistics.median(found) if found else None
