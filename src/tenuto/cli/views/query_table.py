"""The table of `tenuto ls --where`: one line for each checkpoint, of all runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tenuto.cli.console import output
from tenuto.cli.console.output import Columns, joined_marks
from tenuto.cli.views.ages import age_s
from tenuto.cli.views.run_listing import unhealthy
from tenuto.model.ids import attempt_key
from tenuto.printable import clean
from tenuto.repo.best import INTERNAL
from tenuto.units import age, count, size

if TYPE_CHECKING:
    from tenuto.history.rows import Row

_METRICS = 4


def print_rows(rows: Sequence[Row], asked: Sequence[str], *, more: bool = False) -> None:
    """Prints the rows. `asked`: the metrics that the query names, which are shown first; `more`: whether they are only
    the first that match."""
    if not rows:
        output.story("no checkpoint matches")
        return
    there = {name for row in rows for name in row.metrics}
    names = [*dict.fromkeys([*(name for name in asked if name in there), *sorted(there - INTERNAL)])][:_METRICS]
    titles = [output.clipped(clean(name), 16) for name in names]
    table = Columns(
        ("RUN", "ATTEMPT", "STEP", "AGE", "SIZE", *titles, "STATE"),
        right=frozenset({"STEP", "AGE", "SIZE", *titles}),
        dispensable=(*reversed(titles[1:]), "SIZE", "AGE", "ATTEMPT"),
    )
    for row in rows:
        table.add(
            row.id.run,
            attempt_key(row.id.attempt),
            str(row.id.step),
            "" if (seconds := age_s(row.created)) is None else age(seconds),
            "" if row.size is None else size(row.size),
            *(f"{row.metrics[name]:.4g}" if name in row.metrics else "" for name in names),
            joined_marks(_marks(row)),
            style="damaged" if row.damaged else "gone" if row.line == "left" else "",
        )
    table.print()
    output.line(f"{'the first ' if more else ''}{count(len(rows), 'checkpoint')}")


def _marks(row: Row) -> list[str]:
    marks = {
        "latest": row.latest,
        **{f"best {metric}": True for metric in row.best if metric not in INTERNAL},
        "left behind": row.line == "left" and not row.damaged,
        "DAMAGED": row.damaged and row.size is None,
        "SUSPECT": row.damaged and row.size is not None,
        unhealthy(): not row.healthy and not row.damaged,
        "proven": row.proven,
        "verified": row.verified and not row.proven,
        "pinned": row.pinned,
        "held": row.held,
        **{f"tagged {name}": True for name in row.tags},
    }
    return [mark for mark, given in marks.items() if given]
