"""Which of several copies of an object is read: the first that has it, and no longer one that was damaged."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

from tenuto.store.contract import Store

_READ: Final = 1 << 16
"""Of so many objects it is remembered where they were read last."""


class ReplicaChoice:
    """May be used by several threads."""

    def __init__(self) -> None:
        self._used: dict[str, Store] = {}  # the one read last at the end
        self._turned: dict[str, list[Store]] = {}
        self._lock = threading.Lock()

    def order(self, name: str, stores: Sequence[Store]) -> list[Store]:
        """Those whose copy was damaged come last."""
        turned = self._turned.get(name, ())
        return sorted(stores, key=lambda store: store in turned)

    def read(self, name: str, store: Store) -> None:
        """It was read there."""
        with self._lock:
            self._used.pop(name, None)
            self._used[name] = store
            if len(self._used) > _READ:
                del self._used[next(iter(self._used))]

    def turn_away(self, name: str) -> tuple[Store | None, list[Store]]:
        """Where it was read last, which is not what was saved, and all places of which that is known; None where nobody
        knows, or it was turned away before."""
        with self._lock:
            used, turned = self._used.get(name), self._turned.setdefault(name, [])
            if used is None or used in turned:
                return None, turned
            turned.append(used)
            return used, list(turned)

    def forget(self, names: Iterable[str]) -> None:
        """They are gone."""
        with self._lock:
            for name in names:
                self._used.pop(name, None)
                self._turned.pop(name, None)


# --------------------------------------------------------------------------------------------------
# What was met last, remembered in as much room as a few saves need.

_KEPT: Final = 256


class LruCache:
    """What came last. May be used by several threads."""

    def __init__(self) -> None:
        self._known: dict[Hashable, None] = {}
        self._lock = threading.Lock()

    def __contains__(self, one: Hashable) -> bool:
        return one in self._known

    def add(self, one: Hashable) -> bool:
        """Whether it is new."""
        with self._lock:
            new = one not in self._known
            self._known[one] = None
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
            return new
