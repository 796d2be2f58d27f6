"""The shipped suite on fsspec's own file systems, which replace a file by a rename: they hold data and never commit."""

from __future__ import annotations

import errno
import secrets
import threading

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

import tenuto
from tenuto.errors import (
    AlreadyExists,
    MissingExtra,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TenutoError,
    UsageError,
)
from tenuto.store.contract import Bytes, leftovers_of
from tenuto.store.fsspec import FsspecStore
from tenuto.store.registry import open_store
from tenuto.store.wrappers.retry import Patience, RetryingStore
from tenuto.testing.store_suite import StoreSuite


class Holding(StoreSuite):
    def raw(self, store):
        return store.inner._filesystem, store.inner._root

    def raw_put(self, store, name, data):
        filesystem, root = self.raw(store)
        filesystem.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        filesystem.pipe_file(f"{root}/{name}", data)

    def raw_get(self, store, name):
        filesystem, root = self.raw(store)
        try:
            return filesystem.cat_file(f"{root}/{name}")
        except FileNotFoundError:
            return None

    def raw_delete(self, store, name):
        filesystem, root = self.raw(store)
        if filesystem.exists(f"{root}/{name}"):
            filesystem.rm_file(f"{root}/{name}")

    def test_probe_finds_what_is_declared_and_leaves_nothing(self, store):
        assert not store.capabilities.commits
        assert not store.probe().commits
        assert self.nothing_is_left(store)

    @pytest.mark.parametrize("tokens", ["their own", "one"])
    def test_of_many_threads_one_wins(self, store, tokens):
        """Several may win here, which is why it never commits; what is there is whole, and nothing else is left."""
        barrier = threading.Barrier(8)
        others = []

        def race(number):
            barrier.wait(60)
            try:
                self.put(store, "runs/a/claim", bytes([number]) * 1000, f"t{number}" if tokens == "their own" else "t")
            except (AlreadyExists, StoreError) as error:
                others.append(error)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        found = self.raw_get(store, "runs/a/claim")
        assert len(others) < 8 and len(found) == 1000 and len(set(found)) == 1
        assert not list(leftovers_of(store, ""))

    def test_no_repository_is_made_there(self, store):
        with pytest.raises(TenutoError) as caught:
            tenuto.save({"w": np.zeros(3)}, store)
        assert store.url in str(caught.value) and caught.value.hint
        assert self.nothing_is_left(store)


class TestMemory(Holding):
    @pytest.fixture
    def store(self):
        return open_store(f"fsspec+memory://{secrets.token_hex(8)}/ckpts")


class TestLocal(Holding):
    @pytest.fixture
    def store(self, tmp_path):
        return open_store(f"fsspec+file://{tmp_path}/team a/ckpts")


class Refusing(LocalFileSystem):
    """A file system whose renames refuse a name that is taken, with an error or without a word, as servers do."""

    protocol = "refusing"
    silent = False
    cachable = False

    def mv(self, path1, path2, **options):
        try:
            with open(path2, "xb"):
                pass
        except FileExistsError:
            if self.silent:
                return
            raise OSError("Failure") from None
        super().mv(path1, path2, **options)


@pytest.fixture(params=["with an error", "without a word"])
def refusing(request, tmp_path):
    filesystem = Refusing()
    filesystem.silent = request.param == "without a word"
    return RetryingStore(FsspecStore("fsspec+refusing://x", filesystem, str(tmp_path)), Patience(wait_s=0.0))


class TestRefusing(StoreSuite):
    """Such a file system commits, once the probe has seen it refuse."""

    @pytest.fixture
    def store(self, refusing):
        refusing.probe()
        return refusing

    raw, raw_put, raw_get, raw_delete = Holding.raw, Holding.raw_put, Holding.raw_get, Holding.raw_delete

    def test_a_repository_lives_there(self, store):
        tenuto.save({"w": np.arange(9.0)}, store)
        assert (tenuto.load(store).state["w"] == np.arange(9.0)).all()


def test_a_protocol_of_fsspec_needs_no_prefix(tmp_path):
    assert open_store(f"local://{tmp_path}/x").url == f"fsspec+local://{tmp_path}/x"


@pytest.mark.parametrize(
    "url", ["fsspec+sftp://me:secret@host/x", "sftp://me:secret@host/x", "fsspec+memory://a/x?token=secret"]
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url):
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "secret" not in f"{caught.value} {caught.value.subject}" and caught.value.hint


def test_a_protocol_that_nobody_knows():
    for url in ("fsspec+nosuch://host/x", "nosuch://host/x"):
        with pytest.raises(UsageError) as caught:
            open_store(url)
        assert caught.value.hint


def test_a_protocol_whose_package_is_missing_names_it(monkeypatch):
    known = {"class": "no_such_package.x.Y", "err": "install no_such_package"}
    monkeypatch.setitem(known_implementations, "lacking", known)
    with pytest.raises(MissingExtra, match="no_such_package"):
        open_store("fsspec+lacking://host/x")


def test_without_fsspec_the_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.delitem(sys.modules, "tenuto.store.fsspec", raising=False)
    with pytest.raises(MissingExtra) as caught:
        open_store("fsspec+sftp://host/x")
    assert "fsspec" in caught.value.hint


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StoreFull),
        (ConnectionError("https://host/?signature=secret"), StoreUnavailable),
        (RuntimeError("token=secret"), StoreError),
        (NotImplementedError("secret"), StoreError),
    ],
)
def test_what_a_library_raises_is_an_error_of_ours_without_its_words(refusing, monkeypatch, error, kind):
    store = refusing.inner

    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr(store._filesystem, "open", fails)
    with pytest.raises(kind) as caught:
        store.put_if_absent("a/x", Bytes(b"1"), token="t0")
    assert "secret" not in f"{caught.value}" and caught.value.__cause__ is None and store.url in str(caught.value)
