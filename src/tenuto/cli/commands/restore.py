"""`tenuto restore`: writes a checkpoint, or part of it, to one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository, run_of
from tenuto.errors import UsageError, typed

if TYPE_CHECKING:
    from tenuto.cli.views.export import Export
    from tenuto.engine.read.choose import RestoreResult
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto restore /data/checkpoints state.pt",
    "tenuto restore /data/checkpoints weights.safetensors --include model --strip model/",
    "tenuto restore /data/checkpoints old.pt --run gpt --step 500 --exclude optimizer",
)
Patterns = list[str]


def restore(
    where: options.Where,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The file to write: *.safetensors or *.pt.", show_default=False)
    ],
    *,
    run: options.Run = None,
    step: options.Step = "latest",
    include: Annotated[
        Patterns | None, typer.Option("--include", metavar="GLOB", help="Only these paths and what is below them.")
    ] = None,
    exclude: Annotated[
        Patterns | None, typer.Option("--exclude", metavar="GLOB", help="Not these paths, nor what is below them.")
    ] = None,
    strip: Annotated[
        str, typer.Option("--strip", metavar="PREFIX", help="Take this off the names in a *.safetensors file.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write a checkpoint, every byte verified, to one file.

    No Tenuto is needed to read it. A *.safetensors file gets the leaves, under their paths. A *.pt file (needs torch)
    gets the whole state as nested dicts of tensors and plain values, which torch.load(weights_only=True) reads. OUT
    appears whole or not at all.
    """
    from tenuto.units import count, seconds, size

    repo = repository(where)
    export = _export(out, strip, include, exclude)
    if out.exists() and not force:
        raise UsageError(f"{out} is there already", subject=str(out), hint="--force replaces it")
    with export:
        result = _restore(repo, run, step, export)
        if not export.leaves and out.suffix == ".safetensors" and (include or exclude):
            raise UsageError(
                f"no leaf of {result.id} is left by --include and --exclude; nothing was written",
                subject=str(result.id),
                hint=f"{typed('tenuto', 'show', repo.url, '--run', result.id.run)} shows the paths",
            )
        export.publish(force=force)
    for remark in export.remarks:
        output.story(f"note: {remark}")
    if json:
        body = {
            "where": repo.url,
            "checkpoint": result.id,
            "out": str(out),
            "bytes": result.bytes,
            "leaves": export.leaves,
            "seconds": result.seconds,
            "skipped": [{"checkpoint": id, "reason": reason} for id, reason in result.skipped],
            "notes": export.remarks,
        }
        output.document("restore", body)
    else:
        leaves = count(export.leaves, "leaf")
        output.line(f"{out}: {result.id}, {leaves}, {size(result.bytes)} verified in {seconds(result.seconds)}")


def _export(out: Path, strip: str, include: Patterns | None, exclude: Patterns | None) -> Export:
    if out.suffix == ".safetensors":
        from tenuto.cli.views.export import SafetensorsExport

        return SafetensorsExport(out, include, exclude, strip)
    if out.suffix in (".pt", ".pth"):
        if strip:
            raise UsageError(
                "--strip is for *.safetensors files; a *.pt file keeps the state's own nesting",
                subject="--strip",
                hint="leave --strip out, or write a *.safetensors file",
            )
        from tenuto.cli.views.export import TorchExport

        return TorchExport(out, include, exclude)
    raise UsageError(
        f"{out} is neither a *.safetensors nor a *.pt file", subject=str(out), hint=f"{out.stem}.safetensors"
    )


def _restore(repo: Repo, run: str | None, step: str, export: Export) -> RestoreResult:
    """Restores the checkpoint into the export; for `latest`, skips damaged ones and reports that."""
    from tenuto.engine.read.choose import restore_checkpoint, restore_latest
    from tenuto.events import CandidateSkipped, Emitter, Event
    from tenuto.telemetry.log import sentence
    from tenuto.telemetry.progress import ProgressBar

    class SkipReporter:
        def emit(self, event: Event) -> None:
            if isinstance(event, CandidateSkipped):
                output.story(f"warning: {sentence(event)}")

    bar = ProgressBar()
    emitter = Emitter.of([bar, SkipReporter()])
    try:
        if step != "latest":
            return restore_checkpoint(repo, checkpoint(repo, run, step), export.prepare, emitter=emitter)
        found = restore_latest(repo, run_of(repo, run), export.prepare, emitter=emitter)
        # None: there is no checkpoint; resolving raises an error that lists what exists.
        return found or restore_checkpoint(repo, checkpoint(repo, run, step), export.prepare, emitter=emitter)
    finally:
        bar.close()
