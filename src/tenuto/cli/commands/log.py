"""`tenuto log`: shows the history of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository, run_of
from tenuto.cli.console.output import Columns, joined_marks
from tenuto.errors import MetricNotLogged, UsageError, did_you_mean, typed
from tenuto.printable import clean

if TYPE_CHECKING:
    from tenuto.history.timeline import Point, Timeline, Turn
    from tenuto.model.ids import CheckpointId

EXAMPLES = examples(
    "tenuto log /data/checkpoints",
    "tenuto log /data/checkpoints --run gpt --metric val_loss -n 50",
    "tenuto log /data/checkpoints --json | jq '.checkpoints[] | select(.on_line)'",
)
PAGE = 20
"""How many checkpoints are shown unless told otherwise."""
LONGEST = 16
"""Columns that the name of a metric may take."""
SHOWN_METRICS = 3
"""Metrics that get a column, and a sparkline, unless one is named."""


def log(
    where: options.Where,
    *,
    run: options.Run = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="METRIC", help="This metric; may be repeated.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", metavar="N", min=1, help=f"The N newest. [default: {PAGE}]")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show the history of a run, newest first.

    `*` is on the line that leads to the latest checkpoint, `o` on one that was left behind, `x` is damaged. Lines join
    where training went back. Rollbacks and forks stand where they were made, with their reasons. Below: how each metric
    developed along the line to the latest, from the oldest checkpoint shown to the newest.
    """
    from tenuto.history.timeline import timeline

    if everything and limit is not None:
        raise UsageError("--all and --limit contradict each other", hint=typed("tenuto", "log", where, "--all"))
    repo = repository(where)
    found = timeline(repo, run_of(repo, run), limit=None if everything else PAGE if limit is None else limit)
    names = _metrics(found, metric)
    if json:
        output.document("log", _json(found))
        return
    _print(found, names)
    if found.more:
        output.story(f"… and older ones: {typed('tenuto', 'log', where, '--run', found.run, '--all')}")


def _metrics(found: Timeline, given: Sequence[str] | None) -> list[str]:
    there = found.metrics()
    known = ", ".join(there) or "none"
    for name in given or ():
        if name not in there:
            raise MetricNotLogged(
                f"no checkpoint shown of run {found.run!r} has a metric {name!r}; there are: {known}",
                subject=name,
                hint=did_you_mean(name, there) or "training logs it by ckpt.log(…); --all looks at all checkpoints",
            )
    return list(dict.fromkeys(given)) if given else there[:SHOWN_METRICS]


def _print(found: Timeline, names: Sequence[str]) -> None:
    from tenuto.cli.views.ages import age_s
    from tenuto.cli.views.history_graph import Graph, sparkline
    from tenuto.model.ids import attempt_key
    from tenuto.units import age, size

    several = len({(point.id.run, point.id.attempt) for point in found.points}) > 1
    graph = Graph(found.points, found.latest)
    titles = [output.clipped(clean(name), LONGEST) for name in names]
    table = Columns(
        ("", "STEP", "ATTEMPT", "AGE", "SIZE", *titles, "STATE"),
        right=frozenset({"STEP", "AGE", "SIZE", *titles}),
        dispensable=("SIZE", *reversed(titles[1:]), "AGE", *titles[:1]),
    )
    turns = list(found.turns)
    for point in found.points:
        while turns and (turns[0].attempt > point.id.attempt or point.id.run != found.run):
            table.remark(graph.between(), _turn(turns.pop(0)))
        *before, own = graph.point(point)
        for row in before:
            table.add(row, *[""] * (len(table.titles) - 1))
        seconds = age_s(point.created)
        attempt = attempt_key(point.id.attempt)
        table.add(
            own,
            str(point.id.step),
            "" if not several else attempt if point.id.run == found.run else f"{point.id.run}/{attempt}",
            "" if seconds is None else age(seconds),
            "" if point.bytes is None else size(point.bytes),
            *(f"{point.metrics[name]:.4g}" if name in point.metrics else "" for name in names),
            joined_marks(_marks(found, point)),
            style="damaged" if point.damaged else "" if point.on_line else "gone",
        )
        table.continued[len(table.rows) - 1] = graph.between()
    for turn in turns:
        table.remark(graph.between(), _turn(turn))
    output.line(f"run {found.run}")
    table.print()
    courses = [(name, [value for _, value in found.series(name)]) for name in names]
    rows = [
        (name, f"{sparkline(values)}  {values[0]:.4g} to {values[-1]:.4g}")
        for name, values in courses
        if len(values) > 1
    ]
    if rows:
        output.line(f"\n{output.rows(rows)}")


def _marks(found: Timeline, point: Point) -> Iterator[str]:
    from tenuto.cli.console.output import clipped
    from tenuto.cli.views.run_listing import marks_of_refs, unhealthy

    if point.latest:
        yield "latest"
    of_these = " of these" if found.more else ""
    yield from (f"best {metric}{of_these}" for metric, id in found.best.items() if id == point.id)
    if point.damaged:
        yield "DAMAGED"
    if point.unread:
        yield "A NOTE CANNOT BE READ"
    elif point.checked:
        yield "SUSPECT" if point.checked == "suspect" else point.checked
    if point.health is not None and not point.healthy:
        yield unhealthy(point.health.leaves)
    yield from marks_of_refs(point.refs)
    if point.after is not None and point.after.run != point.id.run:
        yield f"continues {point.after}"
    yield from (f"forked to run {run}" for run in point.forks)
    yield from (f'"{clipped(text, 60)}"' for text in point.texts)


def _turn(turn: Turn) -> str:
    from tenuto.cli.views.ages import age_s
    from tenuto.units import age

    seconds = age_s(turn.created)
    ago = "" if seconds is None else f" {age(seconds)} ago"
    done = "rolled back to" if turn.kind == "rollback" else "forked from"
    return f"{done} {turn.to} by {turn.user}{ago}{f': {turn.reason}' if turn.reason else ''}"


def _json(found: Timeline) -> dict[str, Any]:
    return {
        "where": found.where,
        "run": found.run,
        "latest": found.latest,
        "best": dict(found.best),
        "checkpoints": [_point_json(point) for point in found.points],
        "turns": [
            {
                "kind": turn.kind,
                "attempt": turn.attempt,
                "to": turn.to,
                "reason": turn.reason or None,
                "created": turn.created or None,
                "user": turn.user,
            }
            for turn in found.turns
        ],
        "series": {name: [value for _, value in found.series(name)] for name in found.metrics()},
        "more": found.more,
    }


def _point_json(point: Point) -> Mapping[str, CheckpointId | Any]:
    return {
        "checkpoint": point.id,
        "after": point.after,
        "on_line": point.on_line,
        "latest": point.latest,
        "bytes": point.bytes,
        "created": point.created or None,
        "metrics": dict(point.metrics),
        "damaged": point.damaged,
        "checked": point.checked or None,
        "health": None if point.health is None else point.health.to_json(),
        "refs": [{"kind": ref.kind, "name": ref.name, "reason": ref.reason or None} for ref in point.refs],
        "notes": list(point.texts),
        "forks": list(point.forks),
    }
