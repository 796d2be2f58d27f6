"""What a rank has of a checkpoint in its own memory: copied from there instead of read, where it is the very same.

It is believed chunk by chunk: what has the digest that the index of the checkpoint has is what was saved, wherever it
lies. So nothing has to be known of where it comes from, and what is damaged, or of another step, is simply read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tenuto.codec.chunk_map import ChunkMap
from tenuto.codec.digest import digest
from tenuto.model.leaf import Box, LeafSpec
from tenuto.state.contract import Buffer


class Part(NamedTuple):
    """A box of a leaf. `dtype`: its name; `private`: whether it counts on this rank alone."""

    path: str
    dtype: str
    box: Box
    private: bool

    @classmethod
    def of(cls, spec: LeafSpec, *, private: bool) -> Part:
        return cls(spec.path, spec.dtype, spec.box, private)


class LocalState:
    """Boxes of leaves in memory, with their bytes. Used while the block that opened it lasts."""

    def __init__(self, parts: Mapping[Part, Buffer], close: Callable[[], None]) -> None:
        self._parts = parts
        self._close = close
        self.taken = 0
        """Bytes that were used."""

    def find(self, part: Part, nbytes: int) -> Buffer | None:
        """Returns the bytes of a box; None where exactly this one is not there."""
        found = self._parts.get(part)
        return found if found is not None and len(found) == nbytes else None

    def close(self) -> None:
        self._parts = {}
        self._close()


def is_saved(chunks: ChunkMap, row: int, first: int, stop: int, data: Buffer) -> bool:
    """Returns whether `data` is what was saved as bytes `first..stop-1` of a row. False where its chunks hold bytes
    besides, whose digest says nothing of these alone."""
    if first % chunks.chunk_bytes or (stop % chunks.chunk_bytes and stop != chunks.length.item(row)):
        return False
    found, view = chunks.covering(row, first, stop), data.data
    for number in range(found.first, found.stop):
        one = chunks.part(found, number, number + 1)
        if digest(view[one.low - first : one.high - first]) != chunks.digest_of(number):
            return False
    return True
