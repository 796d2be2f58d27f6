"""A window of memory under a whole image: same bytes as in memory of the image's size, whatever the leaves."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.engine.staging.arena import Arena, acquire_moving_window, acquire_window, map_ring
from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.engine.staging.capture import Capturer
from tenuto.engine.staging.pack_content import Filling, PackContent, WriterGone
from tenuto.state.encode.flattener import flatten

SAVE_ID = "7" * 32
WINDOW = 64 << 10


def test_what_lies_a_window_apart_is_the_same_memory() -> None:
    ring = np.frombuffer(map_ring(4 * WINDOW + 4096, WINDOW), np.uint8)
    ring[5] = 17
    assert [int(ring[5 + turn * WINDOW]) for turn in range(5)] == [17] * 5


def test_too_many_mappings_are_refused() -> None:
    with pytest.raises(OSError, match="would be mapped"):
        map_ring(4096 * 20_000, 4096)


def _streamed(
    state: Any, max_leaves: int = 500_000, acquire: Callable[[int, int], Arena] = acquire_window
) -> tuple[list[bytes], list[bytes]]:
    """The packs as they go out through a window, and as the image that is held whole has them."""
    flattened = flatten(state)
    layout = plan_layout(flattened.specs, max_leaves=max_leaves)
    whole = np.full(layout.nbytes, 0xEE, np.uint8)
    layout.stamp(whole, SAVE_ID)
    for number, source in enumerate(flattened.sources):
        begin = int(layout.start[number])
        whole[begin : begin + int(layout.length[number])] = np.frombuffer(np.ascontiguousarray(source), np.uint8)
    arena = acquire(layout.nbytes, WINDOW)
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
    st.sampled_from([acquire_window, acquire_moving_window]),
)
def test_the_image_that_goes_out_through_a_window_is_the_image(
    leaves: list[tuple[str, int]], max_leaves: int, acquire: Callable[[int, int], Arena]
) -> None:
    generator = np.random.default_rng(len(leaves))
    state = {
        f"leaf{number}": generator.integers(0, 100, count).astype(kind) for number, (kind, count) in enumerate(leaves)
    }
    streamed, expected = _streamed(state, max_leaves, acquire)
    assert streamed == expected


def test_a_capture_that_waits_for_a_writer_that_is_gone_ends() -> None:
    filling = Filling(WINDOW)
    filling.admit(WINDOW)
    filling.abandon()
    with pytest.raises(WriterGone):
        filling.admit(WINDOW + 1)


def test_a_step_is_an_eighth_of_the_window() -> None:
    flattened = flatten({"a": np.arange(5 * WINDOW, dtype=np.uint8)})
    layout = plan_layout(flattened.specs)
    arena = acquire_window(layout.nbytes, WINDOW)
    ends: list[int] = []
    Capturer(flattened, layout, arena).capture(flattened, SAVE_ID, progress=ends.append)
    assert ends[0] == 4096 + WINDOW // 8
    assert set(np.diff(ends).tolist()) == {WINDOW // 8}
    arena.release()


def test_an_arena_with_a_window_says_so() -> None:
    arena = acquire_window(3 * WINDOW + 1, WINDOW - 1)
    assert (arena.kind, arena.note, arena.window) == ("a window", "", WINDOW)
    assert arena.nbytes == len(arena.buffer) == 3 * WINDOW + 4096
    arena.buffer[7] = 9
    assert arena.buffer[7 + 2 * WINDOW] == 9
    arena.release()
    assert len(arena.buffer) == 0
    smallest = acquire_window(0, 0)
    assert (smallest.nbytes, smallest.window) == (4096, 4096)
    smallest.release()


def test_a_forked_child_has_no_window() -> None:
    arena = acquire_window(2 * WINDOW, WINDOW)
    address = f"{arena.buffer.ctypes.data:x}-"
    read, write = os.pipe()
    if os.fork() == 0:
        with open("/proc/self/maps", encoding="ascii") as maps:
            os.write(write, str(any(line.startswith(address) for line in maps)).encode())
        os._exit(0)
    os.wait()
    assert os.read(read, 9) == b"False"
    os.close(read)
    os.close(write)
    arena.release()


def test_as_many_mappings_as_allowed_are_made() -> None:
    with pytest.raises(OSError) as caught:
        map_ring(4096 * 16_385, 4096)
    assert caught.value.errno == errno.E2BIG
    assert "a window of 4096 bytes would be mapped 16385 times" in str(caught.value)
    ring = map_ring(4096 * 16_384, 4096)
    np.frombuffer(ring, np.uint8)[-1] = 5
    assert ring[4095] == 5


def test_a_system_without_such_mappings_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="maps no memory twice") as caught:
        map_ring(8192, 4096)
    assert caught.value.errno == errno.ENOSYS


@pytest.mark.parametrize("moment", ["reserve", "map"])
def test_a_ring_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOMEM, "no")

    gc.collect()  # what an earlier test has left as garbage may give its descriptors back at any moment
    before = set(os.listdir("/proc/self/fd"))
    if moment == "reserve":
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    else:
        monkeypatch.setattr("tenuto.engine.staging.arena._map_over", refuse)
    closed: list[Any] = []

    class Noted(mmap.mmap):
        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(mmap, "mmap", Noted)
    with pytest.raises(OSError) as caught:
        map_ring(8192, 4096)
    assert caught.value.errno == errno.ENOMEM
    assert len(closed) == 1
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("nbytes", "window"), [(8192, 100), (8193, 4096), (100, 100)])
def test_only_whole_blocks_can_be_mapped(nbytes: int, window: int) -> None:
    with pytest.raises(AssertionError):
        map_ring(nbytes, window)
