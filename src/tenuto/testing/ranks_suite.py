"""The contract of every key-value store of ranks, as tests: subclass, give two ranks' stores, and run pytest.

    class TestMine(RanksSuite):
        @pytest.fixture
        def kv_stores(self): ...        # two objects, as two ranks would hold them, that reach the same empty place

The agreement of several ranks is tested on these stores too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import pytest

from tenuto.errors import RankFailed, RanksDisagree, RanksMissing
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.contract import KVStore, Settings
from tenuto.ranks.kv.in_process import ThreadRanks

ANSWER_S: Final = 20.0

KVStores = tuple[KVStore, KVStore]


class Base:
    @pytest.fixture
    def kv_stores(self) -> KVStores:
        raise NotImplementedError("give the kv_stores of two ranks, which reach the same empty store")


VALUES = [b"\x00", b"plain", bytes(range(256)), b"\xff" * 4096, b"line\nline\x00", b"x" * (3 << 20)]


class Keys(Base):
    def test_it_is_a_key_value_store(self, kv_stores: KVStores) -> None:
        for kv_store in kv_stores:
            assert isinstance(kv_store, KVStore)
            assert kv_store.name and 0 < kv_store.longest_pause_s <= 5

    @pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{len(value)}-{value[0]}")
    def test_what_one_puts_the_other_gets(self, kv_stores: KVStores, value: bytes) -> None:
        here, there = kv_stores
        here.put("a/b.c/d_e-1", value, timeout=ANSWER_S)
        assert there.get("a/b.c/d_e-1", timeout=ANSWER_S) == value
        assert there.get_many(["a/x", "a/b.c/d_e-1"], timeout=ANSWER_S) == [None, value]

    def test_the_last_put_counts(self, kv_stores: KVStores) -> None:
        here, there = kv_stores
        for value in (b"long" * 1000, b"", b"short"):
            here.put("key", value, timeout=ANSWER_S)
            assert there.get("key", timeout=ANSWER_S) == value

    def test_a_key_that_is_not_there_is_not_waited_for(self, kv_stores: KVStores) -> None:
        here, _ = kv_stores
        began = time.monotonic()
        assert here.get("nothing", timeout=ANSWER_S) is None
        assert here.get_many(["no/1", "no/2", "no/3"], timeout=ANSWER_S) == [None] * 3
        assert here.get_many([], timeout=ANSWER_S) == []
        assert time.monotonic() - began < ANSWER_S / 2

    @pytest.mark.parametrize("present", [(), (0,), (7,), (3, 4), tuple(range(8)), (0, 2, 4, 6)], ids=str)
    def test_many_are_distinguished(self, kv_stores: KVStores, present: tuple[int, ...]) -> None:
        here, there = kv_stores
        for number in present:
            here.put(f"many/{number}", b"%d" % number, timeout=ANSWER_S)
        wanted = [b"%d" % number if number in present else None for number in range(8)]
        assert there.get_many([f"many/{number}" for number in range(8)], timeout=ANSWER_S) == wanted

    def test_what_is_deleted_is_gone_and_may_come_again(self, kv_stores: KVStores) -> None:
        here, there = kv_stores
        for value in (b"small", b"large" * (1 << 19)):
            here.put("x/1", value, timeout=ANSWER_S)
            here.put("x/2", b"stays", timeout=ANSWER_S)
            there.delete(["x/1", "x/none", "y/none"], timeout=ANSWER_S)
            assert here.get_many(["x/1", "x/2"], timeout=ANSWER_S) == [None, b"stays"]
            here.put("x/1", b"again", timeout=ANSWER_S)
            assert there.get("x/1", timeout=ANSWER_S) == b"again"

    @pytest.mark.parametrize("size", [1, 3 << 20])
    def test_only_the_first_puts_if_absent(self, kv_stores: KVStores, size: int) -> None:
        here, there = kv_stores
        assert here.put_if_absent("first", b"1" * size, timeout=ANSWER_S) == b"1" * size
        assert there.put_if_absent("first", b"2" * size, timeout=ANSWER_S) == b"1" * size
        assert here.put_if_absent("first", b"1" * size, timeout=ANSWER_S) == b"1" * size
        assert there.get("first", timeout=ANSWER_S) == b"1" * size
        there.delete(["first"], timeout=ANSWER_S)
        assert there.put_if_absent("first", b"3", timeout=ANSWER_S) == b"3"

    def test_of_many_at_once_one_is_first(self, kv_stores: KVStores) -> None:
        for attempt in range(10):
            barrier = threading.Barrier(6)

            def put(number: int, key: str = f"race/{attempt}", start: threading.Barrier = barrier) -> bytes:
                start.wait(ANSWER_S)
                return kv_stores[number % 2].put_if_absent(key, b"from %d" % number, timeout=ANSWER_S)

            with ThreadPoolExecutor(6) as pool:
                found = set(pool.map(put, range(6)))
            assert len(found) == 1
            assert kv_stores[0].get(f"race/{attempt}", timeout=ANSWER_S) in found

    def test_a_value_is_seen_whole_or_not_at_all(self, kv_stores: KVStores) -> None:
        here, there = kv_stores
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


SETTINGS: Final = Settings(beat_s=0.05, dead_after_s=ANSWER_S, answer_s=ANSWER_S, probe_s=0.1)
Result = TypeVar("Result")


class Agreeing(Base):
    def test_two_ranks_meet_and_agree(self, kv_stores: KVStores) -> None:
        def take_part(ranks: Agreement) -> list[object]:
            heard: list[object] = [ranks.session.id]
            for size in (0, 10, 2 << 20):
                with ranks.round("gather") as round:
                    heard.append(round.all_gather(b"%d" % ranks.rank * size, ANSWER_S))
                with ranks.round("vote") as round:
                    heard.append(round.vote(size != 10 or ranks.rank == 0, "not this one", ANSWER_S))
            return heard

        first, second = both(kv_stores, take_part)
        assert first == second
        assert first[1::2] == [[b"0" * size, b"1" * size] for size in (0, 10, 2 << 20)]
        assert [bool(verdict) for verdict in first[2::2]] == [True, False, True]

    def test_a_failure_is_everybodys(self, kv_stores: KVStores) -> None:
        def take_part(ranks: Agreement) -> str:
            with ranks.round("save") as round:
                if ranks.rank == 1:
                    assert round.fail("the disk is on fire")
                with pytest.raises(RankFailed, match="save 0: rank 1 has failed: the disk is on fire") as caught:
                    round.all_gather(b"", ANSWER_S)
                assert (caught.value.ranks, caught.value.phase) == ((1,), "save 0")
            with ranks.round("save") as round:
                return round.all_gather(b"next", ANSWER_S)[1].decode()

        assert both(kv_stores, take_part) == ("next", "next")

    def test_who_gives_up_gives_up_for_all(self, kv_stores: KVStores) -> None:
        def take_part(ranks: Agreement) -> tuple[int, ...]:
            round = ranks.round("save")
            if ranks.rank == 1:
                with ranks.round("late") as late:
                    late.receive(ANSWER_S)  # until the other has given up
            round.send(b"")
            with pytest.raises(RanksMissing) as caught:
                round.gather(0.2) if ranks.rank == 0 else round.receive(ANSWER_S)
            if ranks.rank == 0:
                with ranks.round("late") as late:
                    late.broadcast(b"now")
            return caught.value.ranks

        assert both(kv_stores, take_part) == ((1,), (1,))

    def test_ranks_that_disagree_all_learn_it(self, kv_stores: KVStores) -> None:
        def meet(rank: int) -> RanksDisagree:
            with pytest.raises(RanksDisagree, match=r"repository is 'r0' on rank 0 .* and 'r1' on rank 1") as caught:
                Agreement.open(ThreadRanks(rank, 2, kv_stores[rank]), {"repository": f"r{rank}"}, ANSWER_S, SETTINGS)
            return caught.value

        with ThreadPoolExecutor(2) as pool:
            assert [error.ranks for error in pool.map(meet, range(2))] == [(0, 1)] * 2

    def test_they_meet_again_over_what_is_left(self, kv_stores: KVStores) -> None:
        def take_part(ranks: Agreement) -> tuple[str, list[bytes]]:
            data = f"{ranks.session.id} {ranks.rank}".encode()
            with ranks.round("save") as round:
                return ranks.session.id, round.all_gather(data, ANSWER_S)

        met = set()
        for _ in range(3):
            (session, heard), other = both(kv_stores, take_part)
            assert heard == [f"{session} 0".encode(), f"{session} 1".encode()] and other == (session, heard)
            met.add(session)
        assert len(met) == 3


def both(kv_stores: KVStores, take_part: Callable[[Agreement], Result]) -> tuple[Result, Result]:
    """Returns the results of `take_part` on each of two ranks, which are threads."""

    def run(rank: int) -> Result:
        with Agreement.open(ThreadRanks(rank, 2, kv_stores[rank]), {"run": "main"}, ANSWER_S, SETTINGS) as ranks:
            return take_part(ranks)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    return first, second


class RanksSuite(Keys, Agreeing):
    """The place reached by the fixture's stores is empty, and not shared with another test."""
