"""`tenuto compare`: shows checkpoints side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository
from tenuto.cli.console.output import Columns, joined_marks
from tenuto.errors import RunNotFound, UsageError, typed
from tenuto.printable import clean

if TYPE_CHECKING:
    from tenuto.history.compare import Comparison

EXAMPLES = examples(
    "tenuto compare /data/checkpoints 400 500 --run gpt",
    "tenuto compare /data/checkpoints --run small --run large --metric val_loss",
    "tenuto compare /data/checkpoints gpt/a0001/500 tuned/a0001/500 --json",
)
LONGEST = 16
"""Columns that the name of a metric may take."""
SHOWN_METRICS = 6
SHOWN_SETTINGS = 20
"""Settings that differ, of which more would hide what matters; --all shows all."""


def compare(
    where: options.Where,
    steps: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STEP]...", help="Steps, tags, attempt/step or run/attempt/step.", show_default=False),
    ] = None,
    *,
    run: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="RUN", help="The run of the steps; without steps, the latest of each RUN."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="METRIC[:MODE]", help="What decides; without steps, the best of each run."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All settings that differ.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show checkpoints side by side.

    Metrics, sizes, and which is best; below, the settings that are not the same in all of them: plain values of the
    state such as learning rates, versions, the commit of the code. Without steps and runs: the latest of every run.
    MODE is min or max, else what training has recorded.
    """
    from tenuto.history.compare import compare as compared
    from tenuto.history.compare import newest_of
    from tenuto.repo.best import BEST, BestSelector

    repo = repository(where)
    runs = run or []
    if steps and len(runs) > 1:
        raise UsageError(
            "steps of several runs are named in full",
            subject=runs[1],
            hint=typed("tenuto", "compare", where, *(f"{name}/a0001/{steps[0]}" for name in runs)),
        )
    selector = None if metric is None else BestSelector.parse(f"{BEST}{metric.removeprefix(BEST)}")
    if steps:
        ids = [checkpoint(repo, runs[0] if runs else None, step) for step in steps]
    else:
        there = runs or repo.runs()
        if not there:
            raise RunNotFound(f"there is no run at {repo.url} yet", subject=repo.url, hint=typed("tenuto", "ls", where))
        ids = newest_of(repo, there, selector)
    found = compared(repo, ids, selector)
    if json:
        output.document("compare", _json(found))
    else:
        _print(found, None if everything else SHOWN_SETTINGS)


def _print(found: Comparison, most: int | None) -> None:
    from tenuto.cli.views.ages import age_s
    from tenuto.units import age, count, size

    names = found.metrics[:SHOWN_METRICS]
    titles = [output.clipped(clean(name), LONGEST) for name in names]
    table = Columns(
        ("CHECKPOINT", "AGE", "SIZE", "RANKS", *titles, "STATE"),
        right=frozenset({"AGE", "SIZE", "RANKS", *titles}),
        dispensable=("RANKS", "AGE", *reversed(titles[1:]), "SIZE"),
    )
    for one in found.checkpoints:
        seconds = age_s(one.created)
        table.add(
            str(one.id),
            "" if seconds is None else age(seconds),
            size(one.bytes),
            f"{one.ranks:,}" if one.ranks > 1 else "",
            *(f"{one.metrics[name]:.4g}" if name in one.metrics else "" for name in names),
            joined_marks(f"best {metric}" for metric in one.best),
        )
    table.print()
    if len(found.checkpoints) < 2:
        return
    if not found.differing:
        output.line("\nno setting differs")
        return
    output.line(f"\n{count(len(found.differing), 'setting')} that differ{'s' if len(found.differing) == 1 else ''}")
    output.line(output.rows([(path, _values(found, path)) for path in found.differing[:most]]))
    if most is not None and len(found.differing) > most:
        output.story(f"… and {len(found.differing) - most:,} more: --all shows them")


def _values(found: Comparison, path: str) -> str:
    """Returns what a setting is in which checkpoints: `0.1 (gpt/a0001/4), 0.2 (gpt/a0002/7)`."""
    which: dict[str, list[str]] = {}
    for one in found.checkpoints:
        value = repr(one.settings[path]) if path in one.settings else "not there"
        which.setdefault(output.clipped(value, 60), []).append(str(one.id))
    return ", ".join(f"{value} ({', '.join(ids)})" for value, ids in which.items())


def _json(found: Comparison) -> dict[str, Any]:
    return {
        "where": found.where,
        "metrics": list(found.metrics),
        "differing": list(found.differing),
        "checkpoints": [
            {
                "checkpoint": one.id,
                "bytes": one.bytes,
                "stored": one.stored,
                "created": one.created or None,
                "ranks": one.ranks,
                "metrics": dict(one.metrics),
                "best": list(one.best),
                "settings": {path: one.settings[path] for path in found.differing if path in one.settings},
            }
            for one in found.checkpoints
        ],
    }
