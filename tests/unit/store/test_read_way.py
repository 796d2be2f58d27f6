"""How the way of reading is chosen: past the page cache or through it, by what the first reads take."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from tenuto.store.contract import Bytes
from tenuto.store.local import reader as readers
from tenuto.store.local.read_way import SAMPLES, STRETCH, read_way_of
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.store.local.writer import BLOCK

MEBI = 1 << 20
NAME = "pack"


class Disk(OperatingSystem):
    """A disk whose reads take scripted times of a clock of its own, and whose page cache is empty. Any file system does
    for it, also one without direct I/O."""

    def __init__(self, past: float, through: float) -> None:
        self.seconds = {True: past, False: through}
        """Seconds for a MiB, past the cache and through it."""
        self.direct: set[int] = set()
        self.reads: list[bool] = []
        self.now = 0.0

    def open(self, path: str, *, direct: bool = False) -> int:
        descriptor = super().open(path)
        (self.direct.add if direct else self.direct.discard)(descriptor)
        return descriptor

    def pread(self, descriptor: int, buffers: Any, offset: int, *, nowait: bool = False) -> int:
        if nowait:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        count = super().pread(descriptor, buffers, offset)
        past = descriptor in self.direct
        self.reads.append(past)
        self.now += self.seconds[past] * count / MEBI
        return count


@pytest.fixture
def content() -> bytes:
    return os.urandom(MEBI) * 40


def read(store: LocalStore, content: bytes) -> None:
    buffer = memoryview(mmap.mmap(-1, MEBI))
    with store.open(NAME) as reader:
        assert reader.view() is None
        for offset in range(0, len(content), MEBI):
            reader.read_into(offset, buffer)
            assert buffer == content[offset : offset + MEBI]


@pytest.mark.parametrize(
    ("past", "through", "chosen"),
    [
        (2.0, 1.0, False),
        (1.0, 2.0, True),
        (1.0, 1.0, True),  # as fast: nothing is thrown out of the cache
        (1.0, 0.9, True),
        (1.0, 0.75, False),
    ],
)
def test_the_first_reads_decide_for_all_that_follow(
    past: float, through: float, chosen: bool, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(past, through)
    monkeypatch.setattr(readers, "perf_counter", lambda: disk.now)
    store = LocalStore(tmp_path, filesystem=disk)
    store.put_if_absent(NAME, Bytes(content), token="t0")
    read(store, content)
    measured = 2 * SAMPLES
    each = STRETCH // MEBI
    assert disk.reads[:measured] == [number // each % 2 == 0 for number in range(measured)]
    assert disk.reads[measured:] == [chosen] * (40 - measured)
    disk.reads.clear()
    with store.open(NAME) as reader:
        assert reader.alignment == (BLOCK if chosen else 1)
    read(store, content)
    assert disk.reads == [chosen] * 40


def test_a_single_slow_read_does_not_decide(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(1.0, 2.0)
    monkeypatch.setattr(readers, "perf_counter", lambda: disk.now + (1000 if len(disk.reads) > 1 else 0))
    store = LocalStore(tmp_path, filesystem=disk)
    store.put_if_absent(NAME, Bytes(content), token="t0")
    read(store, content)
    assert disk.reads[2 * SAMPLES :] == [True] * (40 - 2 * SAMPLES)


def test_short_reads_go_past_the_cache_and_decide_nothing(content: bytes, tmp_path: Path) -> None:
    disk = Disk(2.0, 1.0)
    store = LocalStore(tmp_path, filesystem=disk)
    store.put_if_absent(NAME, Bytes(content), token="t0")
    buffer = memoryview(mmap.mmap(-1, BLOCK))
    with store.open(NAME) as reader:
        assert reader.alignment == BLOCK
        for number in range(40):
            reader.read_into(number * MEBI, buffer)
    assert disk.reads == [True] * 40


def test_all_stores_of_a_process_in_one_place_share_what_was_measured(tmp_path: Path) -> None:
    assert LocalStore(tmp_path)._read_way is LocalStore(f"{tmp_path}/.")._read_way is read_way_of(str(tmp_path))
    assert LocalStore(tmp_path / "other")._read_way is not LocalStore(tmp_path)._read_way
