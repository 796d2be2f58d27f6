"""The columns of an encoded index (format 2) that say where each chunk lies, and how it is decoded.

Reading trusts nothing, as in `index`: a number is compared with the bytes that exist before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tenuto.codec.derived import MASTER, ROUNDED
from tenuto.model.records import PackEntry, StoredChunks
from tenuto.repo.format.objects import Fields
from tenuto.seal.cipher import TAG

Array = np.ndarray[Any, Any]

COLUMNS: Final = (
    ("chunk.base", "U64", "<u8"),
    ("chunk.offset", "U64", "<u8"),
    ("chunk.raw", "U64", "<u8"),
    ("chunk.stored", "U64", "<u8"),
    ("chunk.pack", "U32", "<u4"),
    ("chunk.codec", "U16", "<u2"),
    ("chunk.digests", "U8", "|u1"),
)
"""`chunk.base` is the number of the chunk that it is decoded from plus one, 0 where from none."""
ROUNDED_COLUMN: Final = ("chunk.rounded", "U8", "|u1")
"""Present only where a chunk's base is the rounding of the numbers there: as `StoredChunks.rounded`."""
RAW: Final = "raw"
"""The codec of a chunk that is stored as it is."""
MAX_CHUNK_BYTES: Final = 16 << 20
"""The longest chunk that may be encoded: so many bytes at most come out of one, whatever its stored bytes say. One that
is stored as it is has all its bytes in its pack, and may be as long as any chunk."""
MAX_CHAIN: Final = 64
"""The most chunks that one is decoded from, one upon the other."""
_MAX_CODECS: Final = 1000
_LIMIT: Final = 2**62


def encode_chunks(chunks: StoredChunks) -> dict[str, Array]:
    """Returns the columns."""
    rounded = {} if chunks.rounded is None else {ROUNDED_COLUMN[0]: chunks.rounded}
    return rounded | {
        "chunk.base": chunks.base + 1,
        "chunk.offset": chunks.offset,
        "chunk.raw": chunks.raw,
        "chunk.stored": chunks.stored,
        "chunk.pack": chunks.pack,
        "chunk.codec": chunks.codec,
        "chunk.digests": np.ascontiguousarray(chunks.digests, np.uint8).reshape(-1),
    }


def decode_chunks(
    columns: dict[str, Array],
    head: Fields,
    *,
    packs: Sequence[PackEntry],
    sizes: Array,
    digests: Array,
    row: Array,
    dtype: Sequence[str],
) -> StoredChunks:
    """Returns the chunks. Raises CorruptionError through `head`.

    sizes: int64 [n], the length of each chunk of the index's rows; digests: uint8 [n, 16], of their content; row: int64
    [n], whose chunk each is. dtype: the name of each row's.
    """
    codecs = _codecs(head)
    count = columns["chunk.pack"].size
    rounded = columns.get(ROUNDED_COLUMN[0])
    for name, _, _ in COLUMNS if rounded is None else (*COLUMNS, ROUNDED_COLUMN):
        if columns[name].size != (count * 16 if name == "chunk.digests" else count):
            raise head.refuse(f"the column {name!r} does not have one value for each of {count} chunks")
    if count < len(sizes):
        raise head.refuse(f"says of {count} chunks where they lie, and its rows have {len(sizes)}")
    offset, raw, stored = (_bounded(columns[f"chunk.{name}"], head) for name in ("offset", "raw", "stored"))
    found = StoredChunks(
        codecs=codecs,
        pack=columns["chunk.pack"].astype(np.int64),
        offset=offset,
        stored=stored,
        raw=raw,
        codec=columns["chunk.codec"].astype(np.int64),
        base=_bounded(columns["chunk.base"], head) - 1,
        digests=columns["chunk.digests"].reshape(-1, 16),
        rounded=rounded,
    )
    if not np.array_equal(raw[: len(sizes)], sizes):
        raise head.refuse("a chunk does not have the length that its row gives it")
    if count and int(found.codec.max()) >= len(codecs):
        raise head.refuse("a chunk has a codec that the index does not list")
    plain = found.codec == codecs.index(RAW) if RAW in codecs else np.zeros(count, np.bool_)
    if count and (int(raw.min()) < 1 or int(raw[~plain].max(initial=0)) > MAX_CHUNK_BYTES):
        raise head.refuse(f"a chunk has no byte, or is encoded and has more than {MAX_CHUNK_BYTES}")
    _check_places(found, head, packs)
    within = np.array([bool(pack.key) for pack in packs], np.bool_)
    sealed = within[found.pack] if count else np.zeros(0, np.bool_)
    _check_raw(found, head, digests, plain & ~sealed, plain & sealed)
    _check_bases(found, head)
    _check_rounded(found, head, row, dtype)
    _check_chains(found, head)
    return found


def _codecs(head: Fields) -> tuple[str, ...]:
    names = head.sequence("codecs")
    if len(names) > _MAX_CODECS or len(set(map(str, names))) != len(names):
        raise head.refuse("lists too many codecs, or one twice")
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= 100 or not name.isascii():
            raise head.refuse("lists a codec whose name is not a short text")
    return tuple(names)


def _bounded(column: Array, head: Fields) -> Array:
    if column.size and int(column.max()) >= _LIMIT:
        raise head.refuse("a number of a chunk is beyond 2^62")
    return column.astype(np.int64)


def _check_places(found: StoredChunks, head: Fields, packs: Sequence[PackEntry]) -> None:
    """Checks that every chunk lies behind its pack's header and within it, and that the chunks of a pack in the
    checkpoint's own directory cover it without a hole: what overlaps is the same chunk stored once."""
    if len(found) and int(found.pack.max()) >= len(packs):
        raise head.refuse("a chunk lies in a data file that the index does not list")
    begins = np.array([pack.header_length for pack in packs], np.int64)
    ends = np.array([pack.length for pack in packs], np.int64)
    if len(found) and (
        (found.stored < 1).any()
        or (found.offset < begins[found.pack]).any()
        or (found.offset + found.stored > ends[found.pack]).any()
    ):
        raise head.refuse("a chunk lies outside of its data file")
    order = np.lexsort((found.stored, found.offset, found.pack))
    pack, offset, stored = found.pack[order], found.offset[order], found.stored[order]
    again = np.flatnonzero((np.diff(pack) == 0) & (np.diff(offset) == 0))
    if (stored[again] != stored[again + 1]).any() or (
        found.digests[order[again]] != found.digests[order[again + 1]]
    ).any():  # whoever verifies a place looks at it once
        raise head.refuse("two chunks at one place have another length or digest there")
    starts = np.searchsorted(pack, np.arange(len(packs) + 1))
    for number, entry in enumerate(packs):
        if entry.at is not None:
            continue
        rows = slice(int(starts[number]), int(starts[number + 1]))
        places = np.unique(np.stack([offset[rows], stored[rows]], 1), axis=0)
        expected = np.concatenate([np.array([entry.header_length], np.int64), places.sum(axis=1)])
        if not np.array_equal(places[:, 0], expected[:-1]) or int(expected[-1]) != entry.length:
            raise head.refuse(f"the chunks in {entry.name} overlap, leave a hole or do not end where it ends")


def _check_raw(found: StoredChunks, head: Fields, digests: Array, plain: Array, sealed: Array) -> None:
    """`plain`, `sealed`: which chunks are stored as they are, and which so in a frame."""
    if (found.stored[plain] != found.raw[plain]).any() or (found.stored[sealed] != found.raw[sealed] + TAG).any():
        raise head.refuse("a chunk that is stored as it is has another length in its data file")
    of_rows = np.flatnonzero(plain[: len(digests)])
    if not np.array_equal(found.digests[of_rows], digests[of_rows]):
        raise head.refuse("a chunk that is stored as it is has another digest there")


def _check_bases(found: StoredChunks, head: Fields) -> None:
    """Checks that bases exist, and are as long as what is decoded from them, unless they are rounded to it."""
    if not len(found):
        return
    if int(found.base.max()) >= len(found):
        raise head.refuse("a chunk is decoded from one that the index does not list")
    built = np.flatnonzero(found.base >= 0 if found.rounded is None else (found.base >= 0) & (found.rounded == 0))
    if (found.raw[built] != found.raw[found.base[built]]).any():
        raise head.refuse("a chunk is decoded from one of another length")


def _check_rounded(found: StoredChunks, head: Fields, row: Array, dtype: Sequence[str]) -> None:
    """Checks that what is decoded from rounded numbers is of a row of the dtype that they are rounded to, and the
    numbers are a float32 row's: as many, and of one row."""
    if found.rounded is None:
        return
    halves = np.flatnonzero(found.rounded)
    base = found.base[halves]
    if not len(halves) or int(found.rounded.max()) > len(ROUNDED) or int(halves[-1]) >= len(row):
        raise head.refuse(
            "no chunk is rounded, or one to a dtype that this version does not know, or one outside of the rows"
        )
    last = base + (2 * found.raw[halves] > found.raw[base])
    if (base < 0).any() or (last >= len(row)).any() or (row[last] != row[base]).any():
        raise head.refuse("a chunk is rounded from numbers outside of the rows")
    held = found.raw[base] + np.where(last > base, found.raw[last], 0)
    if (found.raw[halves] % 2).any() or (held < 2 * found.raw[halves]).any():
        raise head.refuse("a chunk is rounded from fewer numbers than it has")
    names, rounded = np.array(dtype), np.array(["", *ROUNDED])[found.rounded[halves]]
    if (names[row[base]] != MASTER).any() or (names[row[halves]] != rounded).any():
        raise head.refuse("a chunk is rounded from, or to, numbers of another dtype than its row's")


def _check_chains(found: StoredChunks, head: Fields) -> None:
    """Checks that what a chunk is decoded from ends: no chain is endless or long."""
    built = np.flatnonzero(found.base >= 0)
    for _ in range(MAX_CHAIN):
        if not len(built):
            return  # mostly at once: chains are short, and many indexes have none
        below = np.unique(found.below(built))
        built = below[found.base[below] >= 0]
    if len(built):
        raise head.refuse(f"a chunk is decoded from more than {MAX_CHAIN} others, one upon the other")
