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


@record
class ThreadRanks:
    """One of many ranks in one process, for tests and simulations. All get the same store."""

    rank: int
    world_size: int
    shared: KVStore = field(repr=False)

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def kv_store(self) -> KVStore:
        return self.shared
