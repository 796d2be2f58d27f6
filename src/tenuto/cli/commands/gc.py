"""`tenuto gc`: frees what nothing references any more."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository
from tenuto.cli.console.output import agreed

if TYPE_CHECKING:
    from tenuto.maintenance.gc import Garbage, GcPlan, GcReport


EXAMPLES = examples(
    "tenuto gc /data/checkpoints --dry-run",
    "tenuto gc /data/checkpoints --yes                  # say, once a day",
    "tenuto gc /data/checkpoints --grace 48",
)
HOUR_S = 3600.0


def gc(
    where: options.Where,
    *,
    grace: Annotated[
        float, typer.Option("--grace", min=0.0, metavar="HOURS", help="From the first visit to the deletion.")
    ] = 24.0,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Free what is removed, aborted or was never finished.

    Works in two visits: the first marks what nothing reaches, one after the grace deletes what still is unreached. No
    checkpoint that `ls` lists as whole is ever touched, nor anything that Tenuto did not write.
    """
    from tenuto.maintenance.gc import execute, plan_gc

    grace_s = options.grace_seconds(grace)
    repo = repository(where)
    plan = plan_gc(repo, grace_s=grace_s)
    if not json:
        _print(plan)
    report: GcReport | None = None
    if not dry_run and _has_work(plan) and (not _deletes(plan) or agreed("Go on?", yes=yes)):
        report = execute(repo, plan)
        if not json:
            output.line(_done(report))
            if report.marked and not report.deleted:
                output.story(f"hint: what is marked is deleted by the first gc after {grace:g} h")
    if json:
        output.document("gc", {"where": repo.url, "dry_run": dry_run, **_plan_json(plan), "done": _report_json(report)})


def _has_work(plan: GcPlan) -> bool:
    """Returns whether there is anything to do now; waiting garbage needs no visit."""
    return bool(plan.odds or plan.void or plan.forgotten) or any(
        found.due or not found.marked for found in plan.garbage
    )


def _deletes(plan: GcPlan) -> bool:
    return bool(plan.odds or plan.forgotten) or any(found.due for found in plan.garbage)


def _print(plan: GcPlan) -> None:
    from tenuto.units import count, size

    pairs = [(str(found.id), _words(found)) for found in plan.garbage]
    pairs += [(name, f"delete: {reason}") for name, reason in plan.odds]
    pairs += [
        (str(lost.id), f"delete from {lost.place}: no longer known, {size(lost.bytes)}") for lost in plan.forgotten
    ]
    if pairs:
        output.line(output.rows(pairs))
    for reason, many in Counter(reason for _, reason in plan.kept).items():
        output.line(f"  {count(many, 'save')} left alone: {reason}")
    due = sum(found.due for found in plan.garbage)
    new = sum(not found.marked for found in plan.garbage)
    if not pairs:
        output.line("nothing to free")
        return
    waiting = len(plan.garbage) - due - new
    parts = [
        f"{count(due + len(plan.forgotten), 'save')} to delete ({size(plan.bytes)})" if due or plan.forgotten else "",
        f"{count(new, 'save')} to mark" if new else "",
        f"{count(waiting, 'save')} waiting" if waiting else "",
        f"{count(len(plan.odds), 'leftover')} to delete" if plan.odds else "",
    ]
    output.line(", ".join(filter(None, parts)))


def _words(found: Garbage) -> str:
    from tenuto.units import size

    if found.due:
        verb = "delete"
    elif found.marked:
        verb = f"wait {found.left_s / HOUR_S:.1f} h"
    else:
        verb = f"mark, goes in {found.left_s / HOUR_S:g} h"
    return f"{verb}: {found.reason}, {size(found.bytes)}"


def _done(report: GcReport) -> str:
    from tenuto.units import count, size

    lines = [f"{id} was spared: {reason}" for id, reason in report.spared]
    deleted = len(report.deleted) + report.forgotten
    parts = [
        f"{count(deleted, 'save')} deleted, {size(report.bytes)} freed" if deleted else "",
        f"{count(len(report.marked), 'save')} marked" if report.marked else "",
        f"{count(report.odds, 'leftover')} deleted" if report.odds else "",
    ]
    lines.append(", ".join(filter(None, parts)) or "nothing was left to do")
    return "\n".join(lines)


def _plan_json(plan: GcPlan) -> dict[str, Any]:
    return {
        "grace_s": plan.grace_s,
        "bytes": plan.bytes,
        "garbage": [
            {
                "checkpoint": found.id,
                "reason": found.reason,
                "objects": found.objects,
                "bytes": found.bytes,
                "marked": found.marked,
                "left_s": found.left_s,
                "delete": found.due,
            }
            for found in plan.garbage
        ],
        "leftovers": [{"name": name, "reason": reason} for name, reason in plan.odds],
        "forgotten": [{"checkpoint": lost.id, "in": lost.place, "bytes": lost.bytes} for lost in plan.forgotten],
        "kept": [{"checkpoint": id, "reason": reason} for id, reason in plan.kept],
    }


def _report_json(report: GcReport | None) -> dict[str, Any] | None:
    if report is None:
        return None
    return {
        "marked": list(report.marked),
        "deleted": list(report.deleted),
        "forgotten": report.forgotten,
        "bytes": report.bytes,
        "leftovers": report.odds,
        "spared": [{"checkpoint": id, "reason": reason} for id, reason in report.spared],
    }
