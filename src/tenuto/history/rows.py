"""What a query returns of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from tenuto.model.ids import CheckpointId
from tenuto.record import record


@record
class Row:
    """One checkpoint of a query.

    size, stored: bytes of its state, and of its data files; None where its manifest is damaged, as for leaves and
        ranks.
    created: wall clock of the machine that saved, RFC 3339, UTC.
    line: "current" if it leads to the run's latest, else "left".
    metrics: as logged with the step and noted later.
    best: the metrics by which it is the run's best.
    damaged: whether its manifest is, or damage was noted that no verification has taken back.
    healthy: whether it is not damaged, and no tensor had become NaN or infinite, as far as its save has looked.
    """

    id: CheckpointId
    size: int | None
    stored: int | None
    leaves: int | None
    ranks: int | None
    created: str
    age_s: float | None
    line: str
    latest: bool
    metrics: Mapping[str, float]
    tags: tuple[str, ...] = ()
    best: tuple[str, ...] = ()
    pinned: bool = False
    held: bool = False
    verified: bool = False
    proven: bool = False
    damaged: bool = False
    healthy: bool = True

    def json(self) -> dict[str, Any]:
        """Returns it as `tenuto ls --where --json` prints it."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "id"}
        place = {"run": self.id.run, "attempt": self.id.attempt, "step": self.id.step}
        return {**place, **found, "metrics": dict(self.metrics), "tags": list(self.tags), "best": list(self.best)}


def row_of(found: Sequence[Any], metrics: Mapping[str, float], now_s: float) -> Row:
    """Makes a row of one of the catalog's table, with its tags and whether it is pinned and held behind it."""
    _, run, attempt, step, _, size, stored, leaves, ranks, created_s, created, _, *flags = found
    verified, proven, damaged, line, latest, best, healthy, tags, pinned, held = flags
    return Row(
        id=CheckpointId(run, attempt, step),
        size=size,
        stored=stored,
        leaves=leaves,
        ranks=ranks,
        created=created,
        age_s=None if created_s is None else round(now_s - created_s, 3),
        line=line,
        latest=bool(latest),
        metrics=dict(sorted(metrics.items())),
        tags=tuple(sorted((tags or "").split())),
        best=tuple(filter(None, best.split("\n"))),
        pinned=bool(pinned),
        held=bool(held),
        verified=bool(verified),
        proven=bool(proven),
        damaged=bool(damaged),
        healthy=bool(healthy and not damaged),
    )
