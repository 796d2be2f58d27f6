"""`tenuto rollback`: makes an earlier checkpoint the latest one."""

from __future__ import annotations

from typing import Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository, run_of
from tenuto.errors import typed

EXAMPLES = examples(
    'tenuto rollback /data/checkpoints 500 --reason "the loss went up after this"',
    "tenuto rollback /data/checkpoints a0001/700 --run gpt --dry-run",
)
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; `tenuto log` shows it.")]
Force = Annotated[bool, typer.Option("--force", help="Also where the checkpoint is damaged.")]


def rollback(
    where: options.Where,
    step: options.Checkpoint,
    *,
    run: options.Run = None,
    reason: Reason = "",
    force: Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Make an earlier checkpoint the latest one.

    The next training resumes from it, without any argument, also where a newer state lies in memory. Nothing is
    removed: what came after it is left behind, and can be rolled back to until the training's retention drops it.
    Refuses a run that a process trains now.
    """
    from tenuto.history.rollback import execute, plan_rollback

    repo = repository(where, acts=True)
    to = checkpoint(repo, run, step)
    name = run_of(repo, run if run is not None or step.count("/") <= 1 else to.run)
    plan = plan_rollback(repo, name, to, reason=reason, force=force)
    if not json:
        output.line(str(plan))
    attempt = None if dry_run else execute(repo, plan, report=output.story)
    if json:
        body = {
            "where": repo.url,
            "dry_run": dry_run,
            "run": plan.run,
            "to": plan.to,
            "before": plan.before,
            "left_behind": list(plan.left),
            "back": list(plan.back),
            "reason": plan.reason or None,
            "damage": plan.damage or None,
            "attempt": attempt,
        }
        output.document("rollback", body)
    elif not dry_run:
        output.line(f"latest of run {plan.run} is {plan.to}")
        if plan.before not in (None, plan.to):
            output.story(f"hint: to undo it: {typed('tenuto', 'rollback', where, plan.before, '--run', plan.run)}")
