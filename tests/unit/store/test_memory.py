from __future__ import annotations

from holdfast.store.backends.memory import MemoryStore
from holdfast.store.contract import Bytes


def test_times_are_a_counter_that_can_be_moved(request):
    store = MemoryStore(request.node.nodeid)
    store.put_if_absent("old", Bytes(b""), token="t0")
    store.advance(3600)
    store.put_if_absent("new", Bytes(b""), token="t0")
    age = store.stat("new").modified_ns - store.stat("old").modified_ns
    assert 3600e9 < age < 3601e9


def test_it_does_not_survive_power_loss_and_says_so(request):
    assert not MemoryStore(request.node.nodeid).capabilities.persistent


def test_what_was_put_does_not_change_with_its_buffer(request):
    store = MemoryStore(request.node.nodeid)
    buffer = bytearray(b"before")
    store.put_if_absent("x", Bytes(memoryview(buffer)), token="t0")
    buffer[:] = b"after!"
    assert store.get("x", limit=9) == b"before"
