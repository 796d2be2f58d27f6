"""Fork: a new run in the same repository that begins with a checkpoint of another. Its bytes are shared.

What a fork needs is what a training that resumes from another run's checkpoint leaves: a first attempt with that
checkpoint as its parent. Retention of the other run keeps it for the fork (I7) until the fork has one of its own.
"""

from __future__ import annotations

from tenuto.errors import UsageError, typed
from tenuto.history.rollback import Report, check_reason, damage_of, refuse_damage
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import FORK
from tenuto.record import record
from tenuto.repo.lineage import resolve
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo


@record
class ForkPlan:
    """A run to begin from a checkpoint. damage, force: as of a rollback."""

    where: str
    run: str
    parent: CheckpointId
    reason: str = ""
    damage: str = ""
    force: bool = False

    def __str__(self) -> str:
        lines = [f"run {self.run} begins with {self.parent}; no byte of it is copied"]
        if self.reason:
            lines.append(f"  reason: {self.reason}")
        if self.damage:
            lines.append(f"  {'forced' if self.force else 'refused'}: {self.parent} is damaged: {self.damage}")
        return "\n".join(lines)


def plan_fork(repo: Repo, parent: CheckpointId, run: str, *, reason: str = "", force: bool = False) -> ForkPlan:
    """Plans a fork. Raises what `resolve` raises, and UsageError for a name that cannot be a run's or is in use."""
    check_reason(reason)
    run = run_key(run)
    _refuse_used(repo, run)
    parent = resolve(repo, run, parent)
    return ForkPlan(repo.url, run, parent, reason, damage_of(repo, parent), force=force)


def execute(repo: Repo, plan: ForkPlan, *, report: Report | None = None) -> None:
    """Begins the run. Raises what a rollback raises, and UsageError where the run was begun meanwhile."""
    refuse_damage(repo, plan.parent, plan.damage, force=plan.force)
    attempt = claim(
        repo,
        plan.run,
        plan.parent,
        wait_s=0.0,
        report=report,
        before_put=lambda: _refuse_used(repo, plan.run),
        by=FORK,
        reason=plan.reason,
    )
    attempt.release()


def _refuse_used(repo: Repo, run: str) -> None:
    if repo.attempts(run):
        raise UsageError(
            f"there is a run {run!r} already",
            subject=run,
            hint=f"give the fork another name, or go back within that run: "
            f"{typed('tenuto', 'rollback', repo.url, 'STEP', '--run', run)}",
        )
