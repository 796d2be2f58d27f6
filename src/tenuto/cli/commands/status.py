"""`tenuto status`: which checkpoint is whole where, and what a failure would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository
from tenuto.cli.console.output import Columns
from tenuto.errors import typed

if TYPE_CHECKING:
    from tenuto.maintenance.status import Place, Recovery, RunStatus, Status


EXAMPLES = examples(
    "tenuto status /data/checkpoints",
    "tenuto status /data/checkpoints --run gpt --last 6",
    "tenuto status /data/checkpoints --json | jq '.runs[0].recovery'",
)
_PLACES = 6
"""Locations that are shown; there may be one on each of thousands of nodes."""
_LOST = {"process": "the process", "node": "this node", "site": "the site"}


def status(
    where: options.Where,
    *,
    run: options.OnlyRun = None,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, help="How many checkpoints to look at.")] = 4,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show what is whole where, and what a failure costs.

    For each run the newest checkpoints in each location, how far each location is behind, who trains, and what training
    resumes from when the process, this node or the whole site is lost. Looks at names and lengths; `tenuto verify` and
    `tenuto replicate --check` read bytes.
    """
    from tenuto.maintenance.status import status as look

    repo = repository(where)
    found = look(repo, run=run, newest=last)
    if json:
        output.document("status", _json(found))
        return
    for number, place in enumerate(found.places[:_PLACES], 1):
        output.line(f"{number}  {place.url} ({_kind(place)}){': ' + place.problem if place.problem else ''}")
    if len(found.places) > _PLACES:
        output.line(f"and {len(found.places) - _PLACES} more locations, which --json shows")
    if len(found.runs) > 1:
        _print_runs(found)
        output.story(f"hint: {typed('tenuto', 'status', where, '--run', found.runs[0].run)} shows one run")
    elif found.runs:
        _print_run(found, found.runs[0])
        _print_how_to_measure(found, found.runs[0])


def _kind(place: Place) -> str:
    lies = "elsewhere" if "site" in place.survives else "shared" if "node" in place.survives else "on this node"
    return f"{place.kind}, {lies}"


def _print_run(found: Status, one: RunStatus) -> None:
    from tenuto.units import size

    output.line(f"\nrun {one.run}: {_owner(one)}")
    numbers = tuple(str(number) for number in range(1, min(len(found.places), _PLACES) + 1))
    table = Columns(("CHECKPOINT", "SIZE", *numbers), right=frozenset({"SIZE"}))
    for row in one.spread:
        cells = ["?" if place.problem else whole or "-" for place, whole in zip(found.places, row.places, strict=True)]
        table.add(str(row.id).partition("/")[2], size(row.bytes), *cells[:_PLACES])
    if one.spread:
        behind = [
            "?" if place.problem else f"{count} behind" if count else "in step"
            for place, count in zip(found.places, one.behind, strict=True)
        ]
        table.add("", "", *behind[:_PLACES])
        table.print()
    output.line()
    losses = Columns(("IF LOST", "RESUMES FROM", "LOSES AT MOST", "READ IN"))
    for recovery in one.recovery:
        losses.add(_LOST[recovery.failure], _source(found, recovery), _loss(recovery), _time(recovery))
    losses.print()


def _print_how_to_measure(found: Status, one: RunStatus) -> None:
    """Says how to learn the recovery time of the first place whose speed is not known."""
    places = {place.url for place in found.places}
    unknown = [each.source for each in one.recovery if each.seconds is None and each.source in places]
    if unknown:
        output.story(f"hint: {typed('tenuto', 'probe', unknown[0])} measures how fast it is read")


def _owner(one: RunStatus) -> str:
    from tenuto.units import age

    owner, record = one.owner, one.owner.record
    beat = f"; last beat {age(one.beat_s)} ago" if one.beat_s is not None else ""
    if owner.verdict in ("free", "dead"):
        return f"nobody trains it{f' ({owner.reason})' if owner.reason else ''}"
    who = f"pid {record.owner.pid} on {record.owner.host}" if record is not None else "an unknown process"
    return f"{'trained' if owner.verdict != 'unknown' else 'perhaps trained'} by {who}{beat}"


def _source(found: Status, recovery: Recovery) -> str:
    if recovery.id is None:
        return "nothing"
    number = next((str(n) for n, place in enumerate(found.places, 1) if place.url == recovery.source), recovery.source)
    return f"{str(recovery.id).partition('/')[2]} in {number}"


def _loss(recovery: Recovery) -> str:
    from tenuto.units import age, count

    if recovery.id is None:
        return "everything"
    if not recovery.steps and recovery.lost_s == 0:
        return "nothing"
    steps = f"{count(recovery.steps, 'step')} and " if recovery.steps else ""
    since = "what came since" if recovery.lost_s is None else f"the last {age(recovery.lost_s)}"
    return f"{steps}{since}"


def _time(recovery: Recovery) -> str:
    from tenuto.units import seconds

    return "-" if recovery.id is None else "unknown" if recovery.seconds is None else seconds(recovery.seconds)


def _print_runs(found: Status) -> None:
    from tenuto.units import age

    titles = ("RUN", "NEWEST", "IN USE", *(name.upper() for name in _LOST))
    output.line()
    table = Columns(titles)
    for one in found.runs:
        cells = [
            "nothing" if each.id is None else f"{each.id.step}" + (f", {age(each.lost_s)}" if each.lost_s else "")
            for each in one.recovery
        ]
        newest = str(one.spread[0].id.step) if one.spread else "-"
        table.add(one.run, newest, "no" if one.owner.verdict in ("free", "dead") else "yes", *cells)
    table.print()


def _json(found: Status) -> dict[str, Any]:
    return {
        "where": found.where,
        "at": round(found.at, 3),
        "places": [
            {"url": one.url, "kind": one.kind, "survives": sorted(one.survives), "problem": one.problem or None}
            for one in found.places
        ],
        "runs": [
            {
                "run": one.run,
                "owner": {
                    "verdict": one.owner.verdict,
                    "attempt": one.owner.number,
                    "pid": one.owner.record.owner.pid if one.owner.record else None,
                    "host": one.owner.record.owner.host if one.owner.record else None,
                    "beat_s": one.beat_s,
                },
                "checkpoints": [
                    {
                        "checkpoint": row.id,
                        "bytes": row.bytes,
                        "created": row.created,
                        "places": list(row.places),
                    }
                    for row in one.spread
                ],
                "behind": list(one.behind),
                "recovery": [
                    {
                        "failure": each.failure,
                        "checkpoint": each.id,
                        "source": each.source or None,
                        "steps": each.steps if each.id else None,
                        "lost_s": each.lost_s,
                        "bytes": each.bytes,
                        "seconds": each.seconds,
                    }
                    for each in one.recovery
                ],
            }
            for one in found.runs
        ],
    }
