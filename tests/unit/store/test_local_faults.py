"""What the operating system says, in the store's words; and what is left behind."""

from __future__ import annotations

import errno
import os

import pytest

from tenuto.errors import (
    AlreadyExists,
    CorruptionError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnreliable,
)
from tenuto.store.contract import Bytes, leftovers_of
from tenuto.store.local.store import LocalStore
from tenuto.store.wrappers.retry import Patience, RetryingStore

LARGE = 2 * 2**20
NAME = "runs/a/x"
MEANINGS = [
    (errno.ENOSPC, StoreFull),
    (errno.EDQUOT, StoreFull),
    (errno.EROFS, StoreDenied),
    (errno.EACCES, StoreDenied),
    (errno.EPERM, StoreDenied),
    (errno.ESTALE, StoreUnavailable),
    (errno.ETIMEDOUT, StoreUnavailable),
    (errno.EAGAIN, StoreUnavailable),
    (errno.EINTR, StoreUnavailable),
    (errno.EIO, StoreError),
    (errno.ENAMETOOLONG, StoreError),
]


@pytest.fixture
def store(tmp_path, faulty):
    return LocalStore(tmp_path / "store", filesystem=faulty)


def files(store):
    return sorted(
        os.path.relpath(os.path.join(at, f), store.root) for at, _, names in os.walk(store.root) for f in names
    )


@pytest.mark.parametrize(("number", "kind"), MEANINGS)
@pytest.mark.parametrize("method", ["create", "pwrite", "reserve", "truncate", "link", "mkdir"])
def test_a_put_that_meets_a_fault(store, faulty, method, number, kind):
    if method == "link" and number == errno.EPERM:
        pytest.skip("means that there are no hard links")
    faulty.fail(method, number)
    content = Bytes(memoryview(bytearray(LARGE + 5)) if method != "truncate" else padded(LARGE + 5))
    with pytest.raises(StoreError) as caught:
        store.put_if_absent(NAME, content, token="t0")
    assert type(caught.value) is kind
    assert caught.value.errno == number
    assert store.root in caught.value.message
    assert isinstance(caught.value.__cause__, OSError)
    if kind in (StoreFull, StoreDenied):
        assert caught.value.hint
    assert files(store) == []
    assert store.put_if_absent(NAME, content, token="t0").length == LARGE + 5  # the same writer tries again


def padded(length):
    import mmap

    return memoryview(mmap.mmap(-1, length + 4096))[:length]


@pytest.mark.parametrize("number", [errno.EIO, errno.EINTR, errno.ESTALE, errno.EAGAIN, errno.EROFS, errno.EPERM])
def test_a_failed_flush_of_the_file_is_final(store, faulty, number):
    patient = RetryingStore(store, Patience(wait_s=0))
    faulty.fail("fsync", number)
    with pytest.raises(StoreUnreliable) as caught:
        patient.put_if_absent(NAME, Bytes(b"1"), token="t0")
    assert caught.value.subject == NAME
    assert len(faulty.named("fsync")) == 1
    assert not faulty.named("link")
    assert files(store) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_found_full_by_the_flush_is_full(store, faulty, number):
    faulty.fail("fsync", number)
    with pytest.raises(StoreFull):
        store.put_if_absent(NAME, Bytes(b"1"), token="t0")
    assert len(faulty.named("fsync")) == 1
    assert files(store) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESTALE])
@pytest.mark.parametrize("at", [1, 2])
def test_a_failed_flush_of_the_directory_is_final(store, faulty, number, at):
    patient = RetryingStore(store, Patience(wait_s=0))
    faulty.fail("fsync_directory", number, of="runs/a" if at == 1 else "runs")
    with pytest.raises(StoreUnreliable):
        patient.put_if_absent(NAME, Bytes(b"1"), token="t0")
    flushed = [path for _, path in faulty.named("fsync_directory")]
    assert len(set(flushed)) == len(flushed), "nothing was flushed again"


def test_a_flush_that_fails_in_the_middle_of_a_buffered_write(store, faulty, monkeypatch):
    monkeypatch.setattr("tenuto.store.local.writer._FLUSH_EVERY", 2**20)
    monkeypatch.setattr("tenuto.store.local.writer._STRIDE", 2**18)
    faulty.fail("fsync", errno.EIO)
    faulty.fail("set_direct", errno.EINVAL)
    with pytest.raises(StoreUnreliable):
        store.put_if_absent(NAME, Bytes(bytes(4 * 2**20)), token="t0")
    assert len(faulty.named("pwrite")) == 4, "nothing is written after the flush that failed"
    assert files(store) == []


def test_a_place_that_cannot_flush_directories_says_so(store, faulty):
    assert store.capabilities.persistent
    faulty.fail("fsync_directory", errno.EINVAL, of="runs")
    store.put_if_absent(NAME, Bytes(b"1"), token="t0")
    assert not store.capabilities.persistent


def test_a_put_that_cannot_be_reserved_and_does_not_fit(store, faulty, monkeypatch):
    faulty.fail("reserve", errno.EOPNOTSUPP)
    monkeypatch.setattr(type(faulty), "free_bytes", lambda self, path: LARGE - 1)
    with pytest.raises(StoreFull):
        store.put_if_absent(NAME, Bytes(bytes(LARGE)), token="t0")
    assert not faulty.named("pwrite"), "found out before the first byte"
    assert files(store) == []


def test_what_goes_wrong_after_the_object_is_durable_is_no_failure(store, faulty):
    store.put_if_absent("runs/a/y", Bytes(b"1"), token="t0")
    faulty.fail("unlink", errno.EIO)
    faulty.fail("close", errno.EIO)
    assert store.put_if_absent(NAME, Bytes(b"1"), token="t0").length == 1
    assert [entry.name for entry in leftovers_of(store, "")] == ["runs/a/x.tmp-t0"]


def test_an_error_of_the_content_passes_as_it_is(store):
    class Broken:
        length = 5

        def pieces(self):
            raise OSError(errno.ENOSPC, "not the store's")
            yield

    with pytest.raises(OSError, match="not the store's") as caught:
        store.put_if_absent(NAME, Broken(), token="t0")
    assert not isinstance(caught.value, StoreError)
    assert files(store) == []


@pytest.mark.parametrize(("number", "kind"), MEANINGS)
@pytest.mark.parametrize(
    ("method", "act"),
    [
        ("open", lambda store: store.get(NAME, limit=10)),
        ("pread", lambda store: store.get(NAME, limit=10)),
        ("fstatus", lambda store: store.open(NAME)),
        ("status", lambda store: store.stat(NAME)),
        ("listdir", lambda store: store.children("runs/a")),
        ("listdir", lambda store: list(store.walk(""))),
        ("status", lambda store: list(store.walk(""))),
        ("unlink", lambda store: store.delete([NAME])),
        ("free_bytes", lambda store: store.free_bytes()),
    ],
)
def test_reading_listing_and_removing(store, faulty, method, act, number, kind):
    store.put_if_absent(NAME, Bytes(b"1"), token="t0")
    before = set(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else set()
    faulty.fail(method, number)
    with pytest.raises(StoreError) as caught:
        act(store)
    assert type(caught.value) is kind
    assert before == (set(os.listdir("/proc/self/fd")) if before else set())


@pytest.mark.parametrize("act", ["delete", "settle"])
def test_a_failed_flush_of_a_removal_or_a_settling(store, faulty, act):
    store.put_if_absent(NAME, Bytes(b"1"), token="t0")
    faulty.fail("fsync_directory", errno.EIO, of="runs/a")
    with pytest.raises(StoreUnreliable):
        store.delete([NAME]) if act == "delete" else store.settle(NAME)


def test_a_failed_flush_of_the_file_when_settling(store, faulty):
    store.put_if_absent(NAME, Bytes(b"1"), token="t0")
    faulty.fail("fsync", errno.EIO)
    with pytest.raises(StoreUnreliable):
        store.settle(NAME)


def test_a_file_that_becomes_shorter_while_it_is_read(store):
    store.put_if_absent(NAME, Bytes(bytes(10000)), token="t0")
    with store.open(NAME) as reader:
        os.truncate(os.path.join(store.root, NAME), 6000)
        with pytest.raises(CorruptionError) as caught:
            reader.read_into(4000, memoryview(bytearray(4000)))
    assert caught.value.subject == f"{NAME}@6000"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_without_hard_links_a_rename_that_refuses_serves(store, faulty, number):
    faulty.fail("link", number)
    store.put_if_absent(NAME, Bytes(b"1"), token="t0")
    assert store.capabilities.commits
    with pytest.raises(AlreadyExists):
        store.put_if_absent(NAME, Bytes(b"2"), token="t1")
    assert len(faulty.named("link")) == 1, "not tried again"
    assert files(store) == [NAME]


class Replacing:
    """Neither hard links, nor renames that refuse."""

    def link(self, source, target):
        raise OSError(errno.EPERM, "no hard links")

    def rename_noreplace(self, source, target):
        os.rename(source, target)


class Refusing(Replacing):
    def rename_noreplace(self, source, target):
        raise OSError(errno.EINVAL, "no such flag")


@pytest.mark.parametrize("kind", [Replacing, Refusing])
def test_with_neither_nothing_can_be_put(tmp_path, faulty, kind):
    poor = type("Poor", (kind, type(faulty)), {})()
    store = LocalStore(tmp_path / "store", filesystem=poor)
    found = store.probe()
    assert not found.commits and not store.capabilities.commits
    with pytest.raises(StoreError):
        store.put_if_absent(NAME, Bytes(b"1"), token="t0")
    assert files(store) == []


def test_a_fault_while_looking_for_another_way_decides_nothing(store, faulty):
    faulty.fail("link", errno.EPERM)
    faulty.fail("rename_noreplace", errno.EIO)
    with pytest.raises(StoreError):
        store.put_if_absent(NAME, Bytes(b"1"), token="t0")
    assert store.put_if_absent(NAME, Bytes(b"1"), token="t0").length == 1
    assert store.capabilities.commits
    assert files(store) == [NAME]


def test_a_probe_of_a_place_that_cannot_be_written(store, faulty):
    faulty.fail("mkdir", errno.EROFS)
    with pytest.raises(StoreDenied):
        store.probe()


def test_a_store_that_may_not_be_made(tmp_path, faulty):
    store = LocalStore(tmp_path / "absent", filesystem=faulty, create=False)
    with pytest.raises(StoreError, match="no directory"):
        store.put_if_absent(NAME, Bytes(b"1"), token="t0")
    assert not (tmp_path / "absent").exists()
    assert store.children("").objects == ()
