"""How often the processes of a run have failed, by what each claim says of the attempt before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tenuto.errors import CorruptionError
from tenuto.repo.ownership.lease import BEAT_S
from tenuto.repo.repository import Repo

AT_START: Final = 2
"""Beats of a claim itself; one more comes each BEAT_S."""
ATTEMPTS: Final = 20
"""How many attempts are looked at, the newest: each takes a read."""


@dataclass(frozen=True, slots=True)
class PastFailures:
    """`failures`: attempts that ended without releasing the run: killed, or lost with their machine. `trained_s`: how
    long all attempts trained, failed or not, by the beats of their leases."""

    failures: int = 0
    trained_s: float = 0.0


def past_failures(repo: Repo, run: str, *, until: int) -> PastFailures:
    """Looks at what the newest claims up to attempt `until` say of the attempts before them. One that ended within a
    beat counts for nothing: it withdrew, or what failed was its start."""
    failures, beats = 0, 0
    for number in [one for one in repo.attempts(run) if one <= until][-ATTEMPTS:]:
        try:
            record = repo.find_attempt(run, number)
        except CorruptionError:
            continue  # the estimate is one attempt poorer
        if record is not None and record.ended is not None and record.ended[0] > AT_START:
            beats += record.ended[0] - AT_START
            failures += record.ended[1]
    return PastFailures(failures, beats * BEAT_S)
