"""`tenuto export`: writes a model's weights, or any part of a checkpoint, to one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository, run_of
from tenuto.errors import UsageError, did_you_mean, typed

if TYPE_CHECKING:
    from tenuto.cli.views.export import Export
    from tenuto.engine.read.choose import RestoreResult
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto export /data/checkpoints model.safetensors  # the model's weights",
    "tenuto export /data/checkpoints model.safetensors --step best:val_loss",
    "tenuto export /data/checkpoints ema.safetensors --entry ema",
    "tenuto export /data/checkpoints everything.pt --run gpt --step 500",
)
Patterns = list[str]


def export(
    context: typer.Context,
    where: options.Where,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The file to write: *.safetensors or *.pt.", show_default=False)
    ],
    *,
    run: options.Run = None,
    step: options.Step = "latest",
    entry: Annotated[
        str | None,
        typer.Option("--entry", metavar="NAME", help="This entry of the state, its tensors under their names in it."),
    ] = None,
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
    """Write a model's weights, or any other part, to a file.

    Every byte is verified. A *.safetensors file gets the tensors of the state's one model (all, where it has none),
    under their names in it; a *.pt file the whole state, as torch.load(weights_only=True) reads it.
    """
    from tenuto.units import count, seconds, size

    repo = repository(where)
    file = _file(out, entry, strip, include, exclude)
    if out.exists() and not force:
        raise UsageError(f"{out} is there already", subject=str(out), hint="--force replaces it")
    with file:
        result = _restore(repo, run, step, file)
        if not file.leaves and out.suffix == ".safetensors" and (include or exclude):
            raise UsageError(
                f"no tensor of {result.id} is left by --include and --exclude; nothing was written",
                subject=str(result.id),
                hint=did_you_mean((include or [""])[0].rstrip("*/"), file.choices)
                or f"{typed('tenuto', 'show', repo.url, '--run', result.id.run)} shows the paths",
            )
        file.publish(force=force)
    for remark in file.remarks:
        output.story(f"note: {remark}")
    if json:
        body = {
            "where": repo.url,
            "checkpoint": result.id,
            "out": str(out),
            "bytes": result.bytes,
            "leaves": file.leaves,
            "entry": file.entry,
            "seconds": result.seconds,
            "skipped": [{"checkpoint": id, "reason": reason} for id, reason in result.skipped],
            "notes": file.remarks,
        }
        output.document(context.info_name or "export", body)
    else:
        what = count(file.leaves, "tensor") + (f" of entry {file.entry}" if file.entry else "")
        verified = f"{size(result.bytes)} verified in {seconds(result.seconds)}"
        output.line(f"{out}: {what}, step {result.id.step} ({result.id}), {verified}")


def _file(out: Path, entry: str | None, strip: str, include: Patterns | None, exclude: Patterns | None) -> Export:
    if entry is not None and (include or strip):
        raise UsageError(
            "--entry chooses tensors and their names: it cannot be combined with --include or --strip",
            subject="--entry",
            hint=f"leave them out, or write --include {entry} --strip {entry}/",
        )
    if out.suffix == ".safetensors":
        from tenuto.cli.views.export import SafetensorsExport

        return SafetensorsExport(out, include, exclude, strip, entry)
    if out.suffix in (".pt", ".pth"):
        if strip or entry is not None:
            raise UsageError(
                "--entry and --strip are for *.safetensors files; a *.pt file keeps the state's own nesting",
                subject="--strip" if strip else "--entry",
                hint="use --include, or write a *.safetensors file",
            )
        from tenuto.cli.views.export import TorchExport

        return TorchExport(out, include, exclude)
    raise UsageError(
        f"{out} is neither a *.safetensors nor a *.pt file", subject=str(out), hint=f"name it {out.stem}.safetensors"
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
