"""The store's contract for names, for listing and removing objects, and for what a store declares about itself."""

from __future__ import annotations

import pytest

from tenuto.errors import StoreError
from tenuto.store.contract import Entry, Listing, Store, leftovers_of
from tenuto.testing.store_suite.base import Suite


class ListingAndRemoving(Suite):
    # Listing.

    def tree(self, store: Store) -> list[str]:
        names = ["b", "a/b/c", "a/b.d", "a/b/d", "a-", "a/b-", "a/b/c2/x"]
        for name in names:
            self.raw_put(store, name, name.encode())
        self.raw_put(store, "a/b/c.tmp-0123", b"unfinished")
        self.raw_put(store, "z.tmp-1", b"")
        return names

    def test_children(self, store: Store) -> None:
        self.tree(store)
        assert store.children("") == Listing(("a",), ("a-", "b"))
        assert store.children("a") == Listing(("b",), ("b-", "b.d"))
        assert store.children("a/b") == Listing(("c2",), ("c", "d"))

    def test_children_behind_a_name(self, store: Store) -> None:
        self.tree(store)
        assert store.children("a", after="b") == Listing((), ("b-", "b.d"))
        assert store.children("a", after="a") == store.children("a")
        assert store.children("a/b", after="c") == Listing(("c2",), ("d",))
        assert store.children("a/b", after="c1") == Listing(("c2",), ("d",))
        assert store.children("a/b", after="d") == Listing((), ()) == store.children("nowhere", after="a")

    def test_what_is_missing_has_no_children(self, store: Store) -> None:
        self.put(store, "a/x")
        for prefix in ("nowhere", "a/nowhere", "a/x"):
            assert store.children(prefix) == Listing((), ())
            assert not list(store.walk(prefix))

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert store.children("") == Listing((), ())
        assert self.nothing_is_left(store)

    def test_walk_is_sorted_by_full_name(self, store: Store) -> None:
        names = self.tree(store)
        assert list(store.walk("")) == [Entry(name, len(name)) for name in sorted(names)]
        assert [entry.name for entry in store.walk("a/b")] == ["a/b/c", "a/b/c2/x", "a/b/d"]

    def test_a_prefix_is_a_whole_segment(self, store: Store) -> None:
        self.tree(store)
        assert [entry.name for entry in store.walk("a")] == ["a/b-", "a/b.d", "a/b/c", "a/b/c2/x", "a/b/d"]

    def test_leftovers(self, store: Store) -> None:
        self.tree(store)
        assert list(leftovers_of(store, "")) == [Entry("a/b/c.tmp-0123", 10), Entry("z.tmp-1", 0)]
        every = [entry.name for entry in store.walk("", leftovers=True)]
        assert every == sorted([*(entry.name for entry in store.walk("")), "a/b/c.tmp-0123", "z.tmp-1"])
        assert [entry.name for entry in leftovers_of(store, "a")] == ["a/b/c.tmp-0123"]
        store.delete(entry.name for entry in list(leftovers_of(store, "")))
        assert not list(leftovers_of(store, ""))
        assert self.raw_get(store, "a/b/c") == b"a/b/c"

    def test_a_partial_copy_is_put_and_read_and_never_listed_as_an_object(self, store: Store) -> None:
        self.put(store, "a/x", b"whole")
        self.put(store, "a/x.part-0123", b"ho")
        assert store.children("a") == Listing((), ("x",))
        assert list(store.walk("")) == [Entry("a/x", 5)]
        assert list(leftovers_of(store, "")) == [Entry("a/x.part-0123", 2)]
        assert store.get("a/x.part-0123", limit=9) == b"ho"
        store.delete(["a/x.part-0123"])
        assert not list(leftovers_of(store, ""))

    def test_what_vanishes_during_a_walk_is_passed_over(self, store: Store) -> None:
        self.tree(store)
        seen = []
        for entry in store.walk(""):
            seen.append(entry.name)
            self.raw_delete(store, "b")
        assert seen[:2] == ["a-", "a/b-"]

    # Delete and settle.

    def test_delete(self, store: Store) -> None:
        for name in ("runs/a/x", "runs/a/y", "runs/b/z"):
            self.put(store, name)
        store.delete(["runs/a/y", "runs/b/z"])
        assert [entry.name for entry in store.walk("")] == ["runs/a/x"]
        assert store.children("runs") == Listing(("a",), ())

    def test_deleting_what_is_absent_is_no_error(self, store: Store) -> None:
        store.delete([])
        store.delete(["nothing", "no/such/thing"])
        self.put(store, "x")
        store.delete(["x", "x"])
        store.delete(["x"])
        assert self.raw_get(store, "x") is None

    def test_settle(self, store: Store) -> None:
        self.raw_put(store, "runs/a/x", b"1")
        store.settle("runs/a/x")
        store.settle("runs/a/absent")
        store.settle("no/such/directory/x")
        assert self.raw_get(store, "runs/a/x") == b"1"
        assert [entry.name for entry in store.walk("")] == ["runs/a/x"]


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
