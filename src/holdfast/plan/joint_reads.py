"""What several ranks of a node want of the same packs: cut into blocks, each read by one of them for all that want it.

Every rank makes this plan for itself from what all of them ask for, and all make the same. Blocks lie in the windows of
those that read them, and the windows are used again: group after group of blocks, in the order of the packs. A rank is
at one group at a time and may still need the one before it; so a place is free again once all ranks are two groups on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.plan.columns import Column
from holdfast.plan.reads import cut

PAGE: Final = 4096
SECTIONS: Final = 4
"""Groups that a window holds: two that ranks still need, and two that are being read."""
MOST_RANKS: Final = 62
"""Ranks of one node that can read together: each is one bit of a number."""
LONGEST: Final = 1 << 44
"""Bytes of a pack, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Bytes of packs: `low[i] .. high[i] - 1` of pack `pack[i]`, any number that all ranks call it by. In order, and
    without overlaps."""

    pack: Column
    low: Column
    high: Column

    def __len__(self) -> int:
        return len(self.pack)

    @classmethod
    def of(cls, pack: Column, low: Column, high: Column, gap: int = PAGE) -> Asked:
        """Ranges in any order, those joined that overlap or have at most `gap` bytes between them."""
        some = high > low
        pack, low, high = pack[some], low[some], high[some]
        order = np.lexsort((low, pack))
        pack, low, high = pack[order], low[order], high[order]
        if not len(pack):
            return cls(pack, low, high)
        # The furthest end so far within each pack: packs are put far apart first.
        apart = np.searchsorted(np.unique(pack), pack) * LONGEST
        reach = np.maximum.accumulate(high + apart)
        first = np.concatenate([np.ones(1, bool), (low + apart)[1:] > reach[:-1] + gap])
        first[1:] |= pack[1:] != pack[:-1]
        starts = np.flatnonzero(first)
        return cls(pack[starts], low[starts], np.maximum.reduceat(high, starts))


@dataclass(frozen=True, slots=True, eq=False)
class Dealt:
    """Block i: bytes `low[i] .. high[i] - 1` of pack `pack[i]`, wanted by two ranks or more and read by the one at
    place `owner[i]` of the node, in whole pages, into its window at `at[i]`. In order of packs and places; `group`
    never falls."""

    pack: Column
    low: Column
    high: Column
    owner: Column
    group: Column
    at: Column

    def __len__(self) -> int:
        return len(self.pack)

    @property
    def groups(self) -> int:
        return int(self.group[-1]) + 1 if len(self) else 0

    def window(self, owner: int) -> int:
        """Bytes of the window that this rank needs."""
        mine = self.owner == owner
        return int((self.at + _pages(self.low, self.high))[mine].max(initial=0))

    def step(self, pack: Column, high: Column) -> Column:
        """The group that has to be there before the bytes below `high` of `pack` are: of the last block before it."""
        if not len(self):
            return np.zeros(len(pack), np.int64)
        packs = np.unique(self.pack)
        place = np.searchsorted(packs, pack)
        there = packs[np.minimum(place, len(packs) - 1)] == pack
        begins = np.searchsorted(packs, self.pack) * LONGEST + self.low
        last = np.searchsorted(begins, place * LONGEST + np.where(there, high, 0)) - 1
        return self.group[np.maximum(last, 0)]


def deal(asked: Sequence[Asked], *, block_bytes: int, section_bytes: int) -> Dealt:
    """Which blocks the ranks of a node read for each other. A section holds at least two blocks."""
    assert section_bytes >= 2 * (block_bytes + 2 * PAGE) and len(asked) <= MOST_RANKS
    pack, low, high, who = _several(asked)
    at, within = cut(high - low, block_bytes)
    pack, who, begin = pack[at], who[at], low[at] + within
    end = np.minimum(begin + block_bytes, high[at])
    owner = _owners(who, end - begin, block_bytes)
    group, place = _placed(owner, _pages(begin, end), len(asked), section_bytes)
    return Dealt(pack, begin, end, owner, group, place)


def _several(asked: Sequence[Asked]) -> tuple[Column, Column, Column, Column]:
    """The ranges that two ranks or more ask for, and the set of these, a bit for each."""
    pack = np.concatenate([one.pack for one in asked for _ in (0, 1)])
    place = np.concatenate([side for one in asked for side in (one.low, one.high)])
    sign = np.concatenate([np.full(len(one), by) for one in asked for by in (1, -1)])
    bit = np.concatenate([np.full(2 * len(one), 1 << number, np.int64) for number, one in enumerate(asked)])
    order = np.lexsort((place, pack))
    pack, place, sign, bit = pack[order], place[order], sign[order], bit[order]
    count, who = np.cumsum(sign)[:-1], np.cumsum(sign * bit)[:-1]
    # Between two places of one pack; everything is closed at a pack's end.
    some = np.flatnonzero((count > 1) & (place[1:] > place[:-1]))
    return pack[some], place[some], place[some + 1], who[some]


def _owners(who: Column, nbytes: Column, turn: int) -> Column:
    """Who reads each block: those that want it by turns, after as many bytes each."""
    owner = np.zeros(len(who), np.int64)
    sets, of = np.unique(who, return_inverse=True)
    for number, members in enumerate(sets.tolist()):
        lines = np.flatnonzero(of == number)
        ranks = np.array([bit for bit in range(MOST_RANKS) if members >> bit & 1], np.int64)
        before = np.cumsum(nbytes[lines]) - nbytes[lines]
        owner[lines] = ranks[(-(-before // turn) + number) % len(ranks)]
    return owner


def _placed(owner: Column, nbytes: Column, ranks: int, section: int) -> tuple[Column, Column]:
    """The group of each block, and its place in its owner's window: a group is over when one section is full."""
    groups, places = [], []
    used, group = [0] * ranks, 0
    for one, length in zip(owner.tolist(), nbytes.tolist(), strict=True):
        if used[one] + length > section:
            used, group = [0] * ranks, group + 1
        groups.append(group)
        places.append(group % SECTIONS * section + used[one])
        used[one] += length
    return np.array(groups, np.int64), np.array(places, np.int64)


def _pages(low: Column, high: Column) -> Column:
    """Bytes of the whole pages that hold a range."""
    return -(-high // PAGE) * PAGE - low // PAGE * PAGE
