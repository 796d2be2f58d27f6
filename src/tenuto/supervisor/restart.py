"""What a supervisor tells a training that it starts again: which restart it is, why, and what to do differently."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from tenuto.record import record

RESTART: Final = "TENUTO_RESTART"
CAUSE: Final = "TENUTO_RESTART_CAUSE"
BATCH_SCALE: Final = "TENUTO_BATCH_SCALE"
SKIP_STEPS: Final = "TENUTO_SKIP_STEPS"


@record
class Restart:
    """Which start of a training this is, as `tenuto run` counts them, and what it asks of the script.

    number: 0 at the first start. cause: why the start before has ended, such as "killed" or "out of memory"; empty at
    the first one.
    accumulation: how many batches to accumulate for an optimizer's step, where each is `accumulation` times smaller: 1,
    and twice as many after each end for want of memory. With it the effective batch stays what it was.
    skip: steps (numbered from 1) whose batches a rollback has left behind, since values or loss went wrong there.
    """

    number: int = 0
    cause: str = ""
    accumulation: int = 1
    skip: tuple[range, ...] = ()

    @property
    def batch_scale(self) -> float:
        """The share of the usual batch that fits into memory: 1 / accumulation."""
        return 1 / self.accumulation

    def skips(self, step: int) -> bool:
        """Whether to leave out the batch of `step`, numbered from 1: the first step completes step 1."""
        return any(step in one for one in self.skip)

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that say this to a process."""
        found = {RESTART: str(self.number)}
        if self.cause:
            found[CAUSE] = self.cause
        if self.accumulation > 1:
            found[BATCH_SCALE] = f"{self.batch_scale:g}"
        if self.skip:
            found[SKIP_STEPS] = ",".join(f"{one.start}-{one.stop - 1}" for one in self.skip)
        return found


def restart(environment: Mapping[str, str] | None = None) -> Restart:
    """Returns which start of the training this is, as `tenuto run` tells it; `Restart()` where nothing supervises it or
    the variables cannot be read.

    environment: the process's own by default.
    """
    found = os.environ if environment is None else environment
    try:
        spans = [part.split("-") for part in found.get(SKIP_STEPS, "").split(",") if part]
        return Restart(
            int(found.get(RESTART, "0")),
            found.get(CAUSE, ""),
            max(round(1 / float(found.get(BATCH_SCALE, "1"))), 1),
            tuple(range(int(first), int(last) + 1) for first, last in spans),
        )
    except (ValueError, ZeroDivisionError):
        return Restart()
