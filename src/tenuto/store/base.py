"""What most stores have in common.

Who writes one gives `url`, `capabilities`, `put_if_absent`, `open`, `stat`, `walk` and `delete`; the rest follows from
these, as far as the store has nothing better.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from tenuto.errors import AlreadyExists, CorruptionError
from tenuto.model.records import Receipt
from tenuto.store.contract import (
    Bytes,
    Capabilities,
    Content,
    Entry,
    Listing,
    Reader,
    Stat,
    check_name,
    check_prefix,
    is_leftover,
)


class BaseStore(ABC):
    """A Store, but for what its medium decides."""

    @property
    @abstractmethod
    def url(self) -> str: ...

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt: ...

    @abstractmethod
    def open(self, name: str) -> Reader: ...

    @abstractmethod
    def stat(self, name: str) -> Stat: ...

    @abstractmethod
    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]: ...

    @abstractmethod
    def delete(self, names: Sequence[str] | Iterable[str]) -> None: ...

    def probe(self) -> Capabilities:
        """Puts one name twice: some servers accept the second put without a word."""
        return replace(self.capabilities, commits=refuses_second_put(self))

    def get(self, name: str, *, limit: int) -> bytes:
        with self.open(name) as reader:
            if reader.length > limit:
                raise CorruptionError(f"{name} has {reader.length} bytes where at most {limit} belong", subject=name)
            data = bytearray(reader.length)
            reader.read_into(0, memoryview(data))
        return bytes(data)

    def children(self, prefix: str, *, after: str = "") -> Listing:
        start = len(check_prefix(prefix)) + 1 if prefix else 0
        directories: set[str] = set()
        objects: list[str] = []
        for entry in self.walk(prefix, leftovers=True):
            segment, below, _ = entry.name[start:].partition("/")
            if segment <= after:
                continue
            if below:
                directories.add(segment)
            elif not is_leftover(segment):
                objects.append(segment)
        return Listing(tuple(sorted(directories)), tuple(sorted(objects)))

    def settle(self, name: str) -> None:
        """Only checks the name: what is visible is durable."""
        check_name(name)

    def free_bytes(self) -> int | None:
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Does nothing: nothing is open."""


class BaseReader(ABC):
    """A Reader of ranges that are fetched one by one."""

    def __init__(self, name: str, length: int) -> None:
        self.name = name
        self._length = length

    @property
    def length(self) -> int:
        return self._length

    @property
    def alignment(self) -> int:
        return 1

    @abstractmethod
    def fetch(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer`, which is not empty and lies within the object, of type "B". Thread-safe."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer = buffer.cast("B") if buffer.itemsize != 1 or buffer.ndim != 1 else buffer
        end = offset + len(buffer)
        if offset < 0 or end > self._length:
            raise CorruptionError(
                f"{self.name} ends before byte {end}: it has {self._length} bytes", subject=f"{self.name}@{end}"
            )
        if len(buffer):
            self.fetch(offset, buffer)

    def view(self) -> memoryview | None:
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Does nothing: nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def refuses_second_put(store: BaseStore) -> bool:
    """Returns whether the store refuses to put a name that is taken, and keeps what is there. Leaves nothing behind."""
    name = f"tenuto-probe-{secrets.token_hex(8)}"
    store.put_if_absent(name, Bytes(b"first"), token="probe-1")
    try:
        store.put_if_absent(name, Bytes(b"second"), token="probe-2")
    except AlreadyExists:
        return store.get(name, limit=16) == b"first"
    finally:
        store.delete([name])
    return False
