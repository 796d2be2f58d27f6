"""What Tenuto did not put there: symbolic links, devices, odd names. It is neither followed nor touched."""

from __future__ import annotations

import os

import pytest

from tenuto.errors import AlreadyExists, ObjectNotFound, StoreError
from tenuto.store.contract import Bytes, Listing
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem, Status


@pytest.fixture
def store(tmp_path):
    found = LocalStore(tmp_path / "store")
    found.put_if_absent("runs/a/x", Bytes(b"1"), token="t0")
    return found


@pytest.fixture
def outside(tmp_path):
    place = tmp_path / "outside"
    (place / "a").mkdir(parents=True)
    (place / "a" / "secret").write_bytes(b"not ours")
    return place


def test_a_linked_directory_is_not_entered(store, outside):
    os.symlink(outside, f"{store.root}/runs/link")
    name = "runs/link/a/secret"
    assert store.children("runs") == Listing(("a",), ())
    assert store.children("runs/link") == Listing((), ())
    assert [entry.name for entry in store.walk("")] == ["runs/a/x"]
    assert not list(store.walk("runs/link"))
    for look in (lambda: store.get(name, limit=99), lambda: store.open(name), lambda: store.stat(name)):
        with pytest.raises(ObjectNotFound):
            look()
    store.delete([name])
    store.settle(name)
    with pytest.raises(StoreError):
        store.put_if_absent("runs/link/new", Bytes(b"1"), token="t0")
    with pytest.raises(StoreError):
        store.put_if_absent("runs/link/a/new", Bytes(b"1"), token="t0")
    assert sorted(os.listdir(outside / "a")) == ["secret"]
    assert os.listdir(outside) == ["a"]


def test_settling_through_a_linked_directory_does_not_open_it_for_puts(store, outside):
    os.symlink(outside, f"{store.root}/runs/link")
    store.settle("runs/link/x")
    with pytest.raises(StoreError):
        store.put_if_absent("runs/link/x", Bytes(b"1"), token="t0")


def test_a_linked_object_is_not_read(store, outside):
    os.symlink(outside / "a" / "secret", f"{store.root}/runs/a/link")
    with pytest.raises(ObjectNotFound):
        store.get("runs/a/link", limit=99)
    with pytest.raises(ObjectNotFound):
        store.stat("runs/a/link")
    with pytest.raises(AlreadyExists):
        store.put_if_absent("runs/a/link", Bytes(b"1"), token="t0")
    assert store.children("runs/a") == Listing((), ("x",))
    store.delete(["runs/a/link"])
    assert (outside / "a" / "secret").read_bytes() == b"not ours"


def test_a_temporary_that_is_a_link_is_not_written_through(store, outside):
    os.symlink(outside / "a" / "secret", f"{store.root}/runs/a/y.tmp-t0")
    store.put_if_absent("runs/a/y", Bytes(b"mine"), token="t0")
    assert store.get("runs/a/y", limit=9) == b"mine"
    assert (outside / "a" / "secret").read_bytes() == b"not ours"


def test_a_pipe_under_an_objects_name_hangs_nobody(store):
    os.mkfifo(f"{store.root}/runs/a/pipe")
    with pytest.raises(ObjectNotFound):
        store.get("runs/a/pipe", limit=9)
    with pytest.raises(ObjectNotFound):
        store.open("runs/a/pipe")
    assert store.children("runs/a") == Listing((), ("x",))
    store.settle("runs/a/pipe")


def test_a_file_where_a_directory_belongs(store):
    with pytest.raises(StoreError, match="in the way"):
        store.put_if_absent("runs/a/x/y", Bytes(b"1"), token="t0")
    with pytest.raises(ObjectNotFound):
        store.get("runs/a/x/y", limit=1)
    store.delete(["runs/a/x/y"])
    assert store.get("runs/a/x", limit=1) == b"1"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc here")
def test_where_nothing_can_be_made_is_refused_at_once():
    """/proc says of a new directory that there is none above it; so do mounts on demand that are not answered."""
    with pytest.raises(StoreError, match=r"/proc/tenuto cannot be made.*\n  hint: is it no place for files"):
        LocalStore("/proc/tenuto/ckpts").put_if_absent("x", Bytes(b"1"), token="t0")


def test_names_that_no_object_can_have_are_not_listed(store):
    for name in (b"\xff\xfe", b"new\nline", b"\x1b[31m"):
        with open(os.path.join(os.fsencode(store.root), b"runs/a", name), "wb"):
            pass
    assert store.children("runs/a") == Listing((), ("x",))
    assert [entry.name for entry in store.walk("")] == ["runs/a/x"]


def test_a_deep_foreign_tree_is_walked(tmp_path):
    class Deep(OperatingSystem):
        def listdir(self, path):
            return [("d", "directory")] if path.count("/") < 1500 else [("x", "file")]

        def status(self, path):
            return Status("file" if path.endswith("/x") else "directory", 7, 0)

    found = list(LocalStore(tmp_path / "store", filesystem=Deep()).walk("deep/d"))
    assert len(found) == 1 and found[0].length == 7


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    store = LocalStore(tmp_path / "file")
    assert store.children("") == Listing((), ())
    with pytest.raises(StoreError):
        store.put_if_absent("x", Bytes(b"1"), token="t0")
