"""`tenuto drill`: proves that a checkpoint can be restored and trained on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import BEHIND, examples
from tenuto.cli.console.options import checkpoint, repository, run_of
from tenuto.cli.console.signals import exit_on_signals
from tenuto.errors import StoreError, UsageError

if TYPE_CHECKING:
    from tenuto.drill.drill import DrillPlan

EXAMPLES = examples(
    "tenuto drill /data/checkpoints --target 60s",
    "tenuto drill /data/checkpoints --due 7d --html drill.html    # for cron",
    "tenuto drill /data/checkpoints 500 -- python train.py",
)


def drill(
    context: typer.Context,
    where: options.Where,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STEP] [-- COMMAND...]", help="A step or tag, else latest; what trains."),
    ] = None,
    *,
    run: options.Run = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="PLACE", help="A location of the repository, or a copy.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", metavar="TIME", help="How long it may take: 60s.")] = None,
    due: Annotated[
        str | None, typer.Option("--due", metavar="TIME", help="Nothing while the last proof is younger: 7d.")
    ] = None,
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="When a wait is given up.")] = "1h",
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, metavar="N", help="Steps of COMMAND; else to the next with metrics.")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME", help="Compare only this; may be repeated.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, metavar="X", help="Metrics may differ by this part.")
    ] = 0.0,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page.")] = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Prove that a checkpoint can be restored.

    A new process without any settings loads it, and every tensor and value that it holds is compared with what was
    saved. With COMMAND, that script trains on from a copy, and the metrics that it logs are compared with those that
    later checkpoints have recorded; the repository stays as it is.

    The proof is noted: `tenuto ls` says "restorable: proven 3 d ago". Wrong bytes are noted as damage. Leaves with 12
    where something is not what was saved, 17 after --timeout, 20 and 22 where COMMAND does otherwise or fails, 27 where
    all is right and slower than --target.
    """
    from tenuto.cli.console.reporting import WarningReporter
    from tenuto.cli.views import drill_page
    from tenuto.drill.drill import execute, plan_drill
    from tenuto.events import Emitter
    from tenuto.formats.beside import refuse_other
    from tenuto.model.sizes import parse_time

    repo, name = repository(where, acts=True), _parts(words or [], command := list(context.meta[BEHIND]))
    meant = None if name is None else checkpoint(repo, run, name)
    plan = plan_drill(
        repo,
        meant,
        run=meant.run if meant is not None else run_of(repo, run),
        place=source,
        target_s=None if target is None else parse_time(target, "--target"),
        timeout_s=parse_time(timeout, "--timeout"),
        command=command,
        steps=steps,
        metrics=metric or (),
        tolerance=tolerance,
        due_s=None if due is None else parse_time(due, "--due"),
    )
    if html is not None:
        refuse_other(html, drill_page.GENERATOR, "a page of a drill", "--html")
    if dry_run:
        _show(json, {"dry_run": True, **drill_page.plan_document(plan)}, output.rows(drill_page.plan_rows(plan)))
        return
    if plan.due:
        output.story(f"restoring {plan.id} in a process of its own")
    with exit_on_signals():
        result = execute(repo, plan, on_step=_progress(plan), emitter=Emitter.of([WarningReporter()]))
    if html is not None and plan.due:
        _write_page(html, drill_page.html(result))
    lines = (drill_page.headline(result), output.rows(drill_page.rows(result)))
    _show(json, {"dry_run": False, **drill_page.document(result)}, *lines)
    if hint := drill_page.hint(result):
        output.story(f"hint: {hint}")
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _show(as_json: bool, document: Mapping[str, object], *lines: str) -> None:
    if as_json:
        output.document("drill", document)
        return
    for line in lines:
        output.line(line)


def _parts(words: list[str], command: list[str]) -> str | None:
    """Returns the checkpoint that is named in front of the command."""
    names = words[: len(words) - len(command)]
    if len(names) > 1:
        raise UsageError(
            f"a drill takes one checkpoint, and not {len(names)}: {' '.join(names)}",
            subject=names[1],
            hint="a script to train on with stands behind `--`: tenuto drill WHERE 500 -- python train.py",
        )
    return names[0] if names else None


def _write_page(path: Path, text: str) -> None:
    from tenuto.formats.beside import Beside

    try:
        with Beside(path) as beside:
            beside.part.write_text(text, "utf-8")
            beside.publish(force=True)
    except StoreError as error:
        raise UsageError(
            f"the page is missing: {error.message}",
            subject=str(path),
            hint="the outcome is noted all the same; --html FILE in a directory that is there and can be written to",
        ) from error


def _progress(plan: DrillPlan) -> Callable[[int], None]:
    """Returns what to call as steps are completed. Only the first one is reported: steps may take less than a line."""
    begun = False

    def show(step: int) -> None:
        nonlocal begun
        if not begun:
            output.story(f"training from step {plan.id.step} to step {plan.id.step + plan.steps}, on a copy")
        begun = True

    return show
