"""Reads of any range of any leaf give its bytes, and no damaged chunk passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenuto
from tenuto.codec.chunk_map import ChunkMap
from tenuto.engine.read import chunk_reader, lazy_reader
from tenuto.engine.read.lazy_reader import LazyReader
from tenuto.engine.read.leaf_reader import LeafReader, Staged
from tenuto.engine.read.packs import OpenPack, open_pack
from tenuto.errors import CorruptionError
from tenuto.events import Emitter
from tenuto.model.records import Index, Manifest
from tenuto.repo.lineage import resolve
from tenuto.repo.repository import Repo
from tenuto.sharding.slices import region
from tenuto.store.memory import MemoryReader, MemoryStore

CHUNK = 512


def saved(lengths: list[int]) -> tuple[Repo, Manifest, Index, list[bytes]]:
    """Leaves of so many random bytes, in chunks of 512."""
    repo = Repo.create_or_open(MemoryStore("chunk-reader"), chunk_bytes=CHUNK)
    random = np.random.default_rng(len(lengths))
    state = {f"{number:03}": random.integers(0, 256, length, np.uint8) for number, length in enumerate(lengths)}
    tenuto.save(state, repo.store)
    manifest = repo.manifest(resolve(repo, "main", "latest"))
    assert manifest.chunk_bytes == CHUNK
    return repo, manifest, repo.index(manifest), [array.tobytes() for array in state.values()]


class Device(MemoryReader):
    """A reader that shows nothing of its memory, and where `alignment` asks for it is read in whole pages alone."""

    def __init__(self, name: str, data: bytes, alignment: int) -> None:
        super().__init__(name, data)
        self._alignment = alignment

    @property
    def alignment(self) -> int:
        return self._alignment

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self.alignment > 1:
            assert offset % self.alignment == 0 and len(buffer) % self.alignment == 0
        data = self.data[offset : offset + len(buffer)]
        buffer[:] = data + bytes(len(buffer) - len(data))

    def view(self) -> None:
        return None


@contextmanager
def packs_that_are(how: str) -> Iterator[None]:
    def opened(*where: Any, **options: Any) -> OpenPack:
        pack = open_pack(*where, **options)
        if how == "viewed":
            return pack
        reader = pack.reader
        assert isinstance(reader, MemoryReader)
        return OpenPack(pack.name, Device(reader.name, reader.data, 4096 if how == "aligned" else 1), None)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(chunk_reader, "open_pack", opened)
        monkeypatch.setattr(lazy_reader, "open_pack", opened)
        yield


ACCESS = ["viewed", "read", "aligned"]
lengths = st.lists(
    st.sampled_from([0, 1, 100, CHUNK - 1, CHUNK, CHUNK + 1, 3000, 20_000, 300_000]), min_size=1, max_size=8
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(lengths, st.sampled_from(ACCESS), st.data())
def test_every_range_of_every_leaf_is_its_bytes(lengths: list[int], how: str, data: st.DataObject) -> None:
    repo, manifest, index, leaves = saved(lengths)
    wanted = (
        data.draw(st.lists(st.integers(0, len(lengths) - 1).filter(lambda row: lengths[row] > 0), max_size=8))
        if any(lengths)
        else []
    )
    spans = []
    for row in wanted:
        low = data.draw(st.integers(0, lengths[row] - 1))
        spans.append((low, data.draw(st.integers(low + 1, lengths[row]))))
    sinks = [Staged(high - low) for low, high in spans]
    first, stop = np.array(spans, np.int64).reshape(-1, 2).T
    with packs_that_are(how):
        reader = LeafReader(repo, manifest, index, emitter=Emitter())
        nbytes = reader.read(list(zip(wanted, sinks, strict=True)), (first, stop))
    assert nbytes == sum(high - low for low, high in spans)
    for row, (low, high), sink in zip(wanted, spans, sinks, strict=True):
        assert sink.data.tobytes() == leaves[row][low:high]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(lengths.filter(any), st.sampled_from(ACCESS), st.data())
def test_a_flipped_bit_in_any_chunk_is_found(lengths: list[int], how: str, data: st.DataObject) -> None:
    repo, manifest, index, leaves = saved(lengths)
    chunks = ChunkMap.of(index).chunks()
    at = data.draw(st.integers(0, len(chunks) - 1))
    row, offset, size = int(chunks.row[at]), int(chunks.offset[at]), int(chunks.stored[at])
    name = f"{manifest.id.directory}/{index.packs[int(chunks.pack[at])].name}"
    flip(repo, name, offset + data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7)))
    expected = f"{row:03} is damaged: {name}, {size} bytes from offset {offset}, are not what was saved"
    everything = [(number, Staged(length)) for number, length in enumerate(lengths)]
    with packs_that_are(how), pytest.raises(CorruptionError) as caught:
        LeafReader(repo, manifest, index, emitter=Emitter()).read(everything)
    assert (caught.value.message, caught.value.subject, caught.value.object) == (expected, f"{row:03}", name)
    # A part of the leaf in other chunks does not meet the damage; a byte of this chunk does.
    start = int(chunks.start[at])
    for low, harmed in ((start, True), (start + size, False), (start - 1, False)):
        if 0 <= low < lengths[row]:
            sink = Staged(1)
            span = (np.array([low]), np.array([low + 1]))
            with packs_that_are(how):
                reader = LeafReader(repo, manifest, index, emitter=Emitter())
                if harmed:
                    with pytest.raises(CorruptionError) as caught:
                        reader.read([(row, sink)], span)
                    assert caught.value.message == expected
                else:
                    reader.read([(row, sink)], span)
                    assert sink.data.tobytes() == leaves[row][low : low + 1]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(lengths.filter(any), st.sampled_from(ACCESS[:2]), st.data())
def test_slices_are_their_bytes_until_a_bit_flips(lengths: list[int], how: str, data: st.DataObject) -> None:
    repo, manifest, index, leaves = saved(lengths)
    table = repo.table(manifest, 0)
    rows = st.sampled_from([row for row, length in enumerate(lengths) if length])

    def look(reader: LazyReader, row: int, low: int, high: int) -> bytes:
        out = np.empty(high - low, np.uint8)
        reader.read(row, f"{row:03}", region((lengths[row],), slice(low, high), ""), 1, out)
        return out.tobytes()

    with packs_that_are(how):
        reader = LazyReader(repo, manifest.id, table)
        for _ in range(5):
            row = data.draw(rows)
            low = data.draw(st.integers(0, lengths[row] - 1))
            high = data.draw(st.integers(low + 1, lengths[row]))
            assert look(reader, row, low, high) == leaves[row][low:high]
        row = data.draw(rows)
        at = data.draw(st.integers(0, lengths[row] - 1))
        chunk = ChunkMap.of(index).covering(row, at, at + 1)
        name = f"{manifest.id.directory}/{index.packs[chunk.pack].name}"
        flip(repo, name, chunk.begin + at - chunk.low, 0)
        reader = LazyReader(repo, manifest.id, table)
        with pytest.raises(CorruptionError) as caught:
            look(reader, row, 0, lengths[row])
        size = chunk.end - chunk.begin
        expected = f"{row:03} is damaged: {name}, {size} bytes from offset {chunk.begin}, are not what was saved"
        assert (caught.value.message, caught.value.subject, caught.value.object) == (expected, f"{row:03}", name)
        for low, high in ((0, chunk.low), (chunk.high, lengths[row])):
            if low < high:
                assert look(reader, row, low, high) == leaves[row][low:high]


def flip(repo: Repo, name: str, at: int, bit: int) -> None:
    store = repo.store
    assert isinstance(store, MemoryStore)
    data, when = store.place.objects[name]
    store.place.objects[name] = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], when


def test_a_pack_of_empty_leaves_alone_is_looked_for() -> None:
    repo, manifest, index, _ = saved([0, 0])
    repo.store.delete([f"{manifest.id.directory}/{index.packs[0].name}"])
    with pytest.raises(CorruptionError, match="is missing"):
        LeafReader(repo, manifest, index, emitter=Emitter()).read([(0, Staged(0)), (1, Staged(0))])
