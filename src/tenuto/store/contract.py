"""The store contract: a place for opaque objects under relative names; `store/base.py` has defaults for it.

All concurrency control rests on one primitive, `put_if_absent`: there is no overwrite, append or rename. Names are
`/`-separated without empty, `.` or `..` segments. Every method is thread-safe and raises only errors of the
`StoreError` branch, plus whatever `Content.pieces` raises. Nothing retries here; one wrapper does.
"""

from __future__ import annotations

import bisect
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from types import TracebackType
from typing import Final, Protocol, runtime_checkable

from tenuto.errors import ObjectNotFound, StoreError
from tenuto.model.records import Receipt
from tenuto.record import record

TEMPORARY: Final = ".tmp-"
"""Part of the last segment of every temporary: `<final name>.tmp-<token>`."""
PARTIAL: Final = ".part-"
"""Part of the last segment of a partial copy of an object, which outlives no restore: `<name>.part-<token>`."""
_LONGEST: Final = 4096


class Content(Protocol):
    """Bytes to put. `length` is known before the first byte."""

    @property
    def length(self) -> int: ...

    def pieces(self) -> Iterator[memoryview]:
        """Yields the bytes in order, as contiguous buffers whose lengths sum to `length`.

        A piece is valid only until the next one is requested; its memory may be reused from then on. May block until
        bytes are ready. An exception makes the put leave nothing under its name. Each call starts over. A piece can be
        written directly if it is page-aligned in memory and at a multiple of 4096 in the object; the buffer behind the
        last piece must be readable up to the next multiple of 4096.
        """
        ...


@record
class Bytes:
    """Content that is already one buffer."""

    data: bytes | memoryview

    @property
    def length(self) -> int:
        return len(self.data)

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self.data)


@record
class Entry:
    """An object in a listing: full name and length in bytes."""

    name: str
    length: int
    modified_ns: int | None = field(default=None, compare=False)
    """As `Stat.modified_ns`; None where `Capabilities.lists_times` is not given."""


@record
class Stat:
    length: int
    modified_ns: int
    """By the store's own clock: comparable only between objects of one store."""


@record
class Listing:
    """One level of names, sorted. `directories` and `objects` hold last segments, not full names."""

    directories: tuple[str, ...]
    objects: tuple[str, ...]

    def behind(self, after: str) -> Listing:
        """Returns what of it comes behind `after`."""
        return Listing(
            self.directories[bisect.bisect_right(self.directories, after) :],
            self.objects[bisect.bisect_right(self.objects, after) :],
        )


@record
class Capabilities:
    commits: bool
    """Whether put_if_absent is atomic. Where it is not, the store holds data but never commits."""
    persistent: bool
    """Whether acknowledged objects survive power loss."""
    views: bool = False
    """Whether readers may give `view`: then reading ahead, or for other ranks, gains nothing."""
    lists_times: bool = False
    """Whether entries of `walk` have `modified_ns`: then none has to be asked for with `stat`."""
    part_bytes: int = 1 << 20
    """The length of one read, and of one part of a put, at which the store runs at full speed."""
    parallel: int = 8
    """How many reads at once it takes for that."""
    remote: bool = False
    """Whether each call is a request that lasts 20 to 100 ms and costs money: then what only says earlier what a later
    call says too is left out, and removals wait for each other."""


class Reader(Protocol):
    """An open object. `length` is its size when it was opened."""

    @property
    def length(self) -> int: ...

    @property
    def alignment(self) -> int:
        """1, or 4096: the multiple of offset, buffer address and length at which reads bypass the page cache and run at
        full speed. Any other read works too, buffered."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes from `offset`. Thread-safe.

        Raises CorruptionError with object and offset if the object ends first, and ObjectNotFound if it was removed
        since, where the store keeps nothing open. An aligned read may reach past the end by less than `alignment`; the
        bytes there are undefined.
        """
        ...

    def view(self) -> memoryview | None:
        """Returns the whole object read-only if its bytes are in memory and need no copy, else None.

        Valid until `close`. Only for objects that nobody changes: truncating a mapped file ends the process.
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
        """The location, for messages; without credentials."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """As declared, or as found by the last `probe`."""
        ...

    def probe(self) -> Capabilities:
        """Tests whether `put_if_absent` refuses a second put. Leaves nothing behind."""
        ...

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        """Puts an object atomically; it is durable on return.

        `token` (the save id) separates the temporaries of this writer from others'. Raises AlreadyExists, without
        effect, if the name is taken; StoreFull, before the first byte where space can be reserved; StoreUnreliable if a
        flush failed (permanent: the caller abandons the name). After any other error the object may or may not exist.
        """
        ...

    def get(self, name: str, *, limit: int) -> bytes:
        """Returns the whole object. Raises ObjectNotFound; CorruptionError, unread, if it is longer than `limit`
        bytes."""
        ...

    def open(self, name: str) -> Reader:
        """Opens an object for ranged reads. Raises ObjectNotFound."""
        ...

    def stat(self, name: str) -> Stat:
        """Returns length and time of an object. Raises ObjectNotFound."""
        ...

    def children(self, prefix: str, *, after: str = "") -> Listing:
        """Lists the level below `prefix` (no trailing slash, empty for the root) without leftovers, and of that the
        segments behind `after`, in the order of their code points. A missing prefix is empty."""
        ...

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        """Yields every object below `prefix`, sorted by name. Skips those that vanish meanwhile.

        `leftovers`: yields the temporaries of unfinished puts and partial copies too, under names that `delete`
        accepts.
        """
        ...

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        """Removes objects in the given order, durably on return. An absent name is no error.

        Removals are ordered durably only across calls, not within one.
        """
        ...

    def settle(self, name: str) -> None:
        """Makes durable what is visible under `name`: its presence with its bytes, or its absence."""
        ...

    def free_bytes(self) -> int | None:
        """Returns the bytes that can still be put, None if unknown."""
        ...

    def close(self) -> None: ...


def time_of(store: Store, entry: Entry) -> int | None:
    """Returns when a listed object was put, by the store's clock: as listed, or asked for where listings do not say it.
    None if it vanished."""
    if entry.modified_ns is not None:
        return entry.modified_ns
    try:
        return store.stat(entry.name).modified_ns
    except ObjectNotFound:
        return None


def is_unreadable(error: BaseException | None) -> bool:
    """Returns whether a disk failed to read an object (EIO).

    A restore treats a lasting EIO as damage of the object. Removing, claiming and committing stop instead: the object
    may be intact.
    """
    return isinstance(error, StoreError) and error.errno == errno.EIO


def is_inconclusive(error: BaseException) -> bool:
    """Returns whether an error leaves open what the object is that was asked for: the store did not answer, or refused.
    Then nobody may say that it is missing or damaged."""
    return isinstance(error, StoreError) and not isinstance(error, ObjectNotFound) and not is_unreadable(error)


Where = str | os.PathLike[str] | Store
"""A place as a user writes it: a path, a URL or a store."""


# --------------------------------------------------------------------------------------------------
# Valid names of objects, and the temporaries of unfinished puts.


def check_name(name: str) -> str:
    """Returns `name` if it may name an object or a temporary, else raises StoreError. No name reaches outside a store,
    whatever a manifest contains."""
    if not isinstance(name, str) or not name:
        raise StoreError(f"{name!r} cannot name an object", subject=str(name))
    if len(name) > _LONGEST or "\0" in name or any(segment in ("", ".", "..") for segment in name.split("/")):
        raise StoreError(f"{name[:200]!r} cannot name an object: it is not a relative path", subject=name[:200])
    try:
        name.encode()
    except UnicodeEncodeError:
        raise StoreError(f"{name!r} cannot name an object: it is not valid text", subject=repr(name)) from None
    return name


def check_new_name(name: str) -> str:
    """Returns `name` if a new object may have it, as `check_name`."""
    if TEMPORARY in check_name(name):
        raise StoreError(f"{name!r} cannot name an object: {TEMPORARY!r} marks temporaries", subject=name)
    if not name.isprintable():
        raise StoreError(
            f"{name!r} cannot name an object: it holds characters that no listing shows", subject=repr(name)
        )
    return name


def check_prefix(prefix: str) -> str:
    return prefix if prefix == "" else check_name(prefix)


def check_token(token: str) -> str:
    if not isinstance(token, str) or not token.isascii() or not token.replace("-", "").replace("_", "").isalnum():
        raise StoreError(f"{token!r} cannot mark temporaries: letters, digits, - and _ can", subject=str(token))
    return token


def is_leftover(name: str) -> bool:
    """Returns whether a name is that of a temporary, or of a partial copy: never an object."""
    file = name.rpartition("/")[2]
    return TEMPORARY in file or PARTIAL in file


def final_name(name: str) -> str:
    """Returns the name of the object that a leftover belongs to; other names as they are."""
    directory, slash, file = name.rpartition("/")
    return directory + slash + file.partition(TEMPORARY)[0].partition(PARTIAL)[0]


def leftovers_of(store: Store, prefix: str) -> Iterator[Entry]:
    """Yields the temporaries of unfinished puts, and partial copies, below `prefix`."""
    return (entry for entry in store.walk(prefix, leftovers=True) if is_leftover(entry.name))


def is_listable(segment: str) -> bool:
    """Returns whether a file or directory of this name can be an object, a temporary or a directory of them."""
    return segment.isprintable()
