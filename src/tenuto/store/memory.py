"""Objects in the memory of this process, under a name that any part of it can open: for tests and trials."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tenuto.errors import AlreadyExists, ObjectNotFound, StoreError
from tenuto.model.records import Receipt
from tenuto.store.base import BaseReader, BaseStore
from tenuto.store.contract import (
    Capabilities,
    Content,
    Entry,
    Stat,
    check_name,
    check_new_name,
    check_prefix,
    check_token,
    is_leftover,
)

_TICK_NS: Final = 1_000_000


@dataclass
class SharedObjects:
    """The objects and the clock that all stores of one name share."""

    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """Bytes and time of the put, by name."""
    clock_ns: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tick(self) -> int:
        self.clock_ns += _TICK_NS
        return self.clock_ns


_places: dict[str, SharedObjects] = {}
_places_lock = threading.Lock()


class MemoryStore(BaseStore):
    """A store in memory. Stores of one name in one process share their objects. Each put advances the clock by 1 ms."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        with _places_lock:
            self.place: Final = _places.setdefault(name, SharedObjects())

    def __repr__(self) -> str:
        return f"MemoryStore({self.name!r})"

    @property
    def url(self) -> str:
        return f"memory://{self.name}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(commits=True, persistent=False, views=True, lists_times=True)

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        check_new_name(name)
        check_token(token)
        data = b"".join(bytes(piece) for piece in content.pieces())  # copied before the next is requested
        if len(data) != content.length:
            raise StoreError(f"{name} was announced with {content.length} bytes and has {len(data)}", subject=name)
        with self.place.lock:
            if name in self.place.objects:
                raise AlreadyExists(f"{name} exists already ({self.url})", subject=name)
            self.place.objects[name] = data, self.place.tick()
        return Receipt(name, len(data), self.url)

    def _find(self, name: str) -> tuple[bytes, int]:
        with self.place.lock:
            found = self.place.objects.get(check_name(name))
        if found is None:
            raise ObjectNotFound(f"there is no object {name} ({self.url})", subject=name)
        return found

    def open(self, name: str) -> MemoryReader:
        return MemoryReader(name, self._find(name)[0])

    def stat(self, name: str) -> Stat:
        data, modified_ns = self._find(name)
        return Stat(len(data), modified_ns)

    def _below(self, prefix: str) -> list[Entry]:
        start = f"{check_prefix(prefix)}/" if prefix else ""
        with self.place.lock:
            found = [(name, data, time) for name, (data, time) in self.place.objects.items() if name.startswith(start)]
        return [Entry(name, len(data), time) for name, data, time in sorted(found)]

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        return (entry for entry in self._below(prefix) if leftovers or not is_leftover(entry.name))

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        checked = [check_name(name) for name in names]
        with self.place.lock:
            for name in checked:
                self.place.objects.pop(name, None)

    def advance(self, seconds: float) -> None:
        """Advances the clock of this store, for code that depends on the age of objects."""
        with self.place.lock:
            self.place.clock_ns += round(seconds * 1e9)

    def close(self) -> None:
        """Keeps the objects, for the next store of this name."""


class MemoryReader(BaseReader):
    def __init__(self, name: str, data: bytes) -> None:
        super().__init__(name, len(data))
        self.data = data

    def fetch(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = memoryview(self.data)[offset : offset + len(buffer)]

    def view(self) -> memoryview | None:
        return memoryview(self.data)
