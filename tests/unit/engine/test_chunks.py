"""The digests that are taken as an image fills up equal those of each leaf's chunks taken one by one."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.engine.staging.plan import ChunkTable, Digester
from tenuto.model.leaf import LeafSpec

CHUNK = 4096


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(["float32", "uint8", "float64"]), st.integers(0, 3000)), max_size=12),
    st.lists(st.integers(0, 60_000), max_size=6),
)
def test_digests_taken_on_the_way_equal_those_of_the_leaves(leaves: list[tuple[str, int]], stops: list[int]) -> None:
    specs = [LeafSpec(f"leaf{number}", name, (count,)) for number, (name, count) in enumerate(leaves)]
    layout = plan_layout(specs)
    image = np.random.default_rng(1).integers(0, 256, layout.nbytes, np.uint8)
    table = ChunkTable(layout, CHUNK)
    digester = Digester(table, memoryview(image))
    for stop in sorted(stops):
        digester.advance(stop)
    digester.advance(layout.nbytes)
    found = digester.digests()
    expected = []
    for number in range(len(specs)):
        data = image[layout.start[number] : layout.start[number] + layout.length[number]]
        expected += [xxhash.xxh3_128_digest(data[at : at + CHUNK].tobytes()) for at in range(0, len(data), CHUNK)]
        assert table.start[number + 1] == len(expected)
    assert found.tobytes() == b"".join(expected)


def test_a_chunk_is_digested_only_once_it_is_whole() -> None:
    layout = plan_layout([LeafSpec("a", "uint8", (2 * CHUNK,))])
    image = np.zeros(layout.nbytes, np.uint8)
    start = int(layout.start[0])
    digester = Digester(ChunkTable(layout, CHUNK), memoryview(image))
    digester.advance(start + CHUNK - 1)
    image[start : start + CHUNK] = 7  # written after the first advance, before the chunk was whole
    digester.advance(layout.nbytes)
    assert digester.digests()[0].tobytes() == xxhash.xxh3_128_digest(b"\x07" * CHUNK)
