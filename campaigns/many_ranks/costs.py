"""Measures what each phase costs the coordinator and each other rank: bytes, and processor seconds.

Processor seconds are the same on a busy machine as on a quiet one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tenuto.model.records import Receipt
from tenuto.ranks.kv.in_process import InProcessKVStore
from tenuto.store.contract import Content
from tenuto.store.memory import MemoryStore


class CountedKVStore(InProcessKVStore):
    """Counts the bytes that are put and read."""

    def __init__(self) -> None:
        super().__init__()
        self.put_bytes = 0
        self.read_bytes = 0

    def put(self, key: str, value: bytes, *, timeout: float) -> None:
        self.put_bytes += len(value)
        super().put(key, value, timeout=timeout)

    def put_if_absent(self, key: str, value: bytes, *, timeout: float) -> bytes:
        self.put_bytes += len(value)
        return super().put_if_absent(key, value, timeout=timeout)

    def get(self, key: str, *, timeout: float) -> bytes | None:
        return self.get_many([key], timeout=timeout)[0]

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes | None]:
        found = super().get_many(keys, timeout=timeout)
        self.read_bytes += sum(len(value) for value in found if value is not None)
        return found


class CountedStore(MemoryStore):
    """Counts the bytes that are put, and those of whole objects that are read, by what they are."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.put_bytes = 0
        self.read: dict[str, int] = defaultdict(int)
        self.objects: dict[str, int] = defaultdict(int)

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        receipt = super().put_if_absent(name, content, token=token)
        self.put_bytes += receipt.length
        return receipt

    def get(self, name: str, *, limit: int) -> bytes:
        data = super().get(name, limit=limit)
        kind = "indexes" if name.endswith(".index") and "rank-" in name else name.rpartition("/")[2]
        self.read[kind] += len(data)
        self.objects[kind] += 1
        return data


@dataclass
class Phase:
    """`coordinator`, `others`: processor seconds of each turn. Bytes are those that went over the board."""

    coordinator: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    coordinator_bytes: int = 0
    others_bytes: int = 0

    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.coordinator:
            found |= {"coordinator_ms": _ms(sum(self.coordinator)), "coordinator_board_bytes": self.coordinator_bytes}
        if self.others:
            some = np.array(self.others)
            found |= {
                "rank_ms": _ms(float(np.median(some))),
                "rank_ms_99": _ms(float(np.percentile(some, 99))),
                "rank_board_bytes": round(self.others_bytes / len(some)),
            }
        return found


class Costs:
    """Phases by name, in the order in which they were met."""

    def __init__(self, kv_store: CountedKVStore) -> None:
        self._kv_store = kv_store
        self.phases: dict[str, Phase] = {}

    @contextmanager
    def step_of(self, name: str, rank: int) -> Iterator[None]:
        """One turn of one rank."""
        phase = self.phases.setdefault(name, Phase())
        before = self._kv_store.put_bytes + self._kv_store.read_bytes
        began = time.process_time()
        yield
        took = time.process_time() - began
        moved = self._kv_store.put_bytes + self._kv_store.read_bytes - before
        if rank == 0:
            phase.coordinator.append(took)
            phase.coordinator_bytes += moved
        else:
            phase.others.append(took)
            phase.others_bytes += moved

    def json(self) -> dict[str, Any]:
        return {name: phase.json() for name, phase in self.phases.items()}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
