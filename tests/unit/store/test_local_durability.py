"""I1's ground: what is flushed before a put is acknowledged, and in which order."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from tenuto.errors import AlreadyExists, StoreError
from tenuto.store.contract import Bytes, leftovers_of
from tenuto.store.local.store import LocalStore


@pytest.fixture
def store(tmp_path, faulty):
    return LocalStore(tmp_path / "store", filesystem=faulty)


def put(store, name, data=b"1", token="t0"):
    return store.put_if_absent(name, Bytes(data), token=token)


def flushed(faulty):
    return [path for _, path in faulty.named("fsync_directory")]


def test_a_small_put_into_a_known_directory_costs_these_calls_and_no_more(store, faulty):
    put(store, "runs/a/x")
    faulty.calls.clear()
    put(store, "runs/a/y")
    names = [name for name, _ in faulty.calls]
    assert names == ["create", "pwrite", "fsync", "link", "fsync_directory", "close", "unlink"]
    assert faulty.calls[4][1] == f"{store.root}/runs/a"


def test_i1_the_first_put_flushes_every_directory_on_the_way(store, faulty, tmp_path):
    put(store, "runs/a/b/x")
    order = [(name, str(path)) for name, path in faulty.named("mkdir", "fsync_directory", "create", "link")]
    for made in (store.root, f"{store.root}/runs", f"{store.root}/runs/a", f"{store.root}/runs/a/b"):
        above = os.path.dirname(made)
        assert ("fsync_directory", above) in order[order.index(("mkdir", made)) :]
    # Together, once the name is there: real file systems serve them all with one commit of their journal.
    assert [name for name, _ in order].index("fsync_directory") > [name for name, _ in order].index("link")
    assert ("fsync_directory", f"{store.root}/runs/a/b") in order[[name for name, _ in order].index("link") :]


def test_i1_directories_made_by_a_process_that_died_are_flushed_too(store, faulty):
    os.makedirs(f"{store.root}/runs/a")
    put(store, "runs/a/x")
    assert {store.root, f"{store.root}/runs", os.path.dirname(store.root)} <= set(flushed(faulty))


def test_i1_a_directory_removed_and_made_again_is_flushed_again(store, faulty):
    put(store, "runs/a/x")
    store.delete(["runs/a/x"])
    assert os.listdir(f"{store.root}/runs") == []
    faulty.calls.clear()
    put(store, "runs/a/x")
    assert f"{store.root}/runs" in flushed(faulty)


def test_i1_a_directory_that_another_process_removed_is_made_and_flushed_again(store, faulty):
    put(store, "runs/a/b/x")
    os.unlink(f"{store.root}/runs/a/b/x")
    os.rmdir(f"{store.root}/runs/a/b")
    os.rmdir(f"{store.root}/runs/a")
    faulty.calls.clear()
    put(store, "runs/a/b/y")
    assert {f"{store.root}/runs", f"{store.root}/runs/a", f"{store.root}/runs/a/b"} <= set(flushed(faulty))


@pytest.mark.parametrize("moment", ["create", "mkdir", "status"])
def test_a_directory_may_vanish_at_any_moment_before_the_file_exists(store, faulty, moment):
    put(store, "runs/x")
    os.mkdir(f"{store.root}/runs/a")
    vanish = lambda: os.rmdir(f"{store.root}/runs/a")  # noqa: E731
    faulty.before[moment] = vanish
    put(store, "runs/a/y")
    assert store.get("runs/a/y", limit=1) == b"1"


def test_a_directory_that_always_vanishes_is_an_error(tmp_path, faulty):
    class Vanishing(type(faulty)):
        def create(self, path, *, direct=False):
            raise FileNotFoundError(2, "gone", path)

    with pytest.raises(StoreError, match="vanishing"):
        put(LocalStore(tmp_path / "s", filesystem=Vanishing()), "runs/x")


def test_i1_a_directory_made_anew_by_another_thread_just_now_is_flushed_before_the_put_is_acknowledged(store, faulty):
    """The other thread has made it and not flushed it yet: that it was known to be durable once does not count."""
    put(store, "runs/a/x")
    os.unlink(f"{store.root}/runs/a/x")

    def another_thread():
        store.delete(["runs/a/x"])
        os.mkdir(f"{store.root}/runs/a")
        faulty.calls.clear()

    faulty.before["create"] = another_thread
    put(store, "runs/a/y")
    assert f"{store.root}/runs" in flushed(faulty)


def test_i1_a_thread_that_prunes_does_not_spoil_a_put_beside_it(store):
    """One thread puts and deletes in a directory, so that it comes and goes, while others put into it for good."""
    stop = threading.Event()

    def churn():
        count = 0
        while not stop.is_set():
            count += 1
            put(store, f"runs/a/b/churn{count}")
            store.delete([f"runs/a/b/churn{count}"])

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for number in range(40):
            put(store, f"runs/a/b/{number}")
            store.delete([f"runs/a/b/{number}"])
            put(store, f"runs/a/{number}")
    finally:
        stop.set()
        thread.join()
    assert len(list(store.walk(""))) == 40


def test_a_root_that_vanishes_is_not_made_again(store):
    put(store, "runs/a/x")
    shutil.rmtree(store.root)
    with pytest.raises(StoreError, match="vanished"):
        put(store, "runs/a/y")
    assert not os.path.exists(store.root)


def test_delete_goes_in_order_and_flushes_each_directory_once(store, faulty):
    for name in ("runs/a/1", "runs/a/2", "runs/b/1", "runs/a/3"):
        put(store, name)
    faulty.calls.clear()
    store.delete(["runs/a/2", "runs/b/1", "runs/a/1"])
    order = faulty.named("unlink", "fsync_directory", "rmdir")
    base = store.root
    assert order == [
        ("unlink", f"{base}/runs/a/2"),
        ("unlink", f"{base}/runs/b/1"),
        ("unlink", f"{base}/runs/a/1"),
        ("fsync_directory", f"{base}/runs/a"),
        ("fsync_directory", f"{base}/runs/b"),
        ("rmdir", f"{base}/runs/a"),
        ("rmdir", f"{base}/runs/b"),
    ]
    assert sorted(os.listdir(f"{base}/runs")) == ["a"]


def test_directories_left_empty_go_but_not_the_first_level(store):
    put(store, "runs/a/b/c/x")
    store.delete(["runs/a/b/c/x"])
    assert os.listdir(store.root) == ["runs"]
    assert os.listdir(f"{store.root}/runs") == []


def test_a_delete_that_was_cut_off_is_finished_by_the_next(store):
    put(store, "runs/a/b/x")
    os.unlink(f"{store.root}/runs/a/b/x")
    store.delete(["runs/a/b/x"])
    assert os.listdir(f"{store.root}/runs") == []


def test_settle_flushes_the_file_and_what_leads_to_it(store, faulty):
    os.makedirs(f"{store.root}/runs/a")
    with open(f"{store.root}/runs/a/x", "wb") as file:
        file.write(b"1")
    store.settle("runs/a/x")
    assert len(faulty.named("fsync")) == 1
    assert {f"{store.root}/runs/a", f"{store.root}/runs", store.root} <= set(flushed(faulty))
    faulty.calls.clear()
    store.settle("runs/a/x")
    assert flushed(faulty) == [f"{store.root}/runs/a"]


def test_settle_of_an_absence_flushes_the_nearest_directory(store, faulty):
    put(store, "runs/a/x")
    faulty.calls.clear()
    store.settle("runs/a/gone")
    assert flushed(faulty) == [f"{store.root}/runs/a"]
    faulty.calls.clear()
    store.settle("runs/no/such/thing")
    assert flushed(faulty)[-1] == f"{store.root}/runs"
    assert sorted(os.listdir(f"{store.root}/runs")) == ["a"]


def test_reading_writes_and_flushes_nothing(store, faulty):
    assert not list(store.walk(""))
    store.settle("nothing/here")
    assert not os.path.exists(store.root)
    assert not faulty.named("mkdir", "create", "unlink", "link")


def test_a_stale_temporary_of_the_same_writer_is_rewritten(store, faulty):
    put(store, "runs/a/y")
    stale = f"{store.root}/runs/a/x.tmp-t0"
    with open(stale, "wb") as file:
        file.write(b"half of something else")
    put(store, "runs/a/x", b"whole")
    assert store.get("runs/a/x", limit=99) == b"whole"
    assert not os.path.exists(stale)


def test_two_puts_of_one_name_with_one_token_do_not_share_a_file(store):
    class Overtaken:
        length = 10

        def pieces(self):
            yield memoryview(b"outer")
            put(store, "runs/a/x", b"inner whole")
            yield memoryview(b"outer")

    with pytest.raises(AlreadyExists):
        store.put_if_absent("runs/a/x", Overtaken(), token="t0")
    assert store.get("runs/a/x", limit=99) == b"inner whole"
    assert not list(leftovers_of(store, ""))


def test_a_large_put_of_a_taken_name_writes_nothing(store, faulty):
    put(store, "runs/a/x")
    faulty.calls.clear()
    with pytest.raises(AlreadyExists):
        put(store, "runs/a/x", bytes(2**20))
    assert not faulty.named("create", "pwrite")


def test_another_writers_temporary_is_left_alone(store):
    put(store, "runs/a/y")
    other = Path(store.root, "runs/a/x.tmp-other")
    other.write_bytes(b"being written")
    put(store, "runs/a/x", b"whole")
    assert other.read_bytes() == b"being written"


def test_a_link_whose_reply_was_lost_is_a_success(tmp_path, faulty):
    class Repeating(type(faulty)):
        def link(self, source, target):
            os.link(source, target)
            os.link(source, target)  # the repetition finds the name taken

    store = LocalStore(tmp_path / "store", filesystem=Repeating())
    assert put(store, "runs/x").length == 1
    assert store.get("runs/x", limit=1) == b"1"
    with pytest.raises(AlreadyExists):
        LocalStore(tmp_path / "store").put_if_absent("runs/x", Bytes(b"2"), token="t1")


def test_an_object_removed_with_its_directory_before_it_is_durable_is_not_acknowledged(store, faulty):
    put(store, "runs/a/x")

    def remove():
        for name in os.listdir(f"{store.root}/runs/a"):
            os.unlink(f"{store.root}/runs/a/{name}")
        os.rmdir(f"{store.root}/runs/a")

    faulty.before["fsync_directory"] = remove
    with pytest.raises(StoreError):
        put(store, "runs/a/y")
