"""Direct I/O: used where it can be, given up quietly where it cannot, and never a different result."""

from __future__ import annotations

import errno
import mmap
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import StoreError
from tenuto.store.contract import Bytes
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.store.local.writer import BLOCK

MEBI = 2**20
NAME = "runs/a/pack"


class Watched(OperatingSystem):
    """Refuses what Linux refuses, on any file system; notes how each byte went. `cached`: what a probe finds."""

    def __init__(self, cached=0.0, refuse_reads=False):
        self.direct, self.log, self.flushes, self.forgotten = set(), [], [], []
        self.cached, self.refuse_reads, self.reads = cached, refuse_reads, []
        self.written = 0
        self.probes = []

    def set_direct(self, descriptor, direct):
        (self.direct.add if direct else self.direct.discard)(descriptor)

    def open(self, path, *, direct=False):
        descriptor = super().open(path)
        if direct:
            self.direct.add(descriptor)
        return descriptor

    def close(self, descriptor):
        self.direct.discard(descriptor)
        super().close(descriptor)

    def check(self, descriptor, buffers, offset):
        if descriptor in self.direct:
            for buffer in buffers:
                address = np.frombuffer(buffer, np.uint8).ctypes.data
                if address % BLOCK or len(buffer) % BLOCK or offset % BLOCK:
                    raise OSError(errno.EINVAL, "not aligned")
        return descriptor in self.direct

    def pwrite(self, descriptor, buffers, offset):
        direct = self.check(descriptor, buffers, offset)
        self.log.append(("direct" if direct else "buffered", offset, len(buffers[0])))
        return super().pwrite(descriptor, buffers, offset)

    def pread(self, descriptor, buffers, offset, *, nowait=False):
        if nowait:
            self.probes.append(offset)
            if len(self.probes) % 10 < self.cached * 10:
                return super().pread(descriptor, buffers, offset)
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        direct = self.check(descriptor, buffers, offset)
        if direct and self.refuse_reads:
            raise OSError(errno.EINVAL, "not meant")
        self.reads.append(("direct" if direct else "buffered", offset, len(buffers[0])))
        return super().pread(descriptor, buffers, offset)

    def fsync(self, descriptor):
        self.flushes.append(len(self.log))
        super().fsync(descriptor)

    def forget(self, descriptor, offset, length):
        self.forgotten.append((offset, length))


def room(length):
    return memoryview(mmap.mmap(-1, -(-length // BLOCK) * BLOCK + BLOCK))


def content_of(length, seed=0):
    buffer = room(length)
    buffer[:length] = np.random.default_rng(seed).bytes(length)
    return buffer[:length]


class Pieces:
    def __init__(self, *parts):
        self.parts = parts
        self.length = sum(map(len, parts))

    def pieces(self):
        return iter(self.parts)


@pytest.fixture
def system():
    return Watched()


@pytest.fixture
def store(tmp_path, system):
    return LocalStore(tmp_path / "store", filesystem=system)


def stored(store, name=NAME):
    return store.get(name, limit=2**30)


def ways(system):
    return [way for way, _, _ in system.log]


@pytest.mark.parametrize("length", [MEBI, 2 * MEBI, 2 * MEBI + 1, 3 * MEBI - 1, 2 * MEBI + BLOCK])
def test_an_aligned_image_goes_directly_to_its_last_byte(store, system, length):
    data = content_of(length)
    store.put_if_absent(NAME, Pieces(data[:MEBI], data[MEBI:]), token="t0")
    assert set(ways(system)) == {"direct"}
    assert stored(store) == data
    assert store.stat(NAME).length == length


def test_pieces_are_written_in_large_strides(store, system, monkeypatch):
    monkeypatch.setattr("tenuto.store.local.writer._STRIDE", MEBI)
    data = content_of(3 * MEBI + 5)
    store.put_if_absent(NAME, Bytes(data), token="t0")
    assert [length for _, _, length in system.log] == [MEBI, MEBI, MEBI, BLOCK]
    assert stored(store) == data


def test_small_objects_go_buffered(store, system):
    store.put_if_absent("x", Bytes(content_of(MEBI - 1)), token="t0")
    assert ways(system) == ["buffered"]


def test_a_piece_that_is_not_aligned_turns_direct_off_for_the_rest(store, system):
    data = content_of(5 * MEBI)
    store.put_if_absent(
        NAME, Pieces(data[:MEBI], data[MEBI : MEBI + 5], data[MEBI + 5 : 2 * MEBI], data[2 * MEBI :]), token="t0"
    )
    assert ways(system) == ["direct", "buffered", "buffered", "buffered"]
    assert stored(store) == data


def test_buffered_writes_are_flushed_as_they_go(store, system, monkeypatch):
    monkeypatch.setattr("tenuto.store.local.writer._FLUSH_EVERY", MEBI)
    monkeypatch.setattr("tenuto.store.local.writer._STRIDE", MEBI // 2)
    store.put_if_absent(NAME, Bytes(content_of(4 * MEBI + 1)[1:]), token="t0")
    assert set(ways(system)) == {"buffered"}
    assert [at for at in system.flushes if at][:4] == [2, 4, 6, 8], "the earlier ones are of directories"
    assert system.forgotten == [(at * MEBI, MEBI) for at in range(4)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    cuts=st.lists(st.integers(0, 6 * 512), max_size=5),
    unit=st.sampled_from([512, 1000, BLOCK]),
    shift=st.sampled_from([0, 0, 0, 1, 512]),
    tail=st.integers(0, BLOCK),
    stutter=st.sampled_from([None, 512, BLOCK, 5000]),
    refuse=st.booleans(),
)
def test_however_it_is_cut_the_same_bytes_are_stored(tmp_path_factory, cuts, unit, shift, tail, stutter, refuse):
    """The direct way is a fast path, never a second algorithm."""

    class Odd(Watched):
        def pwrite(self, descriptor, buffers, offset):
            if descriptor in self.direct and refuse and offset > MEBI:
                raise OSError(errno.EINVAL, "no more")
            if stutter is not None and len(self.log) % 3 == 1:
                self.log.append(("stutter", offset, 0))
                return OperatingSystem.pwrite(self, descriptor, [buffers[0][:stutter]], offset)
            return super().pwrite(descriptor, buffers, offset)

    data = content_of(shift + MEBI + BLOCK * 5 + tail)[shift:]
    ends = sorted({0, len(data), *(min(cut * unit, len(data)) for cut in cuts)})
    parts = [data[start:end] for start, end in pairwise(ends)]
    store = LocalStore(tmp_path_factory.mktemp("odd"), filesystem=Odd())
    store.put_if_absent(NAME, Pieces(*parts), token="t0")
    assert stored(store) == data


def put_large(store, length=3 * MEBI + 100):
    data = content_of(length)
    store.put_if_absent(NAME, Bytes(data), token="t0")
    return data


@pytest.mark.parametrize(("cached", "alignment"), [(0.0, BLOCK), (0.2, BLOCK), (0.8, 1), (1.0, 1)])
def test_the_page_cache_is_passed_by_unless_it_holds_the_object(tmp_path, cached, alignment):
    system = Watched(cached)
    store = LocalStore(tmp_path / "store", filesystem=system)
    data = put_large(store)
    with store.open(NAME) as reader:
        assert not system.probes, "who does not ask does not pay"
        assert reader.alignment == alignment
        assert all(offset % BLOCK == 0 for offset in system.probes)
        buffer = room(2 * MEBI)[: 2 * MEBI]
        reader.read_into(MEBI, buffer)
        assert buffer == data[MEBI : 3 * MEBI]
        assert system.reads == [("direct" if alignment == BLOCK else "buffered", MEBI, 2 * MEBI)]
    assert not system.direct


def test_small_objects_are_not_probed(store, system):
    store.put_if_absent("x", Bytes(b"12"), token="t0")
    with store.open("x") as reader:
        assert reader.alignment == 1
    assert not system.probes


def test_an_aligned_read_may_reach_beyond_the_end(store, system):
    data = put_large(store)
    with store.open(NAME) as reader:
        buffer = room(BLOCK)[:BLOCK]
        reader.read_into(3 * MEBI, buffer)
        assert buffer[:100] == data[3 * MEBI :]
        assert system.reads[-1][0] == "direct"


def test_what_is_not_aligned_is_read_buffered(store, system):
    data = put_large(store)
    with store.open(NAME) as reader:
        assert reader.alignment == BLOCK
        for offset, length, shift in ((1, BLOCK, 0), (0, 100, 0), (0, BLOCK, 1)):
            buffer = room(length + shift)[shift : shift + length]
            reader.read_into(offset, buffer)
            assert buffer == data[offset : offset + length]
            assert system.reads[-1][0] == "buffered"


def test_direct_reads_that_are_refused_are_done_buffered(tmp_path):
    system = Watched(refuse_reads=True)
    store = LocalStore(tmp_path / "store", filesystem=system)
    data = put_large(store)
    with store.open(NAME) as reader:
        buffer = room(MEBI)[:MEBI]
        reader.read_into(0, buffer)
        assert buffer == data[:MEBI]


def test_an_object_replaced_behind_the_reader_is_read_through_the_open_descriptor(store, system):
    data = put_large(store)
    with store.open(NAME) as reader:
        store.delete([NAME])
        store.put_if_absent(NAME, Bytes(content_of(3 * MEBI + 100, seed=5)), token="t1")
        assert reader.alignment == 1
        buffer = room(MEBI)[:MEBI]
        reader.read_into(0, buffer)
        assert buffer == data[:MEBI]


def test_probing_leaves_the_trainings_random_numbers_alone(store):
    put_large(store)
    random.seed(7)
    before = random.getstate()
    with store.open(NAME) as reader:
        assert reader.alignment
    assert random.getstate() == before


@pytest.mark.parametrize("number", [errno.EINTR, errno.EIO, errno.ENOSPC])
def test_an_error_of_the_last_padded_block_comes_out_as_what_it_is(store, system, number):
    """The block is a mapping of its own; what the failed call still holds of it must not hide what went wrong."""
    first, failed = system.pwrite, []

    def pwrite(descriptor, buffers, offset):
        if not failed and len(buffers[0]) == BLOCK:
            failed.append(offset)
            raise OSError(number, "once")
        return first(descriptor, buffers, offset)

    system.pwrite = pwrite
    with pytest.raises(StoreError) as caught:
        store.put_if_absent(NAME, Pieces(content_of(2 * MEBI + 1)), token="a" * 32)
    assert failed and caught.value.__cause__.errno == number
