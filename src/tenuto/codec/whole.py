"""Codecs that take a chunk as plain bytes: as it is, one repeated item, or compressed whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from tenuto.codec.contract import damaged
from tenuto.codec.stages import Compressor

ITEMS = (1, 2, 4, 8)
"""The lengths of an item that a constant chunk repeats."""


class Raw:
    """The chunk as it is."""

    name = "raw"
    needs_base = False

    def encode(self, raw: memoryview, base: memoryview | None = None) -> bytes | None:
        return None

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None = None) -> None:
        if len(stored) != len(out):
            raise damaged(self.name, f"{len(stored)} bytes where {len(out)} were recorded")
        out[:] = stored


class Constant:
    """One item of 1, 2, 4 or 8 bytes, repeated: all-zero moments, masks, freshly initialised norms. The last may be cut
    short. A chunk of other content costs a look at its first bytes."""

    name = "constant"
    needs_base = False

    def encode(self, raw: memoryview, base: memoryview | None = None) -> bytes | None:
        found = np.frombuffer(raw, np.uint8)
        for item in ITEMS:
            if item >= len(found):
                break
            if _repeats(found[:64], item) and _repeats(found, item):
                return found[:item].tobytes()
        return None

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None = None) -> None:
        item = len(stored)
        if item not in ITEMS or item >= len(out):
            raise damaged(self.name, f"{item} bytes for a chunk of {len(out)}")
        if any(_repeats(np.frombuffer(stored, np.uint8), part) for part in ITEMS if part < item):
            raise damaged(self.name, f"an item of {item} bytes that repeats a shorter one")
        filled, whole = np.frombuffer(out, np.uint8), len(out) // item * item
        filled[:whole].view(f"V{item}")[:] = np.frombuffer(stored, f"V{item}")
        filled[whole:] = np.frombuffer(stored, np.uint8)[: len(out) - whole]


def _repeats(data: np.ndarray[Any, Any], item: int) -> bool:
    return bool(np.array_equal(data[item:], data[:-item]))


class Whole:
    """The chunk through one compressor: integers, masks, bytes."""

    needs_base = False

    def __init__(self, compressor: Compressor) -> None:
        self.name = compressor.name
        self._compressor = compressor

    def encode(self, raw: memoryview, base: memoryview | None = None) -> bytes | None:
        stored = self._compressor.compress(raw)
        return stored if len(stored) < len(raw) else None

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None = None) -> None:
        if len(stored) >= len(out):
            raise damaged(self.name, f"{len(stored)} bytes for a chunk of {len(out)}, which would have been stored raw")
        out[:] = self._compressor.decompress(stored, len(out))
