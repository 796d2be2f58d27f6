"""Rollback: from now on `latest` means an earlier checkpoint, or one of a line that was left behind.

Nothing is removed and nothing moves. A new attempt is claimed with that checkpoint as its parent, and released at once:
by I4 that is what `latest` means, and what training resumes from. What came after it is left behind, until the
training's retention drops it. An image in memory that is newer is not adopted (`format.md`, section 2).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Final

from tenuto.errors import CheckpointNotFound, CorruptionError, RunInUse, Superseded, UsageError, typed
from tenuto.maintenance.inspect import inspect
from tenuto.maintenance.remove import is_suspect
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import ROLLBACK
from tenuto.record import record
from tenuto.repo.lineage import latest, line_of, resolve, walk
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.units import count

LONGEST: Final = 1000
"""Characters of a reason."""
Report = Callable[[str], None]


@record
class RollbackPlan:
    """What a rollback changes.

    to: what `latest` means then. before: what it means now.
    left: the checkpoints that are left behind, newest first.
    back: those of a line left behind that lead to `latest` again, newest first.
    damage: why `to` cannot be restored; empty where nothing is known against it. force: whether that is accepted.
    """

    where: str
    run: str
    to: CheckpointId
    before: CheckpointId | None
    left: tuple[CheckpointId, ...]
    back: tuple[CheckpointId, ...] = ()
    reason: str = ""
    damage: str = ""
    force: bool = False

    def __str__(self) -> str:
        head = f"latest of run {self.run} becomes {self.to}, and is {self.before} now"
        if self.to == self.before:
            head = f"latest of run {self.run} stays {self.to}; newer states in memory are not used"
        lines = [head]
        if self.left:
            first, last = self.left[-1], self.left[0]
            which = str(last) if first == last else f"{first} to {last}"
            lines.append(f"  left behind: {count(len(self.left), 'checkpoint')}, {which}")
            lines.append(
                "  they stay until the training's keep drops them; the newest and the best then go into the trash"
            )
        if self.back:
            older = f" and {len(self.back) - 1} older" if len(self.back) > 1 else ""
            lines.append(f"  on the line again: {self.back[0]}{older}")
        if self.reason:
            lines.append(f"  reason: {self.reason}")
        if self.damage:
            lines.append(f"  {'forced' if self.force else 'refused'}: {self.to} is damaged: {self.damage}")
        return "\n".join(lines)


def plan_rollback(repo: Repo, run: str, to: CheckpointId, *, reason: str = "", force: bool = False) -> RollbackPlan:
    """Plans to make `to` the latest of `run`: a checkpoint of the run, also of a line that was left behind, or one of
    another run that its line goes through. `force` accepts one that is damaged, which the next training passes over.

    Raises RunNotFound, CheckpointNotFound where `to` is not one of these, and UsageError for a reason that is too long.
    """
    check_reason(reason)
    run = run_key(run)
    to = resolve(repo, run, to)
    line = list(walk(repo, run))
    own = line[line.index(to) :] if to in line else list(line_of(repo, run, to)) if to.run == run else []
    if not own:
        raise CheckpointNotFound(
            f"run {run!r} cannot be rolled back to {to}, which is not on its line of training",
            subject=str(to),
            hint=f"to begin a run from there: {typed('tenuto', 'fork', repo.url, to, 'NEWRUN')}",
        )
    common, there = set(own), set(line)
    left = tuple(takewhile(lambda id: id not in common, line))
    back = tuple(takewhile(lambda id: id not in there, own))
    return RollbackPlan(
        repo.url, run, to, line[0] if line else None, left, back, reason, damage_of(repo, to), force=force
    )


def execute(repo: Repo, plan: RollbackPlan, *, report: Report | None = None) -> int:
    """Rolls back, and returns the number of the attempt that says so.

    Raises CorruptionError for a plan that refuses a damaged checkpoint; RunInUse, naming the owner, while a process
    trains the run (one on another host is watched for 15 s); Superseded where `latest` is another one than planned; and
    CheckpointNotFound where the checkpoint is being removed.
    """
    refuse_damage(repo, plan.to, plan.damage, force=plan.force)

    def refuse_if_newer() -> None:
        now = latest(repo, plan.run)
        if now != plan.before:
            raise Superseded(
                f"run {plan.run!r} was not rolled back: its latest is {now} by now, and was {plan.before}",
                subject=plan.run,
                hint=typed("tenuto", "log", repo.url, "--run", plan.run),
            )

    try:
        attempt = claim(
            repo,
            plan.run,
            plan.to,
            wait_s=0.0,
            report=report,
            before_put=refuse_if_newer,
            by=ROLLBACK,
            reason=plan.reason,
        )
    except RunInUse as error:
        again = typed("tenuto", "rollback", repo.url, plan.to, "--run", plan.run)
        raise RunInUse(error.message, subject=error.subject, hint=f"stop that process, then: {again}") from error
    attempt.release()
    return attempt.number


def damage_of(repo: Repo, id: CheckpointId) -> str:
    """Returns why a checkpoint cannot be restored, as far as its structure and the last verification show: everything
    but the bytes of its leaves is read. Empty where nothing is known against it."""
    found = inspect(repo, id)
    errors = [finding.message for finding in found.findings if finding.severity == "error" and finding.harms_restore]
    errors += [finding.message for finding in found.findings if finding.severity == "unread"]
    if errors:
        return errors[0]
    return "the last `tenuto verify` found damage" if is_suspect(repo, id) else ""


def refuse_damage(repo: Repo, id: CheckpointId, damage: str, *, force: bool) -> None:
    """Raises CorruptionError for a damaged checkpoint, unless it is accepted."""
    if damage and not force:
        raise CorruptionError(
            f"{id} is damaged: {damage}",
            subject=str(id),
            hint=f"choose another one ({typed('tenuto', 'log', repo.url, '--run', id.run)}), or pass --force",
        )


def check_reason(reason: str) -> str:
    """Returns `reason`. Raises UsageError for one that is too long to stand in a record."""
    if len(reason) > LONGEST:
        raise UsageError(
            f"the reason has {len(reason):,} characters: {LONGEST:,} at most",
            subject="--reason",
            hint="put the rest where the reason can point to",
        )
    return reason
