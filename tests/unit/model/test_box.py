"""Boxes against sets of items."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import UsageError
from tenuto.model.leaf import Box

many = settings(derandomize=True, deadline=None, max_examples=100)
lengths = st.integers(0, 4)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    axes = draw(st.integers(0, 3))
    one, other = (
        Box(
            tuple(draw(st.lists(lengths, min_size=axes, max_size=axes))),
            tuple(draw(st.lists(lengths, min_size=axes, max_size=axes))),
        )
        for _ in range(2)
    )
    return one, other


def items(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, start + length) for start, length in zip(box.offsets, box.shape, strict=True))))


@many
@given(pairs())
def test_boxes_are_sets_of_items(both: tuple[Box, Box]) -> None:
    one, other = both
    assert one.size == len(items(one))
    assert one.empty == (not items(one))
    met = one.intersection(other)
    assert (set() if met is None else items(met)) == items(one) & items(other)
    assert met is None or not met.empty
    assert met == other.intersection(one)
    assert one.contains(other) == (items(other) <= items(one))


@many
@given(pairs())
def test_a_box_is_found_again_in_the_array_of_another(both: tuple[Box, Box]) -> None:
    one, other = both
    met = one.intersection(other)
    if met is None:
        return
    whole = np.arange(9 ** len(one.shape)).reshape((9,) * len(one.shape))
    assert np.array_equal(whole[other.slices][met.relative_to(other).slices], whole[met.slices])


def test_the_whole_of_a_leaf() -> None:
    assert Box.whole((2, 3)) == Box((0, 0), (2, 3))
    assert Box.whole(()).size == 1
    assert Box.whole((0, 3)).empty
    assert str(Box((1, 0), (2, 3))) == "[1:3, 0:3]"


def test_what_is_no_box_is_refused() -> None:
    with pytest.raises(UsageError, match="2 offsets and 1 lengths"):
        Box((0, 0), (1,))
    with pytest.raises(UsageError, match="whole numbers from 0"):
        Box((-1,), (1,))
    with pytest.raises(UsageError, match="1 axes and one of 2"):
        Box((0,), (1,)).intersection(Box((0, 0), (1, 1)))
    with pytest.raises(UsageError, match="does not lie in"):
        Box((0,), (3,)).relative_to(Box((0,), (2,)))
    with pytest.raises(UsageError, match="does not lie in"):
        Box((0,), (1,)).relative_to(Box((1,), (2,)))
