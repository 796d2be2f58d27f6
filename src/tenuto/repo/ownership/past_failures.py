"""How often the processes of a run have failed, by what each claim says of the attempt before it."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.errors import CorruptionError
from tenuto.record import record
from tenuto.repo.ownership.lease import BEAT_S
from tenuto.repo.repository import Repo

AT_START: Final = 2
"""Beats of a claim itself, the second once what came before it is closed: a run's first claim has only one. One more
comes each BEAT_S."""
ATTEMPTS: Final = 20
"""How many attempts are looked at, the newest: each takes a read."""


@record
class PastFailures:
    """`failures`: attempts that ended without releasing the run: killed, or lost with their machine. `trained_s`: how
    long all attempts trained, failed or not, by the beats of their leases."""

    failures: int = 0
    trained_s: float = 0.0


def past_failures(repo: Repo, run: str, *, until: int) -> PastFailures:
    """Looks at what the newest claims up to attempt `until` say of the attempts before them. One that ended within a
    beat counts for nothing: it withdrew, or what failed was its start."""
    ended: list[tuple[int, bool]] = []
    """Beats while it trained, and whether it failed, of each attempt that got so far."""

    def read(number: int) -> None:
        with suppress(CorruptionError):  # the estimate is one attempt poorer
            record = repo.find_attempt(run, number)
            if record is not None and record.ended is not None:
                beats, failed = record.ended
                beats -= AT_START if number > 2 else 1
                if beats > 0:
                    ended.append((beats, failed))

    numbers = [one for one in repo.attempts(run) if one <= until][-ATTEMPTS:]
    parallel_for(read, numbers, repo.store.capabilities.parallel)
    beats = sum(beats for beats, _ in ended)
    return PastFailures(sum(failed for _, failed in ended), beats * BEAT_S)
