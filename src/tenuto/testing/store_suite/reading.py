"""The store's contract for reading objects: the requested bytes, or an error that names the object."""

from __future__ import annotations

import threading

import pytest

from tenuto.errors import CorruptionError, ObjectNotFound
from tenuto.store.contract import Store
from tenuto.testing.store_suite.base import BLOCK, LARGE, Pieces, Suite, aligned, patterned


class Reading(Suite):
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

    def test_an_open_object_that_is_deleted_is_read_as_it_was_or_not_found(self, store: Store) -> None:
        self.raw_put(store, "x", b"still here")
        with store.open("x") as reader:
            store.delete(["x"])
            buffer = bytearray(10)
            try:
                reader.read_into(0, memoryview(buffer))
            except ObjectNotFound as error:
                assert error.subject == "x"  # nothing is kept open in an object store
            else:
                assert buffer == b"still here"

    def test_a_reader_closes_twice(self, store: Store) -> None:
        self.raw_put(store, "x", b"1")
        reader = store.open("x")
        reader.close()
        reader.close()
        assert store.get("x", limit=1) == b"1"

    def test_stat(self, store: Store) -> None:
        self.put(store, "x", b"12345")
        self.put(store, "y", b"")
        assert store.stat("x").length == 5
        assert store.stat("x").modified_ns <= store.stat("y").modified_ns
