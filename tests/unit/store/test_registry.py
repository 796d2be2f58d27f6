from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import tenuto
from tenuto.errors import UsageError
from tenuto.store import registry
from tenuto.store.contract import Bytes, Store
from tenuto.store.memory import MemoryStore
from tenuto.store.registry import open_store
from tenuto.store.wrappers.retry import RetryingStore


def test_a_path_is_a_local_directory_and_nothing_is_made_by_opening_it(tmp_path):
    for where in (tmp_path / "a", str(tmp_path / "a"), f"file://{tmp_path}/a", f"FILE://localhost{tmp_path}/a"):
        store = open_store(where)
        assert isinstance(store, RetryingStore)
        assert store.url == str(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    store.put_if_absent("x", Bytes(b"1"), token="t0")
    assert (tmp_path / "a" / "x").read_bytes() == b"1"


def test_what_a_store_calls_itself_opens_it_again(tmp_path):
    store = open_store(tmp_path / "with space %20 and ?#")
    assert open_store(store.url).url == store.url


def test_urls_are_unquoted_and_paths_are_not(tmp_path):
    assert open_store(f"file://{tmp_path}/a%20b").url == f"{tmp_path}/a b"
    assert open_store(f"{tmp_path}/a%20b").url == f"{tmp_path}/a%20b"


def test_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/ckpts").url == f"{tmp_path}/ckpts"
    assert open_store(Path("~/ckpts")).url == f"{tmp_path}/ckpts"


def test_relative_paths_are_fixed_when_the_store_is_opened(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    store = open_store("ckpts")
    monkeypatch.chdir("/")
    assert store.url == f"{tmp_path}/ckpts"


def test_a_relative_path_is_refused_where_the_working_directory_has_been_removed(monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(UsageError, match="ckpts is relative to the working directory, which has been removed"):
        open_store("ckpts")
    assert open_store(tmp_path / "ckpts").url == f"{tmp_path}/ckpts"


def test_a_root_behind_a_symbolic_link_is_the_users_own_arrangement(tmp_path):
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk", tmp_path / "ckpts")
    open_store(tmp_path / "ckpts").put_if_absent("runs/x", Bytes(b"1"), token="t0")
    assert (tmp_path / "disk" / "runs" / "x").read_bytes() == b"1"


def test_memory_is_shared_by_name():
    open_store("memory://registry/one").put_if_absent("x", Bytes(b"1"), token="t0")
    assert open_store("memory://registry/one").get("x", limit=1) == b"1"
    assert open_store("memory://registry/two").children("").objects == ()


def test_a_store_is_taken_as_it_is():
    store = MemoryStore("registry/as it is")
    assert open_store(store) is store
    wrapped = RetryingStore(store)
    assert open_store(wrapped) is wrapped


@pytest.mark.parametrize("url", ["nosuch://h/x", "swift+x://example.org/x"])
def test_schemes_that_nobody_serves_say_so(url):
    with pytest.raises(UsageError, match="no store serves") as caught:
        open_store(url)
    assert caught.value.subject == url
    assert caught.value.hint


@pytest.mark.parametrize(
    "where",
    ["", "nosuch://x", "memory://", "memory:///", "file://otherhost/x", "file://", "a\0b", "file:///a%00b", b"bytes"],
)
def test_what_is_no_place(where):
    with pytest.raises(UsageError):
        open_store(where)


def test_entry_points_serve_further_schemes(monkeypatch):
    point = EntryPoint("mine", f"{__name__}:serve", registry.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: MemoryStore)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point] if group == registry.GROUP else [])
    store = open_store("mine://somewhere")
    assert isinstance(store, RetryingStore) and isinstance(store, Store)
    assert store.inner.name == "mine://somewhere"


def test_a_state_in_the_place_of_the_location_is_named():
    with pytest.raises(UsageError, match=r"an object of type dict is not a location.*\n.*the state comes first"):
        tenuto.save("ckpts", {"w": 1})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="an object of type int is not a location"):
        tenuto.load(7)  # type: ignore[arg-type]
