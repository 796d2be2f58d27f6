"""Plans coalesced reads: which ranges of a pack to read for the wanted chunks, and which chunks lie in each.

Uses columns instead of one object for each chunk, so planning ten thousand small leaves costs no more than their bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tenuto.codec.chunk_map import Chunks
from tenuto.record import record

Column = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Bytes = np.ndarray[Any, np.dtype[np.float64]]

TASK_BYTES: Final = 1 << 20
GAP_BYTES: Final = 256 << 10
RUN_BYTES: Final = 256 << 10
"""About how many bytes of small chunks are processed at once, so that they stay in the processor's cache."""
SMALL_BYTES: Final = 16 << 10
"""Below this size, handling a piece by itself costs more than copying it once more."""


@record
class ReadTask:
    """Bytes `start..stop-1` of a pack, read at once; they contain the plan's runs `first..last-1`.

    nbytes: the bytes of the chunks, without unwanted ones between them.
    shortest: the bytes of the shortest piece of a row.
    """

    start: int
    stop: int
    first: int
    last: int
    nbytes: int
    shortest: int


@record
class ReadPlan:
    """The reads of one pack: its wanted chunks in the order in which they lie there.

    Run r is the chunks `runs[r]..runs[r + 1] - 1`: they lie one after the other in the pack, and either belong to one
    row or are pieces of small ones.
    """

    chunks: Chunks
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


def wanted_bytes(chunks: Chunks) -> Bytes:
    """Returns the bytes of all wanted chunks of each wanted row, by its place among them."""
    return np.asarray(np.bincount(chunks.want, weights=chunks.size), np.float64)


def coalesce(
    chunks: Chunks, *, wanted: Bytes | None = None, task_bytes: int = TASK_BYTES, gap_bytes: int = GAP_BYTES
) -> ReadPlan:
    """Returns tasks that cover every chunk once, in the order of the pack.

    chunks: those of the wanted rows, in one pack, row after row; two rows may want the same bytes.
    wanted: `wanted_bytes` of all chunks of these rows; None where `chunks` are all of them.
    task_bytes: the longest task, unless one chunk is longer.
    gap_bytes: the most unwanted bytes in a row that a task reads.
    """
    # A piece is what one task reads of one row: as many chunks of it as fit into a task.
    begins = np.flatnonzero(_piece_begins(chunks, max(task_bytes // int(chunks.stored.max(initial=1)), 1)))
    count = np.diff(np.append(begins, len(chunks)))
    order = np.argsort(chunks.offset[begins], kind="stable")
    piece, number = cut(count[order], 1)
    chunks = chunks.take(begins[order][piece] + number)
    first = np.cumsum(count[order]) - count[order]
    position = chunks.offset[first]
    size = np.add.reduceat(chunks.stored, first) if len(first) else chunks.stored
    # A row may be wanted whole and in part: then a piece may end before the one that begins before it does.
    reached = np.maximum.accumulate(position + size)
    bounds = _groups(position, reached, task_bytes, gap_bytes)
    first = np.append(first, len(chunks))[bounds]
    small = (wanted_bytes(chunks) if wanted is None else wanted) < SMALL_BYTES
    # The short end of a long row is not handled as a small row is, though it may be all that is read of it here.
    runs = _runs(chunks, small[chunks.want], first[:-1])
    return ReadPlan(chunks, runs.tolist(), _tasks(position, size, bounds, np.searchsorted(runs, first)))


def _piece_begins(chunks: Chunks, most: int) -> Flags:
    """Returns which chunks begin a piece: the first of each row, one that does not follow the one before it there and
    in the pack, and every one `most` chunks further on."""
    begins = np.ones(len(chunks), bool)
    begins[1:] = (chunks.want[1:] != chunks.want[:-1]) | (chunks.offset[1:] != chunks.end[:-1]) | _elsewhere(chunks)
    firsts = np.flatnonzero(begins)
    number = np.arange(len(chunks)) - np.repeat(firsts, np.diff(np.append(firsts, len(chunks))))
    found: Flags = number % most == 0
    return found


def _elsewhere(chunks: Chunks) -> Flags:
    """Returns which chunks but the first do not begin in their row where the chunk before them ends in its."""
    found: Flags = chunks.start[1:] != chunks.start[:-1] + chunks.size[:-1]
    return found


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


def _runs(chunks: Chunks, small: Flags, tasks: Column) -> Column:
    """Returns the first chunk of each run, and how many chunks there are. A run begins with each task of `tasks`."""
    want = chunks.want
    if not len(want):
        return np.zeros(1, np.int64)
    stop = chunks.end
    block = (stop - 1) // RUN_BYTES
    apart = (chunks.offset[1:] != stop[:-1]) | (block[1:] != block[:-1])
    other = want[1:] != want[:-1]
    apart |= (other & ~(small[1:] & small[:-1])) | (~other & _elsewhere(chunks))
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
