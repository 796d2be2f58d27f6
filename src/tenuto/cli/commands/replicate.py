"""`tenuto replicate`: copies to another store, or to every location that should hold data files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository
from tenuto.cli.views import copying
from tenuto.errors import UsageError
from tenuto.store.registry import open_store

if TYPE_CHECKING:
    from tenuto.errors import TenutoError
    from tenuto.maintenance.replicate import Copying, ReplicatePlan, ReplicateReport
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto replicate /data/checkpoints s3://elsewhere/checkpoints",
    "tenuto replicate /data/checkpoints /backup --follow --every 5min",
    "tenuto replicate /data/checkpoints /backup --check --read",
    "tenuto replicate /shared/checkpoints            # to its own locations",
)


def replicate(
    where: options.Where,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TO] [CHECKPOINT]...", help="A path or URL to copy to; steps or tags, else all."),
    ] = None,
    *,
    run: options.OnlyRun = None,
    step: Annotated[
        list[str] | None, typer.Option("--step", metavar="STEP", help="Only this one; may be repeated.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Copy what is new, until SIGTERM.")] = False,
    every: Annotated[str, typer.Option("--every", metavar="TIME", help="How often it looks.")] = "30s",
    prune: Annotated[bool, typer.Option("--prune", help="Remove in TO what WHERE removed.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare TO, and write nothing.")] = False,
    read: Annotated[bool, typer.Option("--read", help="Read TO's data files; mend damage.")] = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Copy checkpoints to another store, every byte verified.

    TO becomes a copy, complete by itself: ls, show, verify and restores take it, and nobody can train in it until
    `tenuto promote`. It keeps what WHERE removes. Run again, it continues where it stopped.

    --check leaves with 12 where objects of the copy are missing or damaged, 25 where it has something else under the
    same names, 24 where it only lags behind.

    Without TO, each of the repository's own locations gets what it lacks: the primary what lies only on this node's
    disk, a mirror what it missed. A failure in one location does not stop the others.
    """
    names, repo = list(words or []), repository(where)
    to = names.pop(0) if names and copying.is_destination(repo, names[0]) else None
    names += step or []
    alone = [name for name, given in (("--follow", follow), ("--check", check), ("--prune", prune)) if given]
    if to is None:
        if alone or read:
            raise UsageError(
                f"{(alone or ['--read'])[0]} needs a place to copy to",
                subject=(alone or ["--read"])[0],
                hint="tenuto replicate WHERE TO, where TO is a URL or a path such as /backup",
            )
        _to_own_locations(repo, run, names, dry_run=dry_run, json=json)
        return
    if (follow and (check or dry_run or read or names)) or (check and (dry_run or prune or names)):
        raise UsageError(
            f"{'--follow' if follow else '--check'} goes with --run alone here",
            subject="--follow" if follow else "--check",
            hint="tenuto replicate WHERE TO --follow [--prune]; tenuto replicate WHERE TO --check [--read]",
        )
    target = open_store(to)
    if check:
        copying.check(repo, target, run=run, read=read, json=json)
    elif follow:
        every_s = copying.interval(every)
        with copying.stopping() as stop:
            total = copying.follow(repo, target, run=run, every_s=every_s, prune=prune, stop=stop)
        copying.finish(repo, target.url, replace(total, stopped=False), json)
    else:
        ids = [checkpoint(repo, run, name) for name in names] or None
        copying.copy(repo, target, run=run, ids=ids, prune=prune, read=read, dry_run=dry_run, json=json)


def _to_own_locations(repo: Repo, run: str | None, names: list[str], *, dry_run: bool, json: bool) -> None:
    from tenuto.errors import StoreError
    from tenuto.events import Emitter
    from tenuto.maintenance.replicate import execute, plan_replicate
    from tenuto.telemetry.progress import ProgressBar
    from tenuto.units import size

    plan = plan_replicate(repo, _selected(repo, run, names))
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
