"""Digests of chunks: xxh3-128 in canonical (big-endian) form. Integrity against accidents, never an identity.

A chunk is `chunk_bytes` of one leaf, the last of a leaf shorter; it never spans two leaves, and a leaf of no bytes has
none. Hashing releases the interpreter's lock (xxhash does), so a second thread can write or copy meanwhile.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from xxhash import xxh3_128_digest

from tenuto.codec.chunk_map import chunk_count, chunk_starts

DIGEST_NAME: Final = "xxh3-128"
DIGEST_BYTES: Final = 16
CHUNK_BYTES: Final = 262144

Array = np.ndarray[Any, Any]


def digest(data: bytes | memoryview | Array) -> bytes:
    """The 16 bytes that stand for `data` (any contiguous buffer)."""
    return xxh3_128_digest(data)  # type: ignore[arg-type]


def _view(data: bytes | memoryview | Array) -> memoryview:
    view = memoryview(data)  # type: ignore[arg-type]
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _digests(view: memoryview, chunk_bytes: int) -> list[bytes]:
    length = len(view)
    if length <= chunk_bytes:
        return [xxh3_128_digest(view)] if length else []
    return [xxh3_128_digest(view[at : at + chunk_bytes]) for at in range(0, length, chunk_bytes)]


def digest_chunks(view: bytes | memoryview | Array, chunk_bytes: int, out: Array) -> None:
    """Writes the digests of the chunks of one leaf's bytes into `out`, uint8 [chunks, 16]."""
    found = _digests(_view(view), chunk_bytes)
    assert out.shape == (len(found), DIGEST_BYTES), "a row for each chunk"
    if found:
        out[:] = np.frombuffer(b"".join(found), np.uint8).reshape(-1, DIGEST_BYTES)


def digest_rows(buffer: memoryview | Array, start: Array, length: Array, chunk_bytes: int) -> tuple[Array, Array]:
    """Digests of many leaves at once: leaf i is `length[i]` bytes of `buffer` from `start[i]`.

    Returns chunk_start, int64 [n + 1], and digests, uint8 [chunks, 16], in the order of the rows. Raises ValueError for
    a row that lies outside the buffer: a slice would quietly be shorter.
    """
    view = _view(buffer)
    starts, lengths = np.asarray(start, np.int64), np.asarray(length, np.int64)
    if len(starts) and (int(starts.min()) < 0 or int(lengths.min()) < 0 or bool((lengths > len(view) - starts).any())):
        raise ValueError("a row lies outside the buffer")
    found: list[bytes] = []
    append, hash_of = found.append, xxh3_128_digest
    for begin, size in zip(starts.tolist(), lengths.tolist(), strict=True):
        if size <= chunk_bytes:
            if size:
                append(hash_of(view[begin : begin + size]))
        else:
            found += _digests(view[begin : begin + size], chunk_bytes)
    return chunk_starts(lengths, chunk_bytes), np.frombuffer(b"".join(found), np.uint8).reshape(-1, DIGEST_BYTES)


def check_chunks(view: bytes | memoryview | Array, chunk_bytes: int, expected: Array) -> int:
    """The number of the first chunk of `view` whose digest is not `expected[i]` (uint8 [chunks, 16]), or -1.

    A table with more or fewer rows than `view` has chunks is wrong at the first chunk that only one of them has.
    """
    data = _view(view)
    wanted = np.ascontiguousarray(expected, np.uint8).tobytes()
    have, rows = chunk_count(len(data), chunk_bytes), len(wanted) // DIGEST_BYTES
    for number, found in enumerate(_digests(data[: rows * chunk_bytes], chunk_bytes)):
        if found != wanted[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
            return number
    return -1 if have == rows else min(have, rows)
