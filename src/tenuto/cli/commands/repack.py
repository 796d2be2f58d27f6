"""`tenuto repack`: rewrites the checkpoints of a run in another encoding."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository
from tenuto.cli.console.output import agreed

EXAMPLES = examples(
    "tenuto repack /data/checkpoints --encoding small",
    "tenuto repack /data/checkpoints --run main --encoding dedupe --dry-run",
)


def repack(
    where: options.Where,
    *,
    encoding: Annotated[
        str, typer.Option("--encoding", metavar="ENCODING", help="How: small, dedupe, auto or plain.")
    ] = "small",
    run: options.Run = None,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Rewrite the checkpoints of a run in another encoding.

    For a run that has ended: it was saved plain while every second counted, and shall take less space now. Each
    checkpoint of its line of training is written again, read back and compared; all of them appear in a new attempt,
    under their own steps, with their metrics, times and tags. What several ranks have saved stays a checkpoint of as
    many. The originals go into the trash, from where `tenuto gc`
    frees them after 24 h, or at once with --now. Until then the run takes the space of both.

    Refused while a process trains the run, and where a pin or a hold names one of the checkpoints. Cut off, it leaves
    the run as it was, or with all of both.
    """
    from tenuto.cli.console.options import run_of
    from tenuto.cli.console.reporting import WarningReporter
    from tenuto.events import Emitter
    from tenuto.maintenance.repack import execute, plan_repack
    from tenuto.policy.encoding import encoding_of
    from tenuto.telemetry.progress import ProgressBar
    from tenuto.units import count, size

    repo = repository(where, acts=True)
    plan = plan_repack(repo, run_of(repo, run), encoding_of(encoding))
    what = f"{count(len(plan.checkpoints), 'checkpoint')} of run {plan.run}, {size(plan.stored)} in data files"
    if not json:
        output.line(f"{what}, to be stored as {encoding}")
    done = None
    if dry_run:
        if not json:
            output.line("nothing was written")
    elif agreed("Write them in that encoding, and put the originals into the trash?", yes=yes):
        bar = ProgressBar()
        try:
            done = execute(repo, plan, emitter=Emitter.of([bar, WarningReporter()]))
        finally:
            bar.close()
        if not json:
            output.line(f"{size(plan.stored)} -> {size(done.stored)}, read back and compared")
            output.story("the originals lie in the trash: `tenuto gc` frees them after 24 h, with --now at once")
    if json:
        body: dict[str, Any] = {
            "where": plan.where,
            "run": plan.run,
            "encoding": encoding,
            "dry_run": dry_run,
            "bytes": plan.bytes,
            "stored_before": plan.stored,
            "stored": None if done is None else done.stored,
            "tags": [] if done is None else list(done.tags),
            "checkpoints": [] if done is None else [{"checkpoint": new, "from": old} for old, new in done.checkpoints],
        }
        output.document("repack", body)
