"""The proof that every item of every leaf is written exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from tenuto.errors import ShardMismatch
from tenuto.sharding.holdings import (
    LIMIT,
    Column,
    Flags,
    Holdings,
    Matrix,
    begins,
    check,
    dot,
    every,
    item_name,
    leaf_name,
    paces,
    rank_names,
    volumes,
)

# --------------------------------------------------------------------------------------------------
# Whether boxes tile what they lie in: every item in exactly one of them.
#
# How often each item is covered is a sum of the boxes' indicator functions. Its mixed difference along all axes is
# nothing but signed points, two to the power of the axes for each box: its corners. The sum is 1 everywhere in the
# whole and 0 outside exactly when these points cancel against the whole's own corners, so a sort of corners decides
# what would otherwise be a comparison of each box with each other one; an overlap and a hole of equal size cannot
# hide each other. The first point in row-major order that does not cancel is the first wrong item, and what remains
# there is how far its count is from 1: every point that adds to an item's count lies nowhere behind it along any
# axis, so before it.
#
# Only axes along which some box is a part count, which of most leaves is one or none.

MOST_SPLIT_AXES: Final = 12
"""Along which one tensor is divided: each one doubles the corners."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The first wrong item of the first wrong whole: it is covered `times` times."""

    group: int
    place: tuple[int, ...]
    times: int


def first_fault(group: Column, offsets: Matrix, shape: Matrix, whole: Matrix) -> Fault | None:
    """The first whole whose boxes do not tile it; None where all are tiled.

    Box i lies in whole `group[i]`, which begins at 0 and has the shape `whole[group[i]]`: this must hold, `check` sees
    to it. Boxes and wholes without items count for nothing.
    """
    kept = every(shape > 0)
    if not kept.all():
        group, offsets, shape = group[kept], offsets[kept], shape[kept]
    split = _split(group, offsets, shape, whole)
    wanted = np.flatnonzero(every(whole > 0))
    pattern = split @ (1 << np.arange(split.shape[1], dtype=np.int64))
    found: list[Fault] = []
    for code in np.unique(pattern[wanted]).tolist():
        groups = wanted[pattern[wanted] == code]
        axes = np.flatnonzero([code >> axis & 1 for axis in range(split.shape[1])])
        if len(axes) > MOST_SPLIT_AXES:
            raise ShardMismatch(f"a leaf is divided along {len(axes)} axes; {MOST_SPLIT_AXES} can be checked")
        rows = np.flatnonzero(pattern[group] == code)
        for some in _batches(whole[groups][:, axes] + 1):
            fault = _fault(rows, groups[some], axes, (group, offsets, shape, whole))
            if fault is not None:
                found.append(fault)
                break
    return min(found, key=lambda fault: fault.group, default=None)


def _split(group: Column, offsets: Matrix, shape: Matrix, whole: Matrix) -> Flags:
    """Along which axes some box of each whole is only a part of it."""
    split = np.zeros(whole.shape, bool)
    for axis in range(whole.shape[1]):
        part = shape[:, axis] != whole[group, axis]
        split[group[part], axis] = True
    return split


def _batches(extents: Matrix) -> Iterator[slice]:
    """Wholes that can be counted through together: all of them, nearly always."""
    sizes = np.prod(extents.astype(np.float64), axis=1)
    if sizes.max(initial=0) >= LIMIT / 4:
        raise ShardMismatch("a leaf is too large for its items to be counted")
    number = (np.cumsum(sizes) // (LIMIT / 4)).astype(np.int64)
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(sizes)]
    for low, high in pairwise(bounds):
        yield slice(low, high)


def _fault(rows: Column, groups: Column, axes: Column, boxes: tuple[Column, Matrix, Matrix, Matrix]) -> Fault | None:
    """The first fault of `groups`, whose boxes are among `rows` and which are all split along `axes`."""
    group, offsets, shape, whole = boxes
    number = np.full(len(whole), -1, np.int64)
    number[groups] = np.arange(len(groups))
    rows = rows[number[group[rows]] >= 0]
    lengths = whole[np.ix_(groups, axes)]
    pace = paces(lengths + 1)
    first = begins(volumes(lengths + 1))
    line = number[group[rows]]
    at = first[line] + dot(offsets[np.ix_(rows, axes)], pace[line])
    mine = _corners(at, shape[np.ix_(rows, axes)] * pace[line], 1)
    theirs = _corners(first[:-1], lengths * pace, 0)
    # The sign is the last bit of what is sorted, so that nothing else need be put in order by it.
    marks = np.concatenate([mine, theirs])
    marks.sort()
    key = marks >> 1
    bounds = np.flatnonzero(np.concatenate([np.ones(1, bool), key[1:] != key[:-1]]))
    total = np.add.reduceat((marks & 1) * 2 - 1, bounds)
    wrong = np.flatnonzero(total)
    if not len(wrong):
        return None
    point = int(key[bounds[wrong[0]]])
    which = int(np.searchsorted(first, point, side="right")) - 1
    place = [0] * whole.shape[1]
    rest = point - int(first[which])
    for axis, step in zip(axes.tolist(), pace[which].tolist(), strict=True):
        place[axis], rest = divmod(rest, step)
    return Fault(int(groups[which]), tuple(place), 1 + int(total[wrong[0]]))


def _corners(at: Column, steps: Matrix, sign: int) -> Column:
    """Every corner of boxes that begin at `at` and are `steps` long along each axis, twice its number, and 1 more where
    it adds. `sign`: whether the first does."""
    keys = at[:, None] * 2 + sign
    for axis in range(steps.shape[1]):
        keys = np.concatenate([keys, (keys ^ 1) + 2 * steps[:, axis, None]], axis=1)
    return keys.reshape(-1)


def check_coverage(boxes: Holdings) -> None:
    """Raises ShardMismatch, naming the leaf, the first item that is missing or there twice, and the ranks, unless every
    item of every leaf is in exactly one box. A leaf without items must have a box as well, which says that it exists.

    For boxes as they are written (`written`), or as a checkpoint names them; replicas are taken out by `assign`.
    """
    check(boxes)
    there = np.zeros(boxes.leaves, bool)
    there[boxes.leaf] = True
    if not there.all():
        path = leaf_name(boxes.paths, int(np.argmin(there)))
        raise ShardMismatch(
            f"{path}: no rank holds any of it",
            subject=path,
            hint="keep the tensor on one rank at least, or leave the entry out of the state on every rank",
        )
    fault = first_fault(boxes.leaf, boxes.offsets, boxes.shape, boxes.whole)
    if fault is not None:
        raise _error(boxes, fault)


def _error(boxes: Holdings, fault: Fault) -> ShardMismatch:
    path = leaf_name(boxes.paths, fault.group)
    axes = int(boxes.ndim[fault.group])
    item, whole = item_name(fault.place[:axes]), boxes.whole[fault.group, :axes].tolist()
    of_leaf = boxes.leaf == fault.group
    if not fault.times:
        others = rank_names(boxes.rank[of_leaf].tolist())
        return ShardMismatch(
            f"{path}: {item} of shape {whole} is missing; other parts are on {others}",
            subject=path,
            hint="every part of a sharded tensor must be in the state of one rank at least",
        )
    holders = np.flatnonzero(of_leaf & _holds(boxes, fault))
    seen = [f"rank {boxes.rank[at]} {boxes.box(int(at))}" for at in holders[:2]]
    return ShardMismatch(
        f"{path}: {item} of shape {whole} is there {fault.times} times, in boxes that are not the same: "
        f"{' and '.join(seen)}",
        subject=path,
        hint="replicas hold equal boxes, whose bytes can be compared; shards of one tensor do not overlap",
    )


def _holds(boxes: Holdings, fault: Fault) -> Flags:
    """Which boxes hold the item."""
    place = np.array(fault.place, np.int64)
    return every((boxes.offsets <= place) & (place < boxes.offsets + boxes.shape))
