"""A part of a saved box as bytes: which runs of the saved row go where in the wanted one, in which chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.plan.columns import Column, Matrix, dot, paces, volumes
from holdfast.plan.holdings import Holdings
from holdfast.plan.reads import cut
from holdfast.plan.reshard import Reshard
from holdfast.plan.slices import Region, box_region


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Run i: `length[i]` bytes from `source[i]` of the saved row on go to `target[i]` of the wanted box's bytes, both
    row-major. `line[i]` is the line of the Reshard, and the runs are in that order; no two of a line can be one."""

    line: Column
    source: Column
    target: Column
    length: Column

    def __len__(self) -> int:
        return len(self.line)


def runs(plan: Reshard, saved: Holdings, wanted: Holdings) -> tuple[Column, Column]:
    """For each line of `plan`, how many runs it has and the bytes of each. One where all lies in one run."""
    axis = _inner(plan, _shapes(plan, saved, wanted))
    behind = paces(plan.shape)[np.arange(len(plan)), axis]
    items = plan.shape[np.arange(len(plan)), axis] * behind
    return volumes(plan.shape) // np.maximum(items, 1), items * saved.itemsize[plan.saved]


def pieces(plan: Reshard, saved: Holdings, wanted: Holdings) -> Pieces:
    """The runs of every line. For parts of many short runs `regions` is cheaper to read by, and says the same."""
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


def regions(plan: Reshard, saved: Holdings, lines: slice | Column = slice(None)) -> list[Region]:
    """For each line, what it asks of its saved row, as a lazy reader takes it. The items then go to
    `wanted_offsets` and `shape` of the wanted box's array, which may be a view with any strides."""
    columns = (saved.shape[plan.saved[lines]], plan.saved_offsets[lines], plan.shape[lines])
    return [box_region(*map(tuple, line)) for line in zip(*(column.tolist() for column in columns), strict=True)]


def chunk_ranges(found: Pieces, row: Column, length: Column, *, chunk_bytes: int) -> tuple[Column, Column, Column]:
    """The bytes of saved rows to read, in whole chunks, each chunk once: (row, low, high), by row and place.

    `row[i]` is the row that run i is of (any number that tells rows apart), `length[i]` the bytes of that row. A range
    is as long as wanted chunks lie side by side. With the rows' offsets in their packs these are what `coalesce` takes.
    """
    order = np.lexsort((found.source, row))
    row, length = row[order], length[order]
    low = found.source[order] // chunk_bytes
    high = -(-(found.source + found.length)[order] // chunk_bytes)
    if not len(order):
        return row, low, high
    first = np.concatenate([np.ones(1, bool), row[1:] != row[:-1]])
    # The furthest end so far within each row: the rows are put far apart first.
    apart = (np.cumsum(first) - 1) * (int(high.max()) + 1)
    reach = np.maximum.accumulate(high + apart) - apart
    first[1:] |= low[1:] > reach[:-1]
    starts = np.flatnonzero(first)
    stop = np.minimum(np.maximum.reduceat(high, starts) * chunk_bytes, length[starts])
    return row[starts], low[starts] * chunk_bytes, stop


def _shapes(plan: Reshard, saved: Holdings, wanted: Holdings) -> tuple[Matrix, Matrix]:
    axes = plan.shape.shape[1]
    both = ((saved.shape, plan.saved), (wanted.shape, plan.wanted))
    theirs, mine = (
        np.pad(shape[lines], ((0, 0), (0, axes - shape.shape[1])), constant_values=1) for shape, lines in both
    )
    return theirs, mine


def _inner(plan: Reshard, shapes: tuple[Matrix, Matrix]) -> Column:
    """The axis at which runs begin: along all behind it the part is all of both boxes."""
    partly = np.zeros(plan.shape.shape, bool)
    for one in shapes:
        partly |= plan.shape != one
    axes = plan.shape.shape[1]
    last = axes - 1 - np.argmax(partly[:, ::-1], axis=1)
    found: Column = np.where(partly.any(axis=1), last, 0)
    return found
