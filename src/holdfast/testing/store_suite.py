"""What every store has to keep, as tests: subclass, give a `store` and three methods that bypass it, and run pytest.

    class TestMine(StoreSuite):
        @pytest.fixture
        def store(self): ...
        def raw_put(self, store, name, data): ...
        def raw_get(self, store, name): ...
        def raw_delete(self, store, name): ...

A wrapper passes the same suite as the store that it wraps.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from holdfast.errors import AlreadyExists, CorruptionError, ObjectNotFound, StoreError
from holdfast.model.checkpoint import Receipt
from holdfast.store.contract import Bytes, Entry, Listing, Store

BLOCK = 4096


@dataclass(frozen=True)
class Pieces:
    """Content in given pieces; `announced` is its length, if another than they sum to."""

    parts: tuple[bytes | memoryview, ...]
    announced: int | None = None

    @property
    def length(self) -> int:
        return sum(len(part) for part in self.parts) if self.announced is None else self.announced

    def pieces(self) -> Iterator[memoryview]:
        for part in self.parts:
            yield memoryview(part)


class Interrupted(Exception):
    """What the content of an abandoned put raises."""


@dataclass(frozen=True)
class Failing:
    """Content that ends in an error after `given`."""

    given: bytes
    length: int

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self.given)
        raise Interrupted


def patterned(length: int, seed: int = 1) -> bytes:
    """Bytes that differ from one block to the next."""
    return np.random.default_rng(seed).bytes(length)


def aligned(data: bytes) -> memoryview:
    """The same bytes at a page-aligned address, readable up to the next multiple of 4096."""
    room = mmap.mmap(-1, max(BLOCK, -(-len(data) // BLOCK) * BLOCK))
    room[: len(data)] = data
    return memoryview(room)[: len(data)]


LARGE = 3 * 2**20
HOSTILE = (
    "", "/", "/etc/passwd", "..", "../x", "a/../b", "a/..", "a//b", "a/", "./a", "a/./b", "a\0b", "\ud800", "a" * 5000,
)  # fmt: skip


class StoreSuite:
    """The store given by the fixture is empty, and is not shared with another test."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("a subclass gives the store under test")

    def raw_put(self, store: Store, name: str, data: bytes) -> None:
        raise NotImplementedError

    def raw_get(self, store: Store, name: str) -> bytes | None:
        """None if there is no such object."""
        raise NotImplementedError

    def raw_delete(self, store: Store, name: str) -> None:
        raise NotImplementedError

    def put(self, store: Store, name: str, data: bytes = b"data", token: str = "t0") -> Receipt:
        return store.put_if_absent(name, Bytes(data), token=token)

    def nothing_is_left(self, store: Store) -> bool:
        return not list(store.walk("")) and not list(store.leftovers(""))

    # -- put ---------------------------------------------------------------------------------------------------------

    def test_what_is_put_is_there(self, store: Store) -> None:
        receipt = self.put(store, "runs/a/one.json", b"hello")
        assert receipt == Receipt("runs/a/one.json", 5, store.url)
        assert self.raw_get(store, "runs/a/one.json") == b"hello"
        assert not list(store.leftovers(""))

    def test_an_object_without_bytes(self, store: Store) -> None:
        assert self.put(store, "empty", b"").length == 0
        assert self.raw_get(store, "empty") == b""
        assert store.get("empty", limit=0) == b""
        with store.open("empty") as reader:
            assert reader.length == 0
            reader.read_into(0, memoryview(bytearray()))

    def test_no_pieces_are_an_object_without_bytes(self, store: Store) -> None:
        store.put_if_absent("empty", Pieces(()), token="t0")
        assert self.raw_get(store, "empty") == b""

    @pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, LARGE, LARGE - 1, LARGE + 1])
    @pytest.mark.parametrize("at", [0, 1])
    def test_lengths_and_addresses(self, store: Store, length: int, at: int) -> None:
        data = patterned(length + at)
        store.put_if_absent("a/pack", Pieces((aligned(data)[at:],)), token="t0")
        assert self.raw_get(store, "a/pack") == data[at:]

    @pytest.mark.parametrize("cuts", [(2**20,), (2**20, 2**21), (1,), (2**20 + 1,), (2**20, 2**20 + 7, 2**21)])
    def test_pieces_are_joined_in_order(self, store: Store, cuts: tuple[int, ...]) -> None:
        data = aligned(patterned(LARGE + 5))
        ends = (0, *cuts, len(data))
        parts = tuple(data[start:end] for start, end in pairwise(ends))
        store.put_if_absent("a/pack", Pieces(parts), token="t0")
        assert self.raw_get(store, "a/pack") == bytes(data)

    def test_each_piece_may_lie_anywhere(self, store: Store) -> None:
        data = patterned(LARGE)
        parts = (aligned(data[: 2**20]), data[2**20 : 2**21], b"", aligned(data[2**21 :]))
        store.put_if_absent("a/pack", Pieces(parts), token="t0")
        assert self.raw_get(store, "a/pack") == data

    def test_bytes_on_the_far_side_of_the_last_piece_are_not_stored(self, store: Store) -> None:
        room = aligned(b"\xff" * (2 * 2**20))
        store.put_if_absent("a/pack", Pieces((room[: 2**20 + 100],)), token="t0")
        assert store.stat("a/pack").length == 2**20 + 100
        assert self.raw_get(store, "a/pack") == b"\xff" * (2**20 + 100)

    # -- if absent ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("length", [4, LARGE])
    def test_a_taken_name_is_refused_and_unchanged(self, store: Store, length: int) -> None:
        self.put(store, "runs/x", b"first")
        with pytest.raises(AlreadyExists) as caught:
            store.put_if_absent("runs/x", Bytes(bytes(length)), token="t1")
        assert caught.value.subject == "runs/x"
        assert self.raw_get(store, "runs/x") == b"first"
        assert not list(store.leftovers(""))

    def test_equal_bytes_are_refused_too(self, store: Store) -> None:
        self.put(store, "x", b"same")
        with pytest.raises(AlreadyExists):
            self.put(store, "x", b"same")

    def test_an_object_put_behind_its_back_counts(self, store: Store) -> None:
        self.raw_put(store, "runs/a/x", b"other")
        with pytest.raises(AlreadyExists):
            self.put(store, "runs/a/x")
        assert self.raw_get(store, "runs/a/x") == b"other"

    @pytest.mark.parametrize("tokens", ["their own", "one"])
    def test_of_many_threads_one_wins(self, store: Store, tokens: str) -> None:
        barrier = threading.Barrier(16)
        outcomes: list[tuple[int, str]] = []

        def race(number: int) -> None:
            barrier.wait(60)
            try:
                token = f"t{number}" if tokens == "their own" else "t"
                self.put(store, "runs/a/claim", bytes([number]) * 1000, token)
                outcomes.append((number, "won"))
            except AlreadyExists:
                outcomes.append((number, "taken"))

        threads = [threading.Thread(target=race, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        winners = [number for number, outcome in outcomes if outcome == "won"]
        assert len(outcomes) == 16 and len(winners) == 1
        assert self.raw_get(store, "runs/a/claim") == bytes(winners) * 1000
        assert not list(store.leftovers(""))

    def test_a_name_is_free_again_once_deleted(self, store: Store) -> None:
        self.put(store, "runs/a/x", b"one")
        store.delete(["runs/a/x"])
        self.put(store, "runs/a/x", b"two")
        assert self.raw_get(store, "runs/a/x") == b"two"

    # -- abandoned puts ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("given", [0, 10, 2**20])
    def test_an_abandoned_put_leaves_nothing(self, store: Store, given: int) -> None:
        with pytest.raises(Interrupted):
            store.put_if_absent("runs/a/x", Failing(bytes(given), LARGE), token="t0")
        assert self.raw_get(store, "runs/a/x") is None
        assert self.nothing_is_left(store)
        self.put(store, "runs/a/x", b"later")
        assert self.raw_get(store, "runs/a/x") == b"later"

    @pytest.mark.parametrize("announced", [0, 3, 5, LARGE])
    def test_content_of_another_length_than_announced_is_refused(self, store: Store, announced: int) -> None:
        with pytest.raises(StoreError):
            store.put_if_absent("x", Pieces((b"four",), announced), token="t0")
        assert self.nothing_is_left(store)

    # -- get and open ------------------------------------------------------------------------------------------------

    def test_get_returns_what_lies_there(self, store: Store) -> None:
        self.raw_put(store, "runs/a/x", b"bytes")
        assert store.get("runs/a/x", limit=5) == b"bytes"

    def test_get_refuses_more_than_the_limit(self, store: Store) -> None:
        self.raw_put(store, "x", b"12345")
        with pytest.raises(CorruptionError) as caught:
            store.get("x", limit=4)
        assert caught.value.subject == "x"

    @pytest.mark.parametrize("name", ["x", "runs/x", "runs/a/b/c"])
    def test_what_is_absent_is_not_found(self, store: Store, name: str) -> None:
        self.raw_put(store, "runs/a/b/other", b"")
        for look in (lambda: store.get(name, limit=9), lambda: store.open(name), lambda: store.stat(name)):
            with pytest.raises(ObjectNotFound) as caught:
                look()
            assert caught.value.subject == name

    def test_a_directory_is_no_object(self, store: Store) -> None:
        self.raw_put(store, "runs/a/x", b"1")
        with pytest.raises(ObjectNotFound):
            store.get("runs/a", limit=9)
        with pytest.raises(ObjectNotFound):
            store.stat("runs/a")

    @pytest.mark.parametrize(
        ("offset", "length"), [(0, 10), (5, 1), (4095, 2), (BLOCK, BLOCK), (LARGE - 7, 7), (0, LARGE)]
    )
    @pytest.mark.parametrize("at", [0, 3])
    def test_ranged_reads(self, store: Store, offset: int, length: int, at: int) -> None:
        data = patterned(LARGE)
        self.raw_put(store, "a/pack", data)
        with store.open("a/pack") as reader:
            assert reader.length == LARGE
            buffer = aligned(bytes(length + at))[at:]
            reader.read_into(offset, buffer)
            assert buffer == data[offset : offset + length]

    def test_aligned_reads_give_the_whole_object(self, store: Store) -> None:
        data = aligned(patterned(LARGE + 100))
        store.put_if_absent("a/pack", Pieces((data,)), token="t0")
        with store.open("a/pack") as reader:
            step = max(reader.alignment, 1) * 64 if reader.alignment > 1 else 2**18
            room = aligned(bytes(-(-len(data) // step) * step))
            for start in range(0, len(data), step):
                end = min(start + step, -(-len(data) // reader.alignment) * reader.alignment)
                reader.read_into(start, room[start:end])
            assert room[: len(data)] == data

    @pytest.mark.parametrize(("offset", "length"), [(0, 101), (100, 1), (99, 2), (5000, 1), (0, 2**20), (2**62, 1)])
    def test_reads_beyond_the_end_are_corruption(self, store: Store, offset: int, length: int) -> None:
        self.raw_put(store, "x", bytes(100))
        with store.open("x") as reader, pytest.raises(CorruptionError) as caught:
            reader.read_into(offset, memoryview(bytearray(length)))
        assert caught.value.subject is not None and caught.value.subject.startswith("x")

    def test_a_block_beyond_the_end_is_corruption(self, store: Store) -> None:
        self.raw_put(store, "a/pack", patterned(LARGE))
        with store.open("a/pack") as reader, pytest.raises(CorruptionError):
            reader.read_into(LARGE, aligned(bytes(BLOCK)))

    def test_threads_read_one_reader(self, store: Store) -> None:
        data = patterned(LARGE)
        self.raw_put(store, "a/pack", data)
        wrong: list[int] = []

        def read(seed: int) -> None:
            for turn in range(20):
                offset = (seed * 7919 + turn * 104729) % (LARGE - 5000)
                buffer = bytearray(5000)
                reader.read_into(offset, memoryview(buffer))
                if buffer != data[offset : offset + 5000]:
                    wrong.append(offset)

        with store.open("a/pack") as reader:
            threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert not wrong

    def test_an_open_object_can_be_read_after_it_is_deleted(self, store: Store) -> None:
        self.raw_put(store, "x", b"still here")
        with store.open("x") as reader:
            store.delete(["x"])
            buffer = bytearray(10)
            reader.read_into(0, memoryview(buffer))
        assert buffer == b"still here"

    def test_a_reader_closes_twice(self, store: Store) -> None:
        self.raw_put(store, "x", b"1")
        reader = store.open("x")
        reader.close()
        reader.close()

    def test_stat(self, store: Store) -> None:
        self.put(store, "x", b"12345")
        self.put(store, "y", b"")
        assert store.stat("x").length == 5
        assert store.stat("x").modified_ns <= store.stat("y").modified_ns

    # -- listing -----------------------------------------------------------------------------------------------------

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
        assert list(store.leftovers("")) == [Entry("a/b/c.tmp-0123", 10), Entry("z.tmp-1", 0)]
        assert [entry.name for entry in store.leftovers("a")] == ["a/b/c.tmp-0123"]
        store.delete(entry.name for entry in list(store.leftovers("")))
        assert not list(store.leftovers(""))
        assert self.raw_get(store, "a/b/c") == b"a/b/c"

    def test_what_vanishes_during_a_walk_is_passed_over(self, store: Store) -> None:
        self.tree(store)
        seen = []
        for entry in store.walk(""):
            seen.append(entry.name)
            self.raw_delete(store, "b")
        assert seen[:2] == ["a-", "a/b-"]

    # -- delete and settle -------------------------------------------------------------------------------------------

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

    # -- names -------------------------------------------------------------------------------------------------------

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

    # -- the store itself --------------------------------------------------------------------------------------------

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
