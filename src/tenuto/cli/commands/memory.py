"""`tenuto memory clear`: frees the memory of dead processes' images."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.output import agreed

EXAMPLES = examples(
    "tenuto memory clear               # tenuto ls --memory shows what there is",
    "tenuto memory clear --run gpt --yes",
)


class Action(StrEnum):
    """The actions on images."""

    clear = "clear"


def memory(
    action: Annotated[Action, typer.Argument(metavar="clear", help="Remove images.", show_default=False)],
    *,
    run: options.OnlyRun = None,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Free the memory that images of dead processes take.

    They lie in this node's shared memory, where memory= put them. What is in no store is lost with them: `tenuto
    flush WHERE` writes it first. Images of running processes stay, and those of other users, for root too.
    """
    from tenuto.cli.views.memory_images import document, judged, table
    from tenuto.engine.memory_tier.listing import remove_image
    from tenuto.units import count, size

    rows = [(found, verdict) for found, verdict in judged(None, run) if not found.alive]
    if not json:
        table(rows)
    nbytes = sum(found.bytes for found, _ in rows)
    removed = []
    if rows and not dry_run and agreed(f"Remove {count(len(rows), 'image')}, {size(nbytes)}?", yes=yes):
        removed = [found for found, _ in rows if remove_image(found)]
    freed = sum(found.bytes for found in removed)
    if json:
        images = [document(found, verdict, rows) for found, verdict in rows]
        names = [found.name for found in removed]
        output.document("memory", {"dry_run": dry_run, "images": images, "removed": names, "bytes": freed})
    elif not rows:
        output.line("no dead process has left an image in memory")
    elif removed:
        output.line(f"{count(len(removed), 'image')} removed, {size(freed)} freed")
