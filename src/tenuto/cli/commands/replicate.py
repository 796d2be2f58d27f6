"""`tenuto replicate`: copies packs to every place that should hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository

if TYPE_CHECKING:
    from tenuto.errors import TenutoError
    from tenuto.maintenance.replicate import Copying, ReplicatePlan, ReplicateReport
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto replicate /shared/checkpoints",
    "tenuto replicate /shared/checkpoints 500",
    "tenuto replicate /shared/checkpoints --dry-run",
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
    """Copy data files to every location that should have them.

    For a repository in several locations. WHERE is its primary. Copies what lies only on this node's own disk to the
    primary, and to a mirror that was away what it lacks. Verifies every byte on the way. A failure in one location does
    not stop the others; the exit status reports it, and a mirror that is not found.
    """
    from tenuto.errors import StoreError
    from tenuto.events import Emitter
    from tenuto.maintenance.replicate import execute, plan_replicate
    from tenuto.telemetry.progress import ProgressBar
    from tenuto.units import size

    repo = repository(where)
    plan = plan_replicate(repo, _selected(repo, run, checkpoints or []))
    if not json:
        output.line(_words(plan))
    report: ReplicateReport | None = None
    if plan.copies and not dry_run:
        bar = ProgressBar()
        try:
            report = execute(repo, plan, emitter=Emitter.of([bar]))
        finally:
            bar.close()
    failed = [*plan.failed, *(() if report is None else report.failed)]
    copied = 0 if report is None else report.bytes
    if json:
        output.document("replicate", {"where": plan.where, "dry_run": dry_run, **_json(plan, failed), "bytes": copied})
    elif report is not None:
        output.line(f"{size(copied)} copied")
    mirrors = [place for place in plan.away if not place.node]
    for error in failed:
        output.story(f"error: {error.message}")
    if mirrors:
        output.story(f"error: {', '.join(map(str, mirrors))} is not found: what it lacks cannot be brought")
    if failed or mirrors:
        raise typer.Exit(max([error.exit_code for error in failed] + [StoreError.exit_code] * bool(mirrors)))


def _json(plan: ReplicatePlan, failed: list[TenutoError]) -> dict[str, Any]:
    return {
        "plan": [
            {
                "checkpoint": one.id,
                "to": one.target,
                "packs": list(one.packs),
                "small": list(one.small),
                "bytes": one.bytes,
            }
            for one in plan.copies
        ],
        "unfound": list(plan.unfound),
        "away": [{"node": place.node, "url": place.url} for place in plan.away],
        "failed": [error.message for error in failed],
    }


def _selected(repo: Repo, run: str | None, names: list[str]) -> list[CheckpointId]:
    from tenuto.model.ids import CheckpointId

    if names:
        return [checkpoint(repo, run, name) for name in names]
    return [
        CheckpointId(one, attempt, step)
        for one in ([run] if run is not None else repo.runs())
        for attempt in repo.attempts(one)
        for step in repo.committed(one, attempt)
    ]


def _words(plan: ReplicatePlan) -> str:
    from tenuto.units import count

    lines: list[str] = []
    for target in dict.fromkeys(one.target for one in plan.copies):
        lines.append(f"to {target}")
        lines.append(output.rows([_row(one) for one in plan.copies if one.target == target]))
    nodes = [place for place in plan.away if place.node]
    if plan.unfound:
        where = f"perhaps on {', '.join(map(str, nodes[:3]))}" if nodes else f"{plan.unfound[0]} the first"
        lines.append(f"{count(len(plan.unfound), 'data file')} in no location that can be reached from here, {where}")
    if not lines:
        lines.append("nothing to copy")
    return "\n".join(lines)


def _row(one: Copying) -> tuple[str, str]:
    from tenuto.units import count, size

    parts = [
        f"{count(len(one.packs), 'data file')}, {size(one.bytes)}" if one.packs else "",
        count(len(one.small), "small object") if one.small else "",
    ]
    return str(one.id) if one.id else "names", ", ".join(filter(None, parts))
