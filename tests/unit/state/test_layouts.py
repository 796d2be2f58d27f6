"""Every way to say where a local tensor lies: its parts, laid where they belong, are what it was cut from."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenuto
from tenuto.errors import UsageError
from tenuto.state.declarations import ShardLayout, cross_layout, merge_spans, part_view

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def laid(layout: ShardLayout, local: Any, into: Any) -> Any:
    """`into` with the local array's parts in it."""
    assert local.shape == layout.local
    for part in layout.parts:
        index = tuple(slice(at, at + length) for at, length in zip(part.offsets, part.shape, strict=True))
        piece = part_view(local, part)
        assert piece.base is not None or piece is local
        into[index] = piece.reshape(part.shape)
    return into


def numbered(shape: tuple[int, ...]) -> Any:
    return np.arange(1, prod(shape) + 1).reshape(shape)


@given(SHAPES, st.data())
@settings(max_examples=100)
def test_a_flat_range_is_the_same_elements_in_boxes(whole: tuple[int, ...], data: st.DataObject) -> None:
    total = prod(whole)
    begin = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - begin))
    full = numbered(whole)
    shard = tenuto.flat(full.reshape(-1)[begin : begin + length], whole=whole, begin=begin)
    expected = np.where((full > begin) & (full <= begin + length), full, 0)
    assert np.array_equal(laid(shard.layout, shard.value, np.zeros_like(full)), expected)
    assert len(shard.layout.parts) <= 2 * len(whole) - 1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), SHAPES, st.data())
@settings(max_examples=50)
def test_fused_parameters_are_cut_each_by_itself(
    widths: list[int], of: int, shape: tuple[int, ...], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    sizes = [width * of for width in widths]
    whole = list(shape)
    whole[dim] = sum(sizes)
    full = numbered(tuple(whole))
    found = np.zeros_like(full)
    for rank in range(of):
        pieces = [np.split(one, of, dim)[rank] for one in np.split(full, np.cumsum(sizes)[:-1], dim)]
        shard = tenuto.fused(np.concatenate(pieces, dim), sizes=sizes, rank=rank, of=of, dim=dim)
        assert shard.layout.whole == full.shape and len(shard.layout.parts) <= len(sizes)
        before = int((found != 0).sum())
        laid(shard.layout, shard.value, found)
        assert int((found != 0).sum()) == before + shard.value.size
    assert np.array_equal(found, full)


@given(SHAPES, st.data())
@settings(max_examples=50)
def test_spans_along_several_dimensions_cross(whole: tuple[int, ...], data: st.DataObject) -> None:
    spans = {}
    for dim in data.draw(st.sets(st.integers(0, len(whole) - 1))):
        chosen = data.draw(st.permutations(range(whole[dim])))[: data.draw(st.integers(0, whole[dim]))]
        spans[dim] = [(one, one + 1) for one in chosen]
    layout = cross_layout(whole, spans)
    full = numbered(whole)
    every = [
        [one for span in spans.get(dim, [(0, length)]) for one in range(*span)] for dim, length in enumerate(whole)
    ]
    local = full[np.ix_(*every)]
    assert local.shape == layout.local
    expected = np.where(np.isin(full, local), full, 0)
    assert np.array_equal(laid(layout, local, np.zeros_like(full)), expected)


def test_spans_that_touch_are_one() -> None:
    assert merge_spans([(0, 2), (2, 2), (2, 5), (7, 8), (5, 7)]) == [(0, 5), (7, 8), (5, 7)]


def test_the_three_ways_of_a_shard() -> None:
    full = numbered((4, 6))
    one = tenuto.shard(full[2:], whole=(4, 6), offsets=(2, 0))
    assert one.layout == tenuto.shard(full[2:], dim=0, rank=1, of=2).layout
    two = tenuto.shard(
        full[:, [0, 1, 4, 5]],
        whole=(4, 6),
        boxes=[((slice(None), slice(2)), (0, 0)), ((slice(4), slice(2, 4)), (0, 4))],
    )
    assert np.array_equal(laid(two.layout, two.value, np.zeros_like(full)), np.where((full - 1) % 6 // 2 == 1, 0, full))
    stacked = tenuto.shard(full, whole=(3, 4, 6), offsets=(1, 0, 0))
    assert stacked.layout.parts[0].shape == (1, 4, 6)
    assert tenuto.shard(full[4:], whole=(4, 6), offsets=(4, 0)).layout.parts == ()


WRONG = {
    "nothing said": lambda x: tenuto.shard(x),
    "two ways": lambda x: tenuto.shard(x, whole=(8, 3), offsets=(0, 0), dim=0, rank=0, of=2),
    "beyond the end": lambda x: tenuto.shard(x, whole=(5, 3), offsets=(2, 0)),
    "before the start": lambda x: tenuto.shard(x, whole=(5, 3), offsets=(-1, 0)),
    "too few offsets": lambda x: tenuto.shard(x, whole=(5, 3), offsets=(0,)),
    "fewer dimensions": lambda x: tenuto.shard(x, whole=(12,), offsets=(0,)),
    "half of the tensor": lambda x: tenuto.shard(x, whole=(9, 3), boxes=[(slice(2), (0, 0))]),
    "an element twice": lambda x: tenuto.shard(x, whole=(9, 3), boxes=[(slice(2), (0, 0)), (slice(1, 3), (4, 0))]),
    "one place twice": lambda x: tenuto.shard(x, whole=(9, 3), boxes=[(slice(2), (0, 0)), (slice(2, 4), (1, 0))]),
    "with a step": lambda x: tenuto.shard(x, whole=(9, 3), boxes=[(slice(0, 4, 2), (0, 0))]),
    "sizes that do not fit": lambda x: tenuto.fused(x, sizes=(4, 2), rank=0, of=2),
    "sizes that do not divide": lambda x: tenuto.fused(x, sizes=(5, 3), rank=0, of=2),
    "no such rank": lambda x: tenuto.shard(x, dim=0, rank=2, of=2),
    "no such dimension": lambda x: tenuto.shard(x, dim=2, rank=0, of=2),
    "not flat": lambda x: tenuto.flat(x, whole=(4, 3), begin=0),
    "flat beyond the end": lambda x: tenuto.flat(x.reshape(-1), whole=(4, 3), begin=1),
    "no tensor": lambda x: tenuto.shard(5, whole=(1,), offsets=(0,)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        WRONG[name](np.zeros((4, 3)))
