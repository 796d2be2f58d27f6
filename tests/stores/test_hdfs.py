"""A Hadoop file system: the suite, refusals in words, and processes killed in the middle of puts and of a training."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from campaigns.ports import free_port
from stores import training
from stores.cases import OnServer, Suite
from stores.hdfs_server import HdfsServer
from tenuto.errors import StoreDenied, StoreError, StoreFull, StoreUnavailable
from tenuto.maintenance.verify import assert_whole
from tenuto.store import hdfs
from tenuto.store.contract import Bytes, Store
from tenuto.store.registry import open_store
from tenuto.store.wrappers.retry import Patience, RetryingStore


def impatient(place: str) -> Store:
    """Opens a store that tries each call once."""
    return RetryingStore(open_store(place).inner, Patience(attempts=1))  # type: ignore[attr-defined]


class TestSuite(Suite):
    server_name = "hdfs"


class TestRefusals(OnServer):
    server_name = "hdfs"

    def test_another_user_is_denied(self, place: str) -> None:
        store = open_store(f"{place.rpartition('/')[0]}/not-ours")
        with pytest.raises(StoreDenied, match="permission") as caught:
            store.put_if_absent("x", Bytes(b"1"), token="t0")
        assert caught.value.hint and "HADOOP_USER_NAME" in caught.value.hint

    def test_a_quota_is_full_and_nothing_is_left(self, server: HdfsServer, place: str) -> None:
        store = open_store(place)
        server.set_space_quota(place, 1 << 20)
        with pytest.raises(StoreFull, match="quota") as caught:
            store.put_if_absent("a/x", Bytes(bytes(3 << 20)), token="t0")
        assert caught.value.hint
        assert not list(store.walk("", leftovers=True))

    @pytest.mark.parametrize(
        ("where", "kind", "says"),
        [
            ("hdfs://127.0.0.1:{port}/x", StoreUnavailable, "does not answer"),
            ("hdfs://no-such-name/x", StoreError, "no port"),
        ],
    )
    def test_a_wrong_address(self, place: str, where: str, kind: type[StoreError], says: str) -> None:
        store = impatient(where.format(port=free_port()))
        calls: list[Callable[[], object]] = [
            lambda: store.put_if_absent("x", Bytes(b"1"), token="t0"),
            lambda: store.get("x", limit=9),
            lambda: list(store.walk("")),
            lambda: store.delete(["x"]),
        ]
        for call in calls:
            with pytest.raises(kind, match=says) as caught:
                call()
            assert caught.value.hint and store.url in str(caught.value)

    def test_the_file_system_of_the_configuration(self, server: HdfsServer, place: str) -> None:
        path = place.removeprefix(f"hdfs://{server.address}")
        open_store(f"hdfs://{path}").put_if_absent("x", Bytes(b"1"), token="t0")
        assert server.get(place, "x") == b"1"

    def test_a_colon_in_a_name_is_refused(self, place: str) -> None:
        with pytest.raises(StoreError, match="colon"):
            open_store(place).put_if_absent("a:b", Bytes(b"1"), token="t0")


class TestKilled(OnServer):
    server_name = "hdfs"

    @pytest.mark.parametrize("length", [2000, 20 << 20])
    @pytest.mark.parametrize("node", ["namenode", "datanode"])
    def test_a_node_killed_in_the_middle_of_puts(self, server: HdfsServer, place: str, node: str, length: int) -> None:
        """What was acknowledged is there; what was not is whole or absent."""
        store = impatient(place)
        data = np.random.default_rng(2).bytes(length)
        acknowledged: list[str] = []
        refused: list[str] = []
        begun, killed = threading.Event(), threading.Event()

        def put_many() -> None:
            for number in range(1000):
                name = f"packs/{number:04}"
                try:
                    store.put_if_absent(name, Bytes(data), token="t0")
                    acknowledged.append(name)
                except StoreError:
                    refused.append(name)
                    if killed.is_set():
                        return
                if number == 3:
                    begun.set()

        thread = threading.Thread(target=put_many)
        thread.start()
        assert begun.wait(120)
        getattr(server, node).kill()
        killed.set()
        thread.join(120)
        server.restart()
        assert acknowledged and refused
        for name in acknowledged:
            assert server.get(place, name) == data
        for name in refused:
            assert server.get(place, name) in (None, data)
        open_store(place).put_if_absent("packs/later", Bytes(data), token="t0")
        assert {entry.length for entry in store.walk("")} == {length}

    @pytest.mark.parametrize("node", ["namenode", "datanode"])
    def test_a_training_and_a_node_killed_and_resumed(self, server: HdfsServer, place: str, node: str) -> None:
        job = self.start(place, 1000)
        committed = self.committed(job, 3)
        getattr(server, node).kill()
        job.kill()
        committed += self.committed(job, 1000)
        job.wait(60)
        server.restart()
        self.check(place, committed)
        last = committed[-1] + 3
        resumed = self.start(place, last)
        committed += self.committed(resumed, 1000)
        assert resumed.wait(300) == 0
        assert committed[-1] == last
        self.check(place, committed)

    def start(self, place: str, steps: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(training.__file__)), place, str(steps)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy())

    def committed(self, job: subprocess.Popen[str], most: int) -> list[int]:
        """Returns the steps that a job says are committed, up to so many, or until it ends."""
        found: list[int] = []
        assert job.stdout is not None
        while len(found) < most and (line := job.stdout.readline()):
            if line.startswith("committed "):
                found.append(int(line.split()[1]))
        return found

    def check(self, place: str, committed: list[int]) -> None:
        repository = tenuto.Repository(place)
        there = [id.step for id in repository.checkpoints("main")]
        assert committed and set(committed) <= set(there)
        for step in (max(there), committed[0]):
            found: Any = tenuto.load(place, step=step).state["w"]
            assert np.array_equal(found, training.state_at(step))
        assert_whole(repository.repo)


class TestHanging(OnServer):
    """A NameNode that accepts connections and never answers."""

    server_name = "hdfs"

    @pytest.fixture
    def hung(self, server: HdfsServer, place: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        """A store with one object, opened before its NameNode is stopped."""
        monkeypatch.setattr(hdfs, "ANSWER_S", 3.0)
        store = impatient(place)
        store.put_if_absent("there", Bytes(b"1"), token="t0")
        monkeypatch.setattr(hdfs, "_DATA_S", 3.0)
        server.namenode.pause()
        yield store
        server.namenode.resume()

    def test_each_call_ends_with_one_error_and_passes_later(self, server: HdfsServer, hung: Store) -> None:
        calls: list[Callable[[], object]] = [
            lambda: hung.put_if_absent("late", Bytes(b"late"), token="t0"),
            lambda: hung.get("there", limit=9),
            lambda: hung.stat("there"),
            lambda: list(hung.walk("")),
            lambda: hung.children(""),
            lambda: hung.delete(["there"]),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailable, match="has not answered") as caught:
                call()
            assert caught.value.hint and "dfsadmin -report" in caught.value.hint and hung.url in str(caught.value)
        server.namenode.resume()
        hung.put_if_absent("new", Bytes(b"2"), token="t0")
        assert hung.get("new", limit=9) == b"2"
        hung.delete(["there"])  # what was asked for meanwhile may have been done since, or not
        assert {entry.name for entry in hung.walk("")} == {"new"}

    def test_a_put_that_is_cut_off_leaves_nothing_under_its_name(self, server: HdfsServer, place: str) -> None:
        """The NameNode stops between the first piece and the last."""

        class Stopping:
            length = 9 << 20

            def pieces(self) -> Iterator[memoryview]:
                yield memoryview(bytes(8 << 20))
                server.namenode.pause()
                yield memoryview(bytes(1 << 20))

        store = impatient(place)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(hdfs, "_DATA_S", 3.0)
                with pytest.raises(StoreUnavailable, match="has not answered"):
                    store.put_if_absent("packs/1", Stopping(), token="t0")
        finally:
            server.namenode.resume()
        assert server.get(place, "packs/1") is None
        store.put_if_absent("packs/1", Bytes(b"1"), token="t0")
        assert [entry.name for entry in store.walk("")] == ["packs/1"]
