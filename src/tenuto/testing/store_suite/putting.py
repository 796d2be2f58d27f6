"""The store's contract for putting objects: complete or absent, and never over another."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest

from tenuto.errors import AlreadyExists, StoreError
from tenuto.model.records import Receipt
from tenuto.store.contract import Bytes, Store, leftovers_of
from tenuto.testing.store_suite.base import (
    BLOCK,
    LARGE,
    Failing,
    Interrupted,
    Pieces,
    Refilled,
    Suite,
    aligned,
    patterned,
)


class Putting(Suite):
    # Put.

    def test_what_is_put_is_there(self, store: Store) -> None:
        receipt = self.put(store, "runs/a/one.json", b"hello")
        assert receipt == Receipt("runs/a/one.json", 5, store.url)
        assert self.raw_get(store, "runs/a/one.json") == b"hello"
        assert not list(leftovers_of(store, ""))

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

    def test_a_piece_is_not_looked_at_once_the_next_was_asked_for(self, store: Store) -> None:
        data = patterned(9 * BLOCK + 5)
        store.put_if_absent("a/pack", Refilled(data), token="t0")
        assert self.raw_get(store, "a/pack") == data

    def test_bytes_on_the_far_side_of_the_last_piece_are_not_stored(self, store: Store) -> None:
        room = aligned(b"\xff" * (2 * 2**20))
        store.put_if_absent("a/pack", Pieces((room[: 2**20 + 100],)), token="t0")
        assert store.stat("a/pack").length == 2**20 + 100
        assert self.raw_get(store, "a/pack") == b"\xff" * (2**20 + 100)

    # If absent.

    @pytest.mark.parametrize("length", [4, LARGE])
    def test_a_taken_name_is_refused_and_unchanged(self, store: Store, length: int) -> None:
        self.put(store, "runs/x", b"first")
        with pytest.raises(AlreadyExists) as caught:
            store.put_if_absent("runs/x", Bytes(bytes(length)), token="t1")
        assert caught.value.subject == "runs/x"
        assert self.raw_get(store, "runs/x") == b"first"
        assert not list(leftovers_of(store, ""))

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
        assert not list(leftovers_of(store, ""))

    def test_a_name_is_free_again_once_deleted(self, store: Store) -> None:
        self.put(store, "runs/a/x", b"one")
        store.delete(["runs/a/x"])
        self.put(store, "runs/a/x", b"two")
        assert self.raw_get(store, "runs/a/x") == b"two"

    # Abandoned puts.

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
