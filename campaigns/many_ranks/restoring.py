"""Ranks of another layout restore what the job has saved: what each of them reads, and how long that takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from campaigns.many_ranks.job import ManyRanks
from campaigns.many_ranks.states import Mesh
from tenuto.engine.read.choose import CheckpointLeaves, fetch
from tenuto.events import Emitter
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.state.contract import Prepared
from tenuto.state.restore.match import match_state


@dataclass(frozen=True, slots=True)
class Restored:
    """What one rank of the new layout has read, in bytes by what it is; `indexes`: how many of those; `overlapping`:
    how many boxes of the old one meet its own. seconds: of the processor."""

    rank: int
    seconds: float
    read: dict[str, int]
    indexes: int
    overlapping: int
    wrong: str | None


def restore(job: ManyRanks, id: CheckpointId, mesh: Mesh, ranks: Sequence[int], step: int) -> list[Restored]:
    """These ranks of `mesh`, one after the other, each as if it were alone."""
    return [_restored(job, id, mesh, rank, step) for rank in ranks]


def _restored(job: ManyRanks, id: CheckpointId, mesh: Mesh, rank: int, step: int) -> Restored:
    store, state = job.store, mesh.state(rank, empty=True)
    store.read.clear()
    store.objects.clear()

    def match(manifest: Manifest, leaves: CheckpointLeaves) -> Prepared:
        return match_state(manifest.tree, leaves.private, leaves.specs, state)

    began = time.process_time()
    manifest = job.repo.manifest(id)
    prepared, _ = fetch(job.repo, manifest, match, rank=rank, of=mesh.ranks, emitter=Emitter())
    prepared.apply()
    seconds = time.process_time() - began
    wrong = mesh.differs(state, rank, step)
    return Restored(
        rank, seconds, dict(store.read), store.objects["indexes"], _overlapping(job.mesh, mesh, rank), wrong
    )


def _overlapping(saved: Mesh, wanted: Mesh, rank: int) -> int:
    """Boxes of the old layout that meet the rank's own: of each one writer has something, of whole leaves further."""
    rows, columns = wanted.box(rank)
    boxes = {
        (box[0].start, box[1].start)
        for box in map(saved.box, range(saved.ranks))
        if box[0].start < rows.stop and rows.start < box[0].stop
        if box[1].start < columns.stop and columns.start < box[1].stop
    }
    return len(boxes)


def restore_costs(found: Sequence[Restored]) -> dict[str, Any]:
    """Of some ranks: medians and largest."""
    kinds = sorted({kind for one in found for kind in one.read})
    return {
        "ranks_looked_at": len(found),
        "rank_ms": round(float(np.median([one.seconds for one in found])) * 1e3, 3),
        "read_bytes": {kind: round(float(np.median([one.read.get(kind, 0) for one in found]))) for kind in kinds},
        "indexes_read": int(max(one.indexes for one in found)),
        "boxes_that_overlap": int(max(one.overlapping for one in found)),
        "wrong": [f"rank {one.rank}: {one.wrong}" for one in found if one.wrong],
    }
