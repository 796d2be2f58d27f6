"""Coalesced reads: which ranges of a pack to read for a set of wanted leaves, and which chunks lie in each.

Columns instead of an object for each chunk: a checkpoint of ten thousand small leaves costs no more than its bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

Column = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

TASK_BYTES: Final = 1 << 20
GAP_BYTES: Final = 256 << 10
RUN_BYTES: Final = 256 << 10
"""About how many bytes of small chunks are handled at once: they still lie in the processor's cache."""
SMALL_BYTES: Final = 16 << 10
"""Below this the cost of handling a piece by itself is more than that of copying it once more."""


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Bytes `start..stop-1` of a pack, read at once; the runs `first..last-1` of the plan lie in them.

    `nbytes`: of the chunks, without what is unwanted between them. `shortest`: of the shortest piece of a leaf.
    """

    start: int
    stop: int
    first: int
    last: int
    nbytes: int
    shortest: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to read of one pack: its wanted chunks in the order in which they lie there.

    Columns, int64 [chunks]: chunk i is the `size[i]` bytes at `position[i]` of the pack, and the bytes from `start[i]`
    on of the `want[i]`-th wanted leaf. `row` is its place in the index's table of digests. Run r is the chunks
    `runs[r]..runs[r + 1] - 1`: they lie one after the other in the pack, and either belong to one leaf or are pieces of
    small ones.
    """

    want: Column
    start: Column
    size: Column
    position: Column
    row: Column
    runs: Sequence[int]
    tasks: Sequence[ReadTask]


def cut(length: Column, step: int) -> tuple[Column, Column]:
    """Pieces of at most `step` bytes: which row each is of, and where in it the piece begins. int64 [pieces] each; rows
    of no bytes have no piece."""
    counts = -(-length // step)
    row = np.repeat(np.arange(len(length)), counts)
    # A running count minus where the row began.
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return row, within * step


def coalesce(
    want: Column,
    offset: Column,
    length: Column,
    chunk_start: Column,
    *,
    chunk_bytes: int,
    task_bytes: int = TASK_BYTES,
    gap_bytes: int = GAP_BYTES,
) -> ReadPlan:
    """Tasks that cover every byte of the wanted leaves once, in the order of the pack. Wanted ranges may overlap.

    One row for each wanted leaf, int64 [wanted]: `want` is what the plan calls it, `offset` and `length` are bytes in
    the pack, `chunk_start` is the row of its first digest. A task is at most `task_bytes` long unless one chunk is
    longer, and spans gaps of unwanted bytes up to `gap_bytes`.
    """
    row, start = cut(length, max(task_bytes // chunk_bytes, 1) * chunk_bytes)
    order = np.argsort(offset[row] + start, kind="stable")
    row, start = row[order], start[order]
    position = offset[row] + start
    size = np.minimum(length[row] - start, max(task_bytes // chunk_bytes, 1) * chunk_bytes)
    # One leaf may be wanted whole and in part: then a piece may end before the one that begins before it does.
    reached = np.maximum.accumulate(position + size)
    bounds = _groups(position, reached, task_bytes, gap_bytes)
    piece, within = cut(size, chunk_bytes)
    # Pieces and chunks: a piece is what a task reads of a leaf, whole chunks of it.
    at = position[piece] + within
    counts = np.minimum(size[piece] - within, chunk_bytes)
    first = np.searchsorted(piece, bounds)
    # By the leaf: the short end of a long one is not handled as a small leaf is.
    runs = _runs(want[row][piece], at, counts, (length < SMALL_BYTES)[row][piece], first[:-1])
    return ReadPlan(
        want=want[row][piece],
        start=start[piece] + within,
        size=counts,
        position=at,
        row=chunk_start[row][piece] + (start[piece] + within) // chunk_bytes,
        runs=runs.tolist(),
        tasks=_tasks(position, size, bounds, np.searchsorted(runs, first)),
    )


def _groups(start: Column, stop: Column, limit: int, gap: int) -> Column:
    """Where to cut ranges, by where they begin, into groups of at most `limit` bytes, or of one longer range, without a
    gap of more than `gap` bytes inside: the first of each, and how many there are. `stop`: where all up to each end."""
    starts, stops = start.tolist(), stop.tolist()
    breaks = [*(np.flatnonzero(start[1:] - stop[:-1] > gap) + 1).tolist(), len(starts)]
    bounds, at, coming = [0], 0, 0
    while at < len(starts):
        while breaks[coming] <= at:
            coming += 1
        fits = bisect_right(stops, starts[at] + limit, at)
        at = max(at + 1, min(fits, breaks[coming]))
        bounds.append(at)
    return np.array(bounds, np.int64)


def _runs(want: Column, position: Column, size: Column, small: Flags, tasks: Column) -> Column:
    """The first chunk of each run, and how many chunks there are. A run begins with each task of `tasks`."""
    if not len(want):
        return np.zeros(1, np.int64)
    stop = position + size
    block = (stop - 1) // RUN_BYTES
    apart = (position[1:] != stop[:-1]) | (block[1:] != block[:-1])
    apart |= (want[1:] != want[:-1]) & ~(small[1:] & small[:-1])
    begins = np.concatenate([np.ones(1, bool), apart])
    begins[tasks] = True
    return np.append(np.flatnonzero(begins), len(want))


def _tasks(position: Column, size: Column, bounds: Column, runs: Column) -> list[ReadTask]:
    if not len(position):
        return []
    firsts = bounds[:-1]
    columns = (
        position[firsts],
        np.maximum.reduceat(position + size, firsts),
        runs[:-1],
        runs[1:],
        np.add.reduceat(size, firsts),
        np.minimum.reduceat(size, firsts),
    )
    return [ReadTask(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
