"""A window of memory under a whole image: same bytes as in memory of the image's size, whatever the leaves."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.content import Filling, PackContent, WriterGone
from holdfast.image.arena import acquire_window
from holdfast.image.capture import Capturer
from holdfast.image.layout import plan_layout
from holdfast.image.ring import map_ring
from holdfast.state.flattener import flatten

SAVE_ID = "7" * 32
WINDOW = 64 << 10


def test_what_lies_a_window_apart_is_the_same_memory() -> None:
    ring = np.frombuffer(map_ring(4 * WINDOW + 4096, WINDOW), np.uint8)
    ring[5] = 17
    assert [int(ring[5 + turn * WINDOW]) for turn in range(5)] == [17] * 5


def test_too_many_mappings_are_refused() -> None:
    with pytest.raises(OSError, match="would be mapped"):
        map_ring(4096 * 20_000, 4096)


def _streamed(state: Any, max_leaves: int = 500_000) -> tuple[list[bytes], list[bytes]]:
    """The packs as they go out through a window, and as the image that is held whole has them."""
    flattened = flatten(state)
    layout = plan_layout(flattened.specs, max_leaves=max_leaves)
    whole = np.full(layout.nbytes, 0xEE, np.uint8)
    layout.stamp(whole, SAVE_ID)
    for number, source in enumerate(flattened.sources):
        begin = int(layout.start[number])
        whole[begin : begin + int(layout.length[number])] = np.frombuffer(np.ascontiguousarray(source), np.uint8)
    arena = acquire_window(layout.nbytes, WINDOW)
    capturer = Capturer(flattened, layout, arena)
    filling = Filling(arena.window)
    packs: list[bytes] = []

    def write() -> None:
        for plan in layout.packs:
            content = PackContent(plan, arena.buffer.data, filling)
            packs.append(b"".join(bytes(piece) for piece in content.pieces()))

    assert capturer.largest_step(flattened) * 4 <= WINDOW
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    capturer.capture(flattened, SAVE_ID, progress=filling.advance, admit=filling.admit)
    writer.join(60)
    arena.release()
    return packs, [whole[plan.start : plan.start + plan.length].tobytes() for plan in layout.packs]


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["f8", "f4", "u1", "i2"]), st.integers(0, 60_000)), max_size=12),
    st.sampled_from([3, 500_000]),
)
def test_the_image_that_goes_out_through_a_window_is_the_image(leaves: list[tuple[str, int]], max_leaves: int) -> None:
    generator = np.random.default_rng(len(leaves))
    state = {
        f"leaf{number}": generator.integers(0, 100, count).astype(kind) for number, (kind, count) in enumerate(leaves)
    }
    streamed, expected = _streamed(state, max_leaves)
    assert streamed == expected


def test_a_capture_that_waits_for_a_writer_that_is_gone_ends() -> None:
    filling = Filling(WINDOW)
    filling.admit(WINDOW)
    filling.abandon()
    with pytest.raises(WriterGone):
        filling.admit(WINDOW + 1)
