"""Which bytes of a checkpoint's packs are read together to be verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tenuto.model.records import Index

PIECE_BYTES = 8 << 20
Column = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRun:
    """Bytes `start..stop-1` of pack `pack`: whole chunks that follow each other without a hole.

    begin, end: int64, each chunk's bytes in the pack; row: its place in the index's digests; leaf: whose it is.
    """

    pack: int
    start: int
    stop: int
    begin: Column
    end: Column
    row: Column
    leaf: Column


def chunk_runs(index: Index, piece_bytes: int = PIECE_BYTES) -> Iterator[ChunkRun]:
    """All chunks of all packs, cut into pieces of about `piece_bytes`, in order. Reading the index has checked
    that its rows cover every byte after each pack's header exactly once."""
    counts = np.diff(index.chunk_start)
    leaf = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    row = np.arange(len(leaf), dtype=np.int64)
    begin = index.offset[leaf] + (row - index.chunk_start[leaf]) * index.chunk_bytes
    end = np.minimum(begin + index.chunk_bytes, index.offset[leaf] + index.length[leaf])
    of_pack = index.pack[leaf]
    order = np.lexsort((begin, of_pack))
    begin, end, row, leaf, of_pack = (column[order] for column in (begin, end, row, leaf, of_pack))
    if not len(row):
        return
    whole = ChunkRun(0, 0, 0, begin, end, row, leaf)
    group = begin // piece_bytes
    cuts = np.flatnonzero((np.diff(group) != 0) | (np.diff(of_pack) != 0)) + 1
    for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(row)], strict=True):
        yield _cut(whole, int(of_pack[low]), low, high)


def halves(piece: ChunkRun) -> tuple[ChunkRun, ChunkRun]:
    """A piece of at least two chunks, divided between two of them."""
    middle = len(piece.row) // 2
    return _cut(piece, piece.pack, 0, middle), _cut(piece, piece.pack, middle, len(piece.row))


def _cut(piece: ChunkRun, pack: int, low: int, high: int) -> ChunkRun:
    """The chunks numbered `low..high-1` of a piece."""
    rows = slice(low, high)
    begin, end = piece.begin[rows], piece.end[rows]
    return ChunkRun(pack, int(begin[0]), int(end[-1]), begin, end, piece.row[rows], piece.leaf[rows])
