"""`tenuto fork`: begins a new run with a checkpoint of another."""

from __future__ import annotations

from typing import Annotated

import typer

from tenuto.cli.commands.rollback import Force, Reason
from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository

EXAMPLES = examples(
    "tenuto fork /data/checkpoints 500 warmer",
    'tenuto fork /data/checkpoints best:val_loss tuned --run gpt --reason "a lower learning rate"',
)


def fork(
    where: options.Where,
    step: options.Checkpoint,
    new_run: Annotated[str, typer.Argument(metavar="NEWRUN", help="The name of the new run.", show_default=False)],
    *,
    run: options.Run = None,
    reason: Reason = "",
    force: Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Begin a new run with a checkpoint of another.

    A training with run="NEWRUN" resumes from it. No byte is copied, and the other run goes its own way; its retention
    keeps the checkpoint until the new run has saved one.
    """
    from tenuto.history.fork import execute, plan_fork

    repo = repository(where, acts=True)
    plan = plan_fork(repo, checkpoint(repo, run, step), new_run, reason=reason, force=force)
    if not json:
        output.line(str(plan))
    if not dry_run:
        execute(repo, plan, report=output.story)
    if json:
        output.document(
            "fork",
            {
                "where": repo.url,
                "dry_run": dry_run,
                "run": plan.run,
                "parent": plan.parent,
                "reason": plan.reason or None,
                "damage": plan.damage or None,
            },
        )
    elif not dry_run:
        output.line(f'to train it: Checkpointer(…, run="{plan.run}")')
