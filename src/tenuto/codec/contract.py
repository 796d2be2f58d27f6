"""The contract of codecs: how the bytes of one chunk become fewer, and come back bit for bit."""

from __future__ import annotations

from typing import Protocol

from tenuto.errors import CorruptionError


class Codec(Protocol):
    """Encodes and decodes single chunks. Both calls may be made from several threads at once, and release the
    interpreter's lock in their heavy part. `tenuto.testing.codec_suite` tests all that is said here."""

    @property
    def name(self) -> str:
        """The name that an index records, such as `planes2-zstd`. It says all that decoding has to know: the level is
        the encoder's own affair."""
        ...

    @property
    def needs_base(self) -> bool:
        """Whether the codec encodes the difference to a base chunk, which has as many bytes as the chunk."""
        ...

    def encode(self, raw: memoryview, base: memoryview | None = None) -> bytes | None:
        """Returns the stored form of `raw`, shorter than it; None if it would be no shorter: then `raw` is stored as it
        is. Both views hold bytes (format `B`, contiguous)."""
        ...

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None = None) -> None:
        """Fills `out`, which has exactly the chunk's recorded length.

        Takes memory of a small multiple of `out`, whatever `stored` says. Raises CorruptionError if `stored` is nothing
        that `encode` returns for a chunk of this length; `out` then has undefined bytes. Other bytes that are as valid
        give another chunk: the digests tell.
        """
        ...


def damaged(name: str, what: str) -> CorruptionError:
    """Returns the error for stored bytes that codec or stage `name` cannot have written. The caller, who knows them,
    adds leaf and object."""
    return CorruptionError(f"the stored bytes of a chunk are not {name}: {what}")
