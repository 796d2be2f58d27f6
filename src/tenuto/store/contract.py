"""The store contract: a place that holds opaque objects under relative names.

One primitive carries all concurrency: `put_if_absent`. There is no overwrite, no append and no rename. Names are
`/`-separated, without empty, `.` or `..` segments. Every method may be called from any thread. Every method raises only
errors of the `StoreError` branch (and what `Content.pieces` itself raises). Nothing here retries: one wrapper does.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, runtime_checkable

from tenuto.errors import StoreError
from tenuto.model.records import Receipt


class Content(Protocol):
    """Bytes to put: `length` is known before the first byte is."""

    @property
    def length(self) -> int: ...

    def pieces(self) -> Iterator[memoryview]:
        """The bytes in order, as contiguous buffers whose lengths sum to `length`.

        A piece is valid only until the next one is asked for: its memory may hold other bytes from then on. May block
        until bytes are ready; may raise, and then the put leaves nothing under its name. Each call starts anew. A piece
        that starts page-aligned in memory and at a multiple of 4096 in the object can be written directly; the buffer
        behind the last piece is readable up to the next multiple of 4096.
        """
        ...


@dataclass(frozen=True, slots=True)
class Bytes:
    """Content that is one buffer already."""

    data: bytes | memoryview

    @property
    def length(self) -> int:
        return len(self.data)

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self.data)


@dataclass(frozen=True, slots=True)
class Entry:
    """An object in a listing: full name and length in bytes."""

    name: str
    length: int


@dataclass(frozen=True, slots=True)
class Stat:
    length: int
    modified_ns: int
    """By the store's own clock: to be compared with another object's in the same store, with nothing else."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One level of names, sorted: `directories` and `objects` hold last segments, not full names."""

    directories: tuple[str, ...]
    objects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Capabilities:
    commits: bool
    """put_if_absent is atomic here. Where it is not, the store holds data, never commits."""
    persistent: bool
    """What is acknowledged survives power loss."""


class Reader(Protocol):
    """An open object. `length` is its size when it was opened."""

    @property
    def length(self) -> int: ...

    @property
    def alignment(self) -> int:
        """1, or the multiple (4096) at which offset, buffer address and length should lie to be read at full speed:
        then the bytes come past the page cache. Any other read works too, buffered."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes from `offset`; CorruptionError naming object and offset if the object ends
        first.

        An aligned read may reach beyond the end by less than `alignment`: what lies beyond is left undefined. Several
        threads may read at once.
        """
        ...

    def view(self) -> memoryview | None:
        """The whole object, read-only, where its bytes lie in memory already and need no copy to be had; else None.

        Valid until `close`. For objects that nobody changes: a file that is cut under a view ends the process.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Reader: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Store(Protocol):
    @property
    def url(self) -> str:
        """Where this is, for messages; without credentials."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """As declared, or as found by the last `probe`."""
        ...

    def probe(self) -> Capabilities:
        """Finds out by doing whether `put_if_absent` refuses a second put; leaves nothing behind."""
        ...

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        """Puts an object: whole or not at all, durable when this returns.

        `token` (the save id) tells this writer's temporaries from others'. Raises AlreadyExists, changing nothing, if
        the name is taken; StoreFull before the first byte where space can be reserved; StoreUnreliable if a flush
        failed (permanent: the caller abandons the name). After any other error the object may or may not exist.
        """
        ...

    def get(self, name: str, *, limit: int) -> bytes:
        """The whole object. Raises ObjectNotFound; CorruptionError if it is longer than `limit` bytes, unread."""
        ...

    def open(self, name: str) -> Reader:
        """An object for ranged reads. Raises ObjectNotFound."""
        ...

    def stat(self, name: str) -> Stat:
        """Raises ObjectNotFound."""
        ...

    def children(self, prefix: str) -> Listing:
        """The level below `prefix` (no trailing slash; empty for the root), without leftovers. A missing prefix is
        empty."""
        ...

    def walk(self, prefix: str) -> Iterator[Entry]:
        """Every object below `prefix`, sorted by name, without leftovers. What vanishes meanwhile is passed over."""
        ...

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        """Temporaries of unfinished puts below `prefix`, by names that `delete` takes."""
        ...

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        """Removes objects in the order given; gone durably when this returns. A name that is absent is no error.

        Each removal is durable before the next one is begun only across calls, not within one.
        """
        ...

    def settle(self, name: str) -> None:
        """Makes durable what is visible now under `name`: its presence with its bytes, or its absence."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes that can still be put, or None where nobody knows."""
        ...

    def close(self) -> None: ...


def is_unreadable(error: BaseException | None) -> bool:
    """Whether a disk did not give an object's bytes (EIO). Whoever restores takes that for damage of the object, if it
    stays; whoever removes, claims or commits does not, and stops: the object may be whole."""
    return isinstance(error, StoreError) and error.errno == errno.EIO


Where = str | os.PathLike[str] | Store
"""What a user writes for a place: a path, a URL, or a store already made."""
