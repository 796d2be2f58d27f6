"""`tenuto ls`: lists the runs and checkpoints of a repository."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository
from tenuto.cli.console.output import Columns, joined_marks
from tenuto.cli.console.where import VARIABLE, default_place
from tenuto.cli.views.ages import age_s
from tenuto.errors import UsageError, typed
from tenuto.model.ids import attempt_key, run_key
from tenuto.printable import clean
from tenuto.repo.best import INTERNAL
from tenuto.units import age, count, size

if TYPE_CHECKING:
    from tenuto.cli.views.run_listing import RunRows
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto ls /data/checkpoints",
    "tenuto ls /data/checkpoints --run gpt --all",
    "tenuto ls /data/checkpoints --where 'val_loss < 2 and step > 1000' --sort val_loss",
    "tenuto ls --memory                 # what processes of this node keep, or left, in memory",
    "tenuto ls /data/checkpoints --json | jq '.runs[].latest.step'",
)
SHOWN_METRICS = 4
"""Metrics that get a column, where the terminal is wide enough; `show` has all."""
LONGEST = 16
"""Columns that the name of a metric may take."""
PAGE = 20
"""How many checkpoints of each run are shown unless told otherwise."""


Where = Annotated[
    str | None,
    typer.Argument(
        metavar="WHERE", help=f"The repository; else ${VARIABLE}, this folder, or tenuto.toml.", show_default=False
    ),
]
"""Not needed with --memory."""


def ls(
    where: Where = None,
    *,
    run: options.OnlyRun = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="The images in this node's memory instead; as root, everybody's.")
    ] = False,
    trash: Annotated[
        bool, typer.Option("--trash", help="Only what is removed and still there, and when its space comes free.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            metavar="N",
            min=1,
            help=f"The N newest of each run. [default: {PAGE}; with --json all]",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.", show_default=False)] = False,
    condition: Annotated[
        str | None,
        typer.Option("--where", metavar="TEXT", help='Of all runs, what matches: "val_loss < 2 and step > 9".'),
    ] = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="NAME", help="Of all runs, by this, lowest first; -step: highest.")
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Look at every checkpoint first.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List runs and checkpoints, newest first.

    "best" is by the metrics that the training's policies use. "left behind" marks a checkpoint that does not lead to
    the latest: training went back to an earlier one. Damaged, aborted and copied ones are marked as such. What was
    removed is counted, and listed with --trash (with --json in any case). Metrics that training's policies go by get a
    column first. Of damage in data files ls knows what `tenuto verify --note` has noted, and what is missing or cut.

    --where and --sort list checkpoints of all runs in one table. They compare metrics, by name, and fields: `run,
    attempt, step, size, stored, leaves, ranks, created, age, line, tag, best, pinned, verified, proven, damaged,
    healthy`. Sizes and times are text: `size > "2 GiB" and age < "3d"`. Each that is listed is as the repository has
    it now. What manifests and notes say is kept in the user's cache directory, so a note of the last hour (a metric
    that was noted late, damage) may not count yet for which ones are listed: --refresh looks at all.

    Says which process trains a run now. Times are those of the machine that saved, in UTC. --step takes what is listed
    under STEP, and ATTEMPT/STEP where several attempts have that step.
    """
    from tenuto.cli.views.run_listing import in_trash, listing

    if memory:
        _memory(where, run, as_json=json)
        return
    where = where or default_place("; tenuto ls --memory needs none")
    repo = repository(where)
    if everything and limit is not None:
        raise UsageError("--all and --limit contradict each other", hint=typed("tenuto", "ls", where, "--all"))
    if condition is not None or sort is not None or refresh:
        if trash:
            raise UsageError("--trash has no conditions: nothing is measured by what is removed", hint="leave one out")
        _query(
            repo,
            where,
            run,
            condition,
            sort,
            limit=None if everything else limit or (None if json else PAGE),
            refresh=refresh,
            as_json=json,
        )
        return
    from tenuto.repo.notes import judged_without

    page = None if everything or trash else PAGE if limit is None and not json else limit
    runs = listing(repo, run, page, trash=trash or json)
    if trash:
        runs = in_trash(runs)
    if json:
        output.document("ls", {"where": repo.url, "repository": repo.id, "runs": [_json(found) for found in runs]})
        return
    if not runs:
        output.story(f"{repo.url}: {'nothing in the trash' if trash else 'no runs yet'}")
    _print_all(runs, where)
    left_out = {row.id: row.unread for found in runs for row in found.rows if row.unread}
    if left_out:
        output.story(f"note: {judged_without(left_out, 'not among the best', repo.url)}")


def _print_all(runs: Sequence[RunRows], where: str) -> None:
    for number, found in enumerate(runs):
        if number:
            output.line()
        _print(found)
        if found.trash:
            output.story(f"{found.trash:,} in the trash: {typed('tenuto', 'ls', where, '--run', found.run, '--trash')}")
        if found.more:
            rest = typed("tenuto", "ls", where, "--run", found.run, "--all")
            shown = found.latest is None or any(row.latest for row in found.rows)
            output.story(f"… and {found.more:,} more{'' if shown else f', latest is {found.latest}'}: {rest}")
    if len(runs) > 1:
        output.line(f"\n{_total(runs)}")


def _query(
    repo: Repo,
    place: str,
    run: str | None,
    condition: str | None,
    sort: str | None,
    *,
    limit: int | None,
    refresh: bool,
    as_json: bool,
) -> None:
    from tenuto.cli.views.query_table import print_rows
    from tenuto.history.catalog_cache import query
    from tenuto.history.query import Order, Query
    from tenuto.repo.lineage import resolve

    where = Query.parse("attempt > 0" if condition is None else condition)
    if run is not None:
        if run_key(run) not in repo.runs():
            resolve(repo, run)  # raises, listing the existing runs
        where = where.of_run(run)
    order = None if sort is None else Order.parse(sort)
    rows = query(repo, where, order, None if limit is None else limit + 1, refresh=refresh, report=output.story)
    more, rows = limit is not None and len(rows) > limit, rows[:limit]
    if as_json:
        found = [{**row.json(), "age_s": age_s(row.created)} for row in rows]
        output.document("ls", {"where": repo.url, "repository": repo.id, "condition": condition, "checkpoints": found})
        return
    print_rows(rows, [*([order.name] if order else []), *where.metrics], more=more)
    if more:
        given = [(name, text) for name, text in (("--run", run), ("--where", condition), ("--sort", sort)) if text]
        words = [word for name, text in given for word in ([f"{name}={text}"] if text[0] == "-" else [name, text])]
        output.story(f"… and more: {typed('tenuto', 'ls', place, *words, '--all')}")


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
    spiked = found.spikes()
    return {
        "run": found.run,
        "attempts": list(found.attempts),
        "latest": found.latest,
        "best": dict(found.best),
        "owner": None if found.owner is None else found.owner.json(),
        "bytes": found.bytes,
        "checkpoints": [row.json(found.best_of(row), spiked.get(row.id)) for row in found.rows],
        "more": found.more,
    }


def _total(runs: Sequence[RunRows]) -> str:
    return f"{count(len(runs), 'run')}, {_counted(runs)}"


def _heading(found: RunRows) -> str:
    if not found.rows and not found.trash:
        return f"run {found.run}: no checkpoint yet"
    return f"run {found.run}: {_counted([found])}"


def _counted(runs: Sequence[RunRows]) -> str:
    """Returns how many there are. What is not shown was not read: it may be a save that was never finished, too."""
    rows, nbytes = [row for found in runs for row in found.rows], size(sum(found.bytes for found in runs))
    if runs[0].counted == "removed":
        return f"{len(rows):,} in the trash, {nbytes}"
    more, trash = sum(found.more for found in runs), sum(found.trash for found in runs)
    if more:
        text = f"{len(rows):,} of {count(len(rows) + more, 'save')} shown, {nbytes}"
    else:
        text = f"{count(sum(found.checkpoints for found in runs), 'checkpoint')}, {nbytes}"
    return f"{text}; {trash:,} in the trash" if trash else text


def _print(found: RunRows) -> None:
    begun = f"; attempt {found.attempts[-1]} was begun" if not found.rows and found.attempts else ""
    output.line(_heading(found) + begun)
    if found.owner is not None:
        output.line(output.rows([("", str(found.owner))], indent=""))
    if not found.rows:
        return
    names = _metrics(found)
    titles = [output.clipped(clean(name), LONGEST) for name in names]
    table = Columns(
        ("ATTEMPT", "STEP", "AGE", "SIZE", "RANKS", "CREATED", *titles, "STATE"),
        right=frozenset({"STEP", "AGE", "SIZE", "RANKS", *titles}),
        dispensable=("RANKS", "CREATED", *reversed(titles[1:]), "SIZE", *titles[:1], "AGE"),
    )
    for row in found.rows:
        if row.freed:
            continue
        seconds = age_s(row.created)
        table.add(
            attempt_key(row.id.attempt),
            str(row.id.step),
            age(seconds) if seconds is not None else "",
            size(row.bytes) if row.bytes is not None else "",
            f"{row.ranks:,}" if row.ranks is not None and row.ranks > 1 else "",
            row.created[:16].replace("T", " "),
            *(f"{row.metrics[name]:.4g}" if name in row.metrics else "" for name in names),
            joined_marks(row.marks(found.best_of(row), of_these=found.more > 0)),
            style="damaged" if row.state == "damaged" else "" if row.state == "committed" else "gone",
        )
    table.print()


def _metrics(found: RunRows) -> list[str]:
    """Returns the metrics to show: those that training's policies go by first, then in the order of their names."""
    there = {name for row in found.rows for name in row.metrics} - INTERNAL
    judged = {name for row in found.rows for name in row.modes} & there
    return [*sorted(judged), *sorted(there - judged)][:SHOWN_METRICS]
