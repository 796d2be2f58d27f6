"""Tests keys and values: complete or absent, and never waited for."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tenuto.ranks.contract import KVStore
from tenuto.testing.ranks_suite.base import ANSWER_S, Base, Boards

VALUES = [b"\x00", b"plain", bytes(range(256)), b"\xff" * 4096, b"line\nline\x00", b"x" * (3 << 20)]


class Keys(Base):
    def test_it_is_a_key_value_store(self, boards: Boards) -> None:
        for kv_store in boards:
            assert isinstance(kv_store, KVStore)
            assert kv_store.name and 0 < kv_store.longest_pause_s <= 5

    @pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{len(value)}-{value[0]}")
    def test_what_one_puts_the_other_gets(self, boards: Boards, value: bytes) -> None:
        here, there = boards
        here.put("a/b.c/d_e-1", value, timeout=ANSWER_S)
        assert there.get("a/b.c/d_e-1", timeout=ANSWER_S) == value
        assert there.get_many(["a/x", "a/b.c/d_e-1"], timeout=ANSWER_S) == [None, value]

    def test_the_last_put_counts(self, boards: Boards) -> None:
        here, there = boards
        for value in (b"long" * 1000, b"", b"short"):
            here.put("key", value, timeout=ANSWER_S)
            assert there.get("key", timeout=ANSWER_S) == value

    def test_a_key_that_is_not_there_is_not_waited_for(self, boards: Boards) -> None:
        here, _ = boards
        began = time.monotonic()
        assert here.get("nothing", timeout=ANSWER_S) is None
        assert here.get_many(["no/1", "no/2", "no/3"], timeout=ANSWER_S) == [None] * 3
        assert here.get_many([], timeout=ANSWER_S) == []
        assert time.monotonic() - began < ANSWER_S / 2

    @pytest.mark.parametrize("present", [(), (0,), (7,), (3, 4), tuple(range(8)), (0, 2, 4, 6)], ids=str)
    def test_many_are_told_apart(self, boards: Boards, present: tuple[int, ...]) -> None:
        here, there = boards
        for number in present:
            here.put(f"many/{number}", b"%d" % number, timeout=ANSWER_S)
        wanted = [b"%d" % number if number in present else None for number in range(8)]
        assert there.get_many([f"many/{number}" for number in range(8)], timeout=ANSWER_S) == wanted

    def test_what_is_deleted_is_gone_and_may_come_again(self, boards: Boards) -> None:
        here, there = boards
        for value in (b"small", b"large" * (1 << 19)):
            here.put("x/1", value, timeout=ANSWER_S)
            here.put("x/2", b"stays", timeout=ANSWER_S)
            there.delete(["x/1", "x/none", "y/none"], timeout=ANSWER_S)
            assert here.get_many(["x/1", "x/2"], timeout=ANSWER_S) == [None, b"stays"]
            here.put("x/1", b"again", timeout=ANSWER_S)
            assert there.get("x/1", timeout=ANSWER_S) == b"again"

    @pytest.mark.parametrize("size", [1, 3 << 20])
    def test_only_the_first_puts_if_absent(self, boards: Boards, size: int) -> None:
        here, there = boards
        assert here.put_if_absent("first", b"1" * size, timeout=ANSWER_S) == b"1" * size
        assert there.put_if_absent("first", b"2" * size, timeout=ANSWER_S) == b"1" * size
        assert here.put_if_absent("first", b"1" * size, timeout=ANSWER_S) == b"1" * size
        assert there.get("first", timeout=ANSWER_S) == b"1" * size
        there.delete(["first"], timeout=ANSWER_S)
        assert there.put_if_absent("first", b"3", timeout=ANSWER_S) == b"3"

    def test_of_many_at_once_one_is_first(self, boards: Boards) -> None:
        for attempt in range(10):
            barrier = threading.Barrier(6)

            def put(number: int, key: str = f"race/{attempt}", start: threading.Barrier = barrier) -> bytes:
                start.wait(ANSWER_S)
                return boards[number % 2].put_if_absent(key, b"from %d" % number, timeout=ANSWER_S)

            with ThreadPoolExecutor(6) as pool:
                found = set(pool.map(put, range(6)))
            assert len(found) == 1
            assert boards[0].get(f"race/{attempt}", timeout=ANSWER_S) in found

    def test_a_value_is_seen_whole_or_not_at_all(self, boards: Boards) -> None:
        here, there = boards
        values = {bytes([number]) * size for number, size in enumerate((10, 100_000, 3 << 20))}
        ended = threading.Event()

        def put() -> None:
            for _ in range(5):
                for value in values:
                    here.put("torn", value, timeout=ANSWER_S)
            ended.set()

        writer = threading.Thread(target=put)
        writer.start()
        while not ended.is_set():
            found = there.get("torn", timeout=ANSWER_S)
            assert found is None or found in values
        writer.join()
        assert there.get("torn", timeout=ANSWER_S) in values
