"""Plans coalesced reads: which ranges of a pack to read for the wanted leaves, and which chunks lie in each.

Uses columns instead of one object for each chunk, so planning ten thousand small leaves costs no more than their bytes.
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
"""About how many bytes of small chunks are processed at once, so that they stay in the processor's cache."""
SMALL_BYTES: Final = 16 << 10
"""Below this size, handling a piece by itself costs more than copying it once more."""


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Bytes `start..stop-1` of a pack, read at once; they contain the plan's runs `first..last-1`.

    nbytes: bytes of the chunks, without unwanted bytes between them.
    shortest: bytes of the shortest piece of a leaf.
    """

    start: int
    stop: int
    first: int
    last: int
    nbytes: int
    shortest: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The reads of one pack: its wanted chunks in the order in which they lie there.

    Columns are int64 [chunks]: chunk i is the `size[i]` bytes at `position[i]` of the pack, and the bytes from
    `start[i]` on of the `want[i]`-th wanted leaf.

    row: each chunk's row in the index's table of digests.
    runs: run r is the chunks `runs[r]..runs[r + 1] - 1`; they are adjacent in the pack, and belong to one leaf or to
        several small ones.
    """

    want: Column
    start: Column
    size: Column
    position: Column
    row: Column
    runs: Sequence[int]
    tasks: Sequence[ReadTask]


def cut(length: Column, step: int) -> tuple[Column, Column]:
    """Cuts rows into pieces of at most `step` bytes.

    Returns each piece's row and its start in that row, int64 [pieces] each; empty rows have no piece.
    """
    counts = -(-length // step)
    row = np.repeat(np.arange(len(length)), counts)
    # A running count minus the row's first piece.
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
    """Plans tasks that cover every byte of the wanted leaves once, in pack order. Wanted ranges may overlap.

    want: int64 [wanted], the plan's number for each wanted leaf.
    offset, length: int64 [wanted], bytes in the pack.
    chunk_start: int64 [wanted], the row of each leaf's first digest.

    A task has at most `task_bytes` bytes, unless one chunk is longer, and spans unwanted gaps of up to `gap_bytes`.
    """
    row, start = cut(length, max(task_bytes // chunk_bytes, 1) * chunk_bytes)
    order = np.argsort(offset[row] + start, kind="stable")
    row, start = row[order], start[order]
    position = offset[row] + start
    size = np.minimum(length[row] - start, max(task_bytes // chunk_bytes, 1) * chunk_bytes)
    # A leaf may be wanted in full and in part: then a piece may end before an earlier one does.
    reached = np.maximum.accumulate(position + size)
    bounds = _groups(position, reached, task_bytes, gap_bytes)
    piece, within = cut(size, chunk_bytes)
    # A piece is what one task reads of a leaf, in complete chunks.
    at = position[piece] + within
    counts = np.minimum(size[piece] - within, chunk_bytes)
    first = np.searchsorted(piece, bounds)
    # Uses the leaf's length: the short end of a long leaf is not treated as a small leaf.
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
    """Groups ranges, sorted by start, into at most `limit` bytes (or one longer range) without a gap over `gap`.

    Returns the first range of each group and, last, the number of ranges. `stop`: the furthest end of all ranges so
    far.
    """
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
    """Returns the first chunk of each run and, last, the number of chunks. Each task of `tasks` begins a run."""
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
