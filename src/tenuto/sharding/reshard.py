"""Plans the change of layout: for every box a rank wants, the parts of saved boxes that form it.

Boxes of two layouts are intersected axis by axis, without comparing each pair. Saved boxes of a leaf with the same
interval along the first axis form one slab; a wanted box meets few slabs, and few intervals of the next axis within
each. So a grid of ranks costs the sum of its intersections along each axis, not their product. Intervals are looked up
by their start among those of similar length, so that one long interval does not make all later ones candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from tenuto.errors import ShardMismatch
from tenuto.record import record
from tenuto.sharding.coalesce import cut
from tenuto.sharding.coverage import Fault, first_fault
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
    renumbered,
    volumes,
)
from tenuto.sharding.slices import Region, box_region


@record(eq=False)
class BoxColumns:
    """Boxes with at least one item; only boxes of one group can meet.

    group: int64 [n], numbered without gaps.
    offsets, shape: int64 [n, d].
    """

    group: Column
    offsets: Matrix
    shape: Matrix


def intersect(saved: BoxColumns, wanted: BoxColumns, extent: Matrix) -> tuple[Column, Column]:
    """Returns every pair of a wanted and a saved box with an item in common, as columns (wanted, saved), sorted.

    extent: int64 [groups, d], an upper bound for the ends of each group's boxes.
    """
    node, root = saved.group, np.arange(len(extent))
    who, at = np.arange(len(wanted.group)), wanted.group
    for axis in range(extent.shape[1]):
        begin, length = saved.offsets[:, axis], saved.shape[:, axis]
        low, long = wanted.offsets[:, axis], wanted.shape[:, axis]
        ends = extent[:, axis]
        if np.array_equal(length, ends[saved.group]):
            continue  # every saved box spans this axis, so it is met
        slabs = _Slabs(node, begin, length, ends[root])
        who, at = slabs.met(who, at, low, long)
        node, root = slabs.node, root[slabs.parent]
    # Only distinct boxes are left; if several saved boxes are equal, each is met.
    order = np.argsort(node, kind="stable")
    first = np.searchsorted(node[order], np.arange(len(root) + 1))
    pair, within = cut(np.diff(first)[at], 1)
    who, line = who[pair], order[first[at[pair]] + within]
    sort = np.lexsort((line, who))
    return who[sort], line[sort]


class _Slabs:
    """The distinct intervals of one axis below each node."""

    def __init__(self, node: Column, begin: Column, length: Column, extent: Column) -> None:
        """Builds the slabs. `extent[v]`: an upper bound for the ends of node v's boxes."""
        kind = np.frexp(length.astype(np.float64))[1].astype(np.int64)
        kinds, kind = np.unique(kind, return_inverse=True)
        nodes, classes = len(extent), len(kinds)
        code = node * classes + kind
        group = renumbered(code, nodes * classes)
        groups = int(group.max(initial=-1)) + 1
        owner = np.zeros(groups, np.int64)
        owner[group] = node
        if extent[owner].astype(np.float64).sum() >= LIMIT:
            raise ShardMismatch("the leaves are too large to be looked up in")
        self._base = begins(extent[owner])
        self._first = np.searchsorted(owner, np.arange(nodes + 1))
        """The first group of each node; a node has one group for each class of lengths."""
        self._longest = np.zeros(groups, np.int64)
        np.maximum.at(self._longest, group, length)
        key = self._base[group] + begin
        order = np.lexsort((length, key))
        key, length = key[order], length[order]
        fresh = np.concatenate([np.ones(1, bool), (key[1:] != key[:-1]) | (length[1:] != length[:-1])])[: len(order)]
        self.node = np.empty(len(order), np.int64)
        self.node[order] = np.cumsum(fresh) - 1
        """The slab of each saved box."""
        self._key, self._end = key[fresh], (key + length)[fresh]
        self.parent = owner[group[order]][fresh]

    def met(self, who: Column, at: Column, low: Column, long: Column) -> tuple[Column, Column]:
        """Returns the pairs of boxes `who`, at nodes `at`, and slabs that meet; `low` and `long` give the boxes'
        intervals."""
        pair, within = cut(np.diff(self._first)[at], 1)
        group = self._first[at[pair]] + within
        who = who[pair]
        base, begin = self._base[group], low[who]
        first = np.searchsorted(self._key, base + np.maximum(begin - self._longest[group] + 1, 0))
        last = np.searchsorted(self._key, base + begin + long[who])
        pair, within = cut(last - first, 1)
        slab = first[pair] + within
        kept = self._end[slab] > (base + begin)[pair]
        return who[pair[kept]], slab[kept]


# The overlap of a region of a leaf with one part of that leaf.


@record
class Overlap:
    """The items `region` of a part, which fill `where` of the result. Its axes are the leaf's; an integer index leaves
    one of length 1."""

    region: Region
    where: tuple[slice, ...]


def overlap(found: Region, whole: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]) -> Overlap | None:
    """Returns the overlap of a region of a leaf of shape `whole` with its part at `offsets`; None if empty."""
    if not found.size or not prod(shape):
        return None
    place, first = found.first, 0
    pace, part_pace = prod(whole), prod(shape)
    counts, strides, where = [], [], []
    for axis, (length, extent) in enumerate(zip(whole, shape, strict=True)):
        pace, part_pace = pace // length, part_pace // extent
        low, place = divmod(place, pace)
        # A single item has no step.
        step = max(found.strides[axis] // pace, 1) if found.counts[axis] > 1 else 1
        begin = max(-(-(offsets[axis] - low) // step), 0)
        end = min(-(-(offsets[axis] + extent - low) // step), found.counts[axis])
        if begin >= end:
            return None
        first += (low + begin * step - offsets[axis]) * part_pace
        counts.append(end - begin)
        strides.append(step * part_pace)
        last = found.counts[axis]
        where.append(slice(last - end, last - begin) if found.flipped[axis] else slice(begin, end))
    inside = Region(first, tuple(counts), tuple(strides), found.flipped, tuple(counts))
    return Overlap(inside, tuple(where))


def bands(one: Overlap, items: int) -> Iterator[Overlap]:
    """Splits an overlap into bands of about `items` items, at least a line each, along the first axis over 1."""
    region = one.region
    axis = next((axis for axis, count in enumerate(region.counts) if count > 1), None)
    if axis is None or region.size <= items:
        yield one
        return
    count = region.counts[axis]
    step = max(items // (region.size // count), 1)
    for low in range(0, count, step):
        high = min(low + step, count)
        begin = count - high if region.flipped[axis] else low
        counts = (*region.counts[:axis], high - low, *region.counts[axis + 1 :])
        start = one.where[axis].start
        where = (*one.where[:axis], slice(start + low, start + high), *one.where[axis + 1 :])
        first = region.first + begin * region.strides[axis]
        yield Overlap(Region(first, counts, region.strides, region.flipped, counts), where)


@record(eq=False)
class Reshard:
    """The parts of saved boxes that form the wanted ones, ordered by `wanted`, then `saved`.

    Line i is a box of `shape[i]` that begins at `saved_offsets[i]` of line `saved[i]` of the saved Holdings and at
    `wanted_offsets[i]` of line `wanted[i]` of the wanted ones. Every item of every wanted box is in exactly one line.
    """

    wanted: Column
    saved: Column
    wanted_offsets: Matrix
    saved_offsets: Matrix
    shape: Matrix

    def __len__(self) -> int:
        return len(self.wanted)

    def take(self, lines: Column) -> Reshard:
        return Reshard(
            self.wanted[lines],
            self.saved[lines],
            self.wanted_offsets[lines],
            self.saved_offsets[lines],
            self.shape[lines],
        )

    def overlap(self, line: int, saved: Holdings) -> Overlap:
        """Returns the items of the saved row that one line takes, and where in the wanted box's array they go."""
        have = int(self.saved[line])
        axes = int(saved.ndim[saved.leaf[have]])
        columns = saved.shape[have], self.saved_offsets[line], self.wanted_offsets[line], self.shape[line]
        row, there, here, shape = (tuple(one[:axes].tolist()) for one in columns)
        where = tuple(slice(begin, begin + extent) for begin, extent in zip(here, shape, strict=True))
        return Overlap(box_region(row, there, shape), where)


def saved_spans(plan: Reshard, saved: Holdings) -> tuple[Column, Column]:
    """Returns, for each line, the bytes of its saved row between the first and the last that it takes: the first, and
    the one behind the last."""
    theirs = _wide(saved.shape[plan.saved], plan.shape.shape[1], 1)
    pace, itemsize = paces(theirs), saved.itemsize[plan.saved]
    first = dot(plan.saved_offsets, pace)
    return first * itemsize, (first + dot(plan.shape - 1, pace) + 1) * itemsize


def reshard(saved: Holdings, wanted: Holdings) -> Reshard:
    """Plans what every wanted box takes from which saved one; both sides number leaves alike.

    Wanted boxes may overlap, and may be those of one rank only. Raises ShardMismatch, naming the leaf, if its global
    shape or item size differs from the checkpoint's, or an item is missing or repeated there.
    """
    check(saved)
    check(wanted)
    lines, others, groups = _of_same_leaves(saved, wanted)
    axes = max(saved.whole.shape[1], wanted.whole.shape[1])
    have = BoxColumns(
        groups[saved.leaf[lines]], _wide(saved.offsets[lines], axes, 0), _wide(saved.shape[lines], axes, 1)
    )
    want = BoxColumns(
        groups[wanted.leaf[others]], _wide(wanted.offsets[others], axes, 0), _wide(wanted.shape[others], axes, 1)
    )
    extent = _wide(wanted.whole[np.flatnonzero(groups >= 0)], axes, 1)
    who, which = intersect(have, want, extent)
    low = np.maximum(have.offsets[which], want.offsets[who])
    high = np.minimum(have.offsets[which] + have.shape[which], want.offsets[who] + want.shape[who])
    inside = low - want.offsets[who]
    fault = first_fault(who, inside, high - low, want.shape)
    if fault is not None:
        raise _error(wanted, int(others[fault.group]), fault)
    return Reshard(others[who], lines[which], inside, low - have.offsets[which], high - low)


def _of_same_leaves(saved: Holdings, wanted: Holdings) -> tuple[Column, Column, Column]:
    """Returns the non-empty lines of both sides whose leaves are wanted, and each leaf's number among these, or -1."""
    others = np.flatnonzero(every(wanted.shape > 0))
    asked = np.zeros(wanted.leaves, bool)
    asked[wanted.leaf] = True
    _check_leaves(saved, wanted, asked)
    asked = np.zeros(wanted.leaves, bool)
    asked[wanted.leaf[others]] = True
    groups = np.where(asked, np.cumsum(asked) - 1, -1)
    known = saved.leaf < wanted.leaves
    known[known] = asked[saved.leaf[known]]
    return np.flatnonzero(known & every(saved.shape > 0)), others, groups


def _check_leaves(saved: Holdings, wanted: Holdings, asked: Flags) -> None:
    """Raises ShardMismatch unless the checkpoint has every wanted leaf with the same shape and item size."""
    leaves = np.flatnonzero(asked)
    missing = leaves[leaves >= saved.leaves]
    if len(missing):
        path = leaf_name(wanted.paths, int(missing[0]))
        raise ShardMismatch(
            f"{path}: the checkpoint has no such leaf",
            subject=path,
            hint="`tenuto show WHERE` lists the leaves that it has",
        )
    axes = max(saved.whole.shape[1], wanted.whole.shape[1])
    here, there = _wide(wanted.whole[leaves], axes, 1), _wide(saved.whole[leaves], axes, 1)
    differs = (here != there).any(axis=1) | (wanted.ndim[leaves] != saved.ndim[leaves])
    if differs.any():
        leaf = int(leaves[np.argmax(differs)])
        path = leaf_name(wanted.paths, leaf)
        was, now = (tuple(one.whole[leaf, : one.ndim[leaf]].tolist()) for one in (saved, wanted))
        raise ShardMismatch(f"{path}: of shape {was} in the checkpoint, and of {now} here", subject=path)
    size = np.full(max(saved.leaves, wanted.leaves), -1, np.int64)
    size[saved.leaf] = saved.itemsize
    other = (size[wanted.leaf] >= 0) & (size[wanted.leaf] != wanted.itemsize)
    if other.any():
        at = int(np.argmax(other))
        path, was, now = wanted.path(at), size[wanted.leaf[at]], wanted.itemsize[at]
        raise ShardMismatch(f"{path}: items of {was} bytes in the checkpoint, and of {now} here", subject=path)


def _wide(lines: Matrix, axes: int, fill: int) -> Matrix:
    """Pads to as many columns as the other side has."""
    return np.pad(lines, ((0, 0), (0, axes - lines.shape[1])), constant_values=fill)


def _error(wanted: Holdings, at: int, fault: Fault) -> ShardMismatch:
    path, box = wanted.path(at), wanted.box(at)
    place = [one + offset for one, offset in zip(fault.place, box.offsets, strict=False)]
    problem = "is not in the checkpoint" if not fault.times else f"is {fault.times} times in the checkpoint"
    return ShardMismatch(
        f"{path}: {item_name(place)} {problem}; rank {wanted.rank[at]} wants {box}",
        subject=path,
        hint="`tenuto verify WHERE` names all that is damaged",
    )


# The parts as bytes: which runs of a saved row go where in the wanted box.


@record(eq=False)
class Pieces:
    """Contiguous runs of bytes: `length[i]` bytes from `source[i]` of the saved row go to `target[i]` of the wanted
    box.

    Both sides are row-major. The runs are ordered by `line[i]`, the line of the Reshard; no two of a line can be
    merged.
    """

    line: Column
    source: Column
    target: Column
    length: Column

    def __len__(self) -> int:
        return len(self.line)


def runs(plan: Reshard, saved: Holdings, wanted: Holdings) -> tuple[Column, Column]:
    """Returns the number of runs of each line of `plan`, and the bytes of each run."""
    axis = _inner(plan, _shapes(plan, saved, wanted))
    behind = paces(plan.shape)[np.arange(len(plan)), axis]
    items = plan.shape[np.arange(len(plan)), axis] * behind
    return volumes(plan.shape) // np.maximum(items, 1), items * saved.itemsize[plan.saved]


def pieces(plan: Reshard, saved: Holdings, wanted: Holdings) -> Pieces:
    """Returns the runs of every line. For many short runs `Reshard.overlap` is equivalent and cheaper to read by."""
    theirs, mine = _shapes(plan, saved, wanted)
    count, length = runs(plan, saved, wanted)
    axis = _inner(plan, (theirs, mine))
    line, number = cut(count, 1)
    outer = np.arange(plan.shape.shape[1]) < axis[:, None]
    lengths = np.where(outer, plan.shape, 1)
    steps = paces(lengths)
    from_pace, to_pace = paces(theirs), paces(mine)
    source = dot(plan.saved_offsets, from_pace)[line]
    target = dot(plan.wanted_offsets, to_pace)[line]
    for one in range(plan.shape.shape[1]):
        if not outer[:, one].any():
            break
        place = number // steps[line, one] % lengths[line, one]
        source += place * from_pace[line, one]
        target += place * to_pace[line, one]
    itemsize = saved.itemsize[plan.saved][line]
    return Pieces(line, source * itemsize, target * itemsize, length[line])


def _shapes(plan: Reshard, saved: Holdings, wanted: Holdings) -> tuple[Matrix, Matrix]:
    axes = plan.shape.shape[1]
    both = ((saved.shape, plan.saved), (wanted.shape, plan.wanted))
    theirs, mine = (
        np.pad(shape[lines], ((0, 0), (0, axes - shape.shape[1])), constant_values=1) for shape, lines in both
    )
    return theirs, mine


def _inner(plan: Reshard, shapes: tuple[Matrix, Matrix]) -> Column:
    """Returns the axis at which runs begin: the part spans both boxes along all later axes."""
    partly = np.zeros(plan.shape.shape, bool)
    for one in shapes:
        partly |= plan.shape != one
    axes = plan.shape.shape[1]
    last = axes - 1 - np.argmax(partly[:, ::-1], axis=1)
    found: Column = np.where(partly.any(axis=1), last, 0)
    return found
