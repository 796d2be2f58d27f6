"""What an error of the file system says: what was being done, to which path, for which object."""

from __future__ import annotations

import errno
import mmap
import os

import pytest

from tenuto.errors import AlreadyExists, ObjectNotFound, StoreDenied, StoreError, StoreFull, StoreUnreliable
from tenuto.store.contract import Bytes
from tenuto.store.local import os_errors
from tenuto.store.local.store import LocalStore

NAME = "runs/a/x"
LARGE = 2**20


@pytest.fixture
def store(tmp_path, faulty):
    found = LocalStore(tmp_path / "store", filesystem=faulty)
    found.put_if_absent("runs/b/other", Bytes(b"1"), token="t0")
    return found


def put(store, data=b"1"):
    return store.put_if_absent(NAME, Bytes(data), token="t0")


def odd_image():
    return memoryview(mmap.mmap(-1, LARGE + 8192))[: LARGE + 5]


PUTS = [
    ("mkdir", b"1", "making {root}/runs/a", "runs/a"),
    ("create", b"1", "creating {root}/runs/a/x.tmp-t0", NAME),
    ("pwrite", b"1", "writing {root}/runs/a/x.tmp-t0", NAME),
    ("pwrite", odd_image(), "writing {root}/runs/a/x.tmp-t0", NAME),
    ("reserve", bytes(LARGE), "reserving {root}/runs/a/x.tmp-t0", NAME),
    ("set_direct", odd_image(), "opening {root}/runs/a/x.tmp-t0", NAME),
    ("truncate", odd_image(), "writing {root}/runs/a/x.tmp-t0", NAME),
    ("link", b"1", "naming {root}/runs/a/x", NAME),
    ("status", bytes(LARGE), "looking at {root}/runs/a/x", NAME),
]
READS = [
    ("open", lambda store: store.get(NAME, limit=9), "opening {root}/runs/a/x", NAME),
    ("fstatus", lambda store: store.open(NAME), "opening {root}/runs/a/x", NAME),
    ("pread", lambda store: store.get(NAME, limit=9), "reading {root}/runs/a/x", NAME),
    ("listdir", lambda store: store.children("runs/a"), "listing {root}/runs/a", "runs/a"),
    ("unlink", lambda store: store.delete([NAME]), "removing {root}/runs/a/x", NAME),
    ("free_bytes", lambda store: store.free_bytes(), "measuring {root}", "{root}"),
]


def refused(store, faulty, method, act, words, subject, number, kind, pattern):
    faulty.fail(method, number)
    with pytest.raises(StoreError) as caught:
        act()
    error = caught.value
    assert type(error) is kind
    assert error.errno == number
    assert error.message == pattern.format(words.format(root=store.root), os.strerror(number))
    assert error.subject == subject.format(root=store.root)
    return error


@pytest.mark.parametrize(("method", "data", "words", "subject"), PUTS, ids=lambda value: str(value)[:12])
def test_a_put_says_where_it_failed(store, faulty, method, data, words, subject):
    act = lambda: put(store, data)  # noqa: E731
    refused(store, faulty, method, act, words, subject, errno.EIO, StoreError, "{} failed: {}")
    error = refused(store, faulty, method, act, words, subject, errno.ENOSPC, StoreFull, "no space while {}: {}")
    assert "make room there" in error.hint and "tenuto gc" in error.hint


@pytest.mark.parametrize(("method", "act", "words", "subject"), READS, ids=lambda value: str(value)[:12])
def test_reading_says_where_it_failed(store, faulty, method, act, words, subject):
    put(store)
    error = refused(
        store, faulty, method, lambda: act(store), words, subject, errno.EACCES, StoreDenied, "not permitted: {}: {}"
    )
    path = words.format(root=store.root).rpartition(" ")[2]
    assert error.hint.startswith(f"check who owns {path} and its directory")
    refused(store, faulty, method, lambda: act(store), words, subject, errno.EIO, StoreError, "{} failed: {}")


@pytest.mark.parametrize("act", ["put", "settle"])
def test_a_flush_that_fails_says_of_what(store, faulty, act):
    if act == "settle":
        put(store)
    faulty.fail("fsync", errno.EIO)
    with pytest.raises(StoreUnreliable) as caught:
        put(store) if act == "put" else store.settle(NAME)
    path = f"{store.root}/{NAME}" + (".tmp-t0" if act == "put" else "")
    assert caught.value.message == f"flushing {path} to stable storage failed: {os.strerror(errno.EIO)}"
    assert (caught.value.subject, caught.value.errno) == (NAME, errno.EIO)
    assert "look at the kernel log (`dmesg`)" in caught.value.hint


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.EIO, StoreUnreliable, "flushing {} to stable storage failed: "),
        (errno.ENOSPC, StoreUnreliable, "flushing {} to stable storage failed: "),
        (errno.EACCES, StoreDenied, "not permitted: opening {}: "),
        (errno.EPERM, StoreDenied, "not permitted: opening {}: "),
        (errno.EROFS, StoreDenied, "not permitted: opening {}: "),
        (errno.ELOOP, StoreError, "opening {} failed: "),
    ],
)
def test_a_directory_that_cannot_be_flushed_or_opened_is_named(store, faulty, number, kind, words):
    faulty.fail("fsync_directory", number, of="runs/a")
    with pytest.raises(StoreError) as caught:
        put(store)
    assert type(caught.value) is kind
    assert caught.value.message == words.format(f"{store.root}/runs/a") + os.strerror(number)
    assert (caught.value.subject, caught.value.errno) == (NAME, number)


def test_a_disk_found_full_by_the_flush_says_so(store, faulty):
    faulty.fail("fsync", errno.ENOSPC)
    with pytest.raises(StoreFull, match=rf"no space while flushing {store.root}/runs/a/x\.tmp-t0") as caught:
        put(store)
    assert caught.value.subject == NAME


def test_what_does_not_fit_says_how_much_is_free(store, faulty, monkeypatch):
    faulty.fail("reserve", errno.EOPNOTSUPP)
    monkeypatch.setattr(type(faulty), "free_bytes", lambda self, path: LARGE - 1)
    with pytest.raises(StoreFull) as caught:
        put(store, bytes(LARGE))
    assert f"{LARGE} bytes are needed, {LARGE - 1} are free" in caught.value.message
    assert f"reserving {store.root}/runs/a/x.tmp-t0" in caught.value.message
    assert (caught.value.subject, caught.value.errno) == (NAME, errno.ENOSPC)


def test_exactly_what_is_free_may_be_used(store, faulty, monkeypatch):
    faulty.fail("reserve", errno.EOPNOTSUPP)
    monkeypatch.setattr(type(faulty), "free_bytes", lambda self, path: LARGE)
    assert put(store, bytes(LARGE)).length == LARGE


@pytest.mark.parametrize("number", sorted(os_errors.PASSING))
def test_a_passing_fault_is_called_so(number):
    error = os_errors.meaning(OSError(number, "gone for now"), "reading", "/p", "s")
    assert error.message == "passing fault while reading /p: gone for now"
    assert (error.subject, error.errno, error.hint) == ("s", number, None)


def test_an_error_without_words_is_told_by_its_text():
    error = os_errors.meaning(OSError("odd"), "reading", "/p", "s")
    assert error.message == "reading /p failed: odd"
    assert error.errno is None
    assert "failed: odd" in os_errors.unflushed(OSError("odd"), "/p", "s").message


def test_absent_and_taken_names_are_told_with_their_paths(store):
    for look in (lambda: store.get(NAME, limit=1), lambda: store.stat(NAME), lambda: store.open(NAME)):
        with pytest.raises(ObjectNotFound) as absent:
            look()
        assert absent.value.message == f"there is no object {NAME} ({store.root}/{NAME})"
        assert absent.value.subject == NAME
    put(store)
    for data in (b"1", bytes(LARGE)):
        with pytest.raises(AlreadyExists) as taken:
            put(store, data)
        assert taken.value.message == f"{NAME} exists already ({store.root}/{NAME})"
        assert taken.value.subject == NAME


@pytest.mark.parametrize("data", [b"four", bytes(LARGE)])
@pytest.mark.parametrize("more", [-1, 1])
def test_another_length_than_announced_is_told_in_bytes(store, data, more):
    class Content:
        length = len(data) + more

        def pieces(self):
            yield memoryview(data)

    with pytest.raises(StoreError) as caught:
        store.put_if_absent(NAME, Content(), token="t0")
    said = "has more" if more < 0 else f"has {len(data)}"
    assert caught.value.message == f"{NAME} was announced with {len(data) + more} bytes and {said}: it is not stored"
    assert caught.value.subject == NAME


def test_a_write_that_makes_no_progress_ends(tmp_path, faulty):
    class Stuck(type(faulty)):
        def pwrite(self, descriptor, buffers, offset):
            return 0 if offset else super().pwrite(descriptor, [buffers[0][:1]], offset)

    store = LocalStore(tmp_path / "stuck", filesystem=Stuck())
    with pytest.raises(StoreError) as caught:
        put(store, b"12")
    assert caught.value.message == f"writing {store.root}/{NAME}.tmp-t0 makes no progress at byte 1"
    assert caught.value.subject == NAME


def test_a_root_that_is_missing_or_gone_is_named_with_what_to_do(tmp_path, faulty):
    import shutil

    store = LocalStore(tmp_path / "absent", filesystem=faulty, create=False)
    with pytest.raises(StoreError) as caught:
        put(store)
    assert caught.value.message == f"there is no directory {store.root}"
    assert (caught.value.subject, caught.value.hint) == (store.root, f"mkdir -p {store.root}")
    store = LocalStore(tmp_path / "gone", filesystem=faulty)
    put(store)
    shutil.rmtree(store.root)
    with pytest.raises(StoreError) as caught:
        store.put_if_absent("runs/c/x", Bytes(b"1"), token="t0")
    assert caught.value.message == f"{store.root} has vanished"
    assert caught.value.subject == store.root
    assert "still mounted" in caught.value.hint


def test_what_is_in_the_way_of_a_directory_is_named(store):
    with open(f"{store.root}/runs/a", "wb"):
        pass
    with pytest.raises(StoreError) as caught:
        put(store)
    assert caught.value.message.startswith(f"{store.root}/runs/a is in the way")
    assert caught.value.subject == "runs/a"
    assert caught.value.hint.startswith(f"move {store.root}/runs/a away")


def test_a_store_without_safe_names_says_to_look_for_another_place(tmp_path, faulty):
    class Poor(type(faulty)):
        def link(self, source, target):
            raise OSError(errno.EPERM, "no hard links")

        def rename_noreplace(self, source, target):
            raise OSError(errno.EINVAL, "no such flag")

    store = LocalStore(tmp_path / "poor", filesystem=Poor())
    with pytest.raises(StoreError) as caught:
        put(store)
    assert caught.value.message.startswith(f"{store.root} has neither hard links nor renames")
    assert caught.value.subject == NAME
    assert caught.value.hint == "keep the repository on another file system"


def test_a_directory_that_cannot_be_looked_at_is_named(store, faulty):
    os.mkdir(f"{store.root}/runs/a")
    faulty.fail("status", errno.EIO, of="runs/a")
    with pytest.raises(StoreError) as caught:
        put(store)
    assert caught.value.message == f"looking at {store.root}/runs/a failed: {os.strerror(errno.EIO)}"
    assert (caught.value.subject, caught.value.errno) == ("runs/a", errno.EIO)


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL])
def test_direct_writing_that_cannot_be_turned_off_is_told(store, faulty, number):
    faulty.fail("set_direct", number, at=2)
    with pytest.raises(StoreError) as caught:
        put(store, memoryview(bytearray(LARGE + 1))[1:])
    assert caught.value.message == f"writing {store.root}/{NAME}.tmp-t0 failed: {os.strerror(number)}"
    assert (caught.value.subject, caught.value.errno) == (NAME, number)


def test_settling_says_where_it_failed(store, faulty):
    put(store)
    anew = LocalStore(store.root, filesystem=faulty)
    faulty.fail("status", errno.EIO, at=2, of="runs/a")  # the first looks whether the way is ours
    with pytest.raises(StoreError) as caught:
        anew.settle(NAME)
    assert caught.value.message == f"looking at {store.root}/runs/a failed: {os.strerror(errno.EIO)}"
    assert (caught.value.subject, caught.value.errno) == (NAME, errno.EIO)


def test_a_range_that_cannot_be_read_is_told(store, faulty):
    put(store)
    with store.open(NAME) as reader:
        faulty.fail("pread", errno.EIO)
        with pytest.raises(StoreError) as caught:
            reader.read_into(0, memoryview(bytearray(1)))
    assert caught.value.message == f"reading from byte 0 of {store.root}/{NAME} failed: {os.strerror(errno.EIO)}"
    assert (caught.value.subject, caught.value.errno) == (NAME, errno.EIO)
