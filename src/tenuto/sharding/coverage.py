"""Proves that every item of every leaf is written exactly once.

The number of boxes that cover an item is a sum of indicator functions. The mixed difference of that sum along all axes
is nonzero only at box corners, 2^axes for each box. The boxes tile their target exactly when these signed points cancel
against the target's own corners, so sorting corners replaces comparing each pair of boxes; an overlap and a hole of
equal size cannot hide each other. The first point in row-major order that does not cancel is the first wrong item, and
its remainder is how far that item's count is from 1: every point that contributes to an item's count precedes it.

Only axes along which some box is a part count, which for most leaves is one or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from tenuto.errors import ShardMismatch
from tenuto.record import record
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

MOST_SPLIT_AXES: Final = 12
"""Maximum number of split axes of one tensor: each doubles the corners."""


@record
class Fault:
    """The first wrong item of the first wrong target; it is covered `times` times."""

    group: int
    place: tuple[int, ...]
    times: int


def first_fault(group: Column, offsets: Matrix, shape: Matrix, whole: Matrix) -> Fault | None:
    """Returns the first target that its boxes do not tile; None if all are tiled.

    Box i lies in target `group[i]`, which begins at 0 and has the shape `whole[group[i]]`; `check` must have verified
    this. Empty boxes and targets are ignored.
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
    """Returns the axes along which some box of each target is only a part."""
    split = np.zeros(whole.shape, bool)
    for axis in range(whole.shape[1]):
        part = shape[:, axis] != whole[group, axis]
        split[group[part], axis] = True
    return split


def _batches(extents: Matrix) -> Iterator[slice]:
    """Yields ranges of targets whose items can be counted in one pass, nearly always a single range."""
    sizes = np.prod(extents.astype(np.float64), axis=1)
    if sizes.max(initial=0) >= LIMIT / 4:
        raise ShardMismatch("a leaf is too large for its items to be counted")
    number = (np.cumsum(sizes) // (LIMIT / 4)).astype(np.int64)
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(sizes)]
    for low, high in pairwise(bounds):
        yield slice(low, high)


def _fault(rows: Column, groups: Column, axes: Column, boxes: tuple[Column, Matrix, Matrix, Matrix]) -> Fault | None:
    """Returns the first fault of `groups`, whose boxes are among `rows` and which are all split along `axes`."""
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
    # The sign is the last bit of the sort key, so nothing else needs reordering.
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
    """Returns every corner of the boxes, twice its number, plus 1 where it counts positive.

    at: where the boxes begin.
    steps: their length along each axis.
    sign: 1 if the first corner counts positive.
    """
    keys = at[:, None] * 2 + sign
    for axis in range(steps.shape[1]):
        keys = np.concatenate([keys, (keys ^ 1) + 2 * steps[:, axis, None]], axis=1)
    return keys.reshape(-1)


def check_coverage(boxes: Holdings) -> None:
    """Raises ShardMismatch unless every item of every leaf is in exactly one box.

    The error names the leaf, the first item that is missing or repeated, and the ranks. An empty leaf needs a box as
    well, to show that it exists. Applies to boxes as written (`written`) or as a checkpoint names them; `assign` has
    already removed replicas.
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
    """Returns which boxes contain the item."""
    place = np.array(fault.place, np.int64)
    return every((boxes.offsets <= place) & (place < boxes.offsets + boxes.shape))
