"""Scrub: verifies what was longest not verified, until everything is younger than asked for, or the time is up.

Meant for a timer: each run takes up where the last one ended, and notes its results, so that several machines share the
work: what one has verified is young for all.
"""

from __future__ import annotations

import time

from tenuto.events import Emitter
from tenuto.maintenance.reading import Pace, ReadingState
from tenuto.maintenance.verify import Parts, VerifyReport, execute, plan_verify
from tenuto.model.ids import CheckpointId
from tenuto.record import record
from tenuto.repo.repository import Repo


@record
class ScrubReport:
    """What a scrub has come to. verification: of what was read. oldest, oldest_s: the checkpoint that was longest not
    verified, and for how many seconds; None without a checkpoint. overdue: how many are older than asked for."""

    verification: VerifyReport
    oldest: CheckpointId | None
    oldest_s: float
    overdue: int

    @property
    def ok(self) -> bool:
        return self.verification.ok


def scrub(
    repo: Repo,
    *,
    every_s: float,
    rate: int | None = None,
    seconds: float | None = None,
    emitter: Emitter | None = None,
) -> ScrubReport:
    """Verifies each checkpoint that was last verified, or saved, more than `every_s` seconds ago, and notes the result.

    rate: bytes per second at most. seconds: how long; what is left then is for the next scrub.
    Reports damage and does not raise it. Raises like `verify.execute`.
    """
    state = ReadingState.load(repo.id)
    plan = plan_verify(repo)
    parts = Parts(Pace(seconds=seconds, rate=rate), state, since=time.time() - every_s)
    report = execute(repo, plan, emitter=emitter, note=True, parts=parts)
    now = time.time()
    ended = set(report.checked) - set(report.partly)
    ages = [(0.0 if id in ended else now - when, id) for id, when in parts.last_read.items()]
    oldest_s, oldest = max(ages, default=(0.0, None))
    return ScrubReport(report, oldest, max(oldest_s, 0.0), sum(age > every_s for age, _ in ages))
