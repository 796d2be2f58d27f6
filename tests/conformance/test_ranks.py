"""Every board that is shipped keeps the contract of kv_stores, and ranks agree on it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tenuto.ranks.detection import Solo
from tenuto.ranks.kv.in_process import InProcessKVStore
from tenuto.ranks.kv.shared_files import SharedFilesKVStore
from tenuto.ranks.kv.torch_store import TorchKVStore
from tenuto.testing.ranks_suite import RanksSuite


class TestMemory(RanksSuite):
    @pytest.fixture
    def kv_stores(self):
        kv_store = InProcessKVStore()
        return kv_store, kv_store


class TestSolo(RanksSuite):
    @pytest.fixture
    def kv_stores(self):
        kv_store = Solo().kv_store()
        return kv_store, kv_store


class TestSharedFiles(RanksSuite):
    @pytest.fixture
    def kv_stores(self):
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=memory, prefix="tenuto-test-") as place:
            yield SharedFilesKVStore(Path(place) / "ranks"), SharedFilesKVStore(Path(place) / "ranks")


@pytest.fixture
def store() -> Iterator[object]:
    distributed = pytest.importorskip("torch.distributed")
    yield distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


class TestTcpStore(RanksSuite):
    @pytest.fixture
    def kv_stores(self, store):
        return TorchKVStore.of(store), TorchKVStore.of(store)


class TestPrefixedTcpStore(RanksSuite):
    @pytest.fixture
    def kv_stores(self, store):
        from torch.distributed import PrefixStore

        prefixed = PrefixStore("/worker/attempt_0", PrefixStore("default_pg", store))
        return TorchKVStore.of(prefixed), TorchKVStore.of(prefixed)


class TestTcpStoreThatCannotBeCloned(RanksSuite):
    """As before torch 2.8."""

    @pytest.fixture
    def kv_stores(self, store):
        class Old:
            def __init__(self, host, port, *arguments, **options):
                from torch.distributed import TCPStore

                self.host, self.port = host, port
                if arguments:
                    self.store = TCPStore(host, port, *arguments, **options)

            def __getattr__(self, name):
                if name in ("clone", "underlying_store"):
                    raise AttributeError(name)
                return getattr(self.store, name)

        old = Old(store.host, store.port)
        return TorchKVStore.of(old), TorchKVStore.of(old)


class TestHashStore(RanksSuite):
    @pytest.fixture
    def kv_stores(self):
        distributed = pytest.importorskip("torch.distributed")
        store = distributed.HashStore()
        return TorchKVStore.of(store), TorchKVStore.of(store)


class TestFileStore(RanksSuite):
    @pytest.fixture
    def kv_stores(self, tmp_path):
        distributed = pytest.importorskip("torch.distributed")
        stores = [distributed.FileStore(str(tmp_path / "store"), 2) for _ in range(2)]
        return TorchKVStore.of(stores[0]), TorchKVStore.of(stores[1])
