"""The compressors that codecs end in, behind one contract: bytes to fewer bytes, and back into a known length."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, Final, Protocol, cast

from tenuto.codec.contract import damaged
from tenuto.errors import MissingExtra, install

LEVEL: Final = 1
"""The level where none is asked for."""

Bytes = bytes | memoryview


class Compressor(Protocol):
    """A general compressor."""

    name: str

    def compress(self, data: Bytes, *, repeats: bool = True) -> bytes:
        """Returns `data` compressed; it may be longer. repeats: whether it is worth looking for bytes that occur again
        in the same order; without, what counts is how often each byte occurs."""
        ...

    def decompress(self, stored: Bytes, size: int) -> bytes:
        """Returns `size` bytes, taking memory for no more than twice that. Raises CorruptionError if `stored` is
        anything but one whole stream of exactly so many bytes."""
        ...


class Zstd:
    """Zstandard, one frame with its content's size. A context of it costs more than a chunk takes, so each thread keeps
    its own."""

    name = "zstd"

    def __init__(self, level: int = LEVEL) -> None:
        self._zstd = zstd_module()
        self._options = {True: {self._zstd.CompressionParameter.compression_level: level}, False: _huffman_options()}
        self._own = threading.local()

    def compress(self, data: Bytes, *, repeats: bool = True) -> bytes:
        which = "repeats" if repeats else "huffman"
        kept = getattr(self._own, which, None)
        if kept is None:
            kept = self._zstd.ZstdCompressor(options=self._options[repeats])
            setattr(self._own, which, kept)
        return cast(bytes, kept.compress(data, kept.FLUSH_FRAME))

    def decompress(self, stored: Bytes, size: int) -> bytes:
        try:
            # The frame's own word is checked before a byte is taken for its content.
            if self._zstd.get_frame_info(stored).decompressed_size != size:
                raise damaged(self.name, f"the frame does not say that it holds {size} bytes")
            frame = self._zstd.ZstdDecompressor()
            data = cast(bytes, frame.decompress(stored, max_length=size))
            # A frame with a checksum, or one that ends in an empty block, has its end behind its last byte of content.
            if len(data) == size and not frame.eof:
                data += frame.decompress(b"", max_length=1)
        except self._zstd.ZstdError as error:
            raise damaged(self.name, str(error)) from error
        if len(data) != size or not frame.eof or frame.unused_data:
            raise damaged(self.name, "the frame ends too early, or bytes follow it")
        return data


class Lz4:
    """LZ4, one block without a size of its own."""

    name = "lz4"

    def __init__(self, level: int = LEVEL) -> None:
        self._block = lz4_module()
        # From level 2 on the slower search, which decodes as fast.
        self._options: dict[str, Any] = (
            {"mode": "default"} if level < 2 else {"mode": "high_compression", "compression": min(level, 12)}
        )

    def compress(self, data: Bytes, *, repeats: bool = True) -> bytes:
        return cast(bytes, self._block.compress(data, store_size=False, **self._options))

    def decompress(self, stored: Bytes, size: int) -> bytes:
        try:
            data = cast(bytes, self._block.decompress(stored, uncompressed_size=size))
        except self._block.LZ4BlockError as error:
            raise damaged(self.name, str(error)) from error
        if len(data) != size:
            raise damaged(self.name, f"the block holds {len(data)} bytes, not {size}")
        return data


LITERALS_BY_HUFFMAN: Final = {1002: 1}
"""`ZSTD_c_literalCompressionMode` = `ZSTD_ps_enable`. The library's header calls it experimental and Python's module
has no name for it, so whether it is taken, and works, is tried once."""
SKIP: Final = -131072
"""The lowest level: of a 128 KiB block, hardly a byte is looked up."""


@cache
def _huffman_options() -> dict[int, int]:
    """Returns the options with which Zstandard does nothing but code bytes by their frequency: several times faster
    than level 1, and smaller where every match that it finds is chance."""
    zstd = zstd_module()
    names = zstd.CompressionParameter
    fastest: dict[int, int] = {names.compression_level: SKIP, **LITERALS_BY_HUFFMAN}
    uneven = bytes(x * x >> 8 & y for x in range(256) for y in (1, 3, 5, 15))
    try:
        if len(zstd.compress(uneven, options=fastest)) < len(uneven) * 3 // 4:
            return fastest
    except (ValueError, zstd.ZstdError):
        pass  # this library has no such parameter
    # Slower by a third: it looks, but by a table so small and for matches so long that it finds none by chance.
    return {names.compression_level: 1, names.min_match: 7, names.hash_log: 6}


def zstd_module() -> Any:
    """Returns Python's own module of Zstandard, or its backport for Pythons before 3.14."""
    try:
        from compression import zstd
    except ImportError:
        try:
            from backports import zstd
        except ImportError:
            raise _missing("zstd", "backports.zstd") from None
    return zstd


def lz4_module() -> Any:
    try:
        import lz4.block
    except ImportError:
        raise _missing("lz4", "lz4") from None
    return lz4.block


def _missing(stage: str, package: str) -> MissingExtra:
    return MissingExtra(
        f"chunks encoded with {stage} need {package}, which is not installed", subject=stage, hint=install(stage)
    )
