"""Finds distinct boxes and their holders: all replicas of one box form one cell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tenuto.errors import ShardMismatch
from tenuto.sharding.coalesce import cut
from tenuto.sharding.holdings import Column, Holdings, begins, dot, every, paces, rising, volumes

_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
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


@dataclass(frozen=True, slots=True, eq=False)
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
