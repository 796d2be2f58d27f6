"""The codecs by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product

from tenuto.codec.contract import Codec
from tenuto.codec.differences import Difference, Ordered, Rotated, Xor
from tenuto.codec.planes import Planes
from tenuto.codec.stages import LEVEL, Compressor, Lz4, Zstd
from tenuto.codec.whole import Constant, Raw, Whole
from tenuto.errors import FormatTooNew

_COMPRESSORS: dict[str, Callable[[int], Compressor]] = {"zstd": cache(Zstd), "lz4": cache(Lz4)}
"""By family; of each level there is one, whose contexts all codecs share."""
_DIFFERENCES: dict[str, Difference] = {"planes": Rotated(), "xor": Xor(), "delta": Ordered()}
_WORDS = (1, 2, 4, 8)


def _makers() -> dict[str, Callable[[int], Codec]]:
    """Returns what makes the codec of each name, given a level."""
    found: dict[str, Callable[[int], Codec]] = {"raw": lambda level: Raw(), "constant": lambda level: Constant()}
    for family, compressor in _COMPRESSORS.items():
        found[family] = lambda level, compressor=compressor: Whole(compressor(level))  # type: ignore[misc]
        for (what, difference), item in product(_DIFFERENCES.items(), _WORDS):
            name = f"{what}{item}-{family}"
            found[name] = partial(_planes, name, difference, item, compressor)
    return found


def _planes(name: str, difference: Difference, item: int, compressor: Callable[[int], Compressor], level: int) -> Codec:
    return Planes(name, difference, item, compressor(level), thorough=level > LEVEL)


_MAKERS = _makers()


def names() -> tuple[str, ...]:
    """Returns the names of all codecs that this version knows."""
    return tuple(_MAKERS)


@cache
def codec(name: str, level: int = LEVEL) -> Codec:
    """Returns the codec called `name`. `level` is how hard its compressor tries, as zstd counts, from 1 on; it has no
    bearing on decoding.

    Raises FormatTooNew if this version does not know the name, and MissingExtra if the codec's package is not there.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise FormatTooNew(
            f"chunks are encoded as {name!r}, which this version does not know",
            subject=name,
            hint="read it with the Tenuto that wrote it, or a newer one",
        )
    return maker(level)
