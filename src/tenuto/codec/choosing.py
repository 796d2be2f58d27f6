"""Which codec a leaf's chunks are stored by: what suits its dtype, and what a few of its chunks say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from tenuto.codec.contract import Codec
from tenuto.codec.registry import codec
from tenuto.codec.stages import LEVEL
from tenuto.model import leaf
from tenuto.record import record

WORTH: Final = 0.98
"""A codec that comes later in the order replaces an earlier one if it stores at most this share of its bytes."""

SMALLEST_BYTES: Final = 4096
"""What may be saved of a shorter chunk is less than what its entry in an index and some 0.1 ms are worth."""


class Suited(NamedTuple):
    """The names of the codecs that suit a leaf, the likeliest first: `plain` without a base, `deltas` with one."""

    plain: tuple[str, ...]
    deltas: tuple[str, ...]


def codecs_for(dtype: str, family: str = "zstd") -> Suited:
    """Returns what suits leaves of `dtype`, a name as indexes have it.

    family: the compressor behind: `zstd` or `lz4`.
    """
    size = leaf.dtype(dtype).size
    item = size // 2 if dtype.startswith("complex") else size
    if item not in (1, 2, 4, 8):
        return Suited((family,), (f"xor1-{family}",))
    planes = f"planes{item}-{family}"
    plain = (planes, family) if dtype.startswith(("float", "bfloat", "complex")) else (family, planes)
    return Suited(plain, (f"delta{item}-{family}", f"xor{item}-{family}"))


def encoded(raw: memoryview, tried: Sequence[Codec], base: memoryview | None = None) -> tuple[str, bytes | memoryview]:
    """Returns the name of the codec that a chunk is to be stored by, and its stored bytes: constant where it is
    that, else the first of `tried` that makes it shorter, else raw. A delta is passed over where there is no `base`,
    and a chunk below SMALLEST_BYTES is raw unless it is constant."""
    for one in (codec("constant"), *(tried if len(raw) >= SMALLEST_BYTES else ())):
        if one.needs_base and base is None:
            continue
        stored = one.encode(raw, base if one.needs_base else None)
        if stored is not None:
            return one.name, stored
    return "raw", raw


@record
class Measured:
    """What a codec made of some chunks. `stored_bytes` counts the chunks that it did not make shorter as they are."""

    name: str
    raw_bytes: int
    stored_bytes: int
    encode_s: float

    @property
    def ratio(self) -> float:
        """How many times fewer bytes are stored."""
        return self.raw_bytes / max(self.stored_bytes, 1)


def measure(
    name: str, chunks: Sequence[memoryview], bases: Sequence[memoryview] | None = None, level: int = LEVEL
) -> Measured:
    """Encodes `chunks` and returns what became of them. bases: the base of each, where the codec needs one."""
    found = codec(name, level)
    stored, begun = 0, time.perf_counter()
    for place, chunk in enumerate(chunks):
        made = found.encode(chunk, bases[place] if bases is not None and found.needs_base else None)
        stored += len(chunk) if made is None else len(made)
    return Measured(name, sum(map(len, chunks)), stored, time.perf_counter() - begun)


def choose(
    dtype: str,
    chunks: Sequence[memoryview],
    bases: Sequence[memoryview] | None = None,
    *,
    family: str = "zstd",
    level: int = LEVEL,
) -> Measured:
    """Returns which codec stores a leaf in the fewest bytes, and how fast, by encoding a few of its chunks.

    bases: a base of equal length for each chunk, from which deltas are tried as well.

    The choice depends on the chunks alone, not on how long anything took. It is `raw` where nothing saves
    2 %: whether what is saved is worth the time is for the caller to decide, who knows where the bytes go.
    """
    suited = codecs_for(dtype, family)
    best = Measured("raw", size := sum(map(len, chunks)), size, 0.0)
    for name in (*suited.plain, *(suited.deltas if bases is not None else ())):
        tried = measure(name, chunks, bases, level)
        if tried.stored_bytes <= best.stored_bytes * WORTH:
            best = tried
    return best
