"""The host memory that images live in, within the stated budget and what the machine has (I9)."""

from __future__ import annotations

from holdfast.errors import SaveFailed
from holdfast.image.arena import Arena, acquire
from holdfast.image.headroom import memory_headroom

SPARE_BYTES = 64 << 20
"""What is left to the rest of the job: indexes, buffers of libraries, the next allocation of training."""


class ArenaHolder:
    """Holds one arena for one run and rank, and exchanges it when the state no longer fits.

    `lasting`: it serves many saves, so it is touched beforehand and lies in shared memory where there is room. A single
    save takes memory as it goes, while what is captured already is being written.
    """

    def __init__(self, repository: str, run: str, rank: int, *, budget: int | None, lasting: bool) -> None:
        self._repository = repository
        self._run = run
        self._rank = rank
        self._budget = budget
        self._lasting = lasting
        self._arena: Arena | None = None

    def acquire(self, nbytes: int) -> Arena:
        """An arena of at least `nbytes`; SaveFailed if that is beyond the budget or the machine's free memory. The one
        given before is no longer valid."""
        if self._arena is not None and self._arena.buffer.nbytes >= nbytes:
            return self._arena
        self.release()
        self._check(nbytes)
        self._arena = acquire(
            nbytes,
            repository=self._repository,
            run=self._run,
            rank=self._rank,
            prewarm=self._lasting,
            shared=self._lasting,
        )
        return self._arena

    def release(self) -> None:
        if self._arena is not None:
            self._arena.release()
            self._arena = None

    def _check(self, nbytes: int) -> None:
        needed = f"an image of this state takes {nbytes / 2**20:,.1f} MiB of host memory"
        if self._budget is not None and nbytes > self._budget:
            raise SaveFailed(
                f"{needed}; the budget is {self._budget / 2**20:,.1f} MiB",
                subject=self._run,
                hint="raise memory_budget=, or save less state",
            )
        free = memory_headroom()
        if free is not None and nbytes + SPARE_BYTES > free:
            raise SaveFailed(
                f"{needed}; {free / 2**20:,.1f} MiB are free here",
                subject=self._run,
                hint="give the job more memory, or save less state: taking more would have it killed",
            )
