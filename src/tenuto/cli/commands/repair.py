"""`tenuto repair`: puts back what is damaged, from wherever its bytes still lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.commands.verify import DAMAGED
from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository
from tenuto.cli.console.output import agreed
from tenuto.errors import StoreError, UsageError, typed

if TYPE_CHECKING:
    from tenuto.maintenance.repair import Quarantined, RepairReport
    from tenuto.maintenance.repair_plan import Mending, RepairPlan
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto repair /data/checkpoints --dry-run",
    "tenuto repair /data/checkpoints 500 --from /backup/checkpoints --yes",
    "tenuto repair /data/checkpoints 500 --salvage whole.safetensors",
)


def repair(
    where: options.Where,
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CHECKPOINT...]", help="Only these: a step, attempt/step, or run/attempt/step."),
    ] = None,
    *,
    run: options.OnlyRun = None,
    from_: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="PLACE", help="A copy or a backup of the repository to take bytes from."),
    ] = None,
    salvage: Annotated[
        Path | None, typer.Option("--salvage", metavar="OUT", help="Write the tensors that are whole to this file.")
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Give up the notes and tags that nothing has any more.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="With --salvage: replace OUT if it is there.")] = False,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Put back what is damaged, from copies of it.

    Bytes come from other locations, copies, --from, equal chunks and this machine's memory, each verified. What nobody
    has is noted (status 12).
    """
    from tenuto.events import Emitter
    from tenuto.maintenance.repair import execute
    from tenuto.maintenance.repair_plan import plan_repair
    from tenuto.maintenance.repair_sources import Sources
    from tenuto.telemetry.progress import ProgressBar

    repo = repository(where, acts=True)
    ids = [checkpoint(repo, run, name) for name in checkpoints] if checkpoints else _of_run(repo, run)
    if salvage is not None:
        _salvage(repo, ids if checkpoints else None, salvage, force=force, json=json)
        return
    bar = ProgressBar()
    emitter = Emitter.of([bar])
    with Sources.of(repo, from_ or ()) as sources:
        try:
            plan = plan_repair(sources, ids, emitter=emitter, forget=forget)
        finally:
            bar.close()
        if not json:
            _print_plan(plan)
        report: RepairReport | None = None
        if not json and not forget and any(one.kind in ("note", "ref") for one in plan.hopeless):
            way = typed("tenuto", "repair", repo.url, "--forget")
            output.story(f"hint: until a note or a tag can be read, what it may be about is kept; {way} gives it up")
        wanted = bool(plan.touched or plan.repairs)
        if wanted and not dry_run and (not plan.repairs or agreed(_question(plan), yes=yes)):
            try:
                report = execute(sources, plan, emitter=emitter)
            finally:
                bar.close()
            if not json:
                _print_report(repo, report)
    if json:
        output.document("repair", _json(plan, report, dry_run=dry_run))
    if plan.mendings if report is None else not report.ok:
        raise typer.Exit(DAMAGED)
    if plan.unread:
        raise typer.Exit(StoreError.exit_code)


def _of_run(repo: Repo, run: str | None) -> list[CheckpointId] | None:
    if run is None:
        return None
    from tenuto.cli.views.run_listing import listing

    (found,) = listing(repo, run)
    return [row.id for row in found.rows if row.state in ("committed", "damaged") and repo.exists(row.id)]


def _question(plan: RepairPlan) -> str:
    from tenuto.units import count

    return f"Replace {count(len(plan.repairs), 'damaged object')}?"


def _print_plan(plan: RepairPlan) -> None:
    from tenuto.units import count, size

    for reason in (*plan.unreached, *plan.unread):
        output.story(f"note: not looked at: {reason}")
    if plan.unseen:
        output.story(f"note: {count(len(plan.unseen), 'data file')} not looked at, on other nodes")
    for one in plan.mendings:
        output.line(_words(one))
    many = count(len(plan.checked), "checkpoint")
    if not plan.mendings:
        output.line(f"{many}: nothing to repair")
        return
    nbytes = sum(one.size for one in plan.repairs)
    parts = [f"{count(len(plan.repairs), 'object')} to repair, {size(nbytes)}" if plan.repairs else ""]
    parts += [f"{count(len(plan.hopeless), 'object')} that nothing can repair" if plan.hopeless else ""]
    output.line(f"{many}: {'; '.join(filter(None, parts))}")


def _words(one: Mending) -> str:
    from tenuto.units import size

    head = "repair" if one.repairable else "LOST  "
    lines = [f"{head}  {one.name}", f"        {one.wrong} (in {one.place})"]
    if one.repairable:
        lines.append("        from " + ", ".join(f"{name}: {size(nbytes)}" for name, nbytes in one.sources))
    else:
        what = size(one.lost_bytes) if one.kind == "pack" else "any"
        lines.append(f"        nothing has {what} of it{_leaves(one.lost, len(one.lost), one.lost_words)}")
    return "\n".join(lines)


def _leaves(paths: tuple[str, ...], number: int, words: str) -> str:
    from tenuto.maintenance.repair import LEAVES_NAMED

    shown = paths[:LEAVES_NAMED]
    more = f" and {number - len(shown)} more" if number > len(shown) else ""
    what = ", ".join(filter(None, [words, *shown]))
    return f": {what}{more}" if what else ""


def _print_report(repo: Repo, report: RepairReport) -> None:
    from tenuto.units import count, size

    for one, error in report.failed:
        output.line(f"FAILED  {one.name} in {one.place}: {error.message}")
    if report.gone:
        output.line(f"{count(len(report.gone), 'object')} of checkpoints that were removed meanwhile: left alone")
    for lost in report.quarantined:
        output.line(f"DAMAGED  {lost.id} stays damaged, and is noted so{_leaves(lost.lost, lost.count, lost.words)}")
        for way in _ways_out(repo, lost):
            output.story(f"more: {way}")
    whole = 0 if report.verification is None else len(report.verification.checked) - len(report.quarantined)
    done = f"{count(len(report.repaired), 'object')} repaired, {size(report.bytes)}"
    output.line(f"{done}; {count(whole, 'checkpoint')} verified whole")


def _ways_out(repo: Repo, lost: Quarantined) -> Iterator[str]:
    from tenuto.maintenance.repair_plan import EVERYTHING

    if lost.instead is not None:
        paths = lost.lost if lost.lost and not lost.words else ("*",)
        include = [word for path in paths for word in ("--include", path)]
        older = typed("tenuto", "export", repo.url, "lost.safetensors", "--step", lost.instead, *include)
        yield f"{older} writes these as they were then"
    if lost.words != EVERYTHING:
        yield f"{typed('tenuto', 'repair', repo.url, lost.id, '--salvage', 'whole.safetensors')} writes the others"


def _salvage(repo: Repo, ids: list[CheckpointId] | None, out: Path, *, force: bool, json: bool) -> None:
    from tenuto.api.salvage import salvage
    from tenuto.units import count, size

    if ids is None or len(ids) != 1:
        raise UsageError(
            "--salvage writes one checkpoint", subject="--salvage", hint="tenuto repair WHERE STEP --salvage OUT"
        )
    done = salvage(repo, ids[0], out, force=force)
    if json:
        lost = [{"leaf": path, "message": why} for path, why in done.lost]
        body = {"checkpoint": done.id, "out": str(out), "leaves": done.leaves, "bytes": done.bytes, "lost": lost}
        output.document("salvage", {"where": repo.url, **body})
    else:
        for path, why in done.lost:
            output.line(f"LOST    {path}: {why.removeprefix(f'{path} is damaged: ')}")
        what = f"{count(done.leaves, 'tensor')} of {done.id} whole, {size(done.bytes)}"
        output.line(f"{out}: {what}; {len(done.lost)} lost")
    if done.lost:
        raise typer.Exit(DAMAGED)


def _json(plan: RepairPlan, report: RepairReport | None, *, dry_run: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "where": plan.where,
        "dry_run": dry_run,
        "checked": list(plan.checked),
        "plan": [
            {
                "checkpoint": one.id,
                "kind": one.kind,
                "object": one.name,
                "place": one.place,
                "wrong": one.wrong,
                "bytes": one.size,
                "repairable": one.repairable,
                "sources": [{"source": name, "bytes": nbytes} for name, nbytes in one.sources],
                "lost": list(one.lost),
                "lost_words": one.lost_words,
            }
            for one in plan.mendings
        ],
        "not_reached": list(plan.unreached),
        "unread": list(plan.unread),
        "unseen": len(plan.unseen),
        "done": None,
    }
    if report is not None:
        body["done"] = {
            "ok": report.ok,
            "repaired": [{"object": one.name, "place": one.place} for one in report.repaired],
            "gone": [one.name for one in report.gone],
            "failed": [{"object": one.name, "message": error.message} for one, error in report.failed],
            "quarantined": [
                {
                    "checkpoint": one.id,
                    "lost": list(one.lost),
                    "count": one.count,
                    "lost_words": one.words,
                    "instead": one.instead,
                }
                for one in report.quarantined
            ],
        }
    return body
