"""Draws a history as a graph of lines of training beside its rows, and the course of a metric in one line."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from typing import Final

from tenuto.history.timeline import Point
from tenuto.model.ids import CheckpointId

ON_LINE, LEFT, DAMAGED = "*", "o", "x"
_BARS: Final = "▁▂▃▄▅▆▇█"
_PLAIN_BARS: Final = "_.-=+*#@"
_POINTS: Final = 40
"""Characters of a sparkline, at most."""


class Graph:
    """The columns of the graph, row by row, newest first. Column 0 is the line that leads to `latest`.

    A column expects the checkpoint that the one above it continues. Where several expect the same one they join there.
    """

    def __init__(self, points: Sequence[Point], latest: CheckpointId | None) -> None:
        self._expected: list[CheckpointId | None] = [latest]
        self._begun: list[bool] = [False]
        self._waiting = {point.id for point in points}
        self._shown = frozenset(self._waiting)

    def point(self, point: Point) -> list[str]:
        """Returns the rows that lead to a checkpoint, and its own row last."""
        columns = [place for place, id in enumerate(self._expected) if id == point.id]
        if not columns:
            columns = [self._free()]
        own, *joining = columns
        rows = []
        for place in reversed(joining):
            self._close(place)
            rows.append(self._joined(own, place))
        self._begun[own] = True
        rows.append(self._row(own, DAMAGED if point.damaged else ON_LINE if point.on_line else LEFT))
        self._waiting.discard(point.id)
        after = point.after
        # What was drawn already, as where runs were forked from each other, is not drawn again.
        self._expected[own] = None if after in self._shown and after not in self._waiting else after
        if self._expected[own] is None:
            self._close(own)
        return rows

    def between(self) -> str:
        """Returns a row without a checkpoint."""
        return self._row(None, "")

    def _free(self) -> int:
        for place in range(1, len(self._expected)):
            if self._expected[place] is None:
                return place
        self._expected.append(None)
        self._begun.append(False)
        return len(self._expected) - 1

    def _close(self, place: int) -> None:
        self._expected[place], self._begun[place] = None, False
        while len(self._expected) > 1 and self._expected[-1] is None:
            self._expected.pop()
            self._begun.pop()

    def _row(self, own: int | None, mark: str) -> str:
        cells = [mark if place == own else "|" if begun else " " for place, begun in enumerate(self._begun)]
        return " ".join(cells).rstrip()

    def _joined(self, own: int, place: int) -> str:
        """Returns the row in which column `place`, which is closed, joins column `own`: `|/`, or `|_|/` past others."""
        cells = list(self._row(None, "").ljust(2 * place))
        for gap in range(2 * own + 1, 2 * place - 1, 2):
            cells[gap] = "_"
        cells[2 * place - 1] = "/"
        return "".join(cells)


def sparkline(values: Sequence[float]) -> str:
    """Returns the course of the values, the oldest first, a character for each, or for several where they are many.
    What is not a number is an `!`. Blocks where stdout can have them, else ASCII."""
    bars = _BARS if _can_print(_BARS) else _PLAIN_BARS
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    every = -(-len(values) // _POINTS) or 1
    return "".join(_bar(values[start : start + every], low, high, bars) for start in range(0, len(values), every))


def _bar(values: Collection[float], low: float, high: float, bars: str) -> str:
    if not all(map(math.isfinite, values)):
        return "!"
    mean = math.fsum(value / len(values) for value in values)
    scale = (mean / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
    return bars[min(max(int(scale * len(bars)), 0), len(bars) - 1)]


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
