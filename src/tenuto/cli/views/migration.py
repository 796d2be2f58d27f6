"""What `tenuto import` and `tenuto migrate` print, and their common work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.output import Columns

if TYPE_CHECKING:
    from tenuto.api.migrate import MigrationPlan, MigrationReport, Planned

_SHOWN = 12
"""Checkpoints that a plan lists one by one."""
_REMARKS = 8

Source = Annotated[Path, typer.Argument(metavar="SRC", help="A file or directory of another tool.", show_default=False)]
Into = Annotated[
    str | None,
    typer.Argument(metavar="WHERE", help="The repository; it is made where there is none.", show_default=False),
]
Run = Annotated[str, typer.Option("--run", metavar="RUN", help="The run.")]
From = Annotated[
    str | None, typer.Option("--from", metavar="FORMAT", help="The format, where the content alone does not tell.")
]
Entry = Annotated[
    str | None, typer.Option("--entry", metavar="NAME", help="Put it below this entry; bare weights go below model.")
]
Rename = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="OLD=NEW", help="Replace this in names: 'old(.*)=new\\1'; may be repeated."),
]
Strip = Annotated[str, typer.Option("--strip", metavar="PREFIX", help="Take this off the names first, as module.")]
DType = Annotated[
    str | None, typer.Option("--dtype", metavar="TYPE", help="Round floating-point tensors: bfloat16, float16, …")
]
CompareAll = Annotated[bool, typer.Option("--compare-all", help="Compare every byte with SRC, not samples.")]
DryRun = options.DryRun


def carry_out(
    command: str,
    source: Path,
    where: str | None,
    *,
    run: str,
    step: int | None,
    format: str | None,
    entry: str | None,
    rename: Sequence[str] | None,
    strip: str,
    dtype: str | None,
    compare_all: bool,
    skip_damaged: bool,
    dry_run: bool,
    json: bool,
) -> None:
    """Plans, executes and reports."""
    from tenuto.api.migrate import Rules, execute, plan_migration
    from tenuto.cli.console.reporting import WarningReporter
    from tenuto.cli.console.where import default_place
    from tenuto.events import Emitter
    from tenuto.formats.convert import Renaming, float_type
    from tenuto.telemetry.progress import ProgressBar

    where = where or default_place()
    rules = Rules(Renaming(rename or (), strip), None if dtype is None else float_type(dtype), entry)
    plan = plan_migration(source, where, run=run, step=step, format=format, rules=rules, single=command == "import")
    if dry_run:
        if json:
            output.document(command, {**_plan_json(plan), "dry_run": True})
        else:
            _print_plan(plan)
        return
    bar = ProgressBar()
    try:
        report = execute(
            plan,
            where,
            check="all" if compare_all else "samples",
            skip_damaged=skip_damaged,
            emitter=Emitter.of([bar, WarningReporter()]),
        )
    finally:
        bar.close()
    if json:
        output.document(command, {**_plan_json(plan), "dry_run": False, **_report_json(report)})
        return
    _notes(plan)
    _print_report(report)


def _print_plan(plan: MigrationPlan) -> None:
    from tenuto.units import count, size

    new = "a new repository" if plan.creates else "there"
    what = f"{count(len(plan.checkpoints), 'checkpoint')}, {size(plan.bytes)}"
    output.line(f"{plan.source} -> run {plan.run} in {plan.where} ({new}): {what}")
    if plan.checkpoints:
        table = Columns(
            ("STEP", "FORMAT", "TENSORS", "SIZE", "METRICS", "FROM"), frozenset({"STEP", "TENSORS", "SIZE"})
        )
        for one in plan.checkpoints[:_SHOWN]:
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in list(one.metrics.items())[:3])
            name = one.found.path.name
            table.add(str(one.step), one.found.format.name, f"{one.tensors:,}", size(one.bytes), metrics, name)
        table.print()
        more = len(plan.checkpoints) - _SHOWN
        if more > 0:
            output.line(f"  … and {more} more, up to step {plan.checkpoints[-1].step}")
    renames = next((one for one in plan.checkpoints if one.renamed), None)
    if renames is not None:
        shown = ", ".join(f"{old} -> {new}" for old, new in renames.renames)
        output.line(f"renamed: {count(renames.renamed, 'name')} in {_which(plan, renames)}, such as {shown}")
    rounded = sum(one.converted for one in plan.checkpoints)
    if rounded:
        output.line(f"rounded to {plan.rules.dtype}: {count(rounded, 'tensor')}")
    for line in _left_out(plan):
        output.line(line)
    output.line("nothing was written")


def _which(plan: MigrationPlan, one: Planned) -> str:
    return "each" if len({planned.renamed for planned in plan.checkpoints}) == 1 else one.found.path.name


def _left_out(plan: MigrationPlan) -> list[str]:
    """Returns what does not come along, one line each."""
    lines = [f"skipped: {path.name}: {reason}" for path, reason in plan.skipped]
    lines += [f"cannot be read: {path.name}: {reason}" for path, reason in plan.failed]
    remarks: dict[str, int] = {}
    for one in plan.checkpoints:
        for remark in one.remarks:
            remarks[remark] = remarks.get(remark, 0) + 1
    for remark, times in list(remarks.items())[:_REMARKS]:
        lines.append(f"note: {remark}{f' (in {times} checkpoints)' if times > 1 else ''}")
    if len(remarks) > _REMARKS:
        lines.append(f"note: and {len(remarks) - _REMARKS} more, which --dry-run --json lists")
    return lines


def _notes(plan: MigrationPlan) -> None:
    for line in _left_out(plan):
        output.story(line)


def _print_report(report: MigrationReport) -> None:
    from tenuto.units import count, seconds, size

    made = report.imported
    if not made:
        output.line(f"nothing to do: run {report.plan.run} in {report.plan.where} has all of it")
        return
    nbytes, compared = sum(one.bytes for one in made), sum(one.compared for one in made)
    steps = f"step {made[0].id.step}" if len(made) == 1 else f"steps {made[0].id.step} to {made[-1].id.step}"
    what = f"{count(len(made), 'checkpoint')} ({steps} of run {report.plan.run})"
    output.line(
        f"{report.plan.where}: {what}, {size(nbytes)} in {seconds(report.seconds)}; "
        f"{size(compared)} read back and compared with {report.plan.source}"
    )


def _plan_json(plan: MigrationPlan) -> dict[str, Any]:
    return {
        "source": str(plan.source),
        "where": plan.where,
        "run": plan.run,
        "creates": plan.creates,
        "bytes": plan.bytes,
        "plan": [
            {
                "from": str(one.found.path),
                "format": one.found.format.name,
                "step": one.step,
                "tensors": one.tensors,
                "bytes": one.bytes,
                "metrics": dict(one.metrics),
                "renamed": one.renamed,
                "renames": [list(pair) for pair in one.renames],
                "rounded": one.converted,
                "notes": list(one.remarks),
            }
            for one in plan.checkpoints
        ],
        "skipped": [{"from": str(path), "reason": reason} for path, reason in plan.skipped],
        "failed": [{"from": str(path), "reason": reason} for path, reason in plan.failed],
    }


def _report_json(report: MigrationReport) -> dict[str, Any]:
    return {
        "imported": [
            {
                "checkpoint": one.id,
                "from": str(one.source),
                "bytes": one.bytes,
                "tensors": one.leaves,
                "content": one.content,
                "compared": one.compared,
            }
            for one in report.imported
        ],
        "seconds": report.seconds,
    }
