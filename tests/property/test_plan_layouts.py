"""Plans for random layouts against a reference that marks every item of small leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.sharded_layouts import Array, Layout, arrays, counts, layouts, leaf_lists
from tenuto.errors import ShardMismatch
from tenuto.sharding.coverage import check_coverage
from tenuto.sharding.holdings import Holdings
from tenuto.sharding.reshard import BoxColumns, Reshard, intersect, pieces, reshard, runs
from tenuto.sharding.slices import blocks
from tenuto.sharding.write_plan import assign, written

many = settings(derandomize=True, deadline=None, max_examples=50)
HOW: dict[str, dict[str, Any]] = {
    "balanced": {"chunk_bytes": 2},
    "layer": {},
    "tensor": {},
    "size": {"size": 12},
    "one": {},
}


def planned(held: Holdings, strategy: str, ranks: int) -> Holdings:
    how = dict(HOW[strategy])
    if strategy == "layer":
        how["layer"] = np.arange(held.leaves) // 2
    made = assign(held, world_size=ranks, strategy=strategy, **how)  # type: ignore[arg-type]
    again = assign(held, world_size=ranks, strategy=strategy, **how)  # type: ignore[arg-type]
    assert all(np.array_equal(getattr(made, name), getattr(again, name)) for name in made.__slots__)
    assert np.array_equal(held.rank[made.holding], made.rank)
    found = written(held, made)
    for at in range(len(made)):
        holding = int(made.holding[at])
        assert held.box(holding).contains(found.box(at)), "a rank writes what it does not hold"
        assert found.row[at] == at - found.of(int(made.rank[at])).start
    return found


@many
@given(layouts(), st.sampled_from(sorted(HOW)))
def test_every_item_is_written_once(layout: Layout, strategy: str) -> None:
    found = planned(layout.holdings(), strategy, layout.ranks)
    assert all((one == 1).all() for one in counts(found))
    assert set(found.leaf.tolist()) == set(range(found.leaves)), "a leaf without items has a row as well"
    empty = (found.shape == 0).any(axis=1)
    assert sorted(found.leaf[empty].tolist()) == [n for n, shape in enumerate(layout.shapes) if 0 in shape]
    check_coverage(found)
    if strategy == "one":
        first = {(leaf, box): holders[0] for leaf, some in enumerate(layout.boxes) for box, holders in some}
        for at in np.flatnonzero(~empty).tolist():
            assert found.rank[at] == first[int(found.leaf[at]), found.box(at)]


@many
@given(layouts(), st.data())
def test_one_wrong_item_is_found_and_named(layout: Layout, data: st.DataObject) -> None:
    """The first in row-major order, and how often it is there, after boxes were moved, lost, doubled or resized."""
    found = planned(layout.holdings(), "one", layout.ranks)
    offsets, shape, leaf = found.offsets.copy(), found.shape.copy(), found.leaf
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(leaf) - 1))
        axes = int(found.ndim[leaf[at]])
        if not axes:
            continue
        axis = data.draw(st.integers(0, axes - 1))
        whole = int(found.whole[leaf[at], axis])
        low = data.draw(st.integers(0, whole))
        offsets[at, axis], shape[at, axis] = low, data.draw(st.integers(0, whole - low))
    changed = replace(found, offsets=offsets, shape=shape)
    if data.draw(st.booleans()):
        kept = np.arange(len(leaf)) != data.draw(st.integers(0, len(leaf) - 1))
        changed = lines(changed, kept)
    seen = counts(changed)
    there = set(changed.leaf.tolist())
    wrong = [number for number, one in enumerate(seen) if (one != 1).any()]
    if len(there) < found.leaves:
        with pytest.raises(ShardMismatch, match="no rank holds any of it"):
            check_coverage(changed)
    elif not wrong:
        check_coverage(changed)
    else:
        with pytest.raises(ShardMismatch) as caught:
            check_coverage(changed)
        one = seen[wrong[0]]
        place = np.unravel_index(int(np.argmax(one.reshape(-1) != 1)), one.shape) if one.ndim else ()
        assert caught.value.subject == f"leaf/{wrong[0]}"
        named = f"item [{', '.join(map(str, place))}]" if one.ndim else "its only item"
        assert named in caught.value.message
        times = int(one[place])
        assert ("is missing" if not times else f"is there {times} times") in caught.value.message
        assert caught.value.hint


def lines(held: Holdings, kept: Array) -> Holdings:
    columns = ("leaf", "rank", "row", "offsets", "shape", "itemsize")
    return replace(held, **{name: getattr(held, name)[kept] for name in columns})


def contents(held: Holdings, whole: list[Array]) -> list[Array]:
    return [whole[int(held.leaf[at])][held.box(at).slices].copy() for at in range(len(held))]


def moved(plan: Reshard, saved: Holdings, wanted: Holdings, have: list[Array]) -> list[Array]:
    """The wanted boxes' contents, put together of pieces; each item exactly once."""
    sizes = wanted.nbytes().tolist()
    out, seen = [np.zeros(size, np.uint8) for size in sizes], [np.zeros(size, np.int64) for size in sizes]
    found = pieces(plan, saved, wanted)
    count, length = runs(plan, saved, wanted)
    assert np.array_equal(np.bincount(found.line, minlength=len(plan)), count)
    assert np.array_equal(length[found.line], found.length)
    for line, source, target, nbytes in zip(found.line, found.source, found.target, found.length, strict=True):
        data = np.frombuffer(have[int(plan.saved[line])].tobytes(), np.uint8)
        to = int(plan.wanted[line])
        out[to][target : target + nbytes] = data[source : source + nbytes]
        seen[to][target : target + nbytes] += 1
    assert all((one == 1).all() for one in seen)
    return [
        data.view(have_of.dtype).reshape(wanted.box(at).shape)
        for at, (data, have_of) in enumerate(zip(out, dtypes_of(wanted, have, plan), strict=True))
    ]


def dtypes_of(wanted: Holdings, have: list[Array], plan: Reshard) -> list[Array]:
    names = {1: np.uint8, 2: np.int16, 4: np.float32, 8: np.float64}
    return [np.zeros(0, names[int(size)]) for size in wanted.itemsize]


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[Layout, Layout]:
    leaves = draw(leaf_lists)
    return draw(layouts(leaves)), draw(layouts(leaves))


@many
@given(two_layouts())
def test_a_layout_becomes_another_and_itself_again(both: tuple[Layout, Layout]) -> None:
    one, other = both
    whole = arrays(one)
    saved = planned(one.holdings(), "balanced", one.ranks)
    wanted = other.holdings()
    plan = reshard(saved, wanted)
    assert np.array_equal(np.lexsort((plan.saved, plan.wanted)), np.arange(len(plan)))
    there = moved(plan, saved, wanted, contents(saved, whole))
    assert all(map(np.array_equal, there, contents(wanted, whole)))
    # What the other ranks hold is saved by them, and read back by the first ones.
    made = assign(wanted, world_size=other.ranks)
    saved_again = written(wanted, made)
    parts = [
        there[int(made.holding[at])][saved_again.box(at).relative_to(wanted.box(int(made.holding[at]))).slices]
        for at in range(len(made))
    ]
    back = moved(reshard(saved_again, saved), saved_again, saved, parts)
    assert all(map(np.array_equal, back, contents(saved, whole)))


@many
@given(two_layouts(), st.sampled_from([8, 64, 1 << 20]))
def test_regions_read_by_blocks_are_the_same(both: tuple[Layout, Layout], block_bytes: int) -> None:
    """The way by which a lazy reader reads: blocks of a region, put into a view of the wanted box."""
    one, other = both
    saved, wanted = planned(one.holdings(), "one", one.ranks), other.holdings()
    have = contents(saved, arrays(one))
    want = contents(wanted, arrays(one))
    out = [np.zeros_like(array) for array in want]
    plan = reshard(saved, wanted)
    for at in range(len(plan)):
        taken, data = plan.overlap(at, saved), have[int(plan.saved[at])]
        target = out[int(plan.wanted[at])][(*taken.where, ...)]
        paces = tuple(stride * data.itemsize for stride in taken.region.strides)
        for block in blocks(taken.region, data.itemsize, block_bytes=block_bytes, gap_bytes=16):
            raw = data.tobytes()[block.start : block.stop]
            target[block.where] = np.ndarray(block.counts, data.dtype, raw, 0, paces)
    assert all(map(np.array_equal, out, want))


@many
@given(two_layouts(), st.data())
def test_what_the_checkpoint_lacks_is_named(both: tuple[Layout, Layout], data: st.DataObject) -> None:
    one, other = both
    saved, wanted = planned(one.holdings(), "one", one.ranks), other.holdings()
    lost = data.draw(st.integers(0, len(saved) - 1))
    assume(not saved.box(lost).empty)
    less = lines(saved, np.arange(len(saved)) != lost)
    box, leaf = saved.box(lost), int(saved.leaf[lost])
    lacking = [
        (at, met)
        for at in range(len(wanted))
        if wanted.leaf[at] == leaf and (met := wanted.box(at).intersection(box)) is not None
    ]
    with pytest.raises(ShardMismatch, match="is not in the checkpoint") as caught:
        reshard(less, wanted)
    at, met = lacking[0]
    assert caught.value.subject == f"leaf/{leaf}"
    named = f"item [{', '.join(map(str, met.offsets))}]" if met.offsets else "its only item"
    assert named in caught.value.message and f"rank {wanted.rank[at]} wants {wanted.box(at)}" in caught.value.message


@st.composite
def any_boxes(draw: st.DrawFn, groups: int, axes: int, extent: int) -> BoxColumns:
    number = draw(st.integers(0, 12))
    group, offsets, shape = [], [], []
    for _ in range(number):
        low = [draw(st.integers(0, extent - 1)) for _ in range(axes)]
        group.append(draw(st.integers(0, groups - 1)))
        offsets.append(low)
        shape.append([draw(st.integers(1, extent - one)) for one in low])
    return BoxColumns(
        np.array(group, np.int64),
        np.array(offsets, np.int64).reshape(-1, axes),
        np.array(shape, np.int64).reshape(-1, axes),
    )


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 9, 40]))
def test_all_pairs_that_meet_are_found(data: st.DataObject, groups: int, axes: int, extent: int) -> None:
    """Also of boxes that overlap, as no layout's do."""
    one, other = (data.draw(any_boxes(groups, axes, extent)) for _ in range(2))
    who, which = intersect(one, other, np.full((groups, axes), extent))
    low = np.maximum(one.offsets[None], other.offsets[:, None])
    high = np.minimum((one.offsets + one.shape)[None], (other.offsets + other.shape)[:, None])
    expected = (low < high).all(axis=2) & (one.group[None] == other.group[:, None])
    assert list(zip(who.tolist(), which.tolist(), strict=True)) == [
        tuple(pair) for pair in np.argwhere(expected).tolist()
    ]
