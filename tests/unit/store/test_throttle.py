from __future__ import annotations

import os
import threading

import pytest

from tenuto.store.contract import Bytes, Store
from tenuto.store.local.store import LocalStore
from tenuto.store.memory import MemoryStore
from tenuto.store.wrappers.throttle import ThrottledStore

MIB = 2**20


class FakeClock:
    """Time passes only in sleeps; several threads may sleep at once."""

    def __init__(self):
        self.now, self.sleeps, self.lock = 0.0, [], threading.Lock()

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        with self.lock:
            self.sleeps.append(seconds)
            self.now += seconds


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def inner(request):
    return MemoryStore(request.node.nodeid)


def test_a_put_takes_its_length_over_its_rate(inner, clock):
    store = ThrottledStore(inner, 10 * MIB, clock=clock)
    store.put_if_absent("a/pack", Bytes(bytes(50 * MIB)), token="t0")
    assert clock.now == pytest.approx(5.0, abs=0.11), "all but the last slice is paid for"
    store.put_if_absent("b", Bytes(b"1"), token="t0")
    assert clock.now == pytest.approx(5.0)
    assert max(clock.sleeps) <= 0.11, "evenly, not in bursts"


def test_a_pause_saves_up_nothing(inner, clock):
    store = ThrottledStore(inner, 10 * MIB, clock=clock)
    clock.now = 1000.0
    store.put_if_absent("a/pack", Bytes(bytes(20 * MIB)), token="t0")
    assert clock.now == pytest.approx(1002.0, abs=0.11)


def test_threads_and_handles_of_one_url_share_one_allowance(inner, clock):
    def put(number):
        ThrottledStore(MemoryStore(inner.name), 10 * MIB, clock=clock).put_if_absent(
            f"a/{number}", Bytes(bytes(10 * MIB)), token="t0"
        )

    threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    ThrottledStore(inner, 10 * MIB, clock=clock).put_if_absent("last", Bytes(b"1"), token="t0")
    assert clock.now >= 4.0 - 1e-6


def test_another_store_has_an_allowance_of_its_own(inner, clock):
    ThrottledStore(inner, MIB, clock=clock).put_if_absent("x", Bytes(bytes(MIB)), token="t0")
    before = clock.now
    ThrottledStore(MemoryStore(inner.name + " another"), MIB, clock=clock).put_if_absent("x", Bytes(b"1"), token="t0")
    assert clock.now == before


def test_reads_are_free_unless_they_are_asked_to_be_limited(inner, clock):
    inner.put_if_absent("x", Bytes(bytes(4 * MIB)), token="t0")
    free = ThrottledStore(inner, MIB, clock=clock)
    free.get("x", limit=4 * MIB)
    with free.open("x") as reader:
        reader.read_into(0, memoryview(bytearray(4 * MIB)))
    assert clock.now == 0
    limited = ThrottledStore(inner, MIB, reads=True, clock=clock)
    with limited.open("x") as reader:
        assert reader.view() is None and not limited.capabilities.views
        for _ in range(2):
            reader.read_into(0, memoryview(bytearray(4 * MIB)))
    limited.get("x", limit=4 * MIB)
    assert clock.now == pytest.approx(8.0)


@pytest.mark.parametrize("rate", [1, 5000, 100_000, 10**9])
def test_aligned_pieces_stay_aligned(inner, clock, rate):
    assert ThrottledStore(inner, rate, clock=clock).slice_bytes % 4096 == 0


def test_what_goes_past_the_page_cache_still_does(tmp_path, faulty, clock):
    import mmap

    store: Store = ThrottledStore(LocalStore(tmp_path / "store", filesystem=faulty), 5 * MIB, clock=clock)
    with mmap.mmap(-1, 3 * MIB) as room:
        room.write(os.urandom(3 * MIB))
        view = memoryview(room)
        store.put_if_absent("a/pack", Bytes(view), token="t0")
        view.release()
    assert len(faulty.named("set_direct")) == 1, "never turned off again"
