"""`tenuto memory clear`: frees the memory of dead processes' images."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository
from tenuto.cli.console.output import agreed
from tenuto.errors import UsageError, typed

EXAMPLES = examples(
    "tenuto memory clear /data/checkpoints        # tenuto ls --memory shows what there is",
    "tenuto memory clear /data/checkpoints --run gpt --yes",
    "tenuto memory clear --all                    # of every repository",
)


class Action(StrEnum):
    """The actions on images."""

    clear = "clear"


def memory(
    action: Annotated[Action, typer.Argument(metavar="clear", help="Remove images.", show_default=False)],
    where: Annotated[
        str | None,
        typer.Argument(metavar="WHERE", help="The repository whose images are removed.", show_default=False),
    ] = None,
    *,
    run: options.OnlyRun = None,
    everything: Annotated[bool, typer.Option("--all", help="Those of every repository.", show_default=False)] = False,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Free the memory that images of dead processes take.

    They lie in this node's shared memory, where memory= put them. What is in no store is lost with them: `tenuto
    flush WHERE` writes it first. Images of running processes stay, and those of other users, for root too; they are
    listed.
    """
    from tenuto.cli.views.memory_images import document, judged, report_hidden_users, table
    from tenuto.engine.memory_tier.listing import images_of_others, remove_image
    from tenuto.units import count, size

    if (where is None) != everything:
        raise UsageError(
            "whose images? Give a repository, or --all for those of all" if where is None else "WHERE or --all?",
            hint=typed("tenuto", "memory", "clear", where or "WHERE"),
        )
    repo = repository(where) if where is not None else None
    other_users = images_of_others()
    # A table of what goes and one of what stays: its owner lives, or is another user.
    found = judged(repo, run, (None, *other_users.users))
    rows = [(image, verdict) for image, verdict in found if not image.alive and image.slot.user is None]
    stays = [row for row in found if row not in rows]
    if not json:
        table(rows)
        if stays:
            held = size(sum(image.bytes for image, _ in stays))
            output.line(f"left alone, of running processes or other users: {count(len(stays), 'image')}, {held}")
            table(stays)
        report_hidden_users(other_users)
    nbytes = sum(image.bytes for image, _ in rows)
    removed = []
    if rows and not dry_run and agreed(f"Remove {count(len(rows), 'image')}, {size(nbytes)}?", yes=yes):
        removed = [image for image, _ in rows if remove_image(image.slot)]
    freed = sum(image.bytes for image in removed)
    if json:
        body = {
            "where": repo.url if repo is not None else None,
            "dry_run": dry_run,
            "images": [document(image, verdict, rows) for image, verdict in rows],
            "left_alone": [document(image, verdict, stays) for image, verdict in stays],
            "removed": [image.name for image in removed],
            "bytes": freed,
        }
        output.document("memory", body)
    elif not rows:
        output.line("no dead process of yours has left an image in memory")
    elif removed:
        output.line(f"{count(len(removed), 'image')} removed, {size(freed)} freed")
