"""A key-value store in this process: for one rank, and for many ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import field
from typing import Final

from tenuto.ranks.contract import KVStore
from tenuto.record import record


class InProcessKVStore:
    """A dictionary shared by all users of this object."""

    host_rank: Final = None
    longest_pause_s: Final = 0.005

    def __init__(self) -> None:
        self.name = f"this process's memory at {id(self):#x}"
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, value: bytes, *, timeout: float) -> None:
        with self._lock:
            self._values[key] = bytes(value)

    def put_if_absent(self, key: str, value: bytes, *, timeout: float) -> bytes:
        with self._lock:
            return self._values.setdefault(key, bytes(value))

    def get(self, key: str, *, timeout: float) -> bytes | None:
        with self._lock:
            return self._values.get(key)

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes | None]:
        with self._lock:
            return [self._values.get(key) for key in keys]

    def delete(self, keys: Sequence[str], *, timeout: float) -> None:
        with self._lock:
            for key in keys:
                self._values.pop(key, None)

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def keys(self) -> list[str]:
        """Returns the keys, sorted; for tests of what is left behind."""
        with self._lock:
            return sorted(self._values)


class SubStore:
    """The keys of another store below one name: for ranks that meet beside those whose store it is."""

    def __init__(self, inner: KVStore, below: str) -> None:
        self.name = inner.name
        self.host_rank = inner.host_rank
        self.longest_pause_s = inner.longest_pause_s
        self._inner = inner
        self._below = below

    def put(self, key: str, value: bytes, *, timeout: float) -> None:
        self._inner.put(self._full(key), value, timeout=timeout)

    def put_if_absent(self, key: str, value: bytes, *, timeout: float) -> bytes:
        return self._inner.put_if_absent(self._full(key), value, timeout=timeout)

    def get(self, key: str, *, timeout: float) -> bytes | None:
        return self._inner.get(self._full(key), timeout=timeout)

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes | None]:
        return self._inner.get_many([self._full(key) for key in keys], timeout=timeout)

    def delete(self, keys: Sequence[str], *, timeout: float) -> None:
        self._inner.delete([self._full(key) for key in keys], timeout=timeout)

    def close(self) -> None:
        """Does nothing: the store is still used by others."""

    def _full(self, key: str) -> str:
        return f"{self._below}/{key}"


@record
class ThreadRanks:
    """One of several ranks in one process. All get the same store."""

    rank: int
    world_size: int
    shared: KVStore = field(repr=False)

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def kv_store(self) -> KVStore:
        return self.shared
