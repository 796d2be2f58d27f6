"""What a reader shows of one object: ranges, views, and what it says when the object is not what it was."""

from __future__ import annotations

import errno
import os

import pytest

from tenuto.errors import CorruptionError, StoreError
from tenuto.store.contract import Bytes
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.store.local.writer import BLOCK, WORTH_DIRECT
from tenuto.store.memory import MemoryStore

NAME = "runs/a/pack"


class Cached(OperatingSystem):
    """Finds so many of the probed blocks in memory, and counts what is asked of it."""

    def __init__(self, found=16):
        self.found, self.probes, self.maps, self.opened, self.closed = found, [], 0, 0, []

    def pread(self, descriptor, buffers, offset, *, nowait=False):
        if not nowait:
            return super().pread(descriptor, buffers, offset)
        self.probes.append((offset, len(buffers[0])))
        if len(self.probes) <= self.found:
            return 1
        raise BlockingIOError(errno.EAGAIN, "not in memory")

    def open(self, path, *, direct=False):
        self.opened += 1
        return super().open(path)

    def close(self, descriptor):
        self.closed.append(descriptor)
        super().close(descriptor)

    def map(self, descriptor, length):
        self.maps += 1
        return super().map(descriptor, length)


def stored(tmp_path, system, data):
    store = LocalStore(tmp_path / "store", filesystem=system)
    store.put_if_absent(NAME, Bytes(data), token="t0")
    system.opened, system.closed = 0, []
    return store


def test_a_large_object_in_the_page_cache_is_mapped_once(tmp_path):
    data = os.urandom(WORTH_DIRECT)
    system = Cached()
    with stored(tmp_path, system, data).open(NAME) as reader:
        view = reader.view()
        assert view is not None and bytes(view) == data and view.readonly
        assert reader.view() is view
        assert system.maps == 1
    assert reader.view() is None, "closed"
    assert bytes(view) == data, "what is held stays"


def test_a_small_object_is_not_mapped(tmp_path):
    system = Cached()
    with stored(tmp_path, system, bytes(WORTH_DIRECT - 1)).open(NAME) as reader:
        assert reader.alignment == 1
        assert reader.view() is None
    assert system.maps == 0
    assert system.probes == []


def test_what_is_read_past_the_page_cache_is_not_mapped(tmp_path):
    system = Cached(found=0)
    with stored(tmp_path, system, bytes(WORTH_DIRECT)).open(NAME) as reader:
        assert reader.alignment == BLOCK
        assert reader.view() is None
    assert system.maps == 0
    assert system.opened == 2 and len(set(system.closed)) == 2, "both descriptors are closed"


@pytest.mark.parametrize(("found", "alignment"), [(7, BLOCK), (8, BLOCK), (9, 1), (16, 1)])
def test_most_of_the_probed_blocks_decide(tmp_path, found, alignment):
    system = Cached(found)
    with stored(tmp_path, system, bytes(WORTH_DIRECT + 1)).open(NAME) as reader:
        assert [reader.alignment, reader.alignment] == [alignment] * 2
    assert len(system.probes) == 16, "asked once"
    assert {length for _, length in system.probes} == {BLOCK}
    assert all(offset % BLOCK == 0 and offset + BLOCK <= WORTH_DIRECT for offset, _ in system.probes)


def test_a_file_system_without_mappings_is_read_instead(tmp_path):
    class Unmappable(Cached):
        def map(self, descriptor, length):
            raise OSError(errno.ENODEV, "no mappings")

    with stored(tmp_path, Unmappable(), bytes(WORTH_DIRECT)).open(NAME) as reader:
        assert reader.view() is None
        assert reader.view() is None


def test_a_closed_reader_opens_nothing_more(tmp_path):
    system = Cached(found=0)
    reader = stored(tmp_path, system, bytes(WORTH_DIRECT)).open(NAME)
    reader.close()
    assert reader.alignment == 1
    assert system.opened == 1 and len(system.closed) == 1
    reader.close()
    assert len(system.closed) == 1


def test_a_range_is_read_into_any_kind_of_buffer(tmp_path):
    import numpy as np

    values = np.arange(600, dtype=np.int32)
    for store in (stored(tmp_path, Cached(), values.tobytes()), MemoryStore("any kind of buffer")):
        if isinstance(store, MemoryStore):
            store.put_if_absent(NAME, Bytes(values.tobytes()), token="t0")
        with store.open(NAME) as reader:
            found = np.zeros((2, 50), np.int32)
            reader.read_into(400, memoryview(found))
            assert found.tolist() == values[100:200].reshape(2, 50).tolist()


@pytest.mark.parametrize(("offset", "length", "end"), [(-1, 1, 0), (0, 11, 11), (10, 1, 11), (11, 1, 12)])
def test_a_range_that_is_not_there_is_named(tmp_path, offset, length, end):
    memory = MemoryStore(f"ranges {offset} {length}")
    memory.put_if_absent(NAME, Bytes(bytes(10)), token="t0")
    for store in (stored(tmp_path, Cached(), bytes(10)), memory):
        with store.open(NAME) as reader, pytest.raises(CorruptionError) as caught:
            reader.read_into(offset, memoryview(bytearray(length)))
        assert caught.value.subject == f"{NAME}@{end}"
        assert f"ends before byte {end}: it has 10 bytes" in caught.value.message


def test_nothing_is_read_from_just_behind_the_end(tmp_path):
    class Counting(Cached):
        reads = 0

        def pread(self, descriptor, buffers, offset, *, nowait=False):
            self.reads += not nowait
            return super().pread(descriptor, buffers, offset, nowait=nowait)

    system = Counting()
    with stored(tmp_path, system, bytes(10)).open(NAME) as reader:
        reader.read_into(10, memoryview(bytearray()))
        reader.read_into(0, memoryview(bytearray()))
        assert system.reads == 0
        reader.read_into(9, memoryview(bytearray(1)))
        assert system.reads == 1


def test_a_read_that_comes_in_pieces_is_joined(tmp_path):
    class Slow(Cached):
        def pread(self, descriptor, buffers, offset, *, nowait=False):
            return super().pread(descriptor, [buffers[0][:3]], offset, nowait=nowait)

    store = stored(tmp_path, Slow(), bytes(range(20)))
    assert store.get(NAME, limit=20) == bytes(range(20))
    with store.open(NAME) as reader:
        buffer = bytearray(10)
        reader.read_into(5, memoryview(buffer))
        assert buffer == bytes(range(5, 15))


def test_an_object_that_shrinks_while_it_is_read_whole_is_a_fault_of_the_store(tmp_path):
    class Shrinking(Cached):
        def pread(self, descriptor, buffers, offset, *, nowait=False):
            return 0 if offset >= 5 else super().pread(descriptor, [buffers[0][:5]], offset)

    store = stored(tmp_path, Shrinking(), bytes(20))
    with pytest.raises(StoreError, match="became shorter") as caught:
        store.get(NAME, limit=20)
    assert caught.value.subject == NAME
    assert not isinstance(caught.value, CorruptionError)


def test_a_limit_is_kept_to_before_anything_is_read(tmp_path):
    class Counting(Cached):
        reads = 0

        def pread(self, descriptor, buffers, offset, *, nowait=False):
            self.reads += 1
            return super().pread(descriptor, buffers, offset, nowait=nowait)

    system = Counting()
    store = stored(tmp_path, system, bytes(20))
    with pytest.raises(CorruptionError, match="has 20 bytes where at most 19 belong") as caught:
        store.get(NAME, limit=19)
    assert caught.value.subject == NAME
    assert system.reads == 0
    assert store.get(NAME, limit=20) == bytes(20)
