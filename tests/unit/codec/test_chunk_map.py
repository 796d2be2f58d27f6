"""The map of chunks equals the arithmetic of the format, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.codec.chunk_map import ChunkMap, Chunks, chunk_counts, chunk_starts, whole_chunks
from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, PackEntry

many = settings(max_examples=50, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Expected:
    """One chunk, as docs/design/format.md places it."""

    row: int
    start: int
    size: int
    pack: int
    offset: int
    digest: int


def by_hand(index: Index) -> list[Expected]:
    found = []
    for row, length in enumerate(index.length.tolist()):
        for number in range(-(-length // index.chunk_bytes)):
            start = number * index.chunk_bytes
            found.append(
                Expected(
                    row,
                    start,
                    min(index.chunk_bytes, length - start),
                    int(index.pack[row]),
                    int(index.offset[row]) + start,
                    len(found),
                )
            )
    return found


def as_rows(chunks: Chunks) -> list[Expected]:
    assert np.array_equal(chunks.size, chunks.stored) and np.array_equal(chunks.end, chunks.offset + chunks.size)
    columns = (chunks.row, chunks.start, chunks.size, chunks.pack, chunks.offset, chunks.digest)
    return [Expected(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    lengths = draw(st.lists(st.integers(0, 900), min_size=1, max_size=20))
    chunk_bytes = draw(st.sampled_from([1, 7, 64, 300, 1000]))
    specs = tuple(LeafSpec(f"leaf{number}", "uint8", (length,)) for number, length in enumerate(lengths))
    layout = plan_layout(specs, max_leaves=draw(st.sampled_from([3, 500_000])))
    starts = chunk_starts(layout.length, chunk_bytes)
    packs = tuple(PackEntry(pack.name, pack.length, pack.header_length, b"") for pack in layout.packs)
    digests = np.random.default_rng(1).integers(0, 256, (int(starts[-1]), 16), np.uint8)
    return Index(0, "", chunk_bytes, packs, specs, layout.pack, layout.offset, layout.length, starts, digests)


@many
@given(indexes())
def test_all_chunks_are_those_of_the_format(index: Index) -> None:
    found = ChunkMap.of(index).chunks()
    assert as_rows(found) == by_hand(index)
    assert found.want.tolist() == found.row.tolist() and len(found) == len(index.digests)
    assert all(getattr(found, column.name).dtype == np.int64 for column in fields(found))


@many
@given(indexes(), st.data())
def test_the_chunks_of_chosen_rows_and_of_parts_of_them(index: Index, data: Any) -> None:
    chunks, expected = ChunkMap.of(index), by_hand(index)
    rows = data.draw(st.lists(st.integers(0, len(index.specs) - 1), max_size=6))
    spans = []
    for row in rows:
        low = data.draw(st.integers(0, int(index.length[row])))
        spans.append((low, data.draw(st.integers(low, int(index.length[row])))))
    chosen = np.array(rows, np.int64)
    assert as_rows(chunks.chunks(chosen)) == [one for row in rows for one in expected if one.row == row]
    low, high = np.array(spans, np.int64).reshape(-1, 2).T
    found = chunks.chunks(chosen, (low, high))
    overlapping = [
        (want, one)
        for want, (row, (begin, end)) in enumerate(zip(rows, spans, strict=True))
        for one in expected
        if one.row == row and begin < end and one.start < end and one.start + one.size > begin
    ]
    assert as_rows(found) == [one for _, one in overlapping]
    assert found.want.tolist() == [want for want, _ in overlapping]
    kept = [place for place, (begin, end) in enumerate(spans) if begin < end]
    pack, first, last = chunks.stored_ranges(chosen[kept], low[kept], high[kept])
    for place, want in enumerate(kept):
        mine = [one for at, one in overlapping if at == want]
        assert (pack[place], first[place]) == (mine[0].pack, mine[0].offset)
        assert last[place] == mine[-1].offset + mine[-1].size
        found_range = chunks.covering(rows[want], *spans[want])
        assert found_range == (
            rows[want], mine[0].pack, mine[0].digest, mine[-1].digest + 1,
            mine[0].start, mine[-1].start + mine[-1].size, mine[0].offset, mine[-1].offset + mine[-1].size,
        )  # fmt: skip
        for one in mine:
            part = chunks.part(found_range, one.digest, one.digest + 1)
            assert (part.low, part.high, part.begin) == (one.start, one.start + one.size, one.offset)
            assert chunks.digest_of(one.digest) == index.digests[one.digest].tobytes()


@many
@given(indexes(), st.data())
def test_chosen_chunks_keep_their_columns(index: Index, data: Any) -> None:
    found = ChunkMap.of(index).chunks()
    if not len(found):
        return
    low = data.draw(st.integers(0, len(found) - 1))
    order = np.arange(len(found))[::-1].copy()
    assert as_rows(found.take(slice(low, None))) == by_hand(index)[low:]
    assert as_rows(found.take(order)) == by_hand(index)[::-1]


def test_counts_starts_and_whole_chunks() -> None:
    length = np.array([0, 1, 64, 65], np.uint64)
    assert chunk_counts(length, 64).tolist() == [0, 1, 1, 2]
    assert chunk_starts(length, 64).tolist() == [0, 0, 1, 2, 4]
    assert [whole_chunks(nbytes, 64) for nbytes in (0, 63, 64, 127, 128)] == [64, 64, 64, 64, 128]


def test_a_place_in_a_large_index_is_found_without_its_other_rows() -> None:
    class Forbidden(np.ndarray):  # type: ignore[type-arg]
        def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("a whole column was computed")

    lengths = np.full(1000, 100, np.int64)
    offset = np.cumsum(lengths) - lengths
    chunks = ChunkMap(np.zeros(1000, np.int64), offset, lengths, chunk_starts(lengths, 64), np.empty((0, 16)), 64)
    watched = replace(
        chunks, **{name: getattr(chunks, name).view(Forbidden) for name in ("pack", "offset", "length", "first")}
    )
    assert watched.covering(700, 70, 80) == (700, 0, 1401, 1402, 64, 100, 70064, 70100)
