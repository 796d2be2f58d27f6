"""`tenuto export`: writes a model's weights, or any part of a checkpoint, in another format."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository, run_of

EXAMPLES = examples(
    "tenuto export /data/checkpoints model.safetensors  # the model's weights",
    "tenuto export /data/checkpoints model.safetensors --step best:val_loss",
    "tenuto export /data/checkpoints model/ --to hf --dtype bfloat16",
    "tenuto export /data/checkpoints ema.safetensors --entry ema",
    "tenuto export /data/checkpoints everything.pt --run gpt --step 500",
)
Patterns = list[str]


def export(
    context: typer.Context,
    where: options.Where,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file or directory to write.", show_default=False)],
    *,
    to: Annotated[
        str | None, typer.Option("--to", metavar="FORMAT", help="hf, gguf, …; else by OUT: *.safetensors, *.pt, *.npz.")
    ] = None,
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
    strip: Annotated[str, typer.Option("--strip", metavar="PREFIX", help="Take this off the names of tensors.")] = "",
    rename: Annotated[
        Patterns | None, typer.Option("--rename", metavar="OLD=NEW", help="Replace this in names: 'old(.*)=new\\1'.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="TYPE", help="Round floating-point tensors: bfloat16, float16, …")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write a model's weights, or any other part, to a file.

    Every byte is verified as it is read, and OUT is read back by the tool that it is for, where that is installed. OUT
    gets the tensors of the state's one model (all, where it has none), under their names in it; a *.pt file the whole
    state, as torch.load(weights_only=True) reads it. --to hf writes a directory for from_pretrained.
    """
    from tenuto.api.export import Choice
    from tenuto.api.export import export as write
    from tenuto.events import CandidateSkipped, Emitter, Event
    from tenuto.formats.convert import float_type
    from tenuto.telemetry.log import sentence
    from tenuto.telemetry.progress import ProgressBar
    from tenuto.units import count, seconds, size

    class SkipReporter:
        def emit(self, event: Event) -> None:
            if isinstance(event, CandidateSkipped):
                output.story(f"warning: {sentence(event)}")

    repo = repository(where, acts=True)
    choice = Choice(entry, include, exclude, strip, rename or (), None if dtype is None else float_type(dtype))
    bar = ProgressBar()
    emitter = Emitter.of([bar, SkipReporter()])
    wanted = step if step == "latest" else checkpoint(repo, run, step)
    try:
        done = write(repo, out, partial(run_of, repo, run), wanted, to=to, choice=choice, force=force, emitter=emitter)
    finally:
        bar.close()
    for remark in done.remarks:
        output.story(f"note: {remark}")
    if json:
        body = {
            "where": repo.url,
            "checkpoint": done.id,
            "out": str(out),
            "format": done.format,
            "bytes": done.bytes,
            "leaves": done.leaves,
            "entry": done.entry,
            "seconds": done.seconds,
            "read_back": done.read_back.by,
            "skipped": [{"checkpoint": id, "reason": reason} for id, reason in done.skipped],
            "notes": list(done.remarks),
        }
        output.document(context.info_name or "export", body)
    else:
        what = count(done.leaves, "tensor") + (f" of entry {done.entry}" if done.entry else "")
        took = f"{size(done.bytes)} in {seconds(done.seconds)}; {done.read_back}"
        output.line(f"{out}: {what}, step {done.id.step} ({done.id}), {took}")
