"""Basic slices: the blocks that are read give what numpy gives, and no more bytes than they may."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import BadIndex, UsageError
from tenuto.sharding.slices import Region, blocks, region

GAP = 64

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
ends = st.none() | st.integers(-12, 12)
steps = st.none() | st.integers(-4, 4).filter(bool)


@st.composite
def asked(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = draw(shapes)
    keys: list[Any] = []
    for length in shape[: draw(st.integers(0, len(shape)))]:
        if length and draw(st.booleans()):
            keys.append(draw(st.integers(-length, length - 1)))
        else:
            keys.append(slice(draw(ends), draw(ends), draw(steps)))
    if draw(st.booleans()):
        keys.insert(draw(st.integers(0, len(keys))), ...)
    return shape, tuple(keys)


def gathered(array: np.ndarray[Any, Any], found: Region, block_bytes: int) -> np.ndarray[Any, Any]:
    """The region as its blocks give it."""
    out = np.empty(found.counts, array.dtype)
    target = out[(*(slice(None, None, -1 if flip else 1) for flip in found.flipped), ...)]
    data = array.tobytes()
    paces = tuple(stride * array.itemsize for stride in found.strides)
    for block in blocks(found, array.itemsize, block_bytes=block_bytes, gap_bytes=GAP):
        assert block.stop - block.start <= max(block_bytes, array.itemsize)
        target[block.where] = np.ndarray(block.counts, array.dtype, data[block.start : block.stop], 0, paces)
    return out.reshape(found.shape)


@settings(derandomize=True, deadline=None, max_examples=75)
@given(asked(), st.sampled_from([8, 24, 400, 1 << 20]))
def test_a_region_is_what_numpy_gives(wanted: tuple[tuple[int, ...], Any], block_bytes: int) -> None:
    shape, key = wanted
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    try:
        expected = array[key]
    except IndexError:
        with pytest.raises(BadIndex):
            region(shape, key, "a")
        return
    found = region(shape, key, "a")
    assert found.shape == expected.shape
    assert np.array_equal(gathered(array, found, block_bytes), expected)
    if found.size and found.is_run:
        assert np.array_equal(array.reshape(-1)[found.first : found.first + found.size], expected.reshape(-1))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(asked())
def test_no_wide_gap_is_read(wanted: tuple[tuple[int, ...], Any]) -> None:
    """Between two bytes that are wanted and read at once lie fewer than GAP that are not."""
    shape, key = wanted
    items = np.arange(int(np.prod(shape))).reshape(shape)
    marks = np.zeros((items.size, 16), bool)
    try:
        marks[np.atleast_1d(items[key]).reshape(-1)] = True
    except IndexError:
        return
    marks = marks.reshape(-1)
    for block in blocks(region(shape, key, "a"), 16, block_bytes=1 << 20, gap_bytes=GAP):
        inside = np.flatnonzero(marks[block.start : block.stop])
        assert inside[0] == 0 and inside[-1] == block.stop - block.start - 1
        assert int(np.diff(inside).max(initial=0)) <= GAP


@pytest.mark.parametrize(
    "key", [5, -5, (0, 0, 0), (..., ...), None, True, [1, 2], "a", 1.5, np.array([1]), slice(0.5, 1)]
)
def test_what_is_no_basic_index_is_refused(key: Any) -> None:
    with pytest.raises(BadIndex) as caught:
        region((4, 3), key, "model/w")
    assert (
        "model/w" in str(caught.value) and isinstance(caught.value, IndexError) and isinstance(caught.value, UsageError)
    )


def test_numbers_of_other_kinds_are_whole_numbers() -> None:
    assert region((4, 3), np.int64(2), "a") == region((4, 3), 2, "a")
    assert region((4, 3), (..., np.uint8(1)), "a").shape == (4,)
