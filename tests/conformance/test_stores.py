"""Every store that is shipped keeps the contract, and so does every wrapper around one."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.backends.local import LocalStore
from holdfast.store.backends.memory import MemoryStore
from holdfast.store.backends.operating_system import OperatingSystem
from holdfast.store.contract import Store
from holdfast.store.wrappers.retry import Patience, RetryingStore
from holdfast.testing.store_suite import StoreSuite


class WithoutDirect(OperatingSystem):
    def open(self, path, *, direct=False):
        if direct:
            raise OSError(errno.EINVAL, "no direct I/O", path)
        return super().open(path)

    def set_direct(self, descriptor, direct):
        raise OSError(errno.EINVAL, "no direct I/O")


class DirectInNameOnly(OperatingSystem):
    """Accepts the flag, and then refuses every direct write."""

    def __init__(self):
        self.flagged = set()

    def set_direct(self, descriptor, direct):
        (self.flagged.add if direct else self.flagged.discard)(descriptor)

    def close(self, descriptor):
        self.flagged.discard(descriptor)
        super().close(descriptor)

    def pwrite(self, descriptor, buffers, offset):
        if descriptor in self.flagged:
            raise OSError(errno.EINVAL, "not meant")
        return super().pwrite(descriptor, buffers, offset)


class WithoutLinks(OperatingSystem):
    def link(self, source, target):
        raise OSError(errno.EPERM, "no hard links", target)


class Stuttering(OperatingSystem):
    """Moves a part of what it was asked to, as the operating system may."""

    def pwrite(self, descriptor, buffers, offset):
        return super().pwrite(descriptor, [part(buffers[0])], offset)

    def pread(self, descriptor, buffers, offset, *, nowait=False):
        return super().pread(descriptor, [part(buffers[0])], offset, nowait=nowait)


def part(buffer):
    length = len(buffer)
    return buffer if length <= 1 else buffer[: max(1, length // 2 // 512 * 512 or length // 2)]


class WithoutReservation(OperatingSystem):
    def reserve(self, descriptor, length):
        raise OSError(errno.EOPNOTSUPP, "cannot reserve")


class LocalSuite(StoreSuite):
    filesystem: type[OperatingSystem] = OperatingSystem

    @pytest.fixture
    def store(self, place: Path) -> Store:
        self.root = place / "store"
        return LocalStore(self.root, filesystem=self.filesystem())

    @pytest.fixture
    def place(self) -> Iterator[Path]:
        """In memory where there is such a place: what differs between these file systems is in this file."""
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=memory, prefix="holdfast-test-") as place:
            yield Path(place)

    def raw_put(self, store: Store, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_get(self, store: Store, name: str) -> bytes | None:
        path = self.root / name
        return path.read_bytes() if path.exists() else None

    def raw_delete(self, store: Store, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    @pytest.fixture(autouse=True)
    def _no_descriptor_stays_open(self, store):
        before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
        yield
        after = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
        assert after <= before


class TestLocal(LocalSuite):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """A real disk, where the tests' own directory is on one."""
        return tmp_path


class TestLocalWithoutDirect(LocalSuite):
    filesystem = WithoutDirect


class TestLocalDirectInNameOnly(LocalSuite):
    filesystem = DirectInNameOnly


class TestLocalWithoutLinks(LocalSuite):
    filesystem = WithoutLinks


class TestLocalStuttering(LocalSuite):
    filesystem = Stuttering


class TestLocalWithoutReservation(LocalSuite):
    filesystem = WithoutReservation


class TestRetryingLocal(LocalSuite):
    @pytest.fixture
    def store(self, place: Path) -> Store:
        self.root = place / "store"
        return RetryingStore(LocalStore(self.root), Patience(wait_s=0))


class MemorySuite(StoreSuite):
    def memory(self, store: Store) -> MemoryStore:
        assert isinstance(store, MemoryStore)
        return store

    def raw_put(self, store: Store, name: str, data: bytes) -> None:
        place = self.memory(store).place
        place.objects[name] = data, place.tick()

    def raw_get(self, store: Store, name: str) -> bytes | None:
        found = self.memory(store).place.objects.get(name)
        return None if found is None else found[0]

    def raw_delete(self, store: Store, name: str) -> None:
        self.memory(store).place.objects.pop(name, None)


class TestMemory(MemorySuite):
    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Store:
        return MemoryStore(request.node.nodeid)


class TestRetryingMemory(MemorySuite):
    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Store:
        return RetryingStore(MemoryStore(request.node.nodeid), Patience(wait_s=0))

    def memory(self, store: Store) -> MemoryStore:
        assert isinstance(store, RetryingStore)
        return super().memory(store.inner)
