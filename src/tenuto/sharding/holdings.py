"""Holdings: which rank holds which boxes, as columns over all ranks, checked before anything is planned with them.

Also has the column arithmetic that every plan needs, and the names of leaves, ranks and items in errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from tenuto.errors import ShardMismatch
from tenuto.model.leaf import Box
from tenuto.record import record
from tenuto.sharding.coalesce import cut

Column = np.ndarray[Any, np.dtype[np.int64]]
"""int64 [n]."""
Matrix = np.ndarray[Any, np.dtype[np.int64]]
"""int64 [n, d]: one line for each box, one column for each axis."""
Ranks = np.ndarray[Any, np.dtype[np.int32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

LIMIT: Final = 1 << 62
"""Every number of a plan is below this, so that no sum of two of them overflows."""


def volumes(shape: Matrix) -> Column:
    """Returns the number of items in each box."""
    found = np.ones(len(shape), np.int64)
    for axis in range(shape.shape[1]):
        found *= shape[:, axis]
    return found


def dot(one: Matrix, other: Matrix) -> Column:
    """Returns the dot product of each pair of lines.

    Loops over axes, like everything here: numpy's reductions take several times as long on lines this short.
    """
    found = np.zeros(len(one), np.int64)
    for axis in range(one.shape[1]):
        found += one[:, axis] * other[:, axis]
    return found


def every(flags: np.ndarray[Any, np.dtype[np.bool_]]) -> Flags:
    """Returns which lines are true along all axes."""
    found = np.ones(len(flags), bool)
    for axis in range(flags.shape[1]):
        found &= flags[:, axis]
    return found


def begins(lengths: Column) -> Column:
    """Returns where each consecutive part begins, and where the last one ends: int64 [n + 1]."""
    found = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


def paces(shape: Matrix) -> Matrix:
    """Returns the row-major strides of each shape, in items."""
    found = np.ones_like(shape)
    for axis in range(shape.shape[1] - 2, -1, -1):
        found[:, axis] = found[:, axis + 1] * shape[:, axis + 1]
    return found


def spread(flat: Column, bounds: Column, axes: int, fill: int) -> Matrix:
    """Returns a ragged column as a matrix, padded at the end of each line."""
    count = np.diff(bounds)
    found = np.full((len(count), axes), fill, np.int64)
    found[np.arange(axes) < count[:, None]] = flat
    return found


def padded(lines: Sequence[tuple[int, ...]], axes: int, fill: int) -> Matrix:
    """Returns tuples as a matrix, padded at the end of each line."""
    flat = np.array([place for line in lines for place in line], np.int64)
    return spread(flat, np.array([0, *accumulate(map(len, lines))], np.int64), axes, fill)


def lines_of(rank: Ranks, one: int) -> slice:
    """Returns one rank's lines in a sorted column of ranks."""
    # Searching with the column's own type avoids converting the column for each search.
    return slice(*np.searchsorted(rank, np.array((one, one + 1), rank.dtype)).tolist())


def rising(key: Column) -> Column:
    """Returns a stable argsort of non-negative numbers."""
    bits = len(key).bit_length()
    if int(key.max(initial=0)).bit_length() + bits > 62:
        return np.argsort(key, kind="stable")
    # Sorting numbers with their positions in the low bits is several times as fast as an argsort.
    marks = (key << bits) | np.arange(len(key))
    marks.sort()
    marks &= (1 << bits) - 1
    return marks


def renumbered(code: Column, size: int) -> Column:
    """Renumbers numbers below `size` without gaps, keeping their order."""
    if not len(code):
        return code
    if size > 8 * len(code) + 1024:
        found: Column = np.unique(code, return_inverse=True)[1].astype(np.int64, copy=False)
        return found
    seen = np.zeros(size, np.int64)
    seen[code] = 1
    return (np.cumsum(seen) - 1)[code]


# Names in errors.

SHOWN: Final = 8
"""Ranks listed one by one."""


def leaf_name(paths: Sequence[str], leaf: int) -> str:
    return paths[leaf] if 0 <= leaf < len(paths) else f"leaf {leaf}"


def rank_names(ranks: Iterable[int]) -> str:
    """Returns `rank 3`, `ranks 0 and 4` or `ranks 0-3 and 8`; beyond a few ranges, the first ones and the number of
    ranks."""
    found = sorted(set(ranks))
    if not found:
        return "no rank"
    runs: list[list[int]] = []
    for rank in found:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [f"{low}" if low == high else f"{low}-{high}" for low, high in runs[:SHOWN]]
    if len(runs) > SHOWN:
        return f"{len(found)} ranks ({', '.join(words)}, …)"
    if len(found) == 1:
        return f"rank {words[0]}"
    return "ranks " + (f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0])


def item_name(place: Sequence[int]) -> str:
    """Names an item by its position along each axis; a leaf without axes has only one."""
    return f"item [{', '.join(map(str, place))}]" if len(place) else "its only item"


@record(eq=False)
class Holdings:
    """Boxes of leaves that ranks hold, have written or want.

    The columns have equal length n and are ordered by rank, then row: row `row[i]` of rank `rank[i]` is the box at
    `offsets[i]` of `shape[i]` of leaf `leaf[i]`, with items of `itemsize[i]` bytes. Matrices have at least one column;
    columns beyond a leaf's axes are padding (offset 0, length 1).

    whole: each leaf's global shape.
    ndim: each leaf's number of axes.
    paths: the leaves' names in errors.
    """

    leaf: Column
    rank: Ranks
    row: Column
    offsets: Matrix
    shape: Matrix
    itemsize: Column
    whole: Matrix
    ndim: Column
    paths: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.leaf)

    @property
    def leaves(self) -> int:
        return len(self.whole)

    def nbytes(self) -> Column:
        """Returns the bytes of each box."""
        return volumes(self.shape) * self.itemsize

    def box(self, at: int) -> Box:
        axes = int(self.ndim[self.leaf[at]])
        return Box(tuple(self.offsets[at, :axes].tolist()), tuple(self.shape[at, :axes].tolist()))

    def of(self, rank: int) -> slice:
        """Returns the lines of one rank."""
        return lines_of(self.rank, rank)

    def path(self, at: int) -> str:
        """Returns the name, in errors, of the leaf of line `at`."""
        return leaf_name(self.paths, int(self.leaf[at]))


@record(eq=False)
class Shards:
    """One rank's rows; row i is line i.

    offsets, shape, whole: int64 [k, d], padded beyond `ndim[i]` as in Holdings.
    dtype: the position of each row's dtype in `dtypes`.
    sizes: bytes of an item of each of `dtypes`.
    placement: a code with the same meaning on all ranks.
    """

    leaf: Column
    offsets: Matrix
    shape: Matrix
    whole: Matrix
    ndim: Column
    dtype: Column
    placement: Column
    dtypes: Sequence[str]
    sizes: Sequence[int]


def shards(
    leaf: Sequence[int],
    boxes: Sequence[Box],
    whole: Sequence[tuple[int, ...]],
    dtypes: Sequence[tuple[str, int]],
    placement: Sequence[int] | None = None,
) -> Shards:
    """Builds one rank's rows. `dtypes`: the name of each row's dtype and the bytes of its items."""
    names = sorted(set(dtypes))
    code = {name: number for number, name in enumerate(names)}
    axes = max(map(len, whole), default=1)
    return Shards(
        leaf=np.array(leaf, np.int64),
        offsets=padded([box.offsets for box in boxes], max(axes, 1), 0),
        shape=padded([box.shape for box in boxes], max(axes, 1), 1),
        whole=padded(whole, max(axes, 1), 1),
        ndim=np.array([len(shape) for shape in whole], np.int64),
        dtype=np.array([code[one] for one in dtypes], np.int64),
        placement=np.array(placement or [0] * len(leaf), np.int64),
        dtypes=[name for name, _ in names],
        sizes=[size for _, size in names],
    )


def gather(by_rank: Sequence[Shards], *, leaves: int, paths: Sequence[str] = ()) -> Holdings:
    """Builds the holdings of all ranks from each rank's rows, `by_rank[r]`; leaves are numbered below `leaves`.

    Raises ShardMismatch, naming leaf and ranks, if two ranks differ in a leaf's global shape, dtype or placement, or a
    box does not lie in its leaf. `check_coverage` checks that the boxes cover the leaves.
    """
    axes = max((one.whole.shape[1] for one in by_rank), default=1)
    counts = np.array([len(one.leaf) for one in by_rank], np.int64)
    names: dict[tuple[str, int], int] = {}
    codes = [_codes(one, names) for one in by_rank]
    leaf = _joined([one.leaf for one in by_rank])
    whole = _widened([one.whole for one in by_rank], axes, 1)
    holdings = Holdings(
        leaf=leaf,
        rank=np.repeat(np.arange(len(by_rank), dtype=np.int32), counts),
        row=np.arange(len(leaf)) - np.repeat(begins(counts)[:-1], counts),
        offsets=_widened([one.offsets for one in by_rank], axes, 0),
        shape=_widened([one.shape for one in by_rank], axes, 1),
        itemsize=np.array([size for _, size in names], np.int64)[_joined(codes)] if names else leaf,
        whole=np.zeros((leaves, axes), np.int64),
        ndim=np.ones(leaves, np.int64),
        paths=paths,
    )
    _check_leaves(holdings)
    ndim = _joined([one.ndim for one in by_rank])
    holdings.whole[leaf] = whole
    holdings.ndim[leaf] = ndim
    _agreed(holdings, ~every(whole == holdings.whole[leaf]) | (ndim != holdings.ndim[leaf]), "its whole shape")
    _agreed(holdings, _differs(leaf, _joined(codes), leaves), "its dtype")
    _agreed(
        holdings, _differs(leaf, _joined([one.placement for one in by_rank]), leaves), "whether and how it is sharded"
    )
    check(holdings)
    return holdings


def check(holdings: Holdings) -> None:
    """Raises ShardMismatch, naming leaf and rank, if a box does not lie in its leaf or sizes cannot be counted.

    Afterwards, lengths and offsets are non-negative, every box ends within its leaf, and all leaves have fewer than
    2^62 items and bytes in total.
    """
    _check_leaves(holdings)
    itemsize = holdings.itemsize
    size = np.prod(holdings.whole.astype(np.float64), axis=1)
    if len(holdings.whole) and (holdings.whole.min() < 0 or not size.sum() < LIMIT / 2):
        worst = int(np.argmax(np.where((holdings.whole < 0).any(axis=1), np.inf, size)))
        raise ShardMismatch(
            f"{leaf_name(holdings.paths, worst)}: a shape of {tuple(holdings.whole[worst].tolist())} is not one that "
            "memory can hold",
            subject=leaf_name(holdings.paths, worst),
        )
    if not len(holdings):
        return
    whole = holdings.whole[holdings.leaf]
    # Compares without a sum, which could overflow.
    wrong = ~every(
        (holdings.shape >= 0)
        & (holdings.offsets >= 0)
        & (holdings.shape <= whole)
        & (holdings.offsets <= whole - holdings.shape)
    )
    padding = np.arange(holdings.whole.shape[1]) >= holdings.ndim[:, None]
    wrong |= ~every(~padding[holdings.leaf] | ((holdings.shape == 1) & (whole == 1)))
    wrong |= (itemsize < 0) | (itemsize.astype(np.float64) * size[holdings.leaf] >= LIMIT / 2)
    if wrong.any():
        at = int(np.argmax(wrong))
        axes = int(holdings.ndim[holdings.leaf[at]])
        offsets, shape, total = (part[:axes].tolist() for part in (holdings.offsets[at], holdings.shape[at], whole[at]))
        raise ShardMismatch(
            f"{holdings.path(at)}: rank {holdings.rank[at]} holds a box at {offsets} of shape {shape}, which does not "
            f"lie in a leaf of shape {total}",
            subject=holdings.path(at),
        )


def _check_leaves(holdings: Holdings) -> None:
    if len(holdings) and not 0 <= int(holdings.leaf.min()) <= int(holdings.leaf.max()) < holdings.leaves:
        at = int(np.argmax((holdings.leaf < 0) | (holdings.leaf >= holdings.leaves)))
        raise ShardMismatch(
            f"rank {holdings.rank[at]} names leaf {holdings.leaf[at]} of {holdings.leaves}", subject=holdings.path(at)
        )


def _differs(leaf: Column, value: Column, leaves: int) -> Flags:
    """Returns which lines have another value than the last line of the same leaf."""
    last = np.zeros(leaves, np.int64)
    last[leaf] = value
    found: Flags = value != last[leaf]
    return found


def _agreed(holdings: Holdings, differs: Flags, what: str) -> None:
    if not differs.any():
        return
    same = holdings.leaf == holdings.leaf[int(np.argmax(differs))]
    some, others = holdings.rank[same & differs].tolist(), holdings.rank[same & ~differs].tolist()
    path = holdings.path(int(np.argmax(differs)))
    raise ShardMismatch(
        f"{path}: {rank_names(some)} and {rank_names(others)} do not agree about {what}",
        subject=path,
        hint="build the same model on every rank, or declare what belongs to one rank with tenuto.per_rank(…)",
    )


def _codes(by_rank: Shards, names: dict[tuple[str, int], int]) -> Column:
    """Returns the dtypes of a rank's rows in the numbering shared by all ranks."""
    numbers = [names.setdefault(one, len(names)) for one in zip(by_rank.dtypes, by_rank.sizes, strict=True)]
    return np.array(numbers, np.int64)[by_rank.dtype] if numbers else by_rank.dtype


def _joined(parts: Sequence[Column]) -> Column:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _widened(parts: Sequence[Matrix], axes: int, fill: int) -> Matrix:
    found = np.full((sum(map(len, parts)), axes), fill, np.int64)
    at = 0
    for part in parts:
        found[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return found


# --------------------------------------------------------------------------------------------------
# Distinct boxes: all replicas of one box form one cell.

_ODD = np.uint64(0x9E3779B97F4A7C15)


@record(eq=False)
class DistinctBoxes:
    """Cells and the lines of Holdings that belong to each, ordered by leaf, then by start.

    holders: the lines of cell c, by rank, are `holders[start[c] .. start[c + 1] - 1]`.
    """

    holders: Column
    start: Column

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def counts(self) -> Column:
        """The number of ranks that hold each cell."""
        return np.diff(self.start)

    @property
    def first(self) -> Column:
        """The line of each cell's lowest rank."""
        return self.holders[self.start[:-1]]


def distinct_boxes(holdings: Holdings) -> DistinctBoxes:
    """Returns the distinct boxes of holdings that `check` has accepted. Raises ShardMismatch if a rank holds a box
    twice.

    Empty boxes are ignored, except the lowest rank's box of an empty leaf.
    """
    size = volumes(holdings.whole)
    lines = _with_items(holdings, size)
    leaf, offsets, shape = holdings.leaf[lines], holdings.offsets[lines], holdings.shape[lines]
    pace = paces(holdings.whole)[leaf] * (size[leaf] > 0)[:, None]
    # Two numbers identify a box: its first and its last item.
    first = begins(np.maximum(size, 1))[leaf] + dot(offsets, pace)
    last = first + dot(shape - 1, pace)
    order = rising(first)  # a stable sort keeps ranks in order
    if ((first[order[1:]] == first[order[:-1]]) & (last[order[1:]] != last[order[:-1]])).any():
        order = np.lexsort((last, first))  # equal starts with different ends: the input is wrong
    first, last = first[order], last[order]
    begun = np.concatenate([np.ones(1, bool), (first[1:] != first[:-1]) | (last[1:] != last[:-1])])[: len(order)]
    found = DistinctBoxes(lines[order], np.append(np.flatnonzero(begun), len(order)))
    rank = holdings.rank[found.holders]
    twice = np.flatnonzero((rank[1:] == rank[:-1]) & ~begun[1:])
    if len(twice):
        at = int(found.holders[twice[0]])
        raise ShardMismatch(
            f"{holdings.path(at)}: rank {holdings.rank[at]} holds the box {holdings.box(at)} twice",
            subject=holdings.path(at),
        )
    return found


def _with_items(holdings: Holdings, size: Column) -> Column:
    """Returns the lines that form cells."""
    lines = np.flatnonzero(every(holdings.shape > 0))
    nothing = np.flatnonzero(size[holdings.leaf] == 0)
    if not len(nothing):
        return lines
    one_each = nothing[np.unique(holdings.leaf[nothing], return_index=True)[1]]
    return np.sort(np.concatenate([lines, one_each]))


@record(eq=False)
class ReplicaSets:
    """Sets of ranks that hold the same cells.

    of: the set of each cell.
    example: one cell of each set.
    size: the number of ranks in each set.
    """

    of: Column
    example: Column
    size: Column


def replica_sets(holdings: Holdings, found: DistinctBoxes) -> ReplicaSets:
    """Returns the set of ranks that hold each cell."""
    counts, rank = found.counts, holdings.rank[found.holders].astype(np.uint64)
    if not len(found):
        return ReplicaSets(counts, counts, counts)
    with np.errstate(over="ignore"):
        marks = np.add.reduceat(_hashed(rank), found.start[:-1]) ^ _hashed(counts.astype(np.uint64))
    _, example, of = np.unique(marks, return_index=True, return_inverse=True)
    # Verifies the sets, because different sets may have the same hash.
    cell, within = cut(counts, 1)
    same = counts == counts[example[of]]
    place = found.start[example[of]][cell] + np.minimum(within, counts[example[of]][cell] - 1)
    same &= np.logical_and.reduceat(rank == rank[place], found.start[:-1])
    odd = np.flatnonzero(~same)
    of[odd] = len(example) + np.arange(len(odd))
    example = np.concatenate([example, odd])
    # Numbers the sets in the order of their first cells.
    order = np.argsort(example)
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    return ReplicaSets(place_of[of], example[order], counts[example[order]])


def _hashed(value: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Hashes numbers to 64 bits (splitmix64)."""
    value = (value + np.uint64(1)) * _ODD
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
