"""Seals the chunks of a checkpoint again, for another name: a frame is sealed for the object that it lies in.

The rows of the index stay what they are, and so does the content digest. Memory is bounded by a batch of chunks and one
pack.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from tenuto.codec.digest import digest
from tenuto.engine.save.encoded_pack import PAGE, Filling, Segment
from tenuto.model.records import Index, PackEntry, StoredChunks
from tenuto.repo.format.object_names import encoded_pack_file
from tenuto.repo.format.safetensors import build_header
from tenuto.repo.format.stored_chunks import RAW
from tenuto.seal.cipher import TAG, PackSealer
from tenuto.state.contract import Buffer

BATCH_BYTES: Final = 8 << 20
"""Bytes that are read at a time."""
PACK_BYTES: Final = 32 << 20
MOST_PACKS: Final = 1000
"""About as many packs has an index at most: of a large state they are longer."""

Read = Callable[[int, int, Buffer], None]
"""Fills a buffer with the verified bytes of a row, from a byte of it on."""
Seal = Callable[[str, int], PackSealer]
"""Returns what seals a pack of this name, whose header has so many bytes."""


def sealed_again(index: Index, read: Read, put: Callable[[Segment], object], seal: Seal) -> Index:
    """Puts the chunks of a sealed index into packs of their own. Returns the index of these. Raises what `read` and
    `put` do."""
    count = len(index.digests)
    pack, offset, stored, sizes = (np.zeros(count, np.int64) for _ in range(4))
    digests = np.zeros((count, 16), np.uint8)
    room = _pack_room(int(index.length.sum()), index.chunk_bytes)
    memory = mmap.mmap(-1, -(-room // PAGE) * PAGE)
    filling: Filling | None = None
    packs: list[PackEntry] = []

    def put_filled() -> None:
        if filling is not None:
            segment = filling.closed(lambda: None)
            put(segment)
            packs.append(segment.entry)

    for number, chunk in enumerate(_chunks(index, read)):
        if filling is None or filling.length + len(chunk) + TAG > room:
            put_filled()
            file = encoded_pack_file(index.rank, len(packs))
            header = build_header((), {"tenuto.pack": file, "tenuto.save_id": index.save_id}, align=PAGE)
            sealer = seal(file, len(header))
            filling = Filling(len(packs), file, header, memory, room, save_id=index.save_id, sealer=sealer)
        frame = filling.sealed(chunk)
        pack[number], offset[number], stored[number] = filling.number, filling.length, len(frame)
        sizes[number], digests[number] = len(chunk), np.frombuffer(digest(frame), np.uint8)
        filling.add(frame)
    put_filled()
    nothing, nowhere = np.zeros(count, np.int64), np.zeros(len(index.length), np.int64)
    table = StoredChunks((RAW,), pack, offset, stored, sizes, nothing, np.full(count, -1, np.int64), digests)
    return replace(index, packs=tuple(packs), pack=nowhere, offset=nowhere, stored=table)


def pack_names(index: Index) -> list[str]:
    """Returns the names that the packs of an index may have once they are sealed again."""
    nbytes, chunks = int(index.length.sum()), len(index.digests)
    room = _pack_room(nbytes, index.chunk_bytes) - min(index.chunk_bytes, nbytes) - TAG - PAGE
    numbers = range((nbytes + TAG * chunks) // max(room, PAGE) + 10)
    return [encoded_pack_file(index.rank, number) for number in numbers]


def _pack_room(nbytes: int, chunk_bytes: int) -> int:
    """Returns how long a pack of an index of so many bytes may become."""
    return max(min(PACK_BYTES, nbytes + nbytes // 1024), -(-nbytes // MOST_PACKS), chunk_bytes) + TAG + 2 * PAGE


def _chunks(index: Index, read: Read) -> Iterator[memoryview]:
    """Yields the chunks of an index, in its order; each is valid until the next one."""
    size = index.chunk_bytes
    batch = max(BATCH_BYTES // size, 1) * size
    memory = np.empty(min(batch, max(index.length.tolist(), default=0)), np.uint8)
    for row, length in enumerate(index.length.tolist()):
        for start in range(0, length, batch):
            data = memory[: min(batch, length - start)]
            read(row, start, data)
            for begin in range(0, len(data), size):
                yield data[begin : begin + size].data
