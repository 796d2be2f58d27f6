"""Pieces hold every chunk once, in order, and stay near their size."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tenuto.codec.chunk_map import ChunkMap
from tenuto.engine.read.chunk_reader import chunk_runs, split_run
from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, PackEntry


@given(
    st.lists(st.integers(0, 3000), max_size=30),
    st.integers(1, 700),
    st.integers(64, 5000),
    st.sampled_from([3, 500_000]),
)
def test_every_byte_is_in_one_piece(lengths, chunk_bytes, piece_bytes, max_leaves):
    specs = tuple(LeafSpec(f"leaf{number}", "uint8", (length,)) for number, length in enumerate(lengths))
    layout = plan_layout(specs, max_leaves=max_leaves)
    starts = np.concatenate([[0], np.cumsum(-(-layout.length // chunk_bytes))]).astype(np.int64)
    packs = tuple(PackEntry(pack.name, pack.length, pack.header_length, b"") for pack in layout.packs)
    digests = np.zeros((int(starts[-1]), 16), np.uint8)
    index = Index(0, "", chunk_bytes, packs, specs, layout.pack, layout.offset, layout.length, starts, digests)
    seen = {number: pack.header_length for number, pack in enumerate(packs)}
    rows = []
    for piece in chunk_runs(ChunkMap.of(index), piece_bytes):
        assert piece.start == seen[piece.pack]
        seen[piece.pack] = piece.stop
        chunks = piece.chunks
        assert chunks.offset[0] == piece.start
        assert chunks.end[-1] == piece.stop
        assert (chunks.offset[1:] == chunks.end[:-1]).all() and (chunks.pack == piece.pack).all()
        assert piece.stop - piece.start < piece_bytes + chunk_bytes
        rows += chunks.digest.tolist()
        for leaf, row, begin in zip(*(c.tolist() for c in (chunks.row, chunks.digest, chunks.offset)), strict=True):
            assert begin == layout.offset[leaf] + (row - starts[leaf]) * chunk_bytes
        if len(chunks) > 1:
            one, two = split_run(piece)
            assert (one.start, one.stop, two.stop) == (piece.start, two.start, piece.stop)
    assert sorted(rows) == list(range(len(digests)))
    assert seen == {number: pack.length for number, pack in enumerate(packs)}
