"""Codecs of floats: the words of a chunk, or their differences to a base's, cut into planes of bytes.

The first bytes of trained weights are exponents, of which few occur; the last ones are noise. Apart from each other
the first ones compress to what their entropy allows, and the last ones are stored as they are, at no cost.

Stored are a table with an entry for each plane, the most significant one first: its method (one byte) and how many
bytes it takes (four, little-endian); then the planes; then the bytes of the chunk behind its last whole word.
"""

from __future__ import annotations

import math
import struct
import threading
from typing import Any, Final

import numpy as np

from tenuto.codec.contract import damaged
from tenuto.codec.differences import Difference, Words
from tenuto.codec.stages import Compressor

RAW, COMPRESSED, CONSTANT = 0, 1, 2
ENTRY: Final = struct.Struct("<BI")

LOOKS: Final = 16
LOOK_WORDS: Final = 64
"""What planes hold is judged by so many pieces of a chunk, of so many words."""
NOISE_BITS: Final = 7.65
"""A plane whose sample carries more is stored raw untried: little can be won (of 8 bits, a sample shows 7.8)."""
REPEATING_SHARE: Final = 0.9
"""Where one byte makes up more of a plane, runs of it are worth looking for: Huffman's code takes a bit for each."""
KEPT_BYTES: Final = 4 << 20
"""The largest chunk for which a thread keeps its scratch memory."""

Plane = np.ndarray[Any, np.dtype[np.uint8]]


class Planes:
    """A codec of words of `item` bytes: `difference`, then planes, each through `compressor` where that helps.

    thorough: look for repeats in every plane that compresses, and keep what is shorter. In the second moments of Adam,
    whose rows are alike, that takes a fifth off the first plane, at a tenth of the speed.
    """

    def __init__(
        self, name: str, difference: Difference, item: int, compressor: Compressor, *, thorough: bool = False
    ) -> None:
        self.name = name
        self.needs_base = difference.needs_base
        self._difference = difference
        self._compressor = compressor
        self._item = item
        self._thorough = thorough
        self._word = np.dtype(f"<u{item}")

    def encode(self, raw: memoryview, base: memoryview | None = None) -> bytes | None:
        item, count = self._item, len(raw) // self._item
        if len(raw) <= item * ENTRY.size:
            return None
        coded, spare, other = _scratch(self._word, count)
        self._difference.forward(self._words(raw, count), self._base(base, raw), coded, (spare, other))
        planes = spare.view(np.uint8).reshape(item, count)
        table, parts = bytearray(), []
        looks = _looked_at(coded)
        for place, plane in enumerate(planes):
            if below := 8 * (item - 1 - place):
                np.right_shift(coded, below, out=plane, casting="unsafe")
            else:
                np.copyto(plane, coded, casting="unsafe")
            method, stored = self._stored(plane, *looks[place])
            table += ENTRY.pack(method, len(stored))
            parts.append(stored)
        parts.append(raw[count * item :])
        if len(table) + sum(map(len, parts)) >= len(raw):
            return None
        return b"".join([table, *parts])

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None = None) -> None:
        item, count = self._item, len(out) // self._item
        head, tail = item * ENTRY.size, len(out) % item
        if not head <= len(stored) < len(out):
            raise damaged(self.name, f"{len(stored)} bytes for a chunk of {len(out)}")
        table = list(ENTRY.iter_unpack(stored[:head]))
        if head + sum(length for _, length in table) + tail != len(stored):
            raise damaged(self.name, "the planes' lengths do not add up to the chunk's")
        coded, spare, other = _scratch(self._word, count)
        begin = head
        for place, (method, length) in enumerate(table):
            plane = self._plane(method, stored[begin : begin + length], count)
            begin += length
            if place == 0:
                coded[:] = plane
                continue
            np.left_shift(coded, 8, out=coded)
            np.copyto(spare, plane)
            np.bitwise_or(coded, spare, out=coded)
        self._difference.back(coded, self._base(base, out), self._words(out, count), (spare, other))
        out[count * item :] = stored[begin:]

    def _words(self, data: memoryview, count: int) -> Words:
        return np.frombuffer(data, self._word, count)

    def _base(self, base: memoryview | None, chunk: memoryview) -> Words | None:
        if not self.needs_base:
            return None
        if base is None or len(base) != len(chunk):
            raise damaged(self.name, f"a chunk of {len(chunk)} bytes needs a base of as many")
        return self._words(base, len(base) // self._item)

    def _stored(self, plane: Plane, share: float, bits: float) -> tuple[int, bytes | memoryview]:
        """Returns by which method a plane is stored, and its stored bytes. share, bits: of a sample of it."""
        if share == 1.0 and not (plane != plane[0]).any():
            return CONSTANT, plane[:1].tobytes()
        if bits <= NOISE_BITS:
            stored = self._compressor.compress(plane.data, repeats=share > REPEATING_SHARE)
            if self._thorough:
                other = self._compressor.compress(plane.data, repeats=share <= REPEATING_SHARE)
                stored = min(stored, other, key=len)
            if len(stored) < len(plane):
                return COMPRESSED, stored
        return RAW, plane.data

    def _plane(self, method: int, stored: memoryview, count: int) -> Plane | np.uint8:
        """Returns a plane of `count` bytes, or the one byte that it repeats."""
        if method == RAW and len(stored) == count:
            return np.frombuffer(stored, np.uint8)
        if method == CONSTANT and len(stored) == 1:
            return np.uint8(stored[0])
        if method == COMPRESSED and 0 < len(stored) < count:
            return np.frombuffer(self._compressor.decompress(stored, count), np.uint8)
        raise damaged(self.name, f"a plane of {count} bytes has {len(stored)} by method {method}")


def _looked_at(coded: Words) -> list[tuple[float, float]]:
    """Returns for each plane of these words, the highest first, the share of its most frequent byte and the bits that
    each of its bytes carries, from a sample."""
    item = coded.dtype.itemsize
    if len(coded) > LOOKS * LOOK_WORDS:
        apart = len(coded) // LOOKS
        coded = coded[: apart * LOOKS].reshape(LOOKS, apart)[:, :LOOK_WORDS].reshape(-1)
    # Bytes of plane k are counted from 256 k on, all planes at once.
    marked = coded.view(np.uint8).reshape(-1, item) + _FIRST_COUNTS[:item]
    counts = np.bincount(marked.reshape(-1), minlength=256 * item).reshape(item, 256)
    size = len(coded)
    shares, bits = counts.max(axis=1) / size, math.log2(size) - _COUNT_LOG_COUNT[counts].sum(axis=1) / size
    return list(zip(shares.tolist(), bits.tolist(), strict=True))[::-1]


_FIRST_COUNTS: Final = np.arange(8, dtype=np.intp) * 256
_COUNT_LOG_COUNT: Final = np.array([0.0, *(count * math.log2(count) for count in range(1, LOOKS * LOOK_WORDS + 1))])
"""The entropy of a sample is computed from its counts, by this table."""
_own = threading.local()


def _scratch(word: np.dtype[Any], count: int) -> tuple[Words, Words, Words]:
    """Returns three arrays of `count` words that belong to this thread until it asks again."""
    last: tuple[np.dtype[Any], int, tuple[Words, Words, Words]] | None = getattr(_own, "last", None)
    if last is not None and last[:2] == (word, count):
        return last[2]
    each = -(-count * word.itemsize // 64) * 64
    kept: Plane | None = getattr(_own, "scratch", None)
    if kept is None or len(kept) < 3 * each:
        kept = np.empty(3 * each, np.uint8)
    first, second, third = (kept[place * each :][: count * word.itemsize].view(word) for place in range(3))
    if each <= KEPT_BYTES:
        _own.scratch, _own.last = kept, (word, count, (first, second, third))
    return first, second, third
