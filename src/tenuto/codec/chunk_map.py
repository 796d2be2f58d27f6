"""Where each chunk of an index's rows lies, and which chunks hold which bytes of a row.

A row (a leaf, or a part of one) is divided into chunks of `chunk_bytes`, the last of them shorter; a row of no bytes
has none, and no chunk spans two rows. In format 1 a chunk is stored as it is, and the chunks of a row lie one after the
other. So no column is written down: each is computed by arithmetic, for the rows that are asked for. In format 2 chunks
are encoded, and lie anywhere: their columns come from the index. Everything else that needs the place of a chunk asks
this module.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple, Protocol

import numpy as np

from tenuto.model.records import StoredChunks
from tenuto.record import record

Array = np.ndarray[Any, Any]
Column = np.ndarray[Any, np.dtype[np.int64]]
Span = tuple[Column, Column]


def chunk_count(length: int, chunk_bytes: int) -> int:
    """Returns the number of chunks of a row of `length` bytes."""
    return -(-length // chunk_bytes)


def chunk_counts(length: Array, chunk_bytes: int) -> Column:
    """Returns the number of chunks of each row, int64 [n]."""
    found: Column = -(-np.asarray(length, np.int64) // chunk_bytes)
    return found


def chunk_sizes(length: Array, chunk_bytes: int) -> Column:
    """Returns the bytes of each chunk of each row, int64 [chunks], row after row."""
    counts = chunk_counts(length, chunk_bytes)
    sizes = np.full(int(counts.sum()), chunk_bytes, np.int64)
    ends = np.cumsum(counts)[counts > 0]
    sizes[ends - 1] = (np.asarray(length, np.int64) - (counts - 1) * chunk_bytes)[counts > 0]
    return sizes


def chunk_starts(length: Array, chunk_bytes: int) -> Column:
    """Returns int64 [n + 1]: the chunks of row i are `result[i]:result[i + 1]` of the table of digests."""
    starts = np.zeros(len(length) + 1, np.int64)
    np.cumsum(chunk_counts(length, chunk_bytes), out=starts[1:])
    return starts


def whole_chunks(nbytes: int, chunk_bytes: int) -> int:
    """Returns the bytes of as many whole chunks as fit into `nbytes`, of one at least."""
    return max(nbytes // chunk_bytes, 1) * chunk_bytes


class ChunkedRows(Protocol):
    """The columns of an index that say where its rows lie."""

    @property
    def pack(self) -> Array: ...
    @property
    def offset(self) -> Array: ...
    @property
    def length(self) -> Array: ...
    @property
    def chunk_start(self) -> Array: ...
    @property
    def digests(self) -> Array: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def stored(self) -> StoredChunks | None: ...
    @property
    def sealed(self) -> int | None: ...


@record(eq=False)
class Chunks:
    """Columns of some chunks, int64 [n] each.

    row: the row that the chunk belongs to.
    want: the place of that row among the rows that were asked for.
    start, size: the bytes of the row that the chunk holds.
    pack, offset, stored: the bytes of the pack that hold the chunk.
    digest: the place of the chunk in the table of digests.
    """

    row: Column
    want: Column
    start: Column
    size: Column
    pack: Column
    offset: Column
    stored: Column
    digest: Column

    def __len__(self) -> int:
        return len(self.row)

    @property
    def end(self) -> Column:
        """The first byte of the pack behind each chunk."""
        return self.offset + self.stored

    def take(self, chosen: slice | Column) -> Chunks:
        """Returns the chosen chunks in their order."""
        return Chunks(*(getattr(self, column.name)[chosen] for column in fields(self)))


class ChunkRange(NamedTuple):
    """Consecutive chunks of one row: numbers `first..stop-1` of the table of digests.

    They hold bytes `low..high-1` of row `row` and lie in bytes `begin..end-1` of pack `pack`.
    """

    row: int
    pack: int
    first: int
    stop: int
    low: int
    high: int
    begin: int
    end: int


@record(eq=False)
class ChunkMap:
    """The chunks of all rows of one index. Making it computes nothing.

    pack, offset, length, first: columns [rows]: where each row lies, and the place of its first chunk in `digests`.
    digests: uint8 [chunks, 16].
    """

    pack: Array
    offset: Array
    length: Array
    first: Array
    digests: Array
    chunk_bytes: int
    stored: StoredChunks | None = None
    """Where the chunks lie, if they are encoded: then what a range of a row's bytes is stored in is no range."""
    sealed: int | None = None
    """The number of the key that hides `digests`; None where they are not hidden."""

    @classmethod
    def of(cls, rows: ChunkedRows) -> ChunkMap:
        """Returns the map of an index or of its table."""
        return cls(
            rows.pack,
            rows.offset,
            rows.length,
            rows.chunk_start,
            rows.digests,
            rows.chunk_bytes,
            rows.stored,
            rows.sealed,
        )

    @property
    def stored_digests(self) -> Array:
        """Returns the digests of the chunks as they are stored, uint8 [chunks, 16]."""
        return self.digests if self.stored is None else self.stored.digests

    def all_stored(self) -> Chunks:
        """Returns every chunk as it is stored, each place in a pack once: of an encoded index also those that others
        are decoded from, which count as chunks of a row that needs them."""
        stored = self.stored
        if stored is None:
            return self.chunks()
        row = np.zeros(len(stored), np.int64)
        counts = chunk_counts(self.length, self.chunk_bytes)
        row[: len(self.digests)] = np.repeat(np.arange(len(counts)), counts)
        built = np.flatnonzero(stored.base >= len(self.digests))
        while len(built):
            below = stored.base[built]
            row[below] = row[built]
            built = np.unique(below[stored.base[below] >= len(self.digests)])
        _, first = np.unique(np.stack([stored.pack, stored.offset], 1), axis=0, return_index=True)
        return Chunks(
            row=row[first],
            want=row[first],
            start=np.zeros(len(first), np.int64),
            size=stored.raw[first],
            pack=stored.pack[first],
            offset=stored.offset[first],
            stored=stored.stored[first],
            digest=first.astype(np.int64),
        )

    def chunks(self, rows: Column | None = None, span: Span | None = None) -> Chunks:
        """Returns the chunks of `rows`, row after row.

        rows: their numbers; None: all rows.
        span: only the chunks that hold some of bytes `span[0][i] .. span[1][i] - 1` of `rows[i]`; None: all chunks.
        """
        if rows is None:
            rows = np.arange(len(self.pack), dtype=np.int64)
        length, chunk = self.length[rows], self.chunk_bytes
        low: Column | None = None
        if span is None:
            counts = chunk_counts(length, chunk)
        else:
            low = span[0] // chunk
            counts = np.where(span[1] > span[0], -(-span[1] // chunk) - low, 0)
        want = np.repeat(np.arange(len(rows), dtype=np.int64), counts)
        # The number of each chunk within its row: a running count less the count at the row's beginning.
        number = np.arange(len(want), dtype=np.int64) - (np.cumsum(counts) - counts)[want]
        if low is not None:
            number += low[want]
        row, start = rows[want], number * chunk
        size = np.minimum(length[want] - start, chunk)
        if self.stored is not None:
            entry = self.first[row] + number
            places = (self.stored.pack[entry], self.stored.offset[entry], self.stored.stored[entry])
            return Chunks(row, want, start, size, *places, digest=entry)
        return Chunks(
            row=row,
            want=want,
            start=start,
            size=size,
            pack=self.pack[row],
            offset=self.offset[row] + start,
            stored=size,
            digest=self.first[row] + number,
        )

    def covering(self, row: int, start: int, stop: int) -> ChunkRange:
        """Returns the chunks that hold bytes `start..stop-1` of a row, at least one byte, in constant time."""
        first = self.first.item(row)
        return self._range(row, first, start // self.chunk_bytes, -(-stop // self.chunk_bytes))

    def part(self, found: ChunkRange, first: int, stop: int) -> ChunkRange:
        """Returns chunks `first..stop-1` of the table of digests, which must be some of those of `found`."""
        before = self.first.item(found.row)
        return self._range(found.row, before, first - before, stop - before)

    def _range(self, row: int, before: int, first: int, stop: int) -> ChunkRange:
        """Returns chunks `first..stop-1` of a row, counted from the row's first, which is chunk `before` of the table
        of digests."""
        low, high = first * self.chunk_bytes, min(stop * self.chunk_bytes, self.length.item(row))
        offset = self.offset.item(row)
        return ChunkRange(
            row, self.pack.item(row), before + first, before + stop, low, high, offset + low, offset + high
        )

    def stored_ranges(self, rows: Column, start: Column, stop: Column) -> tuple[Column, Column, Column]:
        """Returns, for each of `rows`, the bytes that hold its bytes `start[i] .. stop[i] - 1`, in whole chunks: pack,
        first byte, and the byte behind the last."""
        assert self.stored is None, "encoded chunks lie anywhere"
        chunk = self.chunk_bytes
        offset, high = self.offset[rows], np.minimum(-(-stop // chunk) * chunk, self.length[rows])
        return self.pack[rows], offset + start // chunk * chunk, offset + high

    def digest_of(self, number: int) -> bytes:
        """Returns the digest of chunk `number` of the table of digests."""
        found: bytes = self.digests[number].tobytes()
        return found
