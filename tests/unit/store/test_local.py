"""A local store's own ways: how it probes its place, measures it, and finds names for what it writes."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from tenuto.errors import AlreadyExists, StoreError
from tenuto.store.contract import Bytes, leftovers_of
from tenuto.store.local import store as local_store
from tenuto.store.local.store import LocalStore


@pytest.fixture
def store(tmp_path, faulty):
    return LocalStore(tmp_path / "store", filesystem=faulty)


def test_it_says_where_it_is(store, tmp_path):
    assert store.url == store.root == str(tmp_path / "store")
    assert repr(store) == f"LocalStore({store.root!r})"
    assert LocalStore("relative").root == os.path.join(os.getcwd(), "relative")


def test_a_probe_names_twice_and_leaves_nothing(store, faulty):
    assert store.probe() == store.capabilities
    assert store.capabilities.commits and store.capabilities.persistent
    assert os.listdir(store.root) == []
    targets = [os.path.basename(path) for _, path in faulty.named("create")]
    assert len(targets) == 2 and not faulty.named("fsync"), "nothing of it has to last"
    assert all(name.startswith("tenuto-probe-") and name.endswith(".tmp-probe") for name in targets)
    store.probe()
    assert len({os.path.basename(path) for _, path in faulty.named("create")}) == 2 * len(set(targets)), "random names"


class ReplacingLinks:
    """A place whose links silently replace what is there, as some network file systems' do."""

    def link(self, source, target):
        if os.path.exists(target):
            os.unlink(target)
        os.link(source, target)


class LyingLinks:
    """A place that says that a name is taken, and has replaced it all the same."""

    def link(self, source, target):
        if not os.path.exists(target):
            os.link(source, target)
            return
        with open(source, "rb") as new, open(target, "wb") as old:
            old.write(new.read())
        raise FileExistsError(errno.EEXIST, "taken", target)


@pytest.mark.parametrize("links", [ReplacingLinks, LyingLinks])
def test_a_place_that_replaces_what_exists_cannot_commit(tmp_path, faulty, links):
    store = LocalStore(tmp_path / "poor", filesystem=type("Poor", (links, type(faulty)), {})())
    assert store.probe() == store.capabilities
    assert not store.capabilities.commits
    assert os.listdir(store.root) == []
    with pytest.raises(StoreError, match="nothing can be put safely"):
        store.put_if_absent("x", Bytes(b"1"), token="t0")


def test_finding_another_way_to_name_leaves_nothing_and_is_done_once(store, faulty):
    faulty.fail("link", errno.EPERM)
    store.put_if_absent("runs/x", Bytes(b"1"), token="t0")
    assert os.listdir(store.root) == ["runs"]
    assert len(faulty.named("rename_noreplace")) == 3, "two for the probe, one for the object"
    store.put_if_absent("runs/y", Bytes(b"1"), token="t0")
    assert len(faulty.named("rename_noreplace")) == 4
    assert len(faulty.named("link")) == 1
    with pytest.raises(AlreadyExists):
        store.put_if_absent("runs/y", Bytes(b"2"), token="t1")


def test_a_rename_that_fails_otherwise_is_told(store, faulty):
    faulty.fail("link", errno.EPERM)
    store.put_if_absent("runs/x", Bytes(b"1"), token="t0")
    faulty.fail("rename_noreplace", errno.EIO)
    with pytest.raises(StoreError, match=f"naming {store.root}/runs/y failed") as caught:
        store.put_if_absent("runs/y", Bytes(b"1"), token="t0")
    assert caught.value.subject == "runs/y"


def test_free_space_is_measured_where_the_root_will_be(store, faulty, monkeypatch):
    asked = []

    def free(self, path):
        asked.append(path)
        if path == "/":
            return 77
        raise FileNotFoundError(errno.ENOENT, "no", path)

    monkeypatch.setattr(type(faulty), "free_bytes", free)
    assert store.free_bytes() == 77
    above = store.root
    for path in asked:
        assert path == above
        above = os.path.dirname(above)
    assert asked[-1] == "/"


def test_where_not_even_the_root_can_be_measured_nobody_knows(store, faulty, monkeypatch):
    def free(self, path):
        raise FileNotFoundError(errno.ENOENT, "no", path)

    monkeypatch.setattr(type(faulty), "free_bytes", free)
    assert store.free_bytes() is None


def test_puts_of_one_name_and_token_at_once_have_files_of_their_own(store, faulty):
    inside, go_on = threading.Barrier(4), threading.Event()

    class Waiting:
        length = 1

        def pieces(self):
            inside.wait(60)
            go_on.wait(60)
            yield memoryview(b"1")

    outcomes = []

    def put():
        try:
            outcomes.append(store.put_if_absent("runs/x", Waiting(), token="t0"))
        except AlreadyExists as error:
            outcomes.append(error)

    threads = [threading.Thread(target=put) for _ in range(3)]
    for thread in threads:
        thread.start()
    inside.wait(60)
    try:
        names = sorted(os.listdir(f"{store.root}/runs"))
    finally:
        go_on.set()
        for thread in threads:
            thread.join(60)
    assert names == ["x.tmp-t0", "x.tmp-t0-2", "x.tmp-t0-3"]
    assert sum(isinstance(outcome, AlreadyExists) for outcome in outcomes) == 2
    assert not local_store._in_flight, "each is free again"
    assert os.listdir(f"{store.root}/runs") == ["x"]


def test_a_temporary_that_cannot_be_cleared_away_is_an_error(store, faulty):
    store.put_if_absent("runs/y", Bytes(b"1"), token="t0")
    with open(f"{store.root}/runs/x.tmp-t0", "wb"):
        pass
    faulty.fail("unlink", errno.EACCES)
    with pytest.raises(StoreError, match=f"removing {store.root}/runs/x.tmp-t0") as caught:
        store.put_if_absent("runs/x", Bytes(b"1"), token="t0")
    assert caught.value.subject == "runs/x"


def test_nothing_below_a_file_or_an_unknown_prefix_is_listed_or_left_over(store):
    store.put_if_absent("runs/a/x", Bytes(b"12"), token="t0")
    with open(f"{store.root}/runs/a/y.tmp-t9", "wb") as file:
        file.write(b"123")
    assert [(entry.name, entry.length) for entry in leftovers_of(store, "runs")] == [("runs/a/y.tmp-t9", 3)]
    assert list(leftovers_of(store, "runs/a/x")) == list(store.walk("nowhere/at/all")) == []
