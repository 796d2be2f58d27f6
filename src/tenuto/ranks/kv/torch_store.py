"""Ranks that meet in the store of torch.distributed's default process group.

Nothing here is a collective or uses the process group, so a rank that hangs in one is still reported. A TCP store is
asked over a connection of our own, because a connection serves one request at a time and training may occupy its own
for long. torch is never imported: an initialised group has imported it.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, Final, TypeVar

from tenuto.concurrency.deadlines import DeadlineWorker
from tenuto.errors import RankStoreLost
from tenuto.ranks.contract import KVStore
from tenuto.record import record

_PART_BYTES: Final = 1 << 20
"""The store's server closes a connection that sends much more than 8 MiB at once."""
_WHOLE, _PARTS = b"\x00", b"\x01"
_ABSENT_S: Final = 5.0
"""The wait of the store itself for a key that was deleted between two requests."""
_CONNECT_S: Final = 300
"""The limit of torch's own for a connection; a caller gives up at its own timeout."""

Result = TypeVar("Result")


@record
class TorchRanks:
    """The ranks of torch.distributed's default process group."""

    rank: int
    world_size: int

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def kv_store(self) -> KVStore:
        return TorchKVStore.of_default_group()


def initialised(modules: Mapping[str, ModuleType] | None = None) -> TorchRanks | None:
    """Returns the ranks of the default process group; None without one, or if torch has not been imported."""
    distributed: Any = (sys.modules if modules is None else modules).get("torch.distributed")
    # A half-imported module has no such functions yet; a build without distributed support never has.
    if distributed is None or not getattr(distributed, "is_available", bool)() or not distributed.is_initialized():
        return None
    return TorchRanks(int(distributed.get_rank()), int(distributed.get_world_size()))


class TorchKVStore:
    """A key-value store in a `torch.distributed.Store`; `make` connects, in the thread that will ask."""

    longest_pause_s: Final = 0.05

    def __init__(self, make: Callable[[], Any], name: str, host_rank: int | None = None) -> None:
        self.name = name
        self.host_rank = host_rank
        self._make = make
        self._store: Any = None
        self._worker = DeadlineWorker(name, self._lost)

    @classmethod
    def of_default_group(cls) -> TorchKVStore:
        """Opens the store of the default group. Raises RankStoreLost if this version of torch does not expose it."""
        distributed: Any = sys.modules["torch.distributed"]
        try:
            store = distributed.distributed_c10d._get_default_store()
        except (AttributeError, ValueError, KeyError) as error:
            raise RankStoreLost(
                f"the store of torch.distributed's default process group cannot be found: {error}",
                subject="torch.distributed",
                hint="pass ranks=tenuto.SharedFiles(directory, rank=, world_size=)",
            ) from error
        return cls.of(store)

    @classmethod
    def of(cls, store: Any) -> TorchKVStore:
        """Opens a key-value store in `store`, over its own connection where that is a TCP store."""
        base = _base(store)
        if hasattr(base, "host") and hasattr(base, "port"):
            by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
            return cls(
                lambda: _connected(store, base),
                f"the store of torch.distributed at {base.host}:{base.port}",
                None if by_agent else 0,
            )
        return cls(lambda: store, f"the store of torch.distributed ({type(base).__name__})")

    def put(self, key: str, value: bytes, *, timeout: float) -> None:
        def ask(store: Any) -> None:
            store.set(key, self._split(store, key, value))
            store.check([key])  # `set` is only sent: the next reply proves that it has arrived

        self._ask(ask, timeout)

    def put_if_absent(self, key: str, value: bytes, *, timeout: float) -> bytes:
        def ask(store: Any) -> bytes:
            head = self._split(store, key, value)
            found = _bytes(store.compare_set(key, "", head))
            return value if found == head else self._join(store, key, found) or b""

        return self._ask(ask, timeout)

    def get(self, key: str, *, timeout: float) -> bytes | None:
        return self.get_many([key], timeout=timeout)[0]

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes | None]:
        def ask(store: Any) -> list[bytes | None]:
            heads = self._heads(store, list(keys))
            return [
                None if head is None else self._join(store, key, head) for key, head in zip(keys, heads, strict=True)
            ]

        return self._ask(ask, timeout)

    def delete(self, keys: Sequence[str], *, timeout: float) -> None:
        def ask(store: Any) -> None:
            for key, head in zip(keys, self._heads(store, list(keys)), strict=True):
                if head is not None:
                    for name in [key, *_part_keys(key, head)]:
                        store.delete_key(name)

        self._ask(ask, timeout)

    def close(self) -> None:
        def drop() -> None:
            self._store = None

        self._worker.close(drop)

    def _ask(self, work: Callable[[Any], Result], timeout: float) -> Result:
        def ask() -> Result:
            if self._store is None:
                self._store = self._make()
            return work(self._store)

        return self._worker.call(ask, timeout)

    def _heads(self, store: Any, keys: list[str]) -> list[bytes | None]:
        """Finds the keys that exist. The store answers only whether all of some keys do, so this bisects."""
        if not keys:
            return []
        if store.check(keys):
            found = self._present(store, keys)
            if found is not None:
                return found
        elif len(keys) == 1:
            return [None]
        if len(keys) == 1:
            return [None]
        middle = len(keys) // 2
        return [*self._heads(store, keys[:middle]), *self._heads(store, keys[middle:])]

    def _present(self, store: Any, keys: list[str]) -> list[bytes | None] | None:
        """Returns the values; None if one was deleted meanwhile, for which the store waits and gives up."""
        try:
            if len(keys) > 1 and not hasattr(_base(store), "path"):  # a file store waits where others answer
                return [_bytes(value) for value in store.multi_get(keys)]
            return [_bytes(store.get(key)) for key in keys]
        except RuntimeError:
            if store.check(keys):
                raise
            return None

    def _split(self, store: Any, key: str, value: bytes) -> bytes:
        """Puts the parts of a long value under names used once. Returns the value for `key` itself."""
        if len(value) <= _PART_BYTES:
            return _WHOLE + bytes(value)
        count = -(-len(value) // _PART_BYTES)
        head = _PARTS + f"{secrets.token_hex(8)} {count}".encode("ascii")
        for number, name in enumerate(_part_keys(key, head)):
            store.set(name, bytes(value[number * _PART_BYTES : (number + 1) * _PART_BYTES]))
        return head

    def _join(self, store: Any, key: str, head: bytes) -> bytes | None:
        if head[:1] == _WHOLE:
            return head[1:]
        parts = [self._present(store, [name]) if store.check([name]) else None for name in _part_keys(key, head)]
        return None if None in parts else b"".join(part[0] or b"" for part in parts if part)

    def _lost(self, error: Exception) -> RankStoreLost:
        lost = RankStoreLost(
            f"{self.name}, where the ranks meet, is lost: {' '.join(str(error).split())[:200]}",
            subject=self.name,
            hint="the process that serves it has died, or the network is gone: restart the job",
        )
        lost.lasting = True  # nothing reconnects it
        return lost


def _part_keys(key: str, head: bytes) -> list[str]:
    if head[:1] != _PARTS:
        return []
    token, count = head[1:].decode("ascii").split()
    return [f"{key}~{token}~{number}" for number in range(int(count))]


def _base(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _connected(store: Any, base: Any) -> Any:
    """Opens a connection of our own to the same keys.

    A store before torch 2.8 cannot be cloned and does not expose its prefix: then our keys have none.
    """
    if hasattr(store, "clone"):
        own = store.clone()
    else:
        own = type(base)(base.host, base.port, None, False, timedelta(seconds=_CONNECT_S), wait_for_workers=False)
    own.set_timeout(timedelta(seconds=_ABSENT_S))
    return own


def _bytes(value: bytes | str) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)
