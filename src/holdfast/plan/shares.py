"""How much each rank writes: bytes that several ranks hold are poured to where least is written.

The sets of ranks that hold the same boxes usually lie inside each other (a mesh's axes), so pouring the small sets'
bytes first and the large ones' on top is as even as can be. Where sets cross, the pouring is repeated until it stays.
Sets of one size are poured together, as one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.plan.columns import Column, Matrix, begins
from holdfast.plan.reads import cut

SWEEPS: Final = 8
ROUNDS: Final = 64
"""Sets of one size that cross each other are poured one after the other, in at most this many rounds."""


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Sets of k ranks each, poured at once: `ranks` [sets, k], `sets` their numbers."""

    sets: Column
    ranks: Matrix


def rounds(members: Column, start: Column) -> list[Round]:
    """The order in which sets are poured: the smaller first. Set s is the ranks `members[start[s]..start[s + 1] - 1]`,
    ascending."""
    found: list[Round] = []
    size = np.diff(start)
    for one in np.unique(size).tolist():
        sets = np.flatnonzero(size == one)
        ranks = members[start[sets][:, None] + np.arange(one)]
        turn = _turns(ranks)
        found += [Round(sets[turn == now], ranks[turn == now]) for now in np.unique(turn).tolist()]
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


def settle(plan: Sequence[Round], amount: Column, loads: Column) -> list[Matrix]:
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
class Parts:
    """Bytes `low[i]..high[i] - 1` of item `item[i]` go to the `member[i]`-th rank of its set."""

    item: Column
    member: Column
    low: Column
    high: Column


def along(group: Column, nbytes: Column, step: Column, shares: Matrix) -> Parts:
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
    return Parts(item[kept], (slot - group[item] * width)[kept], low[kept], high[kept])
