"""`tenuto mv`: gives a run another name."""

from __future__ import annotations

from typing import Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository
from tenuto.cli.console.output import agreed

EXAMPLES = examples(
    "tenuto mv /data/checkpoints main baseline",
    "tenuto mv /data/checkpoints main baseline --dry-run",
)


def mv(
    where: options.Where,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="NEWRUN", help="Its new name.", show_default=False)],
    *,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Rename a run.

    Its checkpoints get new names, with their lines of training, times, metrics and tags; no data is copied. The old
    names go into the trash: `tenuto undelete` brings them back for 24 h. The script that trains it has to name the new
    run. States in memory stay with the old name.

    Refused while a process trains the run, and where a pin or a hold names one of its checkpoints. One that was cut off
    continues when it is run again.
    """
    from tenuto.cli.console.reporting import WarningReporter
    from tenuto.events import Emitter
    from tenuto.maintenance.rename_run import execute, plan_rename
    from tenuto.units import count, size

    repo = repository(where, acts=True)
    plan = plan_rename(repo, run, new)
    tags = f", {count(len(plan.tags), 'tag')}" if plan.tags else ""
    what = f"{count(len(plan.checkpoints), 'checkpoint')}{tags} of run {plan.run}"
    if not json:
        output.line(f"{what} -> run {plan.new}: no data is copied, {size(plan.bytes)} are shared")
    moved = None
    if dry_run:
        if not json:
            output.line("nothing was written")
    elif agreed(f"Rename run {plan.run}, and put its old names into the trash?", yes=yes):
        moved = execute(repo, plan, emitter=Emitter.of([WarningReporter()]))
        if not json:
            output.line(f"run {plan.run} is run {plan.new} now")
            output.story("the old names lie in the trash: `tenuto undelete` brings them back for 24 h")
    if json:
        body = {
            "where": repo.url,
            "run": plan.run,
            "to_run": plan.new,
            "dry_run": dry_run,
            "plan": list(plan.checkpoints),
            "tags": [name for name, _ in plan.tags],
            "renamed": [] if moved is None else [{"from": old, "to": now} for old, now in moved.checkpoints],
        }
        output.document("mv", body)
