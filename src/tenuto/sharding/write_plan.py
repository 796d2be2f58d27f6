"""Plans which rank writes which box: each distinct box once, with the work on replicas balanced over their holders.

Balancing is water-filling: bytes that several ranks hold go to those that write least. Sets of ranks that hold the same
boxes are usually nested (a mesh's axes), so filling small sets first and large ones on top is as even as possible.
Where sets cross, the filling is repeated until it is stable. Sets of one size are filled at once, as one matrix.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Final, Literal, get_args

import numpy as np

from tenuto.errors import UsageError
from tenuto.record import record
from tenuto.sharding.coalesce import cut
from tenuto.sharding.holdings import (
    Column,
    DistinctBoxes,
    Flags,
    Holdings,
    Matrix,
    Ranks,
    begins,
    check,
    distinct_boxes,
    lines_of,
    replica_sets,
    rising,
)

SWEEPS: Final = 8
ROUNDS: Final = 64
"""Maximum number of rounds for sets of one size that share ranks."""


@record(eq=False)
class PourRound:
    """Sets of k ranks each, filled at once: `ranks` [sets, k]; `sets`: their numbers."""

    sets: Column
    ranks: Matrix


def rounds(members: Column, start: Column) -> list[PourRound]:
    """Returns the order in which sets are filled, smaller sets first.

    Set s is the ranks `members[start[s]..start[s + 1] - 1]`, ascending.
    """
    found: list[PourRound] = []
    size = np.diff(start)
    for one in np.unique(size).tolist():
        sets = np.flatnonzero(size == one)
        ranks = members[start[sets][:, None] + np.arange(one)]
        round_of = _round_numbers(ranks)
        found += [PourRound(sets[round_of == now], ranks[round_of == now]) for now in np.unique(round_of).tolist()]
    return found


def _round_numbers(ranks: Matrix) -> Column:
    """Returns a round for each set. Sets of one round share no rank, except in the last round if rounds run out."""
    round_of = np.full(len(ranks), ROUNDS)
    waiting = np.arange(len(ranks))
    for now in range(ROUNDS):
        first = np.full(int(ranks.max()) + 1, len(ranks))
        np.minimum.at(first, ranks[waiting], waiting[:, None])
        ready = (first[ranks[waiting]] == waiting[:, None]).all(axis=1)
        round_of[waiting[ready]] = now
        waiting = waiting[~ready]
        if not len(waiting):
            break
    return round_of


def poured(loads: Matrix, amount: Column) -> Matrix:
    """Distributes `amount[s]` over the ranks of set s so that the least loaded become level.

    Returns int64 [sets, k]; each line sums exactly to its amount.
    """
    order = np.argsort(loads, axis=1, kind="stable")
    rising = np.take_along_axis(loads, order, axis=1)
    rising -= rising[:, :1]
    before = np.cumsum(rising, axis=1) - rising
    numbers = np.arange(loads.shape[1], dtype=np.int64)
    # The amount that raises all lower ranks to rank j's load.
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
    """Returns the shares of every round, for bytes that can be divided freely, and adds them to `loads`."""
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


@record(eq=False)
class PouredBytes:
    """Bytes `low[i]..high[i] - 1` of item `item[i]` go to the `member[i]`-th rank of its set."""

    item: Column
    member: Column
    low: Column
    high: Column


def along(group: Column, nbytes: Column, step: Column, shares: Matrix) -> PouredBytes:
    """Lays each group's items end to end and cuts the line where the ranks' shares end.

    group: int64 [items], ascending.
    nbytes: bytes of each item.
    step: an item is cut only at multiples of its step, nearest to the share's end; not at all if it equals the length.
    shares: [groups, k], bytes for each rank; line g sums to the bytes of group g's items.
    """
    ends = begins(shares.reshape(-1))
    place = begins(nbytes)
    width = shares.shape[1]
    # The ranks whose shares an item meets; an empty item belongs to the rank it begins at.
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


# Choosing the rank for each item: large ones that cannot be cut one by one, the others along a line.

FINE: Final = 64
"""An uncuttable item is large if it exceeds 1/FINE of a rank's share."""


def deal(item_set: Column, nbytes: Column, step: Column, sets: tuple[Column, Column], loads: Column) -> PouredBytes:
    """Assigns every item to ranks of its set, keeping the largest load small; adds the bytes to `loads`, by rank.

    Item i has `nbytes[i]` bytes and may be cut at multiples of `step[i]`. `sets`: members and starts, as in `rounds`.
    The result is deterministic on every machine.
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
    return PouredBytes(*(_joined([getattr(part, one.name) for part in found]) for one in fields(PouredBytes)))


def _deal_round(
    one: PourRound, items: Column, group: Column, lengths: tuple[Column, Column], loads: Column
) -> PouredBytes:
    """Assigns one round's items, group by group, and adds their bytes to `loads`."""
    nbytes, step = lengths
    total = np.zeros(len(one.sets), np.int64)
    np.add.at(total, group, nbytes)
    large = (step >= nbytes) & (nbytes > total[group] // (FINE * one.ranks.shape[1]))
    member = _one_by_one(one, group, nbytes, large, loads)
    rest = np.flatnonzero(~large)
    remaining = np.zeros(len(one.sets), np.int64)
    np.add.at(remaining, group[rest], nbytes[rest])
    filled = poured(loads[one.ranks], remaining)
    parts = along(group[rest], nbytes[rest], step[rest], filled)
    np.add.at(loads, one.ranks[group[rest][parts.item], parts.member], parts.high - parts.low)
    whole = np.flatnonzero(large)
    return PouredBytes(
        np.concatenate([items[rest][parts.item], items[whole]]),
        np.concatenate([parts.member, member[whole]]),
        np.concatenate([parts.low, np.zeros(len(whole), np.int64)]),
        np.concatenate([parts.high, nbytes[whole]]),
    )


def _one_by_one(one: PourRound, group: Column, nbytes: Column, large: Flags, loads: Column) -> Column:
    """Returns the member for each of the `large` items: the largest first, each to the least loaded rank."""
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
"""Boxes of fewer chunks are not cut: an additional row costs more than it balances."""
ALIGNED_CHUNKS: Final = 16
"""Parts end at common multiples of rows and chunks, if those are at most this many chunks apart"""
EVEN: Final = 32
"""and at most 1/EVEN of the bytes that a rank writes."""
HOME_BYTES: Final = 64 << 10
"""The largest box that is kept where all nodes find it, if ranks of several nodes hold it."""


@record(eq=False)
class Assignment:
    """The boxes that each rank writes, ordered by rank, leaf and position.

    Rank `rank[i]` writes the box at `offsets[i]` of `shape[i]` of its own line `holding[i]` of the Holdings.
    """

    holding: Column
    offsets: Matrix
    shape: Matrix
    rank: Ranks
    in_home: Flags
    """Which of them ranks on other nodes will read, when all of these restart."""

    def __len__(self) -> int:
        return len(self.holding)

    def of(self, rank: int) -> slice:
        """Returns the lines of one rank."""
        return lines_of(self.rank, rank)


@record(eq=False)
class _Options:
    """The arguments of `assign`."""

    world_size: int
    strategy: str
    layer: Column | None
    size: int | None
    chunk_bytes: int
    nodes: Column | None

    def check(self, holdings: Holdings) -> None:
        """Raises UsageError for inconsistent arguments."""
        strategy, layer, size = self.strategy, self.layer, self.size
        if strategy not in get_args(Strategy):
            raise UsageError(f"strategy {strategy!r} is not one of {', '.join(get_args(Strategy))}", subject=strategy)
        if (strategy == "layer") != (layer is not None) or (layer is not None and len(layer) != holdings.leaves):
            raise UsageError('strategy "layer", and no other, needs layer=, a number for each leaf')
        if (strategy == "size") != (size is not None) or (size is not None and size < 1):
            raise UsageError('strategy "size", and no other, needs size=, bytes from 1 on')
        if self.chunk_bytes < 1:
            raise UsageError(f"chunks of {self.chunk_bytes} bytes")
        if self.nodes is not None and len(self.nodes) != self.world_size:
            raise UsageError(f"the nodes of {len(self.nodes)} ranks in a world of {self.world_size}")
        if len(holdings) and (int(holdings.rank[0]) < 0 or int(holdings.rank[-1]) >= self.world_size):
            raise UsageError(
                f"holdings of ranks {holdings.rank[0]} to {holdings.rank[-1]} in a world of {self.world_size}"
            )


def assign(
    holdings: Holdings,
    *,
    world_size: int,
    strategy: Strategy = "balanced",
    layer: Column | None = None,
    size: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    nodes: Column | None = None,
    found: DistinctBoxes | None = None,
) -> Assignment:
    """Assigns each box to the ranks that write it. The same holdings give the same assignment on every machine.

    holdings: the boxes of all ranks. A box on one rank is written by it; equal boxes are replicas, written once.
    strategy: "balanced" cuts large replicas along their first axis (at rows, and at chunks where both coincide) so that
        ranks write about the same; "tensor" cuts none; "layer" gives all boxes of a layer with the same holders to one
        of these; "size" cuts every box into parts of at most `size` bytes, or one row; "one" gives a box to its lowest
        rank.
    layer: a number for each leaf, see `layers`.
    nodes: a number for each rank's node, where a node's ranks alone find what one of them writes. A small box that
        several nodes hold is then written by its lowest rank, and marked as `in_home`.
    found: `distinct_boxes(holdings)`, if at hand, of holdings that `check` has accepted.

    Overlapping boxes that are not equal are no replicas: choosing between their contents would be silent. They are kept
    here, and `check_coverage` of what is `written` rejects them, as it rejects missing items. Raises ShardMismatch for
    an invalid box (`check`) or one that a rank holds twice.
    """
    options = _Options(world_size, strategy, layer, size, chunk_bytes, nodes)
    options.check(holdings)
    if found is None:
        check(holdings)
        found = distinct_boxes(holdings)
    nbytes = holdings.nbytes()[found.first]
    in_home = _small_on_several_nodes(holdings, found, nbytes, nodes)
    return _assignment(holdings, found, _parts(holdings, found, nbytes, in_home, options), nbytes, in_home)


def _small_on_several_nodes(holdings: Holdings, found: DistinctBoxes, nbytes: Column, nodes: Column | None) -> Flags:
    """Returns which cells are small, and held on more than one node."""
    if nodes is None or not len(found):
        return np.zeros(len(found), bool)
    node, starts = nodes[holdings.rank[found.holders]], found.start[:-1]
    several: Flags = np.minimum.reduceat(node, starts) != np.maximum.reduceat(node, starts)
    return several & (nbytes > 0) & (nbytes <= HOME_BYTES)


def _parts(holdings: Holdings, found: DistinctBoxes, nbytes: Column, in_home: Flags, options: _Options) -> PouredBytes:
    """Returns which bytes of each cell go to which holder; those `in_home` to the lowest."""
    row = _rows(holdings, found, nbytes) if options.strategy in ("balanced", "size") else nbytes
    if options.size is not None:
        whole = _pieces(nbytes, np.maximum(options.size // np.maximum(row, 1), 1) * row)
    else:
        whole = _pieces(nbytes, nbytes)
    several = (found.counts > 1)[whole.item] & ~in_home[whole.item]
    if options.strategy == "one" or not several.any():
        return whole
    length = whole.high - whole.low
    loads = np.zeros(options.world_size, np.int64)
    single, shared = np.flatnonzero(~several), np.flatnonzero(several)
    np.add.at(loads, holdings.rank[found.first[whole.item[single]]], length[single])
    step = length
    if options.strategy == "balanced":
        far = min(ALIGNED_CHUNKS * options.chunk_bytes, int(nbytes.sum()) // (options.world_size * EVEN))
        step = _steps(nbytes, row, options.chunk_bytes, max(far, options.chunk_bytes))
    parts = _shared(holdings, found, (whole.item[shared], length[shared], step[shared]), loads, options.layer)
    item = shared[parts.item]
    return PouredBytes(
        np.concatenate([whole.item[single], whole.item[item]]),
        np.concatenate([whole.member[single], parts.member]),
        np.concatenate([whole.low[single], whole.low[item] + parts.low]),
        np.concatenate([whole.high[single], whole.low[item] + parts.high]),
    )


def _shared(
    holdings: Holdings, found: DistinctBoxes, items: tuple[Column, Column, Column], loads: Column, layer: Column | None
) -> PouredBytes:
    """Divides items among their holders; `items`: their cells, bytes, and the steps at which they may be cut."""
    cell, length, step = items
    sets = replica_sets(holdings, found)
    several = sets.size > 1
    group = (np.cumsum(several) - 1)[sets.of[cell]]
    members = _members(holdings, found, sets.example[several])
    if layer is None:
        return deal(group, length, step, members, loads)
    bundle = np.unique(layer, return_inverse=True)[1][holdings.leaf[found.first[cell]]] * len(several) + group
    member = _assign_bundles(bundle, group, length, members, loads)
    return PouredBytes(np.arange(len(cell)), member, np.zeros_like(cell), length)


def _assign_bundles(
    bundle: Column, group: Column, nbytes: Column, sets: tuple[Column, Column], loads: Column
) -> Column:
    """Returns the member that takes each item, with all items of a bundle, which share a set, on one member."""
    _, first, bundle = np.unique(bundle, return_index=True, return_inverse=True)
    total = np.zeros(len(first), np.int64)
    np.add.at(total, bundle, nbytes)
    parts = deal(group[first], total, total, sets, loads)
    member = np.empty(len(first), np.int64)
    member[parts.item] = parts.member
    return member[bundle]


def _members(holdings: Holdings, found: DistinctBoxes, example: Column) -> tuple[Column, Column]:
    """Returns the ranks of each set, concatenated, and where each set begins."""
    counts = found.counts[example]
    of, within = cut(counts, 1)
    return holdings.rank[found.holders[found.start[example][of] + within]].astype(np.int64), begins(counts)


def _axis(shape: Matrix) -> Column:
    """Returns the first axis along which each box is longer than 1: an interval along it is contiguous in memory."""
    found = np.zeros(len(shape), np.int64)
    for axis in range(shape.shape[1] - 1, -1, -1):
        found[shape[:, axis] > 1] = axis
    return found


def _rows(holdings: Holdings, found: DistinctBoxes, nbytes: Column) -> Column:
    """Returns the bytes of one line of each cell along the axis that may be cut."""
    shape = holdings.shape[found.first]
    return nbytes // np.maximum(shape[np.arange(len(shape)), _axis(shape)], 1)


def _steps(nbytes: Column, row: Column, chunk_bytes: int, far: int) -> Column:
    """Returns the distance in bytes of permitted cuts: multiples of chunks, if at most `far` apart."""
    row = np.maximum(row, 1)
    aligned = np.lcm(np.minimum(row, far), chunk_bytes)
    step = np.where((aligned <= far) & (row <= far), aligned, -(-chunk_bytes // row) * row)
    return np.where(nbytes < SMALL_CHUNKS * chunk_bytes, nbytes, np.minimum(step, nbytes))


def _pieces(nbytes: Column, step: Column) -> PouredBytes:
    """Cuts each cell into parts of `step` bytes; an empty cell has one empty part."""
    counts = np.maximum(-(-nbytes // np.maximum(step, 1)), 1)
    item, within = cut(counts, 1)
    low = within * step[item]
    return PouredBytes(item, np.zeros_like(item), low, np.minimum(low + step[item], nbytes[item]))


def _assignment(
    holdings: Holdings, found: DistinctBoxes, parts: PouredBytes, nbytes: Column, in_home: Flags
) -> Assignment:
    """Converts bytes of cells into boxes of lines."""
    holding = found.holders[found.start[parts.item] + parts.member]
    offsets, shape = holdings.offsets[holding], holdings.shape[holding]
    part = np.flatnonzero((parts.high - parts.low) < nbytes[parts.item])
    axis = _axis(shape[part])
    row = nbytes[parts.item[part]] // shape[part, axis]
    offsets[part, axis] += parts.low[part] // row
    shape[part, axis] = (parts.high - parts.low)[part] // row
    rank = holdings.rank[holding]
    # Cells are ordered by leaf and position, parts by position within them.
    code = rank.astype(np.int64) * len(found) + parts.item
    order = np.lexsort((parts.low, code)) if len(part) else rising(code)
    return Assignment(holding[order], offsets[order], shape[order], rank[order], in_home[parts.item[order]])


def written(holdings: Holdings, made: Assignment) -> Holdings:
    """Returns the boxes as the ranks' objects will hold them: row `row` of a rank is its `row`-th line of the
    assignment."""
    ranks, first = np.unique(made.rank, return_index=True)
    began = first[np.searchsorted(ranks, made.rank)] if len(made) else made.holding
    return replace(
        holdings,
        leaf=holdings.leaf[made.holding],
        rank=made.rank,
        row=np.arange(len(made)) - began,
        offsets=made.offsets,
        shape=made.shape,
        itemsize=holdings.itemsize[made.holding],
    )


def layers(paths: Sequence[str]) -> Column:
    """Returns each leaf's layer number: the path up to its first numeric segment (also between dots), or its parent."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(_layer(path), len(numbers)) for path in paths], np.int64)


def _layer(path: str) -> str:
    place = 0
    for part in path.replace(".", "/").split("/"):
        place += len(part) + 1
        if part.removeprefix("#i:").isdecimal():
            return path[: place - 1]
    return path[: max(path.rfind("/"), path.rfind("."), 0)]
