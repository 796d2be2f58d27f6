"""Who writes what: replicas once, evenly, by the strategy asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import ShardMismatch, UsageError
from tenuto.model.leaf import Box
from tenuto.sharding import holdings as cells_module
from tenuto.sharding.coverage import check_coverage
from tenuto.sharding.holdings import Holdings, gather, shards
from tenuto.sharding.write_plan import (
    CHUNK_BYTES,
    HOME_BYTES,
    SMALL_CHUNKS,
    Assignment,
    assign,
    layers,
    poured,
    rounds,
    written,
)

F32 = ("float32", 4)
Held = Sequence[tuple[tuple[int, ...], Sequence[tuple[Box, Sequence[int]]]]]


def world(ranks: int, leaves: Held) -> Holdings:
    """`leaves`: whole shape, and which ranks hold which box."""
    said = []
    for rank in range(ranks):
        rows = [
            (leaf, box, whole)
            for leaf, (whole, boxes) in enumerate(leaves)
            for box, holders in boxes
            if rank in holders
        ]
        said.append(
            shards([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], [F32] * len(rows))
        )
    return gather(said, leaves=len(leaves), paths=[f"w{leaf}" for leaf in range(len(leaves))])


def replicated(ranks: int, shapes: Sequence[tuple[int, ...]]) -> Holdings:
    return world(ranks, [(shape, [(Box.whole(shape), range(ranks))]) for shape in shapes])


def loads(held: Holdings, made: Assignment, ranks: int) -> list[int]:
    check_coverage(written(held, made))
    found = np.zeros(ranks, np.int64)
    np.add.at(found, made.rank, written(held, made).nbytes())
    return [int(one) for one in found]


def lines(held: Holdings, made: Assignment) -> list[tuple[int, int, Box]]:
    """(rank, leaf, box)"""
    found = written(held, made)
    return [(int(found.rank[at]), int(found.leaf[at]), found.box(at)) for at in range(len(made))]


def test_a_large_replica_is_cut_at_whole_chunks() -> None:
    rows = CHUNK_BYTES // 1024
    held = replicated(4, [(rows * 16, 256)])
    made = assign(held, world_size=4)
    assert lines(held, made) == [(rank, 0, Box((rows * 4 * rank, 0), (rows * 4, 256))) for rank in range(4)]
    assert made.of(2) == slice(2, 3)
    assert len(made) == 4


def test_parts_are_chunks_as_far_as_rows_allow() -> None:
    """Rows of 3 KiB meet chunks every 768 KiB."""
    held = replicated(8, [(100_000, 768)])
    made = assign(held, world_size=8)
    nbytes = written(held, made).nbytes()
    assert max(loads(held, made, 8)) <= 1.05 * np.mean(loads(held, made, 8))
    assert all(size % CHUNK_BYTES == 0 for size in nbytes[:-1].tolist())


def test_a_small_replica_stays_in_one_piece() -> None:
    held = replicated(4, [(CHUNK_BYTES // 4,), (5,), ()])
    made = assign(held, world_size=4)
    assert [(leaf, box) for _, leaf, box in sorted(lines(held, made), key=lambda line: line[1])] == [
        (0, Box((0,), (CHUNK_BYTES // 4,))),
        (1, Box((0,), (5,))),
        (2, Box((), ())),
    ]


def test_an_axis_of_one_is_not_what_is_cut() -> None:
    """Layers stacked along a first axis: each rank's box is one layer, cut along the next."""
    held = world(2, [((2, 4096, 1024), [(Box((layer, 0, 0), (1, 4096, 1024)), [0, 1]) for layer in range(2)])])
    assert loads(held, assign(held, world_size=2), 2) == [1 << 24, 1 << 24]


def test_replicas_fill_up_what_shards_leave_uneven() -> None:
    """Rank 0 alone holds 8 MiB; the 24 MiB that all hold go to the others first."""
    mib = 1 << 18
    held = world(4, [((8 * mib,), [(Box((0,), (8 * mib,)), [0])]), ((24 * mib,), [(Box((0,), (24 * mib,)), range(4))])])
    assert loads(held, assign(held, world_size=4), 4) == [8 << 20] * 4


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    st.integers(2, 24),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 700)), min_size=1, max_size=20),
    st.lists(st.integers(1, 200), max_size=300),
)
def test_replicas_of_any_sizes_are_written_evenly(ranks: int, large: list[tuple[int, int]], small: list[int]) -> None:
    """No rank writes over 5 % more than the mean, but for what cannot be cut finer."""
    held = replicated(ranks, [(4096 + rows, columns) for rows, columns in large] + [(one, 64) for one in small])
    made = assign(held, world_size=ranks)
    found = loads(held, made, ranks)
    boxes = [4 * (4096 + rows) * columns for rows, columns in large]
    finest = max(CHUNK_BYTES, 4 * 700, *(nbytes for nbytes in boxes if nbytes < SMALL_CHUNKS * CHUNK_BYTES))
    assert max(found) <= 1.05 * np.mean(found) + finest


def water(ranks: int, holders: Sequence[Sequence[int]], amounts: Sequence[int]) -> list[float]:
    """The most even loads, as if bytes were water: by many moves from the fullest of a set to its emptiest."""
    shares = [dict.fromkeys(some, amount / len(some)) for some, amount in zip(holders, amounts, strict=True)]
    load = [sum(share.get(rank, 0.0) for share in shares) for rank in range(ranks)]
    for _ in range(150):
        for share in shares:
            full = max((rank for rank in share if share[rank] > 0), key=load.__getitem__)
            empty = min(share, key=load.__getitem__)
            step = min(share[full], (load[full] - load[empty]) / 2)
            if step > 0:
                share[full], share[empty] = share[full] - step, share[empty] + step
                load[full], load[empty] = load[full] - step, load[empty] + step
    return load


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(3, 9), st.data())
def test_sets_of_ranks_that_cross_are_evened_out(ranks: int, data: st.DataObject) -> None:
    some = st.sets(st.integers(0, ranks - 1), min_size=1, max_size=4).map(sorted)
    chosen = data.draw(st.lists(st.tuples(some, st.integers(20, 60)), min_size=3, max_size=25))
    held = world(
        ranks,
        [((size * 65536,), [(Box((0,), (size * 65536,)), holders)]) for holders, size in chosen],
    )
    found = loads(held, assign(held, world_size=ranks), ranks)
    best = water(ranks, [holders for holders, _ in chosen], [size * 262144 for _, size in chosen])
    assert max(found) <= 1.05 * max(best) + CHUNK_BYTES


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 200))
def test_what_is_poured_fills_the_lowest_first(loads: list[int], amount: int) -> None:
    found = poured(np.array([loads]), np.array([amount]))[0].tolist()
    expected = list(loads)
    for _ in range(amount):
        expected[expected.index(min(expected))] += 1
    assert sum(found) == amount and min(found) >= 0
    assert sorted(map(sum, zip(loads, found, strict=True))) == sorted(expected)


def test_crossing_sets_take_turns_and_not_too_many() -> None:
    apart = rounds(np.array([0, 1, 2, 3]), np.array([0, 2, 4]))
    assert [one.sets.tolist() for one in apart] == [[0, 1]]
    crossing = rounds(np.array([0, 1, 1, 2, 2]), np.array([0, 2, 4, 5]))
    assert [one.sets.tolist() for one in crossing] == [[2], [0], [1]], "small ones first"
    many = rounds(np.repeat([[0, 1]], 1000, axis=0).reshape(-1), np.arange(0, 2001, 2))
    assert len(many) <= 65 and sum(len(one.sets) for one in many) == 1000


def layered(strategy: str, **more: Any) -> list[tuple[int, int, Box]]:
    """Six leaves of three layers, replicated on two ranks."""
    shapes = [(1 << 20,), (1 << 18,), (1 << 20,), (1 << 18,), (1 << 20,), (1 << 18,)]
    held = replicated(2, shapes)
    made = assign(held, world_size=2, strategy=strategy, **more)  # type: ignore[arg-type]
    loads(held, made, 2)
    return lines(held, made)


def test_layers_stay_together() -> None:
    found = layered("layer", layer=np.array([7, 7, 3, 3, 5, 5]))
    ranks = dict((leaf, rank) for rank, leaf, _ in found)
    assert len(found) == 6
    assert all(ranks[leaf] == ranks[leaf + 1] for leaf in (0, 2, 4))
    assert {*ranks.values()} == {0, 1}


def test_tensors_stay_whole() -> None:
    found = layered("tensor")
    assert len(found) == 6
    mine = [sum(box.size for rank, _, box in found if rank == one) for one in (0, 1)]
    assert max(mine) <= (1 << 20) * 2 + (1 << 18)


def test_parts_have_the_size_that_is_given() -> None:
    found = layered("size", size=1 << 21)
    assert len(found) == 9
    assert all(box.size * 4 <= 1 << 21 for _, _, box in found)
    alone = world(1, [((10, 3), [(Box((0, 0), (10, 3)), [0])])])
    sizes = [box.shape for _, _, box in lines(alone, assign(alone, world_size=1, strategy="size", size=30))]
    assert sizes == [(2, 3)] * 5, "also what one rank holds"
    rows = [box.shape for _, _, box in lines(alone, assign(alone, world_size=1, strategy="size", size=1))]
    assert rows == [(1, 3)] * 10, "never less than a row"


def test_the_lowest_rank_writes_all_that_it_holds() -> None:
    held = world(3, [((4,), [(Box((0,), (2,)), [1, 2]), (Box((2,), (2,)), [2])]), ((3,), [(Box((0,), (3,)), [0, 2])])])
    assert lines(held, assign(held, world_size=3, strategy="one")) == [
        (0, 1, Box((0,), (3,))),
        (1, 0, Box((0,), (2,))),
        (2, 0, Box((2,), (2,))),
    ]


def test_the_input_alone_decides() -> None:
    """Whatever numpy's sorts do with equal keys: a copy, and one whose rows lie elsewhere, give the same."""
    held = replicated(7, [(1000 + at, 300) for at in range(50)])
    first, again = (assign(replace(held, leaf=held.leaf.copy()), world_size=7) for _ in range(2))
    assert lines(held, first) == lines(held, again)


def test_a_leaf_without_items_has_one_row() -> None:
    held = world(
        3, [((0, 4), [(Box((0, 0), (0, 2)), [1, 2]), (Box((0, 2), (0, 2)), [2])]), ((2,), [(Box((0,), (2,)), [0])])]
    )
    assert lines(held, assign(held, world_size=3)) == [(0, 1, Box((0,), (2,))), (1, 0, Box((0, 0), (0, 2)))]


def test_ranks_without_items_of_a_leaf_write_nothing_of_it() -> None:
    held = world(3, [((2,), [(Box((0,), (2,)), [0]), (Box((2,), (0,)), [1, 2])])])
    assert lines(held, assign(held, world_size=3)) == [(0, 0, Box((0,), (2,)))]


def test_nothing_at_all() -> None:
    held = gather([shards([], [], [], [])] * 2, leaves=0)
    for strategy in ("balanced", "tensor", "one"):
        assert len(assign(held, world_size=2, strategy=strategy)) == 0  # type: ignore[arg-type]
    check_coverage(written(held, assign(held, world_size=2)))


def test_boxes_that_overlap_without_being_equal_are_refused() -> None:
    """They are no replicas: nobody could tell whether their bytes are the same."""
    held = world(2, [((4, 4), [(Box((0, 0), (4, 4)), [0]), (Box((2, 0), (2, 4)), [1])])])
    with pytest.raises(ShardMismatch, match=r"item \[2, 0\] .* 2 times.*rank 0 \[0:4, 0:4\] and rank 1 \[2:4, 0:4\]"):
        check_coverage(written(held, assign(held, world_size=2)))


def test_an_overlap_does_not_make_up_for_a_hole() -> None:
    boxes = [(Box((0, 0), (2, 2)), [0]), (Box((1, 0), (2, 2)), [1]), (Box((0, 2), (4, 2)), [2])]
    held = world(3, [((4, 4), boxes), ((4,), [(Box((0,), (4,)), [0])])])
    hole = replace(held, whole=np.array([[3, 4], [4, 1]]), shape=np.minimum(held.shape, [3, 4]))
    found = written(hole, assign(hole, world_size=3))
    with pytest.raises(ShardMismatch, match=r"w0: item \[1, 0\]"):
        check_coverage(found)


def test_a_rank_with_one_box_twice_is_refused() -> None:
    box = Box((0,), (2,))
    held = gather([shards([0, 0], [box, box], [(2,), (2,)], [F32, F32])], leaves=1, paths=["model/w"])
    with pytest.raises(ShardMismatch, match=r"model/w: rank 0 holds the box \[0:2\] twice"):
        assign(held, world_size=1)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"strategy": "even"}, "'even' is not one of balanced, layer"),
        ({"strategy": "layer"}, "needs layer="),
        ({"layer": np.zeros(1, np.int64)}, "needs layer="),
        ({"strategy": "layer", "layer": np.zeros(3, np.int64)}, "needs layer="),
        ({"strategy": "size"}, "needs size="),
        ({"strategy": "size", "size": 0}, "needs size="),
        ({"size": 4}, "needs size="),
        ({"chunk_bytes": 0}, "chunks of 0 bytes"),
        ({"world_size": 1}, "in a world of 1"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        assign(replicated(2, [(4,)]), **{"world_size": 2, **arguments})


def test_sets_whose_marks_collide_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(0, 1), (2, 3), (0, 2), (0, 1), (1, 2, 3)]
    held = world(4, [((64,), [(Box((0,), (64,)), some)]) for some in pairs])
    monkeypatch.setattr(cells_module, "_hashed", lambda value: np.zeros_like(value))
    found = lines(held, assign(held, world_size=4))
    assert all(rank in pairs[leaf] for rank, leaf, _ in found) and len(found) == 5


def test_layers_are_named_by_their_first_number() -> None:
    paths = [
        "m/layers.0.a.1",
        "m/layers.0.b",
        "m/layers.1.a",
        "m/embed.weight",
        "m/embed.bias",
        "#i:3/x",
        "#i:3/y",
        "w",
        "v",
    ]
    assert layers(paths).tolist() == [0, 0, 1, 2, 2, 3, 3, 4, 4]


# -- nodes whose ranks alone find what one of them writes --------------------------------------------------------------


def test_small_boxes_of_several_nodes_are_their_lowest_ranks_and_marked() -> None:
    both, second, large = Box.whole((5,)), Box.whole((7,)), Box.whole((HOME_BYTES // 4 + 1,))
    held = world(
        4,
        [
            ((5,), [(both, range(4))]),
            ((7,), [(second, [2, 3])]),
            (large.shape, [(large, range(4))]),
            ((), [(Box((), ()), [1, 2])]),
        ],
    )
    made = assign(held, world_size=4, nodes=np.array([0, 0, 2, 2]))
    check_coverage(written(held, made))
    found = {leaf: (rank, bool(made.in_home[at])) for at, (rank, leaf, _) in enumerate(lines(held, made))}
    assert (found[0], found[3]) == ((0, True), (1, True))
    assert found[1][0] in (2, 3) and not found[1][1], "one node holds it"
    assert not found[2][1], "more than is small"


@pytest.mark.parametrize("strategy", ["balanced", "tensor", "one"])
def test_on_one_node_the_plan_is_what_it_is_without_nodes(strategy: Any) -> None:
    held = replicated(4, [(3,), (100, 100), (1000, 1000), ()])
    plain, noted = (assign(held, world_size=4, strategy=strategy, nodes=one) for one in (None, np.zeros(4, np.int64)))
    assert lines(held, plain) == lines(held, noted)
    assert not plain.in_home.any() and not noted.in_home.any()


@settings(max_examples=80, derandomize=True, deadline=None)
@given(st.data())
def test_with_nodes_every_item_is_written_once_and_the_marked_are_small(data: Any) -> None:
    ranks = data.draw(st.integers(1, 5))
    shapes = data.draw(
        st.lists(st.sampled_from([(), (0,), (3,), (HOME_BYTES // 4,), (HOME_BYTES // 4 + 1,), (900, 900)]), max_size=6)
    )
    holders = [data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in shapes]
    held = world(ranks, [(shape, [(Box.whole(shape), some)]) for shape, some in zip(shapes, holders, strict=True)])
    nodes = np.array([data.draw(st.integers(0, 2)) for _ in range(ranks)])
    made = assign(
        held, world_size=ranks, nodes=nodes, strategy=data.draw(st.sampled_from(["balanced", "tensor", "one"]))
    )
    boxes = written(held, made)
    check_coverage(boxes)
    for at, (rank, leaf, _) in enumerate(lines(held, made)):
        several = len({int(nodes[one]) for one in holders[leaf]}) > 1
        small = 0 < int(np.prod(shapes[leaf])) * 4 <= HOME_BYTES
        assert bool(made.in_home[at]) == (several and small)
        assert not made.in_home[at] or rank == min(holders[leaf])


def test_nodes_are_those_of_all_ranks() -> None:
    with pytest.raises(UsageError, match="the nodes of 2 ranks in a world of 3"):
        assign(replicated(3, [(3,)]), world_size=3, nodes=np.zeros(2, np.int64))
