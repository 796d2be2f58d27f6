"""`holdfast replicate`: packs come to every place that is to hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli import options, output
from holdfast.cli.exitcodes import examples
from holdfast.cli.places import checkpoint, repository

if TYPE_CHECKING:
    from holdfast.model.names import CheckpointId
    from holdfast.repo.repository import Repo
    from holdfast.upkeep.replicate import ReplicatePlan

EXAMPLES = examples(
    "holdfast replicate /shared/checkpoints",
    "holdfast replicate /shared/checkpoints 500",
    "holdfast replicate /shared/checkpoints --dry-run",
)


def replicate(
    where: options.Where,
    checkpoints: Annotated[
        list[str] | None, typer.Argument(metavar="[CHECKPOINT]...", help="Steps or tags; all, unless given.")
    ] = None,
    *,
    run: options.Run = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Copy packs to every place that is to hold them.

    For a repository that lies in several places. WHERE is its home. What lies only on this node's own disk comes to the
    home; a mirror that was away gets what it lacks. Every byte is verified on the way.
    """
    from holdfast.events import Emitter
    from holdfast.report.measures import size
    from holdfast.report.progress import ProgressBar
    from holdfast.upkeep.replicate import execute, plan_replicate

    repo = repository(where)
    plan = plan_replicate(repo, _meant(repo, run, checkpoints or []))
    if not json:
        output.line(_words(plan))
    copied = 0
    if plan.copies and not dry_run:
        bar = ProgressBar()
        try:
            copied = execute(repo, plan, emitter=Emitter.of([bar]))
        finally:
            bar.close()
        if not json:
            output.line(f"{size(copied)} copied")
    if json:
        output.document(
            "replicate",
            {
                "where": plan.where,
                "dry_run": dry_run,
                "plan": [
                    {"checkpoint": one.id, "to": one.target, "packs": list(one.names), "bytes": one.bytes}
                    for one in plan.copies
                ],
                "unfound": list(plan.unfound),
                "bytes": copied,
            },
        )


def _meant(repo: Repo, run: str | None, names: list[str]) -> list[CheckpointId]:
    from holdfast.model.names import CheckpointId

    if names:
        return [checkpoint(repo, run, name) for name in names]
    return [
        CheckpointId(one, attempt, step)
        for one in ([run] if run is not None else repo.runs())
        for attempt in repo.attempts(one)
        for step in sorted(repo.committed(one, attempt))
    ]


def _words(plan: ReplicatePlan) -> str:
    from holdfast.report.measures import count, size

    rows = [
        (str(one.id), f"{count(len(one.names), 'pack')}, {size(one.bytes)}, to {one.target}") for one in plan.copies
    ]
    lines = [output.rows(rows)] if rows else ["every place has what it is to hold"]
    if plan.unfound:
        lines.append(
            f"{count(len(plan.unfound), 'pack')} in no place that is found from here, {plan.unfound[0]} the first: run "
            "this on the node that has them"
        )
    return "\n".join(lines)
