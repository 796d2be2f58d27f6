"""The base of the suite: the store under test, ways around it, and content to put."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tenuto.model.records import Receipt
from tenuto.store.contract import Bytes, Store

BLOCK = 4096


@dataclass(frozen=True)
class Pieces:
    """Content in given pieces. `announced`: its length, if that is not their sum."""

    parts: tuple[bytes | memoryview, ...]
    announced: int | None = None

    @property
    def length(self) -> int:
        return sum(len(part) for part in self.parts) if self.announced is None else self.announced

    def pieces(self) -> Iterator[memoryview]:
        for part in self.parts:
            yield memoryview(part)


@dataclass(frozen=True)
class Refilled:
    """Content whose pieces share one buffer, refilled for each, like an image larger than its buffer."""

    data: bytes
    piece_bytes: int = BLOCK

    @property
    def length(self) -> int:
        return len(self.data)

    def pieces(self) -> Iterator[memoryview]:
        room = bytearray(self.piece_bytes)
        for start in range(0, len(self.data), self.piece_bytes):
            part = self.data[start : start + self.piece_bytes]
            room[: len(part)] = part
            yield memoryview(room)[: len(part)]


class Interrupted(Exception):
    """Raised by the content of an abandoned put."""


@dataclass(frozen=True)
class Failing:
    """Content that raises an error after `given`."""

    given: bytes
    length: int

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self.given)
        raise Interrupted


def patterned(length: int, seed: int = 1) -> bytes:
    """Returns bytes that differ from one block to the next."""
    return np.random.default_rng(seed).bytes(length)


def aligned(data: bytes) -> memoryview:
    """Returns the same bytes at a page-aligned address, readable up to the next multiple of 4096."""
    room = mmap.mmap(-1, max(BLOCK, -(-len(data) // BLOCK) * BLOCK))
    room[: len(data)] = data
    return memoryview(room)[: len(data)]


LARGE = 3 * 2**20


class Suite:
    """The fixture's store is empty, and not shared with another test."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("a subclass gives the store under test")

    def raw_put(self, store: Store, name: str, data: bytes) -> None:
        raise NotImplementedError

    def raw_get(self, store: Store, name: str) -> bytes | None:
        """Returns the object's bytes; None if there is no such object."""
        raise NotImplementedError

    def raw_delete(self, store: Store, name: str) -> None:
        raise NotImplementedError

    def put(self, store: Store, name: str, data: bytes = b"data", token: str = "t0") -> Receipt:
        return store.put_if_absent(name, Bytes(data), token=token)

    def nothing_is_left(self, store: Store) -> bool:
        return not list(store.walk("", leftovers=True))
