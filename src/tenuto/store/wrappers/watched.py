"""A store that notes when it last got on: a call has returned, or a piece of a content was taken."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tenuto.model.records import Receipt
from tenuto.store.contract import Content, Entry, Listing, Reader, Stat
from tenuto.store.wrappers.delegating import Counted, DelegatingStore


@dataclass(eq=False)
class WatchedStore(DelegatingStore):
    """`moved_s`: by the monotonic clock. A store that has not moved for long, while it was asked for something, does
    not answer."""

    moved_s: float = field(default_factory=time.monotonic)

    def moves(self) -> None:
        self.moved_s = time.monotonic()

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        receipt = self.inner.put_if_absent(name, Counted(content, lambda _: self.moves()), token=token)
        self.moves()
        return receipt

    def get(self, name: str, *, limit: int) -> bytes:
        data = self.inner.get(name, limit=limit)
        self.moves()
        return data

    def open(self, name: str) -> Reader:
        reader = self.inner.open(name)
        self.moves()
        return reader

    def stat(self, name: str) -> Stat:
        found = self.inner.stat(name)
        self.moves()
        return found

    def children(self, prefix: str, *, after: str = "") -> Listing:
        found = self.inner.children(prefix, after=after)
        self.moves()
        return found

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        for entry in self.inner.walk(prefix, leftovers=leftovers):
            self.moves()
            yield entry

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        self.inner.delete(names)
        self.moves()
