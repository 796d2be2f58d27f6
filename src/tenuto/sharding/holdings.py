"""Who holds which boxes: columns over all ranks, checked before anything is planned with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tenuto.errors import ShardMismatch
from tenuto.model.box import Box

# --------------------------------------------------------------------------------------------------
# The columns that plans are made of, and the few sums over them that every plan needs.

Column = np.ndarray[Any, np.dtype[np.int64]]
"""int64 [n]"""
Matrix = np.ndarray[Any, np.dtype[np.int64]]
"""int64 [n, d]: one line for each box, one column for each axis."""
Ranks = np.ndarray[Any, np.dtype[np.int32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

LIMIT: Final = 1 << 62
"""Items that can be counted: every number of a plan is below this, so that no sum of two of them overflows."""


def volumes(shape: Matrix) -> Column:
    """Items in each box."""
    found = np.ones(len(shape), np.int64)
    for axis in range(shape.shape[1]):
        found *= shape[:, axis]
    return found


def dot(one: Matrix, other: Matrix) -> Column:
    """The sum of products along the axes. Axis by axis, as everything here: of lines this short numpy's own reductions
    take several times as long."""
    found = np.zeros(len(one), np.int64)
    for axis in range(one.shape[1]):
        found += one[:, axis] * other[:, axis]
    return found


def every(flags: np.ndarray[Any, np.dtype[np.bool_]]) -> Flags:
    """Which lines are true along all axes."""
    found = np.ones(len(flags), bool)
    for axis in range(flags.shape[1]):
        found &= flags[:, axis]
    return found


def begins(lengths: Column) -> Column:
    """Where each part begins when they lie one after the other, and where the last one ends: int64 [n + 1]."""
    found = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


def paces(shape: Matrix) -> Matrix:
    """How many items apart two neighbours along each axis lie, row-major."""
    found = np.ones_like(shape)
    for axis in range(shape.shape[1] - 2, -1, -1):
        found[:, axis] = found[:, axis + 1] * shape[:, axis + 1]
    return found


def lines_of(rank: Ranks, one: int) -> slice:
    """Where in a column of ranks, which rises, one rank's lines are."""
    # Asked in the column's own type: else all of it would be converted for each question.
    return slice(*np.searchsorted(rank, np.array((one, one + 1), rank.dtype)).tolist())


def rising(key: Column) -> Column:
    """The order in which numbers from 0 on rise; equal ones stay in theirs."""
    bits = len(key).bit_length()
    if int(key.max(initial=0)).bit_length() + bits > 62:
        return np.argsort(key, kind="stable")
    # Numbers with their places in the last bits: a plain sort, several times as fast as one that carries an index.
    marks = (key << bits) | np.arange(len(key))
    marks.sort()
    marks &= (1 << bits) - 1
    return marks


def renumbered(code: Column, size: int) -> Column:
    """Numbers below `size`, numbered anew without gaps, in the same order."""
    if not len(code):
        return code
    if size > 8 * len(code) + 1024:
        found: Column = np.unique(code, return_inverse=True)[1].astype(np.int64, copy=False)
        return found
    seen = np.zeros(size, np.int64)
    seen[code] = 1
    return (np.cumsum(seen) - 1)[code]


# --------------------------------------------------------------------------------------------------
# How errors name leaves, ranks and items.

SHOWN: Final = 8
"""Ranks that are named one by one."""


def leaf_name(paths: Sequence[str], leaf: int) -> str:
    return paths[leaf] if 0 <= leaf < len(paths) else f"leaf {leaf}"


def rank_names(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 and 4`, `ranks 0-3 and 8`; of more than a few runs only the first, and how many ranks."""
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
    """An item by its place along each axis; of a leaf without axes there is only the one."""
    return f"item [{', '.join(map(str, place))}]" if len(place) else "its only item"


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """Boxes of leaves: those that ranks hold, that they have written, or that they want.

    Columns of equal length n, ordered by rank and by row within it: row `row[i]` of rank `rank[i]` is the box at
    `offsets[i]` of `shape[i]` of leaf `leaf[i]`, of `itemsize[i]` bytes an item. By leaf: `whole`, the shape of all of
    it, and `ndim`, its axes; further columns of the matrices are padding (offset 0, length 1). d is at least 1.
    `paths` are what errors call the leaves.
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
        """Bytes of each box."""
        return volumes(self.shape) * self.itemsize

    def box(self, at: int) -> Box:
        axes = int(self.ndim[self.leaf[at]])
        return Box(tuple(self.offsets[at, :axes].tolist()), tuple(self.shape[at, :axes].tolist()))

    def of(self, rank: int) -> slice:
        """The lines of one rank."""
        return lines_of(self.rank, rank)

    def path(self, at: int) -> str:
        """What errors call the leaf of line `at`."""
        return leaf_name(self.paths, int(self.leaf[at]))


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """What one rank says of its rows, row i being line i. `dtype[i]` is a place in `dtypes`, whose `sizes` are bytes
    an item; `placement` is a code that means the same on all ranks. `offsets`, `shape`, `whole`: int64 [k, d], padded
    behind `ndim[i]` as in Holdings."""

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
    """One rank's rows as columns. `dtypes`: each row's dtype by name, and the bytes of its items."""
    names = sorted(set(dtypes))
    code = {name: number for number, name in enumerate(names)}
    axes = max(map(len, whole), default=1)
    return Shards(
        leaf=np.array(leaf, np.int64),
        offsets=_padded([box.offsets for box in boxes], max(axes, 1), 0),
        shape=_padded([box.shape for box in boxes], max(axes, 1), 1),
        whole=_padded(whole, max(axes, 1), 1),
        ndim=np.array([len(shape) for shape in whole], np.int64),
        dtype=np.array([code[one] for one in dtypes], np.int64),
        placement=np.array(placement or [0] * len(leaf), np.int64),
        dtypes=[name for name, _ in names],
        sizes=[size for _, size in names],
    )


def _padded(lines: Sequence[tuple[int, ...]], axes: int, fill: int) -> Matrix:
    return np.array([(*line, *(fill,) * (axes - len(line))) for line in lines], np.int64).reshape(-1, axes)


def gather(said: Sequence[Shards], *, leaves: int, paths: Sequence[str] = ()) -> Holdings:
    """The holdings of all ranks, `said[r]` being what rank r says; leaves are numbered below `leaves`.

    ShardMismatch, naming leaf and ranks, where two ranks differ in a leaf's whole shape, dtype or placement, or where a
    box does not lie in its leaf. Whether the boxes cover the leaves is for `check_coverage` to say.
    """
    axes = max((one.whole.shape[1] for one in said), default=1)
    counts = np.array([len(one.leaf) for one in said], np.int64)
    names: dict[tuple[str, int], int] = {}
    codes = [_codes(one, names) for one in said]
    leaf = _joined([one.leaf for one in said])
    whole = _widened([one.whole for one in said], axes, 1)
    held = Holdings(
        leaf=leaf,
        rank=np.repeat(np.arange(len(said), dtype=np.int32), counts),
        row=np.arange(len(leaf)) - np.repeat(begins(counts)[:-1], counts),
        offsets=_widened([one.offsets for one in said], axes, 0),
        shape=_widened([one.shape for one in said], axes, 1),
        itemsize=np.array([size for _, size in names], np.int64)[_joined(codes)] if names else leaf,
        whole=np.zeros((leaves, axes), np.int64),
        ndim=np.ones(leaves, np.int64),
        paths=paths,
    )
    _check_leaves(held)
    ndim = _joined([one.ndim for one in said])
    held.whole[leaf] = whole
    held.ndim[leaf] = ndim
    _agreed(held, ~every(whole == held.whole[leaf]) | (ndim != held.ndim[leaf]), "its whole shape")
    _agreed(held, _differs(leaf, _joined(codes), leaves), "its dtype")
    _agreed(held, _differs(leaf, _joined([one.placement for one in said]), leaves), "whether and how it is sharded")
    check(held)
    return held


def check(held: Holdings) -> None:
    """Raises ShardMismatch, naming leaf and rank, where a box does not lie in its leaf, or sizes cannot be counted.

    What holds afterwards: lengths and offsets are from 0 on, every box ends within its leaf, and all leaves together
    have fewer than 2^62 items and bytes.
    """
    _check_leaves(held)
    itemsize = held.itemsize
    size = np.prod(held.whole.astype(np.float64), axis=1)
    if len(held.whole) and (held.whole.min() < 0 or not size.sum() < LIMIT / 2):
        worst = int(np.argmax(np.where((held.whole < 0).any(axis=1), np.inf, size)))
        raise ShardMismatch(
            f"{leaf_name(held.paths, worst)}: a shape of {tuple(held.whole[worst].tolist())} is not one that memory "
            "can hold",
            subject=leaf_name(held.paths, worst),
        )
    if not len(held):
        return
    whole = held.whole[held.leaf]
    # Compared without a sum, which could overflow.
    wrong = ~every(
        (held.shape >= 0) & (held.offsets >= 0) & (held.shape <= whole) & (held.offsets <= whole - held.shape)
    )
    padding = np.arange(held.whole.shape[1]) >= held.ndim[:, None]
    wrong |= ~every(~padding[held.leaf] | ((held.shape == 1) & (whole == 1)))
    wrong |= (itemsize < 0) | (itemsize.astype(np.float64) * size[held.leaf] >= LIMIT / 2)
    if wrong.any():
        at = int(np.argmax(wrong))
        axes = int(held.ndim[held.leaf[at]])
        offsets, shape, total = (part[:axes].tolist() for part in (held.offsets[at], held.shape[at], whole[at]))
        raise ShardMismatch(
            f"{held.path(at)}: rank {held.rank[at]} holds a box at {offsets} of shape {shape}, which does not lie in a "
            f"leaf of shape {total}",
            subject=held.path(at),
        )


def _check_leaves(held: Holdings) -> None:
    if len(held) and not 0 <= int(held.leaf.min()) <= int(held.leaf.max()) < held.leaves:
        at = int(np.argmax((held.leaf < 0) | (held.leaf >= held.leaves)))
        raise ShardMismatch(f"rank {held.rank[at]} names leaf {held.leaf[at]} of {held.leaves}", subject=held.path(at))


def _differs(leaf: Column, value: Column, leaves: int) -> Flags:
    """Which lines have another value than the last line of the same leaf."""
    last = np.zeros(leaves, np.int64)
    last[leaf] = value
    found: Flags = value != last[leaf]
    return found


def _agreed(held: Holdings, differs: Flags, what: str) -> None:
    if not differs.any():
        return
    same = held.leaf == held.leaf[int(np.argmax(differs))]
    some, others = held.rank[same & differs].tolist(), held.rank[same & ~differs].tolist()
    path = held.path(int(np.argmax(differs)))
    raise ShardMismatch(
        f"{path}: {rank_names(some)} and {rank_names(others)} do not agree about {what}",
        subject=path,
        hint="build the same model on every rank, or declare what belongs to one rank with tenuto.per_rank(…)",
    )


def _codes(said: Shards, names: dict[tuple[str, int], int]) -> Column:
    """The dtypes of a rank's rows as all ranks number them."""
    numbers = [names.setdefault(one, len(names)) for one in zip(said.dtypes, said.sizes, strict=True)]
    return np.array(numbers, np.int64)[said.dtype] if numbers else said.dtype


def _joined(parts: Sequence[Column]) -> Column:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _widened(parts: Sequence[Matrix], axes: int, fill: int) -> Matrix:
    found = np.full((sum(map(len, parts)), axes), fill, np.int64)
    at = 0
    for part in parts:
        found[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return found
