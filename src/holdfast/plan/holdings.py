"""Who holds which boxes: columns over all ranks, checked before anything is planned with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import ShardMismatch
from holdfast.model.box import Box
from holdfast.plan.columns import LIMIT, Column, Flags, Matrix, Ranks, begins, every, lines_of, volumes
from holdfast.plan.naming import leaf_name, rank_names


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
        hint="build the same model on every rank, or declare what belongs to one rank with holdfast.per_rank(…)",
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
