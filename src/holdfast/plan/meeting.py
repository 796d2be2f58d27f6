"""Which boxes of one layout meet which of another, without comparing each with each.

Axis by axis: the saved boxes of a leaf that take the same interval of the first axis are one slab, whatever they do
along the others; a wanted box meets few slabs, and within each of them few intervals of the next axis. So a grid of
ranks costs what is met along each axis, and not the product. Intervals are looked up by where they begin, among those
of about the same length, so that one long interval does not make all that begin behind it candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.errors import ShardMismatch
from holdfast.plan.columns import LIMIT, Column, Matrix, begins, renumbered
from holdfast.plan.reads import cut


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """`offsets` and `shape` int64 [n, d], all with items; `group` [n], numbers without gaps: only boxes of one group
    can meet."""

    group: Column
    offsets: Matrix
    shape: Matrix


def meet(saved: Boxes, wanted: Boxes, extent: Matrix) -> tuple[Column, Column]:
    """Every pair of a wanted and a saved box with an item in common: (wanted, saved), in that order.

    `extent` [groups, d]: where the boxes of each group end at most.
    """
    node, root = saved.group, np.arange(len(extent))
    who, at = np.arange(len(wanted.group)), wanted.group
    for axis in range(extent.shape[1]):
        begin, length = saved.offsets[:, axis], saved.shape[:, axis]
        low, long = wanted.offsets[:, axis], wanted.shape[:, axis]
        ends = extent[:, axis]
        if np.array_equal(length, ends[saved.group]):
            continue  # every saved box is all along this axis, so it is met
        slabs = _Slabs(node, begin, length, ends[root])
        who, at = slabs.met(who, at, low, long)
        node, root = slabs.node, root[slabs.parent]
    # What is left are distinct boxes; should several saved ones be the same box, each is met.
    order = np.argsort(node, kind="stable")
    first = np.searchsorted(node[order], np.arange(len(root) + 1))
    pair, within = cut(np.diff(first)[at], 1)
    who, line = who[pair], order[first[at[pair]] + within]
    sort = np.lexsort((line, who))
    return who[sort], line[sort]


class _Slabs:
    """The distinct intervals of one axis below each node."""

    def __init__(self, node: Column, begin: Column, length: Column, extent: Column) -> None:
        """`extent[v]`: where the boxes of node v end at most."""
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
        """The groups of each node: one for each class of lengths."""
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
        """The slabs that boxes `who` at nodes `at` meet, whose intervals are `low[who]` and `long[who]` long."""
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
