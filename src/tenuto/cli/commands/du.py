"""`tenuto du`: what checkpoints take, and what removing some of them would free."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository

if TYPE_CHECKING:
    from tenuto.maintenance.usage import CheckpointUsage, Usage
    from tenuto.model.ids import CheckpointId


EXAMPLES = examples(
    "tenuto du /data/checkpoints",
    "tenuto du /data/checkpoints --run gpt --json",
    "tenuto du /data/checkpoints --if-removed 500 --if-removed 600",
)


def du(
    where: options.Where,
    *,
    run: options.OnlyRun = None,
    if_removed: Annotated[
        list[str] | None,
        typer.Option("--if-removed", metavar="CHECKPOINT", help="What removing this one, and others so named, frees."),
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show what checkpoints take.

    LOGICAL is the size of the state, STORED what lies in the checkpoint's own directory, SHARED what it uses of others'
    data files. UNIQUE is what removing this one alone would free, once gc has emptied the trash: nothing of data files
    that another checkpoint needs.
    """
    from tenuto.maintenance.usage import usage_of

    repo = repository(where)
    named = tuple(dict.fromkeys(checkpoint(repo, run, name) for name in if_removed or ()))
    found = usage_of(repo)
    rows = [one for one in found.checkpoints if run is None or one.id.run == run.casefold()]
    if json:
        output.document("du", _json(found, rows, named))
        return
    for name, group in groupby(rows, key=lambda one: one.id.run):
        _print_run(name, list(group))
    _print_total(found, named)


def _print_run(name: str, rows: list[CheckpointUsage]) -> None:
    from rich.table import Table

    from tenuto.units import count, size

    logical, stored = sum(one.logical for one in rows), sum(one.stored for one in rows)
    output.line(f"run {name}: {count(len(rows), 'checkpoint')}, {size(logical)} logical, {size(stored)} stored")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("CHECKPOINT", "LOGICAL", "STORED", "SHARED", "UNIQUE"):
        table.add_column(title, justify="left" if title == "CHECKPOINT" else "right", no_wrap=True)
    for one in rows:
        shared = "?" if one.shared is None else size(one.shared) if one.bases else "-"
        table.add_row(f"{one.id}", size(one.logical), size(one.stored), shared, size(one.unique))
    output.rendered(table)


def _print_total(found: Usage, named: tuple[CheckpointId, ...]) -> None:
    from tenuto.units import count, size

    parts = [
        f"{size(found.needed)} of removed ones that others need" if found.needed else "",
        f"{size(found.removed)} in the trash" if found.removed else "",
        f"{size(found.unfinished)} of unfinished or damaged saves" if found.unfinished else "",
    ]
    more = ", ".join(filter(None, parts))
    output.line(f"total: {size(found.logical)} logical, {size(found.stored)} stored{f' ({more})' if more else ''}")
    if named:
        output.line(f"without {count(len(named), 'checkpoint')}: {size(found.freed_by(named))} free, after gc")


def _json(found: Usage, rows: list[CheckpointUsage], named: tuple[CheckpointId, ...]) -> dict[str, object]:
    return {
        "where": found.where,
        "checkpoints": [
            {
                "checkpoint": one.id,
                "logical": one.logical,
                "stored": one.stored,
                "shared": one.shared,
                "unique": one.unique,
                "rests_on": list(one.bases),
            }
            for one in rows
        ],
        "logical": found.logical,
        "stored": found.stored,
        "needed": found.needed,
        "trash": found.removed,
        "unfinished": found.unfinished,
        "if_removed": {"checkpoints": list(named), "frees": found.freed_by(named)} if named else None,
    }
