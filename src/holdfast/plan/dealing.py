"""Which rank of its set writes each item: large ones that cannot be cut one by one, the others along a line."""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import Final

import numpy as np

from holdfast.plan.columns import Column, Flags, begins
from holdfast.plan.shares import Parts, Round, along, poured, rounds, settle

FINE: Final = 64
"""An item that cannot be cut is large when it is more than this part of a rank's share."""


def deal(item_set: Column, nbytes: Column, step: Column, sets: tuple[Column, Column], loads: Column) -> Parts:
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
    found: list[Parts] = []
    for one, water in zip(plan, shares, strict=True):
        np.subtract.at(loads, one.ranks, water)
        counts = bounds[one.sets + 1] - bounds[one.sets]
        starts = begins(counts)
        group = np.repeat(np.arange(len(counts)), counts)
        items = order[np.arange(starts[-1]) - starts[group] + bounds[one.sets][group]]
        found.append(_deal_round(one, items, group, (nbytes[items], step[items]), loads))
    return Parts(*(_joined([getattr(part, name) for part in found]) for name in Parts.__slots__))


def _deal_round(one: Round, items: Column, group: Column, lengths: tuple[Column, Column], loads: Column) -> Parts:
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
    return Parts(
        np.concatenate([items[rest][parts.item], items[whole]]),
        np.concatenate([parts.member, member[whole]]),
        np.concatenate([parts.low, np.zeros(len(whole), np.int64)]),
        np.concatenate([parts.high, nbytes[whole]]),
    )


def _one_by_one(one: Round, group: Column, nbytes: Column, large: Flags, loads: Column) -> Column:
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
