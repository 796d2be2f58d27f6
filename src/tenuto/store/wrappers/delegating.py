"""A store that passes every call on: wrappers override what they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tenuto.model.records import Receipt
from tenuto.record import record
from tenuto.store.contract import Capabilities, Content, Entry, Listing, Reader, Stat, Store


@dataclass(eq=False)
class DelegatingStore:
    inner: Store

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def probe(self) -> Capabilities:
        self.inner.probe()
        return self.capabilities

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        return self.inner.put_if_absent(name, content, token=token)

    def get(self, name: str, *, limit: int) -> bytes:
        return self.inner.get(name, limit=limit)

    def open(self, name: str) -> Reader:
        return self.inner.open(name)

    def stat(self, name: str) -> Stat:
        return self.inner.stat(name)

    def children(self, prefix: str, *, after: str = "") -> Listing:
        return self.inner.children(prefix, after=after)

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        return self.inner.walk(prefix, leftovers=leftovers)

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        self.inner.delete(names)

    def settle(self, name: str) -> None:
        self.inner.settle(name)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    def close(self) -> None:
        self.inner.close()


@record
class Counted:
    """Content that reports the bytes of each piece once it is taken. What `moved` raises ends it."""

    content: Content
    moved: Callable[[int], None]

    @property
    def length(self) -> int:
        return self.content.length

    def pieces(self) -> Iterator[memoryview]:
        for piece in self.content.pieces():
            yield piece
            self.moved(piece.nbytes)
