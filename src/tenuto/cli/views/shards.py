"""Shows how a checkpoint's leaves are distributed over the ranks that saved it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tenuto.cli.console import output
from tenuto.cli.console.output import Columns
from tenuto.model.leaf import LeafSpec
from tenuto.record import record
from tenuto.sharding.holdings import rank_names
from tenuto.units import size

if TYPE_CHECKING:
    from tenuto.model.records import Index, Manifest
    from tenuto.repo.repository import Repo


SHOWN = 16
"""Ranks, or parts of one leaf, that are listed one by one."""
LeafPart = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The rank, where the part begins in its leaf, and its shape."""


@record
class Contents:
    """A checkpoint's leaves. `shared`: the manifest tree's leaves by number, with full shapes. `parts`: by path, with
    several ranks."""

    indexes: Sequence[Index]
    shared: Sequence[LeafSpec]
    parts: Mapping[str, Sequence[LeafPart]]

    def private(self, index: Index) -> list[LeafSpec]:
        """Returns the private leaves of one rank."""
        return [spec for spec in index.specs if spec.private]


def contents(repo: Repo, manifest: Manifest) -> Contents:
    """Reads every index and, with several ranks, the table of parts. Raises CorruptionError if one is damaged."""
    from tenuto.state.tree import leaf_paths

    indexes = [repo.index(manifest, rank) for rank in range(len(manifest.indexes))]
    boxes = repo.boxes(manifest)
    if boxes is None:
        return Contents(indexes, [spec for spec in indexes[0].specs if not spec.private], {})
    paths = leaf_paths(manifest.tree)
    shared = [LeafSpec(path, *form) for path, form in zip(paths, boxes.forms(), strict=True)]
    parts: dict[str, list[LeafPart]] = {path: [] for path in paths}
    origin, shape = boxes.origin.tolist(), boxes.shape.tolist()
    rows = zip(boxes.leaf.tolist(), boxes.rank.tolist(), pairwise(boxes.bounds.tolist()), strict=True)
    for leaf, rank, (begin, end) in rows:
        parts[paths[leaf]].append((rank, tuple(origin[begin:end]), tuple(shape[begin:end])))
    return Contents(indexes, shared, parts)


def spread(parts: Mapping[str, Sequence[LeafPart]]) -> dict[str, str]:
    """Describes each sharded leaf: its number of parts, and their ranks."""
    return {
        path: f"{len(found)} parts on {rank_names([rank for rank, _, _ in found])}"
        for path, found in parts.items()
        if len(found) > 1
    }


def parts_rows(parts: Sequence[LeafPart]) -> list[tuple[str, str]]:
    """Returns one row for each part of a leaf: the rank that saved it, and its items."""
    shown = [(f"rank {rank}", _items(offsets, shape)) for rank, offsets, shape in parts[:SHOWN]]
    more = len(parts) - SHOWN
    return [*shown, *([("", f"and {more} more parts")] if more > 0 else [])]


def _items(offsets: tuple[int, ...], shape: tuple[int, ...]) -> str:
    if not shape:
        return "all of it"
    return f"[{', '.join(f'{begin}:{begin + count}' for begin, count in zip(offsets, shape, strict=True))}]"


def parts_json(parts: Sequence[LeafPart]) -> list[dict[str, Any]]:
    return [{"rank": rank, "offsets": list(offsets), "shape": list(shape)} for rank, offsets, shape in parts]


def print_ranks(checkpoint: Contents) -> None:
    """Prints what each rank has saved."""
    output.line("\nranks")
    titles = ("RANK", "SIZE", "FILES", "PARTS", "PRIVATE")
    table = Columns(titles, right=frozenset(titles))
    for index in checkpoint.indexes[:SHOWN]:
        own = len(checkpoint.private(index))
        nbytes = sum(pack.length for pack in index.packs)
        shared = len(index.specs) - own
        table.add(str(index.rank), size(nbytes), str(len(index.packs)), f"{shared:,}", f"{own:,}" if own else "")
    table.print()
    if len(checkpoint.indexes) > SHOWN:
        output.line(f"  and {len(checkpoint.indexes) - SHOWN} more ranks")
