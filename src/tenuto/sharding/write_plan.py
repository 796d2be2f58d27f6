"""Which rank writes which box: each distinct box once, and what several ranks hold shared out among them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, get_args

import numpy as np

from tenuto.errors import UsageError
from tenuto.sharding.coalesce import cut
from tenuto.sharding.distinct_boxes import DistinctBoxes, distinct_boxes, replica_sets
from tenuto.sharding.holdings import Column, Flags, Holdings, Matrix, Ranks, begins, check, lines_of, rising

# --------------------------------------------------------------------------------------------------
# How much each rank writes: bytes that several ranks hold are poured to where least is written.
#
# The sets of ranks that hold the same boxes usually lie inside each other (a mesh's axes), so pouring the small sets'
# bytes first and the large ones' on top is as even as can be. Where sets cross, the pouring is repeated until it stays.
# Sets of one size are poured together, as one matrix.

SWEEPS: Final = 8
ROUNDS: Final = 64
"""Sets of one size that cross each other are poured one after the other, in at most this many rounds."""


@dataclass(frozen=True, slots=True, eq=False)
class PourRound:
    """Sets of k ranks each, poured at once: `ranks` [sets, k], `sets` their numbers."""

    sets: Column
    ranks: Matrix


def rounds(members: Column, start: Column) -> list[PourRound]:
    """The order in which sets are poured: the smaller first. Set s is the ranks `members[start[s]..start[s + 1] - 1]`,
    ascending."""
    found: list[PourRound] = []
    size = np.diff(start)
    for one in np.unique(size).tolist():
        sets = np.flatnonzero(size == one)
        ranks = members[start[sets][:, None] + np.arange(one)]
        turn = _turns(ranks)
        found += [PourRound(sets[turn == now], ranks[turn == now]) for now in np.unique(turn).tolist()]
    return found


def _turns(ranks: Matrix) -> Column:
    """For each set a turn; sets of one turn have no rank in common, but for those of the last where turns run out."""
    turn = np.full(len(ranks), ROUNDS)
    waiting = np.arange(len(ranks))
    for now in range(ROUNDS):
        first = np.full(int(ranks.max()) + 1, len(ranks))
        np.minimum.at(first, ranks[waiting], waiting[:, None])
        ready = (first[ranks[waiting]] == waiting[:, None]).all(axis=1)
        turn[waiting[ready]] = now
        waiting = waiting[~ready]
        if not len(waiting):
            break
    return turn


def poured(loads: Matrix, amount: Column) -> Matrix:
    """How much of `amount[s]` each rank of set s gets, so that the least loaded are level. int64 [sets, k]; each line's
    sum is its amount, to the byte."""
    order = np.argsort(loads, axis=1, kind="stable")
    rising = np.take_along_axis(loads, order, axis=1)
    rising -= rising[:, :1]
    before = np.cumsum(rising, axis=1) - rising
    numbers = np.arange(loads.shape[1], dtype=np.int64)
    # What it takes to raise all below rank j to its load.
    takes = rising * numbers - before
    raised = (takes <= amount[:, None]).sum(axis=1)
    total = before[np.arange(len(loads)), raised - 1] + rising[np.arange(len(loads)), raised - 1]
    level, rest = np.divmod(amount + total, raised)
    share = np.where(numbers < raised[:, None], level[:, None] - rising, 0)
    share += numbers < rest[:, None]
    found = np.empty_like(share)
    np.put_along_axis(found, order, share, axis=1)
    return found


def settle(plan: Sequence[PourRound], amount: Column, loads: Column) -> list[Matrix]:
    """Shares of every round as they would be if bytes were water; adds them to `loads`."""
    shares: list[Matrix] = []
    for one in plan:
        shares.append(poured(loads[one.ranks], amount[one.sets]))
        np.add.at(loads, one.ranks, shares[-1])
    highest = int(loads.max(initial=0))
    for _ in range(SWEEPS if len(plan) > 1 else 0):
        for number, one in enumerate(plan):
            np.subtract.at(loads, one.ranks, shares[number])
            shares[number] = poured(loads[one.ranks], amount[one.sets])
            np.add.at(loads, one.ranks, shares[number])
        before, highest = highest, int(loads.max(initial=0))
        if before - highest <= highest // 500:
            break
    return shares


@dataclass(frozen=True, slots=True, eq=False)
class PouredBytes:
    """Bytes `low[i]..high[i] - 1` of item `item[i]` go to the `member[i]`-th rank of its set."""

    item: Column
    member: Column
    low: Column
    high: Column


def along(group: Column, nbytes: Column, step: Column, shares: Matrix) -> PouredBytes:
    """Items laid end to end, group by group, and the line cut where the shares end: each group's ranks get runs of
    neighbours. An item is cut at multiples of its `step` of bytes only (not at all where `step` is its length); its cut
    goes to the nearest. `group` rises; `shares[g]` sums to the bytes of group g's items.
    """
    ends = begins(shares.reshape(-1))
    place = begins(nbytes)
    width = shares.shape[1]
    # Ranks whose part of the line an item meets; one of no bytes lies with the rank it begins at.
    first = np.clip(np.searchsorted(ends, place[:-1], side="right") - 1, group * width, group * width + width - 1)
    last = np.clip(np.searchsorted(ends, place[1:], side="left") - 1, first, group * width + width - 1)
    item, within = cut(last - first + 1, 1)
    slot = first[item] + within
    length, unit, begin = nbytes[item], np.maximum(step[item], 1), place[item]

    def nearest(bound: Column) -> Column:
        found: Column = np.clip((2 * (bound - begin) + unit) // (2 * unit) * unit, 0, length)
        return found

    low = np.where(within == 0, 0, nearest(ends[slot]))
    high = np.where(slot == last[item], length, nearest(ends[slot + 1]))
    kept = (high > low) | ((length == 0) & (within == 0))
    return PouredBytes(item[kept], (slot - group[item] * width)[kept], low[kept], high[kept])


# --------------------------------------------------------------------------------------------------
# Which rank of its set writes each item: large ones that cannot be cut one by one, the others along a line.

FINE: Final = 64
"""An item that cannot be cut is large when it is more than this part of a rank's share."""


def deal(item_set: Column, nbytes: Column, step: Column, sets: tuple[Column, Column], loads: Column) -> PouredBytes:
    """Every item to ranks of its set, which adds to `loads` (bytes by rank), so that the largest load is small.

    Item i is `nbytes[i]` long and may be cut at multiples of `step[i]`. `sets`: members and starts, as of `rounds`.
    The same input gives the same parts everywhere.
    """
    plan = rounds(*sets)
    amount = np.zeros(len(sets[1]) - 1, np.int64)
    np.add.at(amount, item_set, nbytes)
    shares = settle(plan, amount, loads)
    order = np.argsort(item_set, kind="stable")
    bounds = np.searchsorted(item_set[order], np.arange(len(amount) + 1))
    found: list[PouredBytes] = []
    for one, water in zip(plan, shares, strict=True):
        np.subtract.at(loads, one.ranks, water)
        counts = bounds[one.sets + 1] - bounds[one.sets]
        starts = begins(counts)
        group = np.repeat(np.arange(len(counts)), counts)
        items = order[np.arange(starts[-1]) - starts[group] + bounds[one.sets][group]]
        found.append(_deal_round(one, items, group, (nbytes[items], step[items]), loads))
    return PouredBytes(*(_joined([getattr(part, name) for part in found]) for name in PouredBytes.__slots__))


def _deal_round(
    one: PourRound, items: Column, group: Column, lengths: tuple[Column, Column], loads: Column
) -> PouredBytes:
    """One round's items, group by group; `loads` are those of all others, and then of these as well."""
    nbytes, step = lengths
    total = np.zeros(len(one.sets), np.int64)
    np.add.at(total, group, nbytes)
    large = (step >= nbytes) & (nbytes > total[group] // (FINE * one.ranks.shape[1]))
    member = _one_by_one(one, group, nbytes, large, loads)
    rest = np.flatnonzero(~large)
    remaining = np.zeros(len(one.sets), np.int64)
    np.add.at(remaining, group[rest], nbytes[rest])
    poured_out = poured(loads[one.ranks], remaining)
    parts = along(group[rest], nbytes[rest], step[rest], poured_out)
    np.add.at(loads, one.ranks[group[rest][parts.item], parts.member], parts.high - parts.low)
    whole = np.flatnonzero(large)
    return PouredBytes(
        np.concatenate([items[rest][parts.item], items[whole]]),
        np.concatenate([parts.member, member[whole]]),
        np.concatenate([parts.low, np.zeros(len(whole), np.int64)]),
        np.concatenate([parts.high, nbytes[whole]]),
    )


def _one_by_one(one: PourRound, group: Column, nbytes: Column, large: Flags, loads: Column) -> Column:
    """The largest first, each to the rank that writes least by then: the member's number, for `large` items."""
    member = np.zeros(len(group), np.int64)
    which = np.flatnonzero(large)
    which = which[np.lexsort((-nbytes[which], group[which]))]
    bounds = np.searchsorted(group[which], np.arange(len(one.sets) + 1)).tolist()
    for number, (low, high) in enumerate(pairwise(bounds)):
        if low == high:
            continue
        ranks = one.ranks[number]
        heap = [(load, place) for place, load in enumerate(loads[ranks].tolist())]
        heapq.heapify(heap)
        places = []
        for size in nbytes[which[low:high]].tolist():
            load, place = heap[0]
            heapq.heapreplace(heap, (load + size, place))
            places.append(place)
        member[which[low:high]] = places
        for load, place in heap:
            loads[ranks[place]] = load
    return member


def _joined(parts: list[Column]) -> Column:
    return np.concatenate([np.zeros(0, np.int64), *parts])


Strategy = Literal["balanced", "layer", "tensor", "size", "one"]
CHUNK_BYTES: Final = 256 << 10
SMALL_CHUNKS: Final = 4
"""Boxes of fewer chunks are not cut: another row costs more than it evens out."""
ALIGNED_CHUNKS: Final = 16
"""Parts end where rows and chunks end together, if that is not further apart than this, or than"""
EVEN: Final = 32
"""this part of what a rank writes."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """What each rank writes, ordered by rank, then leaf, then place: rank `rank[i]` writes the box at `offsets[i]` of
    `shape[i]` of the leaf, out of line `holding[i]` of the Holdings, which is one of its own."""

    holding: Column
    offsets: Matrix
    shape: Matrix
    rank: Ranks

    def __len__(self) -> int:
        return len(self.holding)

    def of(self, rank: int) -> slice:
        """The lines of one rank."""
        return lines_of(self.rank, rank)


@dataclass(frozen=True, slots=True, eq=False)
class _How:
    """What `assign` was asked for."""

    world_size: int
    strategy: str
    layer: Column | None
    size: int | None
    chunk_bytes: int

    def check(self, held: Holdings) -> None:
        """Raises UsageError for arguments that do not go together."""
        strategy, layer, size = self.strategy, self.layer, self.size
        if strategy not in get_args(Strategy):
            raise UsageError(f"strategy {strategy!r} is none of {', '.join(get_args(Strategy))}", subject=strategy)
        if (strategy == "layer") != (layer is not None) or (layer is not None and len(layer) != held.leaves):
            raise UsageError('strategy "layer", and no other, needs layer=, a number for each leaf')
        if (strategy == "size") != (size is not None) or (size is not None and size < 1):
            raise UsageError('strategy "size", and no other, needs size=, bytes from 1 on')
        if self.chunk_bytes < 1:
            raise UsageError(f"chunks of {self.chunk_bytes} bytes")
        if len(held) and (int(held.rank[0]) < 0 or int(held.rank[-1]) >= self.world_size):
            raise UsageError(f"holdings of ranks {held.rank[0]} to {held.rank[-1]} in a world of {self.world_size}")


def assign(
    held: Holdings,
    *,
    world_size: int,
    strategy: Strategy = "balanced",
    layer: Column | None = None,
    size: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    found: DistinctBoxes | None = None,
) -> Assignment:
    """Who writes what. The same holdings give the same assignment on every machine.

    A box that one rank holds is written by it. Equal boxes of several ranks are replicas, written once:
    "balanced" cuts large ones along their first axis (at multiples of a row, and of `chunk_bytes` where both meet) so
    that all ranks write about as much; "tensor" cuts none; "layer" gives all boxes of one layer with the same holders
    to one of them (`layer[leaf]`: a number for each leaf, see `layers`); "size" cuts every box into parts of at most
    `size` bytes, or of one row; "one" gives all to the lowest rank that holds it.

    Boxes that overlap without being equal are no replicas: their bytes could not be compared, and one of two contents
    would be taken unasked. They are kept here, and `check_coverage` of what is `written` refuses them; so it does where
    something is missing. ShardMismatch where a box is none (`check`) or a rank has one twice. `found`: `cells(held)`,
    of what `check` has passed, where they are at hand.
    """
    how = _How(world_size, strategy, layer, size, chunk_bytes)
    how.check(held)
    if found is None:
        check(held)
        found = distinct_boxes(held)
    nbytes = held.nbytes()[found.first]
    return _assignment(held, found, _parts(held, found, nbytes, how), nbytes)


def _parts(held: Holdings, found: DistinctBoxes, nbytes: Column, how: _How) -> PouredBytes:
    """Which bytes of each cell go to which of its holders."""
    row = _rows(held, found, nbytes) if how.strategy in ("balanced", "size") else nbytes
    if how.size is not None:
        whole = _pieces(nbytes, np.maximum(how.size // np.maximum(row, 1), 1) * row)
    else:
        whole = _pieces(nbytes, nbytes)
    several = found.counts[whole.item] > 1
    if how.strategy == "one" or not several.any():
        return whole
    length = whole.high - whole.low
    loads = np.zeros(how.world_size, np.int64)
    alone, shared = np.flatnonzero(~several), np.flatnonzero(several)
    np.add.at(loads, held.rank[found.first[whole.item[alone]]], length[alone])
    step = length
    if how.strategy == "balanced":
        far = min(ALIGNED_CHUNKS * how.chunk_bytes, int(nbytes.sum()) // (how.world_size * EVEN))
        step = _steps(nbytes, row, how.chunk_bytes, max(far, how.chunk_bytes))
    parts = _shared(held, found, (whole.item[shared], length[shared], step[shared]), loads, how.layer)
    item = shared[parts.item]
    return PouredBytes(
        np.concatenate([whole.item[alone], whole.item[item]]),
        np.concatenate([whole.member[alone], parts.member]),
        np.concatenate([whole.low[alone], whole.low[item] + parts.low]),
        np.concatenate([whole.high[alone], whole.low[item] + parts.high]),
    )


def _shared(
    held: Holdings, found: DistinctBoxes, items: tuple[Column, Column, Column], loads: Column, layer: Column | None
) -> PouredBytes:
    """Who of their holders takes which part of items: their cells, bytes, and the steps at which they may be cut."""
    cell, length, step = items
    sets = replica_sets(held, found)
    several = sets.size > 1
    group = (np.cumsum(several) - 1)[sets.of[cell]]
    members = _members(held, found, sets.example[several])
    if layer is None:
        return deal(group, length, step, members, loads)
    bundle = np.unique(layer, return_inverse=True)[1][held.leaf[found.first[cell]]] * len(several) + group
    member = _together(bundle, group, length, members, loads)
    return PouredBytes(np.arange(len(cell)), member, np.zeros_like(cell), length)


def _together(bundle: Column, group: Column, nbytes: Column, sets: tuple[Column, Column], loads: Column) -> Column:
    """Which member of its set takes each item, where items of one bundle, which are of one set, go to one."""
    _, first, bundle = np.unique(bundle, return_index=True, return_inverse=True)
    total = np.zeros(len(first), np.int64)
    np.add.at(total, bundle, nbytes)
    parts = deal(group[first], total, total, sets, loads)
    member = np.empty(len(first), np.int64)
    member[parts.item] = parts.member
    return member[bundle]


def _members(held: Holdings, found: DistinctBoxes, example: Column) -> tuple[Column, Column]:
    """The ranks of each set, one set after the other, and where each begins."""
    counts = found.counts[example]
    of, within = cut(counts, 1)
    return held.rank[found.holders[found.start[example][of] + within]].astype(np.int64), begins(counts)


def _axis(shape: Matrix) -> Column:
    """The first axis along which each box is longer than 1: what lies between two places along it is one run of
    bytes."""
    found = np.zeros(len(shape), np.int64)
    for axis in range(shape.shape[1] - 1, -1, -1):
        found[shape[:, axis] > 1] = axis
    return found


def _rows(held: Holdings, found: DistinctBoxes, nbytes: Column) -> Column:
    """Bytes of one line of each cell, along the axis that it may be cut along."""
    shape = held.shape[found.first]
    return nbytes // np.maximum(shape[np.arange(len(shape)), _axis(shape)], 1)


def _steps(nbytes: Column, row: Column, chunk_bytes: int, far: int) -> Column:
    """How many bytes apart the places lie at which a box may be cut: multiples of chunks, if not over `far` apart."""
    row = np.maximum(row, 1)
    aligned = np.lcm(np.minimum(row, far), chunk_bytes)
    step = np.where((aligned <= far) & (row <= far), aligned, -(-chunk_bytes // row) * row)
    return np.where(nbytes < SMALL_CHUNKS * chunk_bytes, nbytes, np.minimum(step, nbytes))


def _pieces(nbytes: Column, step: Column) -> PouredBytes:
    """Each cell in parts of `step` bytes; one of no bytes is a part of none."""
    counts = np.maximum(-(-nbytes // np.maximum(step, 1)), 1)
    item, within = cut(counts, 1)
    low = within * step[item]
    return PouredBytes(item, np.zeros_like(item), low, np.minimum(low + step[item], nbytes[item]))


def _assignment(held: Holdings, found: DistinctBoxes, parts: PouredBytes, nbytes: Column) -> Assignment:
    """Bytes of cells as boxes of lines."""
    holding = found.holders[found.start[parts.item] + parts.member]
    offsets, shape = held.offsets[holding], held.shape[holding]
    part = np.flatnonzero((parts.high - parts.low) < nbytes[parts.item])
    axis = _axis(shape[part])
    row = nbytes[parts.item[part]] // shape[part, axis]
    offsets[part, axis] += parts.low[part] // row
    shape[part, axis] = (parts.high - parts.low)[part] // row
    rank = held.rank[holding]
    # Cells are in order of leaf and place, parts in order within them.
    code = rank.astype(np.int64) * len(found) + parts.item
    order = np.lexsort((parts.low, code)) if len(part) else rising(code)
    return Assignment(holding[order], offsets[order], shape[order], rank[order])


def written(held: Holdings, made: Assignment) -> Holdings:
    """The boxes as they will lie in the ranks' objects: row `row` of a rank is its `row`-th line of the assignment."""
    ranks, first = np.unique(made.rank, return_index=True)
    began = first[np.searchsorted(ranks, made.rank)] if len(made) else made.holding
    return replace(
        held,
        leaf=held.leaf[made.holding],
        rank=made.rank,
        row=np.arange(len(made)) - began,
        offsets=made.offsets,
        shape=made.shape,
        itemsize=held.itemsize[made.holding],
    )


def layers(paths: Sequence[str]) -> Column:
    """The layer of each leaf, numbered: a path up to and with its first segment that is a number (also between dots,
    as modules name their parts), or all of it but the last segment where there is none."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(_layer(path), len(numbers)) for path in paths], np.int64)


def _layer(path: str) -> str:
    place = 0
    for part in path.replace(".", "/").split("/"):
        place += len(part) + 1
        if part.removeprefix("#i:").isdecimal():
            return path[: place - 1]
    return path[: max(path.rfind("/"), path.rfind("."), 0)]
