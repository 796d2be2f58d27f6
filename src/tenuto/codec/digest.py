"""Digests of chunks: xxh3-128 in canonical (big-endian) form. Integrity against accidents, never an identity.

A chunk is `chunk_bytes` of one leaf, the last of a leaf shorter; it never spans two leaves, and a leaf of no bytes has
none. Hashing releases the interpreter's lock (xxhash does), so a second thread can write or copy meanwhile.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from xxhash import xxh3_128_digest

DIGEST_NAME: Final = "xxh3-128"
DIGEST_BYTES: Final = 16
CHUNK_BYTES: Final = 262144

Array = np.ndarray[Any, Any]


def digest(data: bytes | memoryview | Array) -> bytes:
    """Returns the 16 bytes that identify `data` (any contiguous buffer)."""
    return xxh3_128_digest(data)  # type: ignore[arg-type]
