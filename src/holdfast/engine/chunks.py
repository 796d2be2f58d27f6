"""Which chunk of which leaf lies where in an image: computed once per layout, used at every save."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from holdfast.codec.digest import digest
from holdfast.image.layout import Layout

Column = np.ndarray[Any, np.dtype[np.int64]]


class ChunkTable:
    """Chunks in image order: `begin` and `end` are positions in the image, `row` the chunk's place in the index.

    `start` (n + 1) gives each leaf's first row, leaves in the order of the index. A leaf of no bytes has no chunk.
    """

    def __init__(self, layout: Layout, chunk_bytes: int) -> None:
        counts = -(-layout.length // chunk_bytes)
        self.start: Column = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=self.start[1:])
        order = layout.order
        per_leaf = counts[order]
        total = int(per_leaf.sum())
        # Number of each chunk within its leaf, for all leaves at once: a running count minus where the leaf began.
        began = np.repeat(np.cumsum(per_leaf) - per_leaf, per_leaf)
        within = np.arange(total, dtype=np.int64) - began
        leaf = np.repeat(order, per_leaf)
        self.begin: Column = layout.start[leaf] + within * chunk_bytes
        self.end: Column = np.minimum(self.begin + chunk_bytes, layout.start[leaf] + layout.length[leaf])
        self.row: Column = self.start[leaf] + within
        self.total = total


class Digester:
    """Digests an image's chunks as the image fills up from its beginning, which has taken `seconds`. One use per
    save."""

    def __init__(self, table: ChunkTable, image: memoryview) -> None:
        self._table = table
        self._image = image
        self._done = 0
        self._parts: list[bytes] = []
        self.seconds = 0.0

    def advance(self, filled: int) -> None:
        """Digests every chunk that lies wholly below position `filled` and has not been digested yet."""
        table, image = self._table, self._image
        stop = int(np.searchsorted(table.end, filled, side="right"))
        if stop <= self._done:
            return
        began = time.perf_counter()
        begins = table.begin[self._done : stop].tolist()
        ends = table.end[self._done : stop].tolist()
        self._parts.extend([digest(image[begin:end]) for begin, end in zip(begins, ends, strict=True)])
        self._done = stop
        self.seconds += time.perf_counter() - began

    def digests(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All digests in index order, uint8 [chunks, 16]."""
        assert self._done == self._table.total, "the image was not digested to its end"
        found = np.frombuffer(b"".join(self._parts), np.uint8).reshape(-1, 16)
        out = np.empty_like(found)
        out[self._table.row] = found
        return out
