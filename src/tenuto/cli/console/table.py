"""Prints rows in aligned columns; on a narrow terminal, drops complete columns, never letters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tenuto.cli.console import output
from tenuto.cli.console.output import Style

GAP = "  "


@dataclass(slots=True)
class Columns:
    """A table.

    titles: one for each column; the last column takes the remaining width.
    right: titles of right-aligned columns.
    dispensable: titles of columns to drop, in this order, while a row is wider than the terminal.
    """

    titles: tuple[str, ...]
    right: frozenset[str] = frozenset()
    dispensable: tuple[str, ...] = ()
    rows: list[tuple[tuple[str, ...], Style]] = field(default_factory=list)

    def add(self, *cells: str, style: Style = "") -> None:
        assert len(cells) == len(self.titles)
        self.rows.append((tuple(output.clean(cell) for cell in cells), style))

    def print(self, indent: str = GAP) -> None:
        """Writes to stdout, in colour if that is a terminal that permits it."""
        shown = self._fitting(output.width() - len(indent))
        wide = [self._width(place) for place in shown]
        for cells, style in [(self.titles, ""), *self.rows]:
            parts = [
                " " * (width - output.cells(cells[place])) + cells[place]
                if self.titles[place] in self.right
                else output.padded(cells[place], width)
                for place, width in zip(shown, wide, strict=True)
            ]
            text = GAP.join(parts).rstrip()
            output.line(indent + output.styled(text, style, sys.stdout), cleaned=True)

    def _fitting(self, width: int) -> list[int]:
        """Returns the positions of the columns to show: non-empty ones that fit."""
        shown = [place for place in range(len(self.titles)) if any(cells[place] for cells, _ in self.rows)]
        for title in self.dispensable:
            if self._total(shown) <= width:
                break
            shown = [place for place in shown if self.titles[place] != title]
        return shown

    def _total(self, shown: Sequence[int]) -> int:
        return sum(self._width(place) for place in shown) + len(GAP) * (len(shown) - 1)

    def _width(self, place: int) -> int:
        return max(len(self.titles[place]), *(output.cells(cells[place]) for cells, _ in self.rows))
