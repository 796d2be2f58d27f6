"""Chooses among copies of an object: the first available one, and damaged ones last; and a small LRU cache."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

from tenuto.store.contract import Store

_REMEMBERED: Final = 1 << 16
"""The number of objects whose last source is remembered."""


class ReplicaChoice:
    """Remembers where objects were read and which copies were damaged. Thread-safe."""

    def __init__(self) -> None:
        self._last_read: dict[str, Store] = {}  # the last one read at the end
        self._damaged: dict[str, list[Store]] = {}
        self._lock = threading.Lock()

    def order(self, name: str, stores: Sequence[Store]) -> list[Store]:
        """Returns the stores, damaged copies last."""
        damaged = self._damaged.get(name, ())
        return sorted(stores, key=lambda store: store in damaged)

    def read(self, name: str, store: Store) -> None:
        """Notes that the object was read from `store`."""
        with self._lock:
            self._last_read.pop(name, None)
            self._last_read[name] = store
            if len(self._last_read) > _REMEMBERED:
                del self._last_read[next(iter(self._last_read))]

    def mark_damaged(self, name: str) -> tuple[Store | None, list[Store]]:
        """Marks the copy read last as damaged. Returns its place, and all places with damaged copies; None if unknown,
        or marked before."""
        with self._lock:
            used, damaged = self._last_read.get(name), self._damaged.setdefault(name, [])
            if used is None or used in damaged:
                return None, damaged
            damaged.append(used)
            return used, list(damaged)

    def forget(self, names: Iterable[str]) -> None:
        """Forgets deleted objects."""
        with self._lock:
            for name in names:
                self._last_read.pop(name, None)
                self._damaged.pop(name, None)


_CAPACITY: Final = 256


class LruCache:
    """The most recent values. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[Hashable, None] = {}
        self._lock = threading.Lock()

    def __contains__(self, one: Hashable) -> bool:
        return one in self._known

    def add(self, one: Hashable) -> bool:
        """Adds a value. Returns whether it is new."""
        with self._lock:
            new = one not in self._known
            self._known[one] = None
            if len(self._known) > _CAPACITY:
                del self._known[next(iter(self._known))]
            return new
