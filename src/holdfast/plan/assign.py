"""Which rank writes which box: each distinct box once, and what several ranks hold shared out among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import numpy as np

from holdfast.errors import UsageError
from holdfast.plan.cells import Cells, cells, replicas
from holdfast.plan.columns import Column, Matrix, Ranks, begins, lines_of, rising
from holdfast.plan.dealing import deal
from holdfast.plan.holdings import Holdings, check
from holdfast.plan.reads import cut
from holdfast.plan.shares import Parts

Strategy = Literal["balanced", "layer", "tensor", "size", "one"]
CHUNK_BYTES: Final = 256 << 10
SMALL_CHUNKS: Final = 4
"""Boxes of fewer chunks are not cut: another row costs more than it evens out."""
ALIGNED_CHUNKS: Final = 16
"""Parts end where rows and chunks end together, if that is not further apart than this, or than"""
EVEN: Final = 32
"""this part of what a rank writes."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """What each rank writes, ordered by rank, then leaf, then place: rank `rank[i]` writes the box at `offsets[i]` of
    `shape[i]` of the leaf, out of line `holding[i]` of the Holdings, which is one of its own."""

    holding: Column
    offsets: Matrix
    shape: Matrix
    rank: Ranks

    def __len__(self) -> int:
        return len(self.holding)

    def of(self, rank: int) -> slice:
        """The lines of one rank."""
        return lines_of(self.rank, rank)


@dataclass(frozen=True, slots=True, eq=False)
class _How:
    """What `assign` was asked for."""

    world_size: int
    strategy: str
    layer: Column | None
    size: int | None
    chunk_bytes: int

    def check(self, held: Holdings) -> None:
        """Raises UsageError for arguments that do not go together."""
        strategy, layer, size = self.strategy, self.layer, self.size
        if strategy not in get_args(Strategy):
            raise UsageError(f"strategy {strategy!r} is none of {', '.join(get_args(Strategy))}", subject=strategy)
        if (strategy == "layer") != (layer is not None) or (layer is not None and len(layer) != held.leaves):
            raise UsageError('strategy "layer", and no other, needs layer=, a number for each leaf')
        if (strategy == "size") != (size is not None) or (size is not None and size < 1):
            raise UsageError('strategy "size", and no other, needs size=, bytes from 1 on')
        if self.chunk_bytes < 1:
            raise UsageError(f"chunks of {self.chunk_bytes} bytes")
        if len(held) and (int(held.rank[0]) < 0 or int(held.rank[-1]) >= self.world_size):
            raise UsageError(f"holdings of ranks {held.rank[0]} to {held.rank[-1]} in a world of {self.world_size}")


def assign(
    held: Holdings,
    *,
    world_size: int,
    strategy: Strategy = "balanced",
    layer: Column | None = None,
    size: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    found: Cells | None = None,
) -> Assignment:
    """Who writes what. The same holdings give the same assignment on every machine.

    A box that one rank holds is written by it. Equal boxes of several ranks are replicas, written once:
    "balanced" cuts large ones along their first axis (at multiples of a row, and of `chunk_bytes` where both meet) so
    that all ranks write about as much; "tensor" cuts none; "layer" gives all boxes of one layer with the same holders
    to one of them (`layer[leaf]`: a number for each leaf, see `layers`); "size" cuts every box into parts of at most
    `size` bytes, or of one row; "one" gives all to the lowest rank that holds it.

    Boxes that overlap without being equal are no replicas: their bytes could not be compared, and one of two contents
    would be taken unasked. They are kept here, and `check_coverage` of what is `written` refuses them; so it does where
    something is missing. ShardMismatch where a box is none (`check`) or a rank has one twice. `found`: `cells(held)`,
    of what `check` has passed, where they are at hand.
    """
    how = _How(world_size, strategy, layer, size, chunk_bytes)
    how.check(held)
    if found is None:
        check(held)
        found = cells(held)
    nbytes = held.nbytes()[found.first]
    return _assignment(held, found, _parts(held, found, nbytes, how), nbytes)


def _parts(held: Holdings, found: Cells, nbytes: Column, how: _How) -> Parts:
    """Which bytes of each cell go to which of its holders."""
    row = _rows(held, found, nbytes) if how.strategy in ("balanced", "size") else nbytes
    if how.size is not None:
        whole = _pieces(nbytes, np.maximum(how.size // np.maximum(row, 1), 1) * row)
    else:
        whole = _pieces(nbytes, nbytes)
    several = found.counts[whole.item] > 1
    if how.strategy == "one" or not several.any():
        return whole
    length = whole.high - whole.low
    loads = np.zeros(how.world_size, np.int64)
    alone, shared = np.flatnonzero(~several), np.flatnonzero(several)
    np.add.at(loads, held.rank[found.first[whole.item[alone]]], length[alone])
    step = length
    if how.strategy == "balanced":
        far = min(ALIGNED_CHUNKS * how.chunk_bytes, int(nbytes.sum()) // (how.world_size * EVEN))
        step = _steps(nbytes, row, how.chunk_bytes, max(far, how.chunk_bytes))
    parts = _shared(held, found, (whole.item[shared], length[shared], step[shared]), loads, how.layer)
    item = shared[parts.item]
    return Parts(
        np.concatenate([whole.item[alone], whole.item[item]]),
        np.concatenate([whole.member[alone], parts.member]),
        np.concatenate([whole.low[alone], whole.low[item] + parts.low]),
        np.concatenate([whole.high[alone], whole.low[item] + parts.high]),
    )


def _shared(
    held: Holdings, found: Cells, items: tuple[Column, Column, Column], loads: Column, layer: Column | None
) -> Parts:
    """Who of their holders takes which part of items: their cells, bytes, and the steps at which they may be cut."""
    cell, length, step = items
    sets = replicas(held, found)
    several = sets.size > 1
    group = (np.cumsum(several) - 1)[sets.of[cell]]
    members = _members(held, found, sets.example[several])
    if layer is None:
        return deal(group, length, step, members, loads)
    bundle = np.unique(layer, return_inverse=True)[1][held.leaf[found.first[cell]]] * len(several) + group
    member = _together(bundle, group, length, members, loads)
    return Parts(np.arange(len(cell)), member, np.zeros_like(cell), length)


def _together(bundle: Column, group: Column, nbytes: Column, sets: tuple[Column, Column], loads: Column) -> Column:
    """Which member of its set takes each item, where items of one bundle, which are of one set, go to one."""
    _, first, bundle = np.unique(bundle, return_index=True, return_inverse=True)
    total = np.zeros(len(first), np.int64)
    np.add.at(total, bundle, nbytes)
    parts = deal(group[first], total, total, sets, loads)
    member = np.empty(len(first), np.int64)
    member[parts.item] = parts.member
    return member[bundle]


def _members(held: Holdings, found: Cells, example: Column) -> tuple[Column, Column]:
    """The ranks of each set, one set after the other, and where each begins."""
    counts = found.counts[example]
    of, within = cut(counts, 1)
    return held.rank[found.holders[found.start[example][of] + within]].astype(np.int64), begins(counts)


def _axis(shape: Matrix) -> Column:
    """The first axis along which each box is longer than 1: what lies between two places along it is one run of
    bytes."""
    found = np.zeros(len(shape), np.int64)
    for axis in range(shape.shape[1] - 1, -1, -1):
        found[shape[:, axis] > 1] = axis
    return found


def _rows(held: Holdings, found: Cells, nbytes: Column) -> Column:
    """Bytes of one line of each cell, along the axis that it may be cut along."""
    shape = held.shape[found.first]
    return nbytes // np.maximum(shape[np.arange(len(shape)), _axis(shape)], 1)


def _steps(nbytes: Column, row: Column, chunk_bytes: int, far: int) -> Column:
    """How many bytes apart the places lie at which a box may be cut: multiples of chunks, if not over `far` apart."""
    row = np.maximum(row, 1)
    aligned = np.lcm(np.minimum(row, far), chunk_bytes)
    step = np.where((aligned <= far) & (row <= far), aligned, -(-chunk_bytes // row) * row)
    return np.where(nbytes < SMALL_CHUNKS * chunk_bytes, nbytes, np.minimum(step, nbytes))


def _pieces(nbytes: Column, step: Column) -> Parts:
    """Each cell in parts of `step` bytes; one of no bytes is a part of none."""
    counts = np.maximum(-(-nbytes // np.maximum(step, 1)), 1)
    item, within = cut(counts, 1)
    low = within * step[item]
    return Parts(item, np.zeros_like(item), low, np.minimum(low + step[item], nbytes[item]))


def _assignment(held: Holdings, found: Cells, parts: Parts, nbytes: Column) -> Assignment:
    """Bytes of cells as boxes of lines."""
    holding = found.holders[found.start[parts.item] + parts.member]
    offsets, shape = held.offsets[holding], held.shape[holding]
    part = np.flatnonzero((parts.high - parts.low) < nbytes[parts.item])
    axis = _axis(shape[part])
    row = nbytes[parts.item[part]] // shape[part, axis]
    offsets[part, axis] += parts.low[part] // row
    shape[part, axis] = (parts.high - parts.low)[part] // row
    rank = held.rank[holding]
    # Cells are in order of leaf and place, parts in order within them.
    code = rank.astype(np.int64) * len(found) + parts.item
    order = np.lexsort((parts.low, code)) if len(part) else rising(code)
    return Assignment(holding[order], offsets[order], shape[order], rank[order])


def written(held: Holdings, made: Assignment) -> Holdings:
    """The boxes as they will lie in the ranks' objects: row `row` of a rank is its `row`-th line of the assignment."""
    ranks, first = np.unique(made.rank, return_index=True)
    began = first[np.searchsorted(ranks, made.rank)] if len(made) else made.holding
    return replace(
        held,
        leaf=held.leaf[made.holding],
        rank=made.rank,
        row=np.arange(len(made)) - began,
        offsets=made.offsets,
        shape=made.shape,
        itemsize=held.itemsize[made.holding],
    )


def layers(paths: Sequence[str]) -> Column:
    """The layer of each leaf, numbered: a path up to and with its first segment that is a number (also between dots,
    as modules name their parts), or all of it but the last segment where there is none."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(_layer(path), len(numbers)) for path in paths], np.int64)


def _layer(path: str) -> str:
    place = 0
    for part in path.replace(".", "/").split("/"):
        place += len(part) + 1
        if part.removeprefix("#i:").isdecimal():
            return path[: place - 1]
    return path[: max(path.rfind("/"), path.rfind("."), 0)]
