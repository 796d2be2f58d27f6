"""`tenuto migrate`: makes all checkpoints of a training by another tool checkpoints of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from tenuto.cli.console import options
from tenuto.cli.console.help_text import examples
from tenuto.cli.views import migration

EXAMPLES = examples(
    "tenuto migrate out/ /data/checkpoints --dry-run  # the plan",
    "tenuto migrate out/ /data/checkpoints --run gpt",
    r"tenuto migrate out/ /data/checkpoints --rename '^module\.(.*)=\1'",
)


def migrate(
    source: migration.Source,
    into: migration.Into = None,
    *,
    run: migration.Run = "main",
    format: migration.From = None,
    entry: migration.Entry = None,
    rename: migration.Rename = None,
    strip: migration.Strip = "",
    dtype: migration.DType = None,
    compare_all: migration.CompareAll = False,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out checkpoints that cannot be read.")
    ] = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Make the checkpoints of another training tool a run.

    SRC is a directory of checkpoints: checkpoint-100, epoch=3-step=400.ckpt, step_500, … All are written and compared
    with SRC first; only then does the first one become visible. A migration that fails or is killed before that leaves
    none that can be seen. Run again, it takes what is new.
    """
    migration.carry_out(
        "migrate",
        source,
        into,
        run=run,
        step=None,
        format=format,
        entry=entry,
        rename=rename,
        strip=strip,
        dtype=dtype,
        compare_all=compare_all,
        skip_damaged=skip_damaged,
        dry_run=dry_run,
        json=json,
    )
