"""Digests of the chunks of rows, one after the other: what the engine computes while it copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from tenuto.codec.chunk_map import chunk_starts
from tenuto.codec.digest import DIGEST_BYTES, digest

Array = np.ndarray[Any, Any]


def digest_rows(buffer: Array, start: Array, length: Array, chunk_bytes: int) -> tuple[Array, Array]:
    """Row i is `length[i]` bytes of `buffer` from `start[i]`. Returns chunk_start, int64 [n + 1], and digests, uint8
    [chunks, 16], in the order of the rows."""
    rows = [buffer[begin : begin + size].data for begin, size in zip(start.tolist(), length.tolist(), strict=True)]
    found = [digest(row[at : at + chunk_bytes]) for row in rows for at in range(0, len(row), chunk_bytes)]
    return chunk_starts(length, chunk_bytes), np.frombuffer(b"".join(found), np.uint8).reshape(-1, DIGEST_BYTES)
