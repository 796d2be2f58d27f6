"""`tenuto rm`: moves checkpoints to the trash; `gc` deletes them for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository
from tenuto.cli.console.output import agreed, print_grace_of_trash

if TYPE_CHECKING:
    from tenuto.maintenance.remove import RemovePlan
    from tenuto.model.ids import CheckpointId


EXAMPLES = examples(
    "tenuto rm /data/checkpoints 500",
    "tenuto rm /data/checkpoints gpt/a0002/500 gpt/a0002/600 --yes",
    "tenuto rm /data/checkpoints 500 --dry-run",
)


def rm(
    where: options.Where,
    checkpoints: options.Checkpoints,
    *,
    run: options.Run = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also what the run would resume from, if no process trains it.")
    ] = False,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Remove checkpoints.

    They go into the trash: `tenuto undelete` brings them back for 24 h, and the first `tenuto gc` after 25 h frees
    their space; `tenuto gc --now` frees it at once. If a tag, a pin or a live run needs one of them, it says so and
    removes nothing.
    """
    from tenuto.maintenance.remove import execute, plan_remove
    from tenuto.units import count, size

    repo = repository(where, acts=True)
    plan = plan_remove(repo, [checkpoint(repo, run, name) for name in checkpoints], force=force)
    if not json:
        output.line(_words(plan))
    removed: tuple[CheckpointId, ...] = ()
    if not dry_run and (plan.refused or agreed(f"Remove {count(len(plan.removals), 'checkpoint')}?", yes=yes)):
        removed = execute(repo, plan)
        if not json:
            nbytes = size(sum(removal.bytes for removal in plan.removals))
            output.line(f"{count(len(removed), 'checkpoint')} removed, {nbytes} in the trash")
            print_grace_of_trash(repo.url)
    if json:
        output.document("rm", {"where": repo.url, "dry_run": dry_run, **_json(plan), "removed": list(removed)})


def _words(plan: RemovePlan) -> str:
    from tenuto.units import size

    refused = {removal.id for removal in plan.refused}
    rows = []
    for removal in plan.removals:
        needs = "; ".join(need.reason for need in removal.needs)
        if removal.id in refused:
            words = f"stays: {needs}"
        else:
            words = f"goes into the trash, {size(removal.bytes)}" + (f" (--force: {needs})" if needs else "")
            words += f"; {removal.stays}" if removal.stays else ""
        rows.append((str(removal.id), words))
    return output.rows(rows)


def _json(plan: RemovePlan) -> dict[str, Any]:
    refused = {removal.id for removal in plan.refused}
    return {
        "plan": [
            {
                "checkpoint": removal.id,
                "bytes": removal.bytes,
                "remove": removal.id not in refused,
                "needed": [need.reason for need in removal.needs],
                "rested_on": list(removal.rested_on),
            }
            for removal in plan.removals
        ]
    }
