"""What saving and restoring cost where thousands of ranks take part, and how that grows.

`python -m campaigns.many_ranks --json FILE`

One process takes the steps of all ranks in turn, through the code that each would run: descriptions, plans, posts and
announcements are encoded and decoded, packs, indexes, the table of parts and the manifest put into a store in memory.
Two saves of each size, the second of a structure that is known, and a restore by some ranks of half as many, each
compared item by item. Times are of the processor. Growth is the slope of a least-squares line through the logarithms
of sizes and costs; what 100,000 ranks would cost is read off the line over the ranks.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from campaigns.many_ranks.job import ManyRanks
from campaigns.many_ranks.restoring import restore, restore_costs
from campaigns.many_ranks.states import ALIKE, Mesh
from campaigns.result_file import Progress, ResultHeader, deliver, options
from tenuto.model.records import Manifest
from tenuto.repo.format.shard_table import saved_boxes
from tenuto.sharding.coverage import check_coverage
from tenuto.state.tree import leaf_paths

MODULE: Final = "campaigns.many_ranks"
RANKS: Final = (1000, 2000, 4000, 8000, 16_000)
LEAVES: Final = (60, 122, 247, 497, 997)
"""Matrices beside the small arrays that all ranks hold: 63 to 1000 boxes on each rank."""
COLUMNS: Final = 8
FAR: Final = 100_000
DIGEST_BYTES: Final = 16


def mesh_of(ranks: int, leaves: int, *, columns: int = COLUMNS, copies: int = 1) -> Mesh:
    """Boxes of about 2 x 4 items; no length is a multiple of the ranks, so boxes differ by an item. The ranks are a
    multiple of `columns` times `copies`."""
    assert not ranks % (columns * copies), f"{ranks} ranks make no mesh of {columns} columns, {copies} times"
    return Mesh(ranks, leaves, (2 * (ranks // columns // copies) + 1, 4 * columns + 1), columns, copies)


def measure(mesh: Mesh, *, look_at: int = 8) -> dict[str, Any]:
    """Two saves over `mesh`, and a restore of the second one by `look_at` ranks of half as many. AssertionError where
    something is not as it has to be."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()  # what the other ranks hold here would be looked through on the coordinator's time
    job = ManyRanks(mesh, f"many-ranks-{mesh.ranks}-{mesh.leaves}-{mesh.copies}")
    try:
        job.save(1, "first")
        id = job.save(2, "known")
        manifest = job.manifests[-1]
        _check(job, manifest)
        half = mesh.ranks // 2
        across = max(mesh.columns // 2, 1)
        other = replace(mesh, ranks=half, columns=across, copies=1)
        some = sorted({*np.linspace(0, half - 1, look_at).astype(int).tolist()})
        found = restore_costs(restore(job, id, other, some, 2))
        assert not found["wrong"], found["wrong"]
        return {
            "ranks": mesh.ranks,
            "entries": mesh.entries,
            "boxes_written": mesh.written,
            "stored": _stored(job, manifest, mesh),
            "phases": job.costs.json(),
            f"restore_onto_{half}_ranks": found,
        }
    finally:
        job.close()
        if collecting:
            gc.enable()


def _check(job: ManyRanks, manifest: Manifest) -> None:
    """Every item of every leaf is in the checkpoint once, in as many boxes as there have to be."""
    read = job.repo.manifest(manifest.id)
    table = job.repo.boxes(read)
    assert table is not None
    paths = leaf_paths(read.tree)
    assert len(table) == job.mesh.written, f"{len(table)} boxes are written, not {job.mesh.written}"
    assert len(paths) == job.mesh.leaves + ALIKE
    check_coverage(saved_boxes(table, paths))


def _stored(job: ManyRanks, manifest: Manifest, mesh: Mesh) -> dict[str, Any]:
    """Bytes of the checkpoint's tables."""
    indexes = sum(entry.length for entry in manifest.indexes)
    assert manifest.boxes is not None
    digests = mesh.written * DIGEST_BYTES  # none of these boxes has more than one chunk
    return {
        "index_bytes": indexes,
        "boxes_bytes": manifest.boxes.length,
        "manifest_bytes": len(job.repo.manifest_bytes(manifest.id)),
        "index_and_boxes_bytes_per_shard": round((indexes - digests + manifest.boxes.length) / mesh.written, 2),
    }


def growth(found: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """By phase and cost, the exponent over these sizes; and for sizes that are ranks what many more would cost."""
    grown: dict[str, dict[str, float]] = {}
    for phase, first in found[0]["phases"].items():
        for cost in first:
            costs = [one["phases"][phase][cost] for one in found]
            if min(costs) > 0:
                slope, base = np.polyfit(np.log(sizes), np.log(costs), 1)
                far = round(float(np.exp(base + slope * np.log(FAR))), 3)
                grown[f"{phase}, {cost}"] = {"exponent": round(float(slope), 3), f"at_{FAR}": far}
    return grown


def meshes(ranks: Sequence[int], leaves: Sequence[int]) -> tuple[Mesh, list[Mesh], list[Mesh]]:
    """One of which every box is on two ranks; those over ranks; those over leaves."""
    twice = max(ranks[0] // (2 * COLUMNS), 1) * 2 * COLUMNS
    over_ranks = [mesh_of(count, leaves[0]) for count in ranks]
    return mesh_of(twice, leaves[0], copies=2), over_ranks, [mesh_of(ranks[0], count) for count in leaves]


def campaign(ranks: Sequence[int], leaves: Sequence[int], log: Callable[[str], None]) -> dict[str, Any]:
    """All sizes, and what they say of growth."""
    known: dict[Mesh, dict[str, Any]] = {}

    def one(mesh: Mesh) -> dict[str, Any]:
        if mesh not in known:
            known[mesh] = measure(mesh)
            log(f"{mesh.ranks:,} ranks, {mesh.entries:,} shard entries")
        return known[mesh]

    twice, in_ranks, in_leaves = meshes(ranks, leaves)
    copied = one(twice)
    over_ranks, over_leaves = [one(mesh) for mesh in in_ranks], [one(mesh) for mesh in in_leaves]
    grown = growth(over_leaves, [count + ALIKE for count in leaves]) if len(leaves) > 1 else {}
    return {
        "sizes": [*over_ranks, *over_leaves[1:], copied],
        "growth_in_ranks": growth(over_ranks, ranks) if len(ranks) > 1 else {},
        "growth_in_leaves": {name: one["exponent"] for name, one in grown.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(MODULE, "Saves and restores of thousands of ranks: time and bytes by phase, and their growth.")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--leaves", type=int, nargs="+", default=list(LEAVES))
    chosen = parser.parse_args(arguments)
    result_header, progress = ResultHeader(MODULE, arguments, seed=None, packages=["numpy"]), Progress()
    found = campaign(chosen.ranks, chosen.leaves, progress)
    progress.end()
    deliver(result_header.result(found), chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
