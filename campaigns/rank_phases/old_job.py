"""Checks I11 for an old job that was cut off and resumes after another has claimed the run and committed.

Nothing that the old job does then counts, and nothing of it completes a save of the other.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from campaigns.rank_kills.processes import Death, Job, Plan
from campaigns.rank_phases.cells import (
    OLD_TIMEOUT_S,
    ONLY_COORDINATOR,
    PATIENCE_S,
    PHASES,
    STEPS,
    WORLD,
    Outcome,
    committed,
    differences,
)
from campaigns.rank_phases.deadlines import SHORT_TIMEOUT_S
from tenuto.engine.save.rank_group import RESTORE_TIMES
from tenuto.maintenance.verify import execute, plan_verify
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

CUTS: Final = {
    name: point
    for name, point in (PHASES | ONLY_COORDINATOR).items()
    if name not in ("meet", "choose", "restore", "claim", "claimed")
}
"""Where in a save the job is cut off."""


@dataclass(frozen=True, slots=True)
class Cut:
    """`whole`: all ranks are stopped, and not the coordinator alone."""

    phase: str
    whole: bool
    nth: int = 1

    def __str__(self) -> str:
        return f"{'all ranks' if self.whole else 'the coordinator'} cut off at {self.phase}, {self.nth}"


def cuts() -> Iterator[Cut]:
    for phase in CUTS:
        nths = (1,) if phase == "plan" else (1, 2)  # planned is once
        yield from (Cut(phase, whole, nth) for whole in (True, False) for nth in nths)


class CutOff:
    """The old job, until it stands still. As a context manager it leaves no process."""

    def __init__(self, cut: Cut, start: Path, place: Path) -> None:
        self.cut = cut
        self.place = Path(shutil.copytree(start, place))
        death = Death(0, CUTS[cut.phase], cut.nth, number=signal.SIGSTOP)
        self.job = Job(Plan(self.place, WORLD, STEPS, timeout_s=2 * SHORT_TIMEOUT_S, death=death))

    def __enter__(self) -> CutOff:
        self.job.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.job.__exit__(*error)

    def is_stopped(self) -> str:
        """Waits until the coordinator is stopped, and stops the others where all are to be. What went wrong, or ""."""
        until = time.monotonic() + PATIENCE_S
        while not _stopped(self.job.pids[0]):
            if self.job.poll() or time.monotonic() > until:
                return f"the coordinator did not come to its point: {self.job.ended}"
            time.sleep(0.002)
        if self.cut.whole:
            for rank in range(1, WORLD):
                self.job.send(rank, signal.SIGSTOP)
        return ""

    def resume(self) -> bool:
        """Whether all of it have ended after that."""
        for rank in set(self.job.pids) - self.job.ended.keys():
            self.job.send(rank, signal.SIGCONT)
        return self.job.wait(RESTORE_TIMES * 2 * SHORT_TIMEOUT_S + PATIENCE_S)


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def judge_cut(cut: Cut, start: Path, place: Path, world: int) -> Outcome:
    """Plays one to its end; the job that takes over has so many ranks."""
    with CutOff(cut, start, place) as old:
        faults = [*_faults(old, world)]
        said = tuple(sorted({str(ended.told.get("error")) for ended in old.job.ended.values() if ended.told}))
    shutil.rmtree(place, ignore_errors=True)
    return Outcome(cut, tuple(faults), said)


def _faults(old: CutOff, world: int) -> Iterator[str]:
    wrong = old.is_stopped()
    if wrong:
        yield wrong
        return
    following = Plan(old.place, world, STEPS, timeout_s=OLD_TIMEOUT_S, more={"takeover": True})
    with Job(following) as job:
        if not job.wait(2 * OLD_TIMEOUT_S) or any(ended.status for ended in job.ended.values()):
            yield f"the job does not go on: {job.ended}"
            return
    yield from differences(old.place)
    after = committed(old.place)
    if not old.resume():
        yield f"the old job does not end: {old.job.ended}"
    if any(ended.status == 0 for ended in old.job.ended.values()):
        yield f"a superseded rank ended well: {old.job.ended}"
    if committed(old.place) != after:
        yield f"I11: {committed(old.place)} are committed, and {after} were before the old job came back"
    yield from differences(old.place)
    repo = Repo.open(open_store(old.place / "checkpoints"))
    report = execute(repo, plan_verify(repo))
    yield from (f"verify: {finding}" for finding in report.errors)
