"""What one rank of a script that is run under an order has told so far."""

from __future__ import annotations

from typing import Any

from holdfast.guard.certify.order import Order
from holdfast.model.trail import Row, Trail
from holdfast.report.growing import GrowingLines


class Followed:
    """Reads the records of its trail as they come. `ranks`: how many there are, as it says; 0 as long as it says
    nothing."""

    def __init__(self, order: Order, rank: int) -> None:
        self._lines = GrowingLines(order.trail_of(rank))
        self.ranks = 0
        self.refused: dict[str, Any] | None = None
        self.saved: int | None = None
        self.done: dict[str, Any] | None = None
        self.rows: list[Row] = []

    @property
    def step(self) -> int:
        return self.rows[-1].step if self.rows else 0

    def look(self) -> bool:
        """Whether there was news."""
        news = self._lines.new()
        for record in news:
            self._take(record)
        return bool(news)

    def trail(self) -> Trail:
        found = self.done or {}
        uncovered, logged = (tuple(found.get(name, ())) for name in ("uncovered", "logged"))
        return Trail(tuple(self.rows), found.get("certificate", {}), uncovered, logged)

    def _take(self, record: dict[str, Any]) -> None:
        kind = record.pop("record")
        if kind == "built":
            self.ranks = int(record["ranks"])
        elif kind == "row":
            row = Row.of(record)
            if row.start:
                self.rows = [kept for kept in self.rows if not kept.start]
            self.rows.append(row)
        elif kind == "saved":
            self.saved = int(record["step"])
        elif kind == "done":
            self.done = record
        elif kind == "refused":
            self.refused = record
