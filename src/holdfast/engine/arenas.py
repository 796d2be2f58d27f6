"""The host memory that images live in, within the stated budget (I9)."""

from __future__ import annotations

from holdfast.errors import SaveFailed
from holdfast.image.arena import Arena, acquire


class ArenaHolder:
    """Holds one arena for one run and rank, and exchanges it when the state no longer fits."""

    def __init__(self, repository: str, run: str, rank: int, budget: int | None) -> None:
        self._repository = repository
        self._run = run
        self._rank = rank
        self._budget = budget
        self._arena: Arena | None = None

    def acquire(self, nbytes: int) -> Arena:
        """An arena of at least `nbytes`; SaveFailed if that is beyond the budget. The one given before is no longer
        valid."""
        if self._budget is not None and nbytes > self._budget:
            raise SaveFailed(
                f"an image of this state takes {nbytes / 2**20:,.1f} MiB of host memory; the budget is "
                f"{self._budget / 2**20:,.1f} MiB",
                subject=self._run,
                hint="raise memory_budget=, or save less state",
            )
        if self._arena is not None and self._arena.buffer.nbytes >= nbytes:
            return self._arena
        self.release()
        self._arena = acquire(nbytes, repository=self._repository, run=self._run, rank=self._rank)
        return self._arena

    def release(self) -> None:
        if self._arena is not None:
            self._arena.release()
            self._arena = None
