from __future__ import annotations

import pytest

from tenuto.errors import ObjectNotFound, StoreError
from tenuto.store.contract import Bytes
from tenuto.store.memory import MemoryStore


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


def test_every_put_moves_the_clock_by_a_millisecond(request):
    store = MemoryStore(request.node.nodeid)
    for name in ("a", "b"):
        store.put_if_absent(name, Bytes(b"12"), token="t0")
    assert store.stat("b").modified_ns - store.stat("a").modified_ns == 1_000_000
    store.advance(2.5)
    store.put_if_absent("c", Bytes(b""), token="t0")
    assert store.stat("c").modified_ns - store.stat("b").modified_ns == 2_501_000_000


def test_stores_of_one_name_share_their_objects_and_say_where_they_are(request):
    first, second = MemoryStore(request.node.nodeid), MemoryStore(request.node.nodeid)
    first.put_if_absent("x", Bytes(b"1"), token="t0")
    assert second.get("x", limit=1) == b"1"
    assert first.url == second.url == f"memory://{request.node.nodeid}"
    assert repr(first) == f"MemoryStore({request.node.nodeid!r})"
    assert first.probe() == first.capabilities
    assert first.capabilities.commits
    assert first.free_bytes() is None
    with pytest.raises(ObjectNotFound, match="no object x"):
        MemoryStore(request.node.nodeid + " another").get("x", limit=1)


def test_a_view_shows_the_object_and_cannot_be_written(request):
    store = MemoryStore(request.node.nodeid)
    store.put_if_absent("x", Bytes(b"12345"), token="t0")
    with store.open("x") as reader:
        view = reader.view()
        assert view is not None and bytes(view) == b"12345" and view.readonly
        assert (reader.length, reader.alignment, reader.name) == (5, 1, "x")


def test_content_that_is_shorter_or_longer_than_announced_is_named(request):
    class Content:
        def __init__(self, length):
            self.length = length

        def pieces(self):
            yield memoryview(b"four")

    store = MemoryStore(request.node.nodeid)
    for length in (3, 5):
        with pytest.raises(StoreError, match=f"announced with {length} bytes and has 4") as caught:
            store.put_if_absent("x", Content(length), token="t0")
        assert caught.value.subject == "x"


def test_names_are_checked_before_anything_is_deleted(request):
    store = MemoryStore(request.node.nodeid)
    store.put_if_absent("x", Bytes(b"1"), token="t0")
    with pytest.raises(StoreError, match="cannot name"):
        store.delete(["x", "../y"])
    with pytest.raises(StoreError, match="cannot name"):
        store.settle("../y")
    assert store.get("x", limit=1) == b"1"
