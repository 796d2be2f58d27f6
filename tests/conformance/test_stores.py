"""Every store that is shipped keeps the contract, and so does every wrapper around one."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tenuto.errors import AlreadyExists, CorruptionError, ObjectNotFound, StoreError
from tenuto.model.records import Receipt
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.store.contract import Bytes, Content, Reader, Stat, Store
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.store.memory import MemoryStore
from tenuto.store.wrappers.cache import Cached
from tenuto.store.wrappers.delegating import DelegatingStore
from tenuto.store.wrappers.retry import Patience, RetryingStore
from tenuto.store.wrappers.stripe import Stripe
from tenuto.store.wrappers.throttle import ThrottledStore
from tenuto.testing.object_store import Bucket, SimulatedObjectStore
from tenuto.testing.store_suite import StoreSuite
from tenuto.testing.store_suite.putting import Putting
from tenuto.testing.store_suite.reading import Reading


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
        with tempfile.TemporaryDirectory(dir=memory, prefix="tenuto-test-") as place:
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
    def place(self) -> Iterator[Path]:
        """A real disk, where the system's temporary directory is on one."""
        with tempfile.TemporaryDirectory(prefix="tenuto-test-") as place:
            yield Path(place)


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


class TestSimulatedObjectStore(StoreSuite):
    """The object store in memory that counts its requests."""

    @pytest.fixture
    def store(self) -> Store:
        return SimulatedObjectStore(Bucket(), part_bytes=1 << 20)

    def raw_put(self, store: Store, name: str, data: bytes) -> None:
        assert isinstance(store, SimulatedObjectStore)
        store.bucket.objects[name] = data, store.bucket.clock_ns

    def raw_get(self, store: Store, name: str) -> bytes | None:
        assert isinstance(store, SimulatedObjectStore)
        return store.bucket.objects.get(name, (None, 0))[0]

    def raw_delete(self, store: Store, name: str) -> None:
        assert isinstance(store, SimulatedObjectStore)
        store.bucket.objects.pop(name, None)


class TestPlaces(MemorySuite):
    """A home and another place beside: what the suite puts is no save's, and lies in the home."""

    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Store:
        home, other = (MemoryStore(f"{request.node.nodeid}-{which}") for which in ("home", "other"))
        return ReplicatedStore(home, [home, other], 2)

    def memory(self, store: Store) -> MemoryStore:
        assert isinstance(store, ReplicatedStore)
        return super().memory(store.home)

    @pytest.fixture(autouse=True)
    def _the_other_place_is_given_nothing(self, store: Store) -> Iterator[None]:
        yield
        assert isinstance(store, ReplicatedStore)
        assert not any(one.place.objects for one in store.members if isinstance(one, MemoryStore))


class AsPacks(DelegatingStore):
    """Calls each object as a pack of a save is called."""

    def _pack(self, name: str) -> str:
        return f"runs/main/a0001/step-00000001/{name.replace('/', '~')}.pack"

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        with self._named(name):
            receipt = self.inner.put_if_absent(self._pack(name), content, token=token)
        assert receipt.name == self._pack(name)
        return replace(receipt, name=name)

    def get(self, name: str, *, limit: int) -> bytes:
        with self._named(name):
            return self.inner.get(self._pack(name), limit=limit)

    def open(self, name: str) -> Reader:
        with self._named(name):
            return self.inner.open(self._pack(name))

    def stat(self, name: str) -> Stat:
        with self._named(name):
            return self.inner.stat(self._pack(name))

    def delete(self, names: Iterable[str]) -> None:
        self.inner.delete([self._pack(name) for name in names])

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except (StoreError, CorruptionError) as error:
            assert error.subject == self._pack(name)
            error.subject = name
            raise


class PackSuite(Putting, Reading):
    """What is put and read as a pack: a copy of it lies in each place, or in none."""

    @pytest.mark.parametrize("tokens", ["their own", "one"])
    def test_of_many_threads_one_wins(self, store: Store, tokens: str) -> None:
        """At most one: nobody puts another's pack, and of several that do each may stand in the other's way."""
        barrier = threading.Barrier(16)
        outcomes: list[int | None] = []

        def race(number: int) -> None:
            barrier.wait(60)
            try:
                self.put(store, "runs/a/pack", bytes([number]) * 1000, f"t{number}" if tokens == "their own" else "t")
                outcomes.append(number)
            except AlreadyExists:
                outcomes.append(None)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        winners = [number for number in outcomes if number is not None]
        assert len(outcomes) == 16 and len(winners) <= 1
        assert self.raw_get(store, "runs/a/pack") == (bytes(winners) * 1000 if winners else None)

    @pytest.mark.parametrize(("offset", "length"), [(0, 101), (100, 1), (2**62, 1)])
    def test_reads_beyond_the_end_are_corruption(self, store: Store, offset: int, length: int) -> None:
        """Of the pack as it is called there: what is read from is a place's own reader."""
        self.raw_put(store, "x", bytes(100))
        with store.open("x") as reader, pytest.raises(CorruptionError, match=r"x\.pack"):
            reader.read_into(offset, memoryview(bytearray(length)))

    def places(self, store: Store) -> list[Store]:
        assert isinstance(store, AsPacks) and isinstance(store.inner, ReplicatedStore)
        return list(store.inner.packs_in)

    def raw_put(self, store: Store, name: str, data: bytes) -> None:
        assert isinstance(store, AsPacks)
        for place in self.places(store):
            place.put_if_absent(store._pack(name), Bytes(data), token="raw")

    def raw_get(self, store: Store, name: str) -> bytes | None:
        assert isinstance(store, AsPacks)
        found: set[bytes | None] = set()
        for place in self.places(store):
            try:
                found.add(place.get(store._pack(name), limit=1 << 30))
            except ObjectNotFound:
                found.add(None)
        (data,) = found
        return data

    def raw_delete(self, store: Store, name: str) -> None:
        assert isinstance(store, AsPacks)
        for place in self.places(store):
            place.delete([store._pack(name)])

    def nothing_is_left(self, store: Store) -> bool:
        return not any(list(place.walk("", leftovers=True)) for place in self.places(store))


class TestPacksInPlaces(PackSuite):
    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Store:
        places = [MemoryStore(f"{request.node.nodeid}-{number}") for number in range(3)]
        return AsPacks(ReplicatedStore(places[0], places, 3))


class TestPacksInDirectories(PackSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        places = [RetryingStore(LocalStore(tmp_path / name), Patience(wait_s=0)) for name in ("home", "other")]
        return AsPacks(ReplicatedStore(places[0], places, 2))


class TestThrottled(LocalSuite):
    @pytest.fixture
    def store(self, place: Path) -> Store:
        self.root = place / "store"
        return ThrottledStore(LocalStore(self.root), 10**12, reads=True)


class TestStripe(StoreSuite):
    """Three places, and parts so small that the larger objects are dealt out to all of them."""

    @pytest.fixture
    def store(self, tmp_path_factory: pytest.TempPathFactory) -> Store:
        self.roots = [tmp_path_factory.mktemp("mount") for _ in range(3)]
        return self.another()

    def another(self) -> Store:
        return Stripe(*(LocalStore(root) for root in self.roots), part="64KiB")

    def begun(self, store: Store) -> None:
        store.probe()  # makes a stripe of empty places, if nothing has been put

    def raw_put(self, store: Store, name: str, data: bytes) -> None:
        self.begun(store)
        if len(data) > 2**16:
            self.another().put_if_absent(name, Bytes(data), token="raw")
            return
        for root in self.roots:
            path = root / "objects" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def raw_get(self, store: Store, name: str) -> bytes | None:
        """As it lies: the descriptor, and the parts behind it."""
        path = self.roots[0] / "objects" / name
        if not path.exists():
            assert not any((root / "objects" / name).exists() for root in self.roots)
            return None
        assert len({(root / "objects" / name).read_bytes() for root in self.roots}) == 1
        data = path.read_bytes()
        if not data.startswith(b"tenuto-stripe-1 "):
            return data
        _, length, part, file, _ = data.decode().split()
        lanes = [root / "stripes" / f"{name}.{file}" for root in self.roots]
        parts = [iter(cut(lane.read_bytes(), int(part)) if lane.exists() else ()) for lane in lanes]
        whole = b"".join(next(parts[(k + int(file[:8], 16)) % 3]) for k in range(-(-int(length) // int(part))))
        assert len(whole) == int(length) and not any(list(rest) for rest in parts)
        return whole

    def raw_delete(self, store: Store, name: str) -> None:
        for root in self.roots:
            (root / "objects" / name).unlink(missing_ok=True)


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


class TestStripeOfLargeParts(TestStripe):
    def another(self) -> Store:
        return Stripe(*(LocalStore(root) for root in self.roots), part="64MiB")

    def raw_put(self, store: Store, name: str, data: bytes) -> None:
        self.begun(store)
        self.another().put_if_absent(name, Bytes(data), token="raw") if ".tmp-" not in name else super().raw_put(
            store, name, data
        )


class TestCached(LocalSuite):
    @pytest.fixture
    def store(self, place: Path) -> Store:
        self.root = place / "store"
        return Cached(LocalStore(self.root), place / "cache")


class TestCachedWhatever(TestCached):
    """Every object through the cache, which in earnest only data files are."""

    @pytest.fixture
    def store(self, place: Path) -> Store:
        class Everything(Cached):
            def holds(self, name: str) -> bool:
                return True

        self.root = place / "store"
        return Everything(LocalStore(self.root), place / "cache")

    def test_an_open_object_can_be_read_after_it_is_deleted(self, store: Store) -> None:
        self.raw_put(store, "x", b"still here")
        with store.open("x") as reader:
            store.delete(["x"])
            with pytest.raises(ObjectNotFound):  # nothing was asked of the store before the first read
                reader.read_into(0, memoryview(bytearray(10)))
