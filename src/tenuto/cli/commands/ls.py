"""`tenuto ls`: lists the runs and checkpoints of a repository."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository
from tenuto.cli.console.output import Columns
from tenuto.errors import UsageError, typed
from tenuto.model.ids import attempt_key
from tenuto.units import size

if TYPE_CHECKING:
    from tenuto.cli.views.run_listing import RunRows


EXAMPLES = examples(
    "tenuto ls /data/checkpoints",
    "tenuto ls /data/checkpoints --run gpt --all",
    "tenuto ls --memory                 # what processes of this node keep, or left, in memory",
    "tenuto ls /data/checkpoints --json | jq '.runs[].latest.step'",
)
SHOWN_METRICS = 2
PAGE = 20
"""How many checkpoints of each run are shown unless told otherwise."""


def ls(
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="WHERE",
            help="The repository: a directory or a URL. With --memory it may be left out.",
            show_default=False,
        ),
    ] = None,
    *,
    run: options.OnlyRun = None,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="The images in this node's memory instead, whose they are, and their age; as root, everybody's.",
        ),
    ] = False,
    trash: Annotated[
        bool,
        typer.Option("--trash", help="Only what is removed and still there, and when its space comes free."),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            metavar="N",
            min=1,
            help=f"At most the N newest of each run. [default: {PAGE}; with --json all]",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.", show_default=False)] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List runs and checkpoints, newest first.

    Damaged, aborted, removed and copied ones are listed as such. "left behind" marks a checkpoint that does not lead to
    the latest: training went back behind it. Times are those of the machine that saved, in UTC.
    """
    from tenuto.cli.views.run_listing import in_trash, listing

    if memory:
        _memory(where, run, as_json=json)
        return
    if where is None:
        raise UsageError("which repository?", hint="tenuto ls WHERE, or tenuto ls --memory")
    repo = repository(where)
    if everything and limit is not None:
        raise UsageError("--all and --limit contradict each other", hint=typed("tenuto", "ls", where, "--all"))
    runs = listing(repo, run, None if everything or trash else PAGE if limit is None and not json else limit)
    if trash:
        runs = in_trash(runs)
    if json:
        output.document("ls", {"where": repo.url, "repository": repo.id, "runs": [_json(found) for found in runs]})
        return
    if not runs:
        output.story(f"{repo.url}: {'nothing in the trash' if trash else 'no runs yet'}")
    for number, found in enumerate(runs):
        if number:
            output.line()
        _print(found)
        if found.more:
            rest = typed("tenuto", "ls", where, "--run", found.run, "--all")
            shown = found.latest is None or any(row.latest for row in found.rows)
            output.story(f"… and {found.more:,} more{'' if shown else f', latest is {found.latest}'}: {rest}")


def _memory(where: str | None, run: str | None, *, as_json: bool) -> None:
    from tenuto.cli.views.memory_images import document, judged, report_hidden_users, table
    from tenuto.engine.memory_tier.listing import images_of_others

    repo = repository(where) if where is not None else None
    other_users = images_of_others()
    rows = judged(repo, run, (None, *other_users.users))
    if as_json:
        images = [document(found, verdict, rows) for found, verdict in rows]
        body = {"where": repo.url if repo is not None else None, "images": images}
        output.document("memory", {**body, "closed_users": other_users.closed, "passed_over": other_users.refused})
        return
    table(rows)
    if not rows:
        output.story("no images in this node's memory")
    report_hidden_users(other_users)


def _json(found: RunRows) -> dict[str, object]:
    return {
        "run": found.run,
        "attempts": list(found.attempts),
        "latest": found.latest,
        "checkpoints": [row.json() for row in found.rows],
        "more": found.more,
    }


def _print(found: RunRows) -> None:
    if not found.rows:
        claimed = f"attempt {found.attempts[-1]} was begun" if found.attempts else "nothing was begun"
        output.line(f"run {found.run}: no checkpoint yet; {claimed}")
        return
    output.line(f"run {found.run}")
    table = Columns(
        ("ATTEMPT", "STEP", "SIZE", "LEAVES", "RANKS", "CREATED", "STATE", "METRICS"),
        right=frozenset({"STEP", "SIZE", "LEAVES", "RANKS"}),
        dispensable=("LEAVES", "RANKS", "CREATED", "METRICS", "SIZE"),
    )
    for row in found.rows:
        table.add(
            attempt_key(row.id.attempt),
            str(row.id.step),
            size(row.bytes) if row.bytes is not None else "",
            f"{row.leaves:,}" if row.leaves is not None else "",
            f"{row.ranks:,}" if row.ranks is not None and row.ranks > 1 else "",
            row.created[:16].replace("T", " "),
            ", ".join(row.marks()),
            metrics(row.metrics),
            style="damaged" if row.state == "damaged" else "" if row.state == "committed" else "gone",
        )
    table.print()


def metrics(found: Mapping[str, float]) -> str:
    """Formats the first few metrics in the order of their names; `show` has all."""
    shown = [f"{name}={value:.4g}" for name, value in sorted(found.items())[:SHOWN_METRICS]]
    more = len(found) - len(shown)
    return " ".join([*shown, *([f"+{more}"] if more > 0 else [])])
