"""`tenuto tag`: gives a checkpoint a name, which also keeps it."""

from __future__ import annotations

from typing import Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint
from tenuto.errors import UsageError, typed

EXAMPLES = examples(
    "tenuto tag /data/checkpoints baseline --step 500",
    "tenuto show /data/checkpoints --step baseline",
    "tenuto tag /data/checkpoints baseline --delete",
)


def tag(
    where: options.Where,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag.", show_default=False)],
    *,
    run: options.Run = None,
    step: options.Step = "latest",
    delete: Annotated[bool, typer.Option("--delete", help="Take the tag off; the checkpoint stays for now.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Give a checkpoint a name, which also keeps it.

    Retention keeps a checkpoint as long as it has a tag. A tag works wherever a step does. A tag that is on another
    checkpoint moves. Tags are the repository's, not a run's.
    """
    from tenuto.api.repository import Repository
    from tenuto.repo.refs import find_tag, is_damaged, is_name

    there = Repository(where)
    damaged = is_name(name) and is_damaged(there.repo, "tag", name)
    before = None if damaged else find_tag(there.repo, name)
    if delete:
        if run is not None or step != "latest":
            raise UsageError(
                "--delete takes a tag off whatever it is on: --run and --step have no effect with it",
                subject="--delete",
                hint=typed("tenuto", "tag", where, name, "--delete"),
            )
        there.untag(name)
    id = None if delete else there.tag(name, checkpoint(there.repo, run, step))
    if json:
        output.document("tag", {"where": there.url, "tag": name, "checkpoint": id, "before": before})
    elif id is None:
        output.line(f"{before or 'what it was on, which cannot be read,'} is no longer tagged {name}")
    else:
        moved = f" (moved from {before})" if before not in (None, id) else ""
        output.line(f"{id} is tagged {name}{moved}")
