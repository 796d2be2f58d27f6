"""`tenuto show --timing`: where the time of a run's saves went, according to their manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tenuto.cli.console import output
from tenuto.cli.console.output import Columns
from tenuto.errors import CheckpointNotFound, CorruptionError
from tenuto.model.ids import CheckpointId, attempt_key
from tenuto.model.timing import RankTimings, Timing
from tenuto.record import record
from tenuto.units import seconds, size

if TYPE_CHECKING:
    from tenuto.repo.repository import Repo


KEY = "timing"
"""The key in the manifest's environment."""
PAGE = 20
"""How many checkpoints are shown; --json has all."""
MEANING: Final[Mapping[str, str]] = {
    "BLOCKED": "how long training was blocked: WAITED, COPY, FENCE, and looking at the state",
    "WAITED": "until the save before was written",
    "COPY": "of the state into memory",
    "FENCE": "updates that waited for a copy still being made",
    "BACKGROUND": "copying while training continued",
    "DIGEST": "digests, in the background",
    "WRITE": "writing and flushing, in the background",
    "SPEED": "SIZE in the time of WRITE",
    "CPU": "processor time of what saves, in the background",
}
"""The columns of durations, and what they say."""


@record
class TimingRow:
    """One checkpoint. `timing`: None if its manifest has none, or cannot be read (`message`)."""

    id: CheckpointId
    bytes: int | None = None
    timing: Timing | None = None
    message: str = ""
    ranks: RankTimings | None = None
    """Timings over ranks, if several saved it."""

    def json(self) -> dict[str, Any]:
        timing = self.timing
        return {
            "checkpoint": self.id,
            "bytes": self.bytes,
            "held_s": round(timing.held_s, 6) if timing is not None else None,
            "bandwidth": round(timing.bandwidth) if timing is not None and timing.bandwidth is not None else None,
            "timing": timing.to_json() if timing is not None else None,
            "ranks": _ranks_json(self.ranks) if self.ranks is not None else None,
            "message": self.message or None,
        }


def show_timing(repo: Repo, run: str, only: CheckpointId | None, *, json: bool) -> None:
    """Prints the checkpoints of `run`, oldest first, or `only` one."""
    ids = (
        [only]
        if only is not None
        else [
            CheckpointId(run, attempt, step)
            for attempt in sorted(repo.attempts(run))
            for step in sorted(repo.committed(run, attempt))
        ]
    )
    saves = len(ids)
    rows = [row for id in (ids if json else ids[-PAGE:]) if (row := _row(repo, id)) is not None]
    if json:
        output.document("timing", {"where": repo.url, "run": run, "checkpoints": [row.json() for row in rows]})
        return
    output.line(f"run {run}" if saves <= PAGE else f"run {run}: the newest {PAGE} of {saves:,} checkpoints")
    _table(rows)
    last = rows[-1] if rows else None
    if last is not None and last.ranks is not None:
        from tenuto.training.stats import slowest_lines

        output.line(f"\nstep {last.id.step}")
        for text in slowest_lines(last.ranks):
            output.line(text)
    if all(row.timing is None for row in rows):
        output.story("none of them records the timing of its save")


def _row(repo: Repo, id: CheckpointId) -> TimingRow | None:
    try:
        manifest = repo.manifest(id)
    except CheckpointNotFound:
        return None  # removed since it was listed
    except CorruptionError as error:
        return TimingRow(id, message=error.message)
    stored = manifest.environment.get(KEY)
    ranks = RankTimings.read(stored.get("ranks")) if isinstance(stored, Mapping) else None
    return TimingRow(id, manifest.bytes, Timing.read(stored, manifest.bytes), ranks=ranks)


def _ranks_json(ranks: RankTimings) -> dict[str, Any]:
    """Returns each part in seconds; for very many ranks, the slowest and quantiles."""
    return {
        "ranks": ranks.ranks,
        "parts": {
            name: {
                "least": part.quantiles[0],
                "quarter": part.quantiles[1],
                "median": part.quantiles[2],
                "three_quarters": part.quantiles[3],
                "most": part.quantiles[4],
                "slowest": [{"rank": rank, "value": value} for rank, value in part.slowest],
                "each": list(part.each) or None,
            }
            for name, part in ranks.parts.items()
        },
    }


def _table(rows: Sequence[TimingRow]) -> None:
    parts = tuple(name for name in MEANING if name not in ("SPEED", "CPU"))
    table = Columns(
        ("ATTEMPT", "STEP", "SIZE", *parts, "SPEED", "CPU", "STATE"),
        right=frozenset({"STEP", "SIZE", *parts, "SPEED", "CPU"}),
        dispensable=("CPU", "BACKGROUND", "DIGEST", "WAITED", "FENCE", "COPY", "SIZE"),
    )
    for row in rows:
        timing = row.timing or Timing()
        spent = (
            timing.held_s,
            timing.wait_s,
            timing.capture_s,
            timing.fence_s,
            timing.late_s,
            timing.digest_s,
            timing.write_s,
        )
        table.add(
            attempt_key(row.id.attempt),
            str(row.id.step),
            size(row.bytes) if row.bytes is not None else "",
            *(seconds(part) if part else "" for part in spent),
            f"{size(round(timing.bandwidth))}/s" if timing.bandwidth is not None else "",
            seconds(timing.cpu_s) if timing.cpu_s else "",
            "DAMAGED" if row.message else "",
            style="damaged" if row.message else "",
        )
    table.print()
    meanings = [(name, MEANING[name]) for name in table.shown() if name in MEANING]
    if meanings:
        output.line(f"\n{output.rows(meanings)}")
