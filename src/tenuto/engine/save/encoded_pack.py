"""The packs of an encoded save: one that is being filled, one whose bytes are all there; and what was measured."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from tenuto.codec.digest import digest
from tenuto.engine.staging.plan import ImagePlan
from tenuto.model.records import PackEntry
from tenuto.record import record
from tenuto.repo.format.object_names import encoded_pack_file
from tenuto.seal.cipher import TAG, PackSealer

Column = np.ndarray[Any, np.dtype[np.int64]]

PAGE: Final = 4096
PIECE_BYTES: Final = 64 << 20
PACK_BYTES: Final = 64 << 20
STRAIGHT_BYTES: Final = 16 << 20
"""A run of chunks that is at least so long is not copied before it is put."""
MOST_PACKS: Final = 200
"""About as many packs has a save at most: of a large state they are longer."""
_SMALLER: Final = 1.05
_FASTER: Final = 1.25
"""By how much encoding has to make a state smaller, and be faster than the place, for `auto` to encode: its rate was
measured while the threads of a capture, and perhaps training, wanted the same cores at another share."""


class Body(NamedTuple):
    """A new chunk as it will be stored. `base`: the chunk of the baseline that it is decoded from, or -1."""

    codec: str
    data: memoryview | bytes
    base: int
    digest: bytes = b""
    """Of the data, where it is known already."""
    master: int = -1
    """The chunk of this save whose rounding it is decoded from, or -1."""


@record
class Segment:
    """A pack whose bytes are all there: those in `memory`, then those of the image in `straight`."""

    number: int
    entry: PackEntry
    memory: mmap.mmap
    straight: memoryview
    moves: Callable[[], None]
    """Called as the pieces go out."""

    @property
    def length(self) -> int:
        return self.entry.length

    def pieces(self) -> Iterator[memoryview]:
        for part in (memoryview(self.memory)[: self.length - len(self.straight)], self.straight):
            for begin in range(0, len(part), PIECE_BYTES):
                self.moves()
                yield part[begin : begin + PIECE_BYTES]


class Filling:
    """A pack that is being filled."""

    def __init__(
        self,
        number: int,
        name: str,
        header: bytes,
        memory: mmap.mmap,
        room: int,
        *,
        save_id: str,
        sealer: PackSealer | None,
    ) -> None:
        self.number = number
        self.room = room
        self._save_id = save_id
        self._sealer = sealer
        self._name = name
        self._header = header
        self._memory = memory
        self._bytes = np.frombuffer(memory, np.uint8)
        self.length = 0
        self.add(header)

    def sealed(self, data: memoryview | bytes) -> memoryview | bytes:
        """Returns the bytes by which these are stored, if they are added next."""
        if self._sealer is None:
            return data
        place, frame = self._sealer.seal(data)
        assert place == self.length, "a frame is sealed for its place"
        return frame

    def add(self, data: memoryview | bytes) -> None:
        self._bytes[self.length : self.length + len(data)] = np.frombuffer(data, np.uint8)
        self.length += len(data)

    def closed(self, moves: Callable[[], None]) -> Segment:
        key = "" if self._sealer is None else self._sealer.wrapped
        entry = PackEntry(
            self._name,
            self.length,
            len(self._header),
            digest(self._header),
            key=key,
            save_id=self._save_id if key else "",
        )
        return Segment(self.number, entry, self._memory, memoryview(b""), moves)


@dataclass(slots=True)
class Rates:
    """What was measured: bytes per second that the place takes, and that are encoded; and how much smaller it gets."""

    place: float = 0.0
    encode: float = 0.0
    ratio: float = 1.0
    whole: bool = False
    """Whether whole saves were encoded: samples say less about the rate."""

    @property
    def worth(self) -> bool:
        """Whether encoding makes a save faster: it has to be faster than the place, since the two overlap."""
        return self.place > 0 and self.encode > self.place * _FASTER and self.ratio > _SMALLER

    def add_encoded(self, raw: float, stored: float, took: float, *, whole: bool) -> None:
        self.ratio = _mean(self.ratio if self.encode else 0.0, raw / stored)
        if whole or not self.whole:
            self.encode = _mean(self.encode if whole == self.whole else 0.0, raw / took)
        self.whole |= whole

    def decision(self, name: str) -> str:
        """Returns in words whether codec `name` is worth it, and why."""
        if not self.place or not self.encode:
            return "not compressed: this place has not been measured yet"
        figures = f"it takes {self.place / 1e9:.2f} GB/s, and {name} encodes {self.encode / 1e9:.2f} GB/s"
        return f"{'' if self.worth else 'not '}compressed: {figures} to 1/{self.ratio:.2f}"

    def add_put(self, nbytes: int, took: float) -> None:
        self.place = _mean(self.place, nbytes / took)


def _mean(old: float, new: float) -> float:
    return new if not old else 0.7 * old + 0.3 * new


def stretches(chunks: Column, begin: Column, end: Column) -> list[tuple[int, int]]:
    """Returns chunks of the image, in its order, as ranges of such as follow each other there."""
    if not len(chunks):
        return []
    cuts = np.flatnonzero((np.diff(chunks) != 1) | (begin[chunks[1:]] != end[chunks[:-1]])) + 1
    firsts, lasts = chunks[np.append(0, cuts)], chunks[np.append(cuts, len(chunks)) - 1]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def pack_names(plan: ImagePlan, *, encoded: bool) -> list[str]:
    """Returns the names that the packs of a save of this structure may have."""
    if not encoded:
        return [pack.name for pack in plan.layout.packs]
    room, image = longest_pack(plan) - _longest_chunk(plan) - PAGE, plan.layout.nbytes + TAG * plan.chunks.total
    room = min(room, straight_bytes(plan))
    return [encoded_pack_file(plan.rank, number) for number in range(image // room + 10)]


def longest_pack(plan: ImagePlan) -> int:
    """Returns how long a pack of this structure may become."""
    image = plan.layout.nbytes + TAG * plan.chunks.total
    return max(min(PACK_BYTES, image), -(-image // MOST_PACKS), 2 * _longest_chunk(plan)) + 2 * PAGE


def _longest_chunk(plan: ImagePlan) -> int:
    return min(plan.chunk_bytes, plan.layout.nbytes) + TAG


def straight_bytes(plan: ImagePlan) -> int:
    """Returns how long a run has to be to become a pack of its own."""
    return max(STRAIGHT_BYTES, longest_pack(plan) // 4)
