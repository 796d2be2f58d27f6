"""A tiny training on numpy state, and stores that fail or wait on command."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto.errors import StoreError
from tenuto.maintenance.verify import assert_whole
from tenuto.model.records import Receipt
from tenuto.policy.save import Moment, SaveHistory, SavePolicy
from tenuto.store.contract import Content, Store
from tenuto.store.registry import open_store


class Gate:
    """A store whose puts of packs can be held back, or made to fail, by the test."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.reached = threading.Event()
        self.failure: StoreError | None = None
        self.failures = 0

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        if name.endswith(".safetensors"):
            self.reached.set()
            assert self.open_gate.wait(60)
            if self.failure is not None and self.failures != 0:
                self.failures -= 1
                raise self.failure
        return self._inner.put_if_absent(name, content, token=token)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def state() -> dict[str, Any]:
    return {"w": np.zeros(1000, np.float32), "n": 0}


def train(one: dict[str, Any], batch: float = 1.0) -> None:
    one["w"] += np.float32(batch * np.random.random())
    one["n"] += 1


def steps_of(where: Any, run: str = "main") -> list[int]:
    return [id.step for id in tenuto.Repository(where).checkpoints(run)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory for a repository, which is whole when the test is over."""
    where = tmp_path / "checkpoints"
    yield where
    if (where / "tenuto.json").exists():
        assert_whole(tenuto.Repository(where).repo)


@pytest.fixture
def gate(place: Path) -> Gate:
    return Gate(open_store(place))


def flip(where: Path, pattern: str, at: int) -> None:
    """Flips one bit in every file that matches."""
    found: Sequence[Path] = sorted(where.glob(pattern))
    assert found, pattern
    for path in found:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(bytes(data))


def flip_leaf(where: Path, pattern: str, leaf: str) -> None:
    """Flips one bit of a leaf in every pack that matches; where it lies is read from the safetensors header."""
    for path in sorted(where.glob(pattern)):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        start, _ = json.loads(data[8 : 8 + length])[leaf]["data_offsets"]
        flip(where, str(path.relative_to(where)), 8 + length + start)


class AtStepsOfItsOwn(SavePolicy):
    """Says of itself that all ranks decide alike, and they do not."""

    alike = True

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        return None if now.step % self.steps else "it is time"
