"""Which bytes of a checkpoint's packs are read together to be verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tenuto.codec.chunk_map import ChunkMap, Chunks

PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRun:
    """Bytes `start..stop-1` of pack `pack`: the chunks follow each other without a hole."""

    pack: int
    start: int
    stop: int
    chunks: Chunks


def chunk_runs(chunks: ChunkMap, piece_bytes: int = PIECE_BYTES) -> Iterator[ChunkRun]:
    """Yields all chunks of all packs, cut into pieces of about `piece_bytes`, in order. Reading the index has checked
    that its rows cover every byte after each pack's header exactly once."""
    found = chunks.chunks()
    if not len(found):
        return
    found = found.take(np.lexsort((found.offset, found.pack)))
    group = found.offset // piece_bytes
    cuts = (np.flatnonzero((np.diff(group) != 0) | (np.diff(found.pack) != 0)) + 1).tolist()
    for low, high in zip([0, *cuts], [*cuts, len(found)], strict=True):
        yield _run(found.take(slice(low, high)))


def halves(piece: ChunkRun) -> tuple[ChunkRun, ChunkRun]:
    """Returns a piece of at least two chunks, divided between two of them."""
    middle = len(piece.chunks) // 2
    return _run(piece.chunks.take(slice(0, middle))), _run(piece.chunks.take(slice(middle, None)))


def _run(chunks: Chunks) -> ChunkRun:
    return ChunkRun(int(chunks.pack[0]), int(chunks.offset[0]), int(chunks.offset[-1] + chunks.stored[-1]), chunks)
