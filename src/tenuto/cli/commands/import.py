"""`tenuto import`: makes one checkpoint of another tool a checkpoint of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from tenuto.cli.console import options
from tenuto.cli.console.help_text import examples
from tenuto.cli.views import adoption, migration

EXAMPLES = examples(
    "tenuto import model.safetensors /data/checkpoints",
    "tenuto import out/checkpoint-500 /data/checkpoints --run finetuned",
    "tenuto import model.npz /data/checkpoints --strip module. --dtype bfloat16",
    "tenuto import model.safetensors /data/checkpoints --dry-run",
    "tenuto import --in-place runs/dcp/step-500",
)


def import_(
    source: migration.Source,
    into: migration.Into = None,
    *,
    run: migration.Run = "main",
    step: Annotated[
        int | None, typer.Option("--step", metavar="STEP", min=0, help="The step, where SRC tells none.")
    ] = None,
    format: migration.From = None,
    entry: migration.Entry = None,
    rename: migration.Rename = None,
    strip: migration.Strip = "",
    dtype: migration.DType = None,
    compare_all: migration.CompareAll = False,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place", help="Copy nothing: index the files where they lie. SRC becomes the repository without WHERE."
        ),
    ] = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Make a checkpoint of another tool one of yours.

    SRC is read without running code from it, and needs no memory for its tensors. What was written is compared with
    SRC before it becomes visible. Bare weights become the entry model, a training state keeps its own entries.
    """
    if in_place:
        if rename or strip or dtype is not None or entry is not None or dry_run:
            from tenuto.errors import UsageError

            raise UsageError(
                "--in-place takes a checkpoint as it is: without --rename, --strip, --dtype, --entry and --dry-run",
                hint="leave --in-place out to convert it",
            )
        adoption.carry_out(source, into, run=run, step=step, format=format, json=json)
        return
    migration.carry_out(
        "import",
        source,
        into,
        run=run,
        step=step,
        format=format,
        entry=entry,
        rename=rename,
        strip=strip,
        dtype=dtype,
        compare_all=compare_all,
        skip_damaged=False,
        dry_run=dry_run,
        json=json,
    )


globals()["import"] = import_  # a command is the function of its module's name, which is a keyword here
