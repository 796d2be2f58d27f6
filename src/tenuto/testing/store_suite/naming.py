"""The store's contract for names, and for what it declares about itself."""

from __future__ import annotations

import pytest

from tenuto.errors import StoreError
from tenuto.store.contract import Store
from tenuto.testing.store_suite.base import Suite

HOSTILE = (
    "", "/", "/etc/passwd", "..", "../x", "a/../b", "a/..", "a//b", "a/", "./a", "a/./b", "a\0b", "\ud800", "a" * 5000,
)  # fmt: skip


class Naming(Suite):
    # Names.

    @pytest.mark.parametrize("name", HOSTILE)
    def test_no_name_leads_out_of_the_store(self, store: Store, name: str) -> None:
        for act in (
            lambda: self.put(store, name),
            lambda: store.get(name, limit=9),
            lambda: store.open(name),
            lambda: store.stat(name),
            lambda: store.delete([name]),
            lambda: store.settle(name),
        ):
            with pytest.raises(StoreError):
                act()
        if name:
            for listing in (store.children, lambda prefix: list(store.walk(prefix))):
                with pytest.raises(StoreError):
                    listing(name)
        assert self.nothing_is_left(store)

    @pytest.mark.parametrize("name", ["x.tmp-1", "a.tmp-/x", "a/.tmp-"])
    def test_no_object_is_named_like_a_temporary(self, store: Store, name: str) -> None:
        with pytest.raises(StoreError):
            self.put(store, name)

    @pytest.mark.parametrize("token", ["", "a/b", "..", "a b", "\0", "é"])
    def test_tokens_that_would_name_something_else(self, store: Store, token: str) -> None:
        with pytest.raises(StoreError):
            self.put(store, "x", token=token)
        assert self.nothing_is_left(store)

    @pytest.mark.parametrize("name", ["spaces in it", "ünïcode/日本", "a=b,c;d", "...", "-rf", "a'b\"c", "%2e%2e"])
    def test_unusual_names_are_names(self, store: Store, name: str) -> None:
        self.put(store, name, b"1")
        assert [entry.name for entry in store.walk("")] == [name]
        assert store.get(name, limit=1) == b"1"

    # The store itself.

    def test_probe_finds_what_is_declared_and_leaves_nothing(self, store: Store) -> None:
        found = store.probe()
        assert found.commits
        assert found == store.capabilities
        assert self.nothing_is_left(store)

    def test_it_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.url
        free = store.free_bytes()
        assert free is None or free >= 0
        store.close()
