"""Finds the leaves of a save that are the rounded copies of others, such as the bf16 weights beside their fp32 masters.

Which leaf is whose copy is told by a sample of the values of each, never by names alone, and at every save anew:
nothing that a trainer calls its leaves, and nothing that held at the save before, has to be right. A chunk that is not
quite the rounding is still stored exactly (`codec/derived`), so a wrong guess costs time and no bits.

A copy mostly lies before its master in the image. So the chunks of what may be a copy wait until every leaf that may
be its master is captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tenuto.codec.choosing import SMALLEST_BYTES
from tenuto.codec.derived import MASTER, ROUNDED, rounded
from tenuto.codec.registry import codec
from tenuto.engine.staging.plan import SavePlan
from tenuto.model.leaf import LeafSpec
from tenuto.repo.format.stored_chunks import MAX_CHUNK_BYTES

Column = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

SAMPLES: Final = 64
"""So many numbers of each leaf are compared."""
PARTS: Final = 4
"""The sample is cut into so many parts, one of which has to be equal: a copy may differ in a few numbers."""
RARELY: Final = 16
"""A structure without copies is looked at again after so many saves."""
SMALL: Final = 4
"""A chunk is stored by its master where that takes at most one byte for so many."""


class _Group(NamedTuple):
    """Leaves with one number of elements: those that may be copies, and those that may be their masters. `end`: how far
    the image has to be filled for all of them."""

    end: int
    copies: list[int]
    masters: list[int]


class RoundedCopies:
    """The copies of one save.

    - `waits`: for each chunk of the image, whether it belongs to what may be a copy.
    - `master`: for each chunk in the order of the index, the chunk of this save from which on its numbers are rounded,
      once that is known; -1 where there is none.
    - `rounded`: uint8, for each chunk in the order of the index, as in `StoredChunks`, if it has a master.
    """

    def __init__(
        self,
        plan: SavePlan,
        specs: Sequence[LeafSpec],
        alike: Sequence[tuple[list[int], list[int]]],
        found: Callable[[], object],
    ) -> None:
        """alike: leaves that may be copies, and those that may be the masters of these: as many elements have all.
        found: called where a copy is found."""
        self._plan = plan
        self._found = found
        self._specs = specs
        table = plan.chunks
        self._place = np.empty(table.total, np.int64)
        """Of each chunk in the order of the index, its place in that of the image."""
        self._place[table.row] = np.arange(table.total)
        self._sizes: Column = (table.end - table.begin)[self._place]
        groups = [_Group(max(map(self._end, (*copies, *masters))), copies, masters) for copies, masters in alike]
        self._coming = sorted(groups, reverse=True)
        self.waits: Flags = np.zeros(table.total, np.bool_)
        for group in groups:
            for leaf in group.copies:
                self.waits[self._of(leaf)] = True
        self.master: Column = np.full(table.total, -1, np.int64)
        halves = ["", *ROUNDED]
        kinds = np.array([halves.index(name) if name in ROUNDED else 0 for name in plan.rows.dtypes], np.uint8)
        self.rounded = np.repeat(kinds[plan.rows.code], np.diff(table.start))

    def due(self, end: int) -> Column:
        """Returns the chunks of the image that need wait no longer where it is filled up to `end`, and finds their
        masters."""
        found = [np.zeros(0, np.int64)]
        while self._coming and self._coming[-1].end <= end:
            group = self._coming.pop()
            self._find(group)
            found += [np.arange(part.start, part.stop) for part in map(self._of, group.copies)]
        return np.sort(np.concatenate(found))

    def encoded(self, row: int, raw: memoryview, family: str, level: int) -> tuple[str, bytes] | None:
        """Returns the codec and the stored bytes of chunk `row` of the index as the difference to its master, rounded;
        None where it has none, or where that is not small."""
        master = int(self.master[row])
        if master < 0:
            return None
        begin = int(self._plan.chunks.begin[self._place[master]])
        numbers = self._plan.arena.buffer[begin : begin + 2 * len(raw)].data
        name = f"xor2-{family}"
        base = rounded(numbers, tuple(ROUNDED)[self.rounded[row] - 1])
        stored = codec(name, level).encode(raw, memoryview(base))
        return (name, stored) if stored is not None and SMALL * len(stored) <= len(raw) else None

    def masters_among(self, same: Column, rows: Column, base: Column) -> Flags:
        """Returns for which chunks of the index the masters are, in the baseline, its chunks from `base` on: `same`, as
        in `joined_chunks.Written`."""
        master = self.master[rows]
        longer = 2 * self._sizes[rows] > self._sizes[master]
        known = (master >= 0) & (same[master] == base)
        return np.asarray(known & (~longer | (same[np.minimum(master + 1, len(same) - 1)] == base + 1)), np.bool_)

    # -- which leaf is whose copy --------------------------------------------------------------------------------------

    def _end(self, leaf: int) -> int:
        return int(self._plan.chunks.end[self._of(leaf).stop - 1])

    def _of(self, leaf: int) -> slice:
        """Returns the chunks of the image that a leaf has."""
        first, stop = self._plan.chunks.start[leaf : leaf + 2].tolist()
        begin = int(self._place[first])
        return slice(begin, begin + stop - first)

    def _find(self, group: _Group) -> None:
        start = self._plan.chunks.start
        known: dict[tuple[str, int, bytes], list[int]] = {}
        dtypes = {self._dtype(leaf) for leaf in group.copies}
        for leaf in group.masters:
            numbers = memoryview(self._sample(leaf, "<u4"))
            for dtype in dtypes:
                for number, part in _parts(rounded(numbers, dtype)):
                    known.setdefault((dtype, number, part), []).append(leaf)
        for leaf in group.copies:
            dtype, found = self._dtype(leaf), Counter[int]()
            for number, part in _parts(self._sample(leaf, "<u2")):
                found.update(known.get((dtype, number, part), ()))
            if found:
                self._found()
                most = max(found.values())
                best = [master for master, count in found.items() if count == most]
                master = best[0] if len(best) == 1 else self._likeliest(leaf, best)
                first, stop = int(start[leaf]), int(start[leaf + 1])
                self.master[first:stop] = int(start[master]) + 2 * np.arange(stop - first)

    def _dtype(self, leaf: int) -> str:
        return self._plan.rows.dtypes[int(self._plan.rows.code[leaf])]

    def _sample(self, leaf: int, word: str) -> bytes:
        """Returns some words of a leaf, from all over it."""
        begin, nbytes = int(self._plan.chunks.begin[self._of(leaf).start]), int(self._plan.layout.length[leaf])
        words = self._plan.arena.buffer[begin : begin + nbytes].view(word)
        return words[(2 * np.arange(SAMPLES) + 1) * len(words) // (2 * SAMPLES)].tobytes()

    def _likeliest(self, leaf: int, masters: list[int]) -> int:
        """Returns the one of these masters, which look alike, whose path has most in common with the leaf's."""
        names = set(self._specs[leaf].path.split("/"))
        return max(masters, key=lambda master: (len(names & set(self._specs[master].path.split("/"))), -master))


def _parts(sample: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the parts of a sample that tell something: of one number again and again, many leaves have some."""
    size = len(sample) // PARTS
    for number in range(PARTS):
        part = sample[number * size : (number + 1) * size]
        if part != part[:2] * (size // 2):
            yield number, part


class CopySearch:
    """Begins the search for copies in each save of one run, and leaves it out for some saves after one without any."""

    def __init__(self) -> None:
        self._without: dict[str, int] = {}
        """By structure: since which save it has been without copies."""

    def begin(self, plan: SavePlan, specs: Sequence[LeafSpec], saves: int) -> RoundedCopies | None:
        """Returns what may be copies in a save, before which were `saves` others; None where there is nothing to look
        for."""
        if saves < self._without.get(plan.fingerprint, -RARELY) + RARELY:
            return None
        alike = _alike(plan)
        self._without[plan.fingerprint] = saves
        return RoundedCopies(plan, specs, alike, lambda: self._without.pop(plan.fingerprint, None)) if alike else None


def _alike(plan: SavePlan) -> list[tuple[list[int], list[int]]]:
    """Returns leaves in half precision, and those of float32 with as many elements. None are where the image passes
    through a window: a copy and its master are never in it together."""
    dtypes, chunk_bytes, length, code = plan.rows.dtypes, plan.chunk_bytes, plan.layout.length, plan.rows.code
    halves = [number for number, name in enumerate(dtypes) if name in ROUNDED]
    if plan.arena.window is not None or not halves or MASTER not in dtypes:
        return []
    if chunk_bytes % 4 or chunk_bytes > MAX_CHUNK_BYTES:
        return []  # a number lies in two chunks, or nothing is encoded
    copies: dict[int, list[int]] = {}
    for leaf in np.flatnonzero(np.isin(code, halves) & (length >= SMALLEST_BYTES)).tolist():
        copies.setdefault(2 * int(length[leaf]), []).append(leaf)
    masters: dict[int, list[int]] = {}
    for leaf in np.flatnonzero((code == dtypes.index(MASTER)) & np.isin(length, list(copies))).tolist():
        masters.setdefault(int(length[leaf]), []).append(leaf)
    return [(copies[nbytes], found) for nbytes, found in masters.items()]
