"""`tenuto gc`: frees what nothing references any more."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository
from tenuto.cli.console.output import agreed
from tenuto.errors import UsageError, typed

if TYPE_CHECKING:
    from tenuto.maintenance.gc import Garbage, GcPlan, GcReport


EXAMPLES = examples(
    "tenuto gc /data/checkpoints --dry-run",
    "tenuto gc /data/checkpoints --yes                  # say, once a day",
    "tenuto gc /data/checkpoints --now                  # the disk is full",
)
HOUR_S = 3600.0


def gc(
    where: options.Where,
    *,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            min=0.0,
            metavar="HOURS",
            help="How long what is removed or unfinished waits. [default: 24]",
            show_default=False,
        ),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Free everything at once, without a grace.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --now: also a run's last checkpoint, and what has lost its manifest.")
    ] = False,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Free what is removed, aborted or was never finished.

    What is in the trash goes 25 h after it was removed, and can be brought back for the first 24 of them. What was
    never finished goes 24 h after the first gc that finds it. With --now nothing waits. It never touches a checkpoint
    that `ls` lists as whole, what a living process is saving, or anything that Tenuto did not write.
    """
    from tenuto.maintenance.gc import execute, plan_gc
    from tenuto.units import size

    if now and grace is not None:
        raise UsageError("--now and --grace contradict each other", hint=typed("tenuto", "gc", where, "--now"))
    if force and not now:
        raise UsageError("--force needs --now", hint=typed("tenuto", "gc", where, "--now", "--force"))
    grace_s = options.grace_seconds(24.0 if grace is None else grace)
    repo = repository(where)
    plan = plan_gc(repo, grace_s=grace_s, now=now, force=force)
    if not json:
        _print(plan)
    report: GcReport | None = None
    free: tuple[int | None, int | None] = (repo.store.free_bytes(), None)
    question = f"Free {size(plan.bytes)}? It cannot be brought back."
    if not dry_run and _has_work(plan) and (not _deletes(plan) or agreed(question, yes=yes)):
        report = execute(repo, plan)
        free = (free[0], repo.store.free_bytes())
        if not json:
            output.line(_done(report, free))
    if json:
        done = _report_json(report, free)
        output.document("gc", {"where": repo.url, "dry_run": dry_run, **_plan_json(plan), "done": done})
    else:
        _print_what_waits(plan, report)


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
    new = sum(not found.marked and not found.due for found in plan.garbage)
    if not pairs:
        output.line("nothing to free")
        return
    waiting = len(plan.garbage) - due - new
    waits = sum(found.bytes for found in plan.garbage if found.marked and not found.due)
    parts = [
        f"{count(due + len(plan.forgotten), 'save')} to delete ({size(plan.bytes)})" if due or plan.forgotten else "",
        f"{count(new, 'save')} to mark" if new else "",
        f"{count(waiting, 'save')} waiting ({size(waits)})" if waiting else "",
        f"{count(len(plan.odds), 'leftover')} to delete" if plan.odds else "",
    ]
    output.line(", ".join(filter(None, parts)))


def _print_what_waits(plan: GcPlan, report: GcReport | None) -> None:
    """Says when the space of what was not deleted comes free, and how to have it now."""
    from tenuto.units import size

    waiting = [found for found in plan.garbage if not found.due]
    if waiting:
        hours = max(found.left_s for found in waiting) / HOUR_S
        nbytes = size(sum(found.bytes for found in waiting))
        now = typed("tenuto", "gc", plan.where, "--now")
        output.story(f"hint: the first gc after {hours:.1f} h frees {nbytes}; {now} frees it now")
    elif plan.now and (report is None or not report.bytes) and not plan.bytes:
        keep = typed("tenuto", "keep", plan.where, "--latest", "1", "--now")
        output.story(f"hint: {keep} frees all but the newest checkpoint of a run, and asks first")


def _words(found: Garbage) -> str:
    from tenuto.units import size

    if found.due:
        verb = "delete"
    elif found.marked:
        verb = f"wait {found.left_s / HOUR_S:.1f} h"
    else:
        verb = f"mark, goes in {found.left_s / HOUR_S:.1f} h"
    return f"{verb}: {found.reason}, {size(found.bytes)}"


def _done(report: GcReport, free: tuple[int | None, int | None]) -> str:
    from tenuto.units import count, size

    lines = [f"{id} was spared: {reason}" for id, reason in report.spared]
    deleted = len(report.deleted) + report.forgotten
    before, after = free
    room = f" ({size(after)} free there now, {size(before)} before)" if before is not None and after is not None else ""
    parts = [
        f"{count(deleted, 'save')} deleted, {size(report.bytes)} freed{room}" if deleted else "",
        f"{count(len(report.marked), 'save')} marked" if report.marked else "",
        f"{count(report.odds, 'leftover')} deleted" if report.odds else "",
    ]
    lines.append(", ".join(filter(None, parts)) or "nothing was left to do")
    return "\n".join(lines)


def _plan_json(plan: GcPlan) -> dict[str, Any]:
    return {
        "grace_s": plan.grace_s,
        "now": plan.now,
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


def _report_json(report: GcReport | None, free: tuple[int | None, int | None]) -> dict[str, Any] | None:
    if report is None:
        return None
    return {
        "marked": list(report.marked),
        "deleted": list(report.deleted),
        "forgotten": report.forgotten,
        "bytes": report.bytes,
        "free_before": free[0],
        "free_after": free[1],
        "leftovers": report.odds,
        "spared": [{"checkpoint": id, "reason": reason} for id, reason in report.spared],
    }
