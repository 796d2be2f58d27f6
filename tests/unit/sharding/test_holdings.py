"""What ranks say of their shards, put together: agreement, and boxes that lie in their leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tenuto.errors import ShardMismatch
from tenuto.model.leaf import Box
from tenuto.sharding.holdings import Shards, check, gather, item_name, rank_names, shards

F32 = ("float32", 4)


def row(box: Box, whole: tuple[int, ...], dtype: tuple[str, int] = F32, placement: int = 0, leaf: int = 0) -> Shards:
    return shards([leaf], [box], [whole], [dtype], [placement])


def test_ranks_are_put_together_in_order() -> None:
    said = [
        shards([0, 2], [Box((0,), (2,)), Box((), ())], [(4,), ()], [F32, ("int64", 8)]),
        shards([], [], [], []),
        shards([0, 1], [Box((2,), (2,)), Box((0, 1, 0), (1, 1, 3))], [(4,), (1, 2, 3)], [F32, ("bfloat16", 2)]),
    ]
    held = gather(said, leaves=3, paths=["a", "b", "c"])
    assert len(held) == 4
    assert held.rank.tolist() == [0, 0, 2, 2] and held.row.tolist() == [0, 1, 0, 1]
    assert held.leaf.tolist() == [0, 2, 0, 1]
    assert [held.box(at) for at in range(4)] == [
        Box((0,), (2,)),
        Box((), ()),
        Box((2,), (2,)),
        Box((0, 1, 0), (1, 1, 3)),
    ]
    assert held.itemsize.tolist() == [4, 8, 4, 2] and held.nbytes().tolist() == [8, 8, 8, 6]
    assert held.whole.tolist() == [[4, 1, 1], [1, 2, 3], [1, 1, 1]] and held.ndim.tolist() == [1, 3, 0]
    assert [held.of(rank) for rank in range(3)] == [slice(0, 2), slice(2, 2), slice(2, 4)]
    check(held)


def test_ranks_that_hold_nothing_at_all() -> None:
    held = gather([shards([], [], [], [])] * 2, leaves=0)
    assert len(held) == 0 and held.leaves == 0
    check(held)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (row(Box((0,), (4,)), (8,)), "whole shape"),
        (row(Box((0, 0), (4, 1)), (4, 1)), "whole shape"),
        (row(Box((0,), (4,)), (4,), ("int32", 4)), "dtype"),
        (row(Box((0,), (4,)), (4,), placement=1), "sharded"),
    ],
)
def test_ranks_that_do_not_agree_are_named(other: Shards, what: str) -> None:
    mine = row(Box((0,), (4,)), (4,))
    with pytest.raises(ShardMismatch, match=what) as caught:
        gather([mine, mine, other, mine], leaves=1, paths=["model/w"])
    assert caught.value.subject == "model/w" and caught.value.hint
    assert "rank 2" in caught.value.message and "ranks 0-1 and 3" in caught.value.message


@pytest.mark.parametrize(
    ("box", "whole"),
    [(Box((2,), (3,)), (4,)), (Box((5,), (0,)), (4,)), (Box((0, 0), (1, 3)), (2, 2))],
)
def test_a_box_outside_its_leaf_is_refused(box: Box, whole: tuple[int, ...]) -> None:
    with pytest.raises(
        ShardMismatch, match=r"model/w: rank 1 holds a box at .* does not lie in a leaf of shape"
    ) as caught:
        gather([row(Box.whole(whole), whole), row(box, whole)], leaves=1, paths=["model/w"])
    assert caught.value.subject == "model/w"


def test_a_leaf_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ShardMismatch, match="rank 0 names leaf 3 of 1"):
        gather([row(Box((0,), (4,)), (4,), leaf=3)], leaves=1)


HUGE = 1 << 61


@pytest.mark.parametrize(
    "column",
    [
        {"offsets": [[-1]]},
        {"shape": [[-1]]},
        {"offsets": [[np.iinfo(np.int64).max]], "shape": [[2]]},
        {"whole": [[HUGE]], "shape": [[HUGE]]},
        {"whole": [[-4]]},
        {"itemsize": [-1]},
        {"itemsize": [HUGE]},
        {"leaf": [-1]},
        {"ndim": [0]},
    ],
)
def test_numbers_that_lie_are_refused_before_they_overflow(column: dict[str, Any]) -> None:
    held = gather([row(Box((0,), (4,)), (4,))], leaves=1)
    with pytest.raises(ShardMismatch):
        check(replace(held, **{name: np.array(value, np.int64) for name, value in column.items()}))


def test_ranks_and_items_are_named_as_people_would() -> None:
    assert rank_names([]) == "no rank"
    assert rank_names([3, 3]) == "rank 3"
    assert rank_names([0, 4]) == "ranks 0 and 4"
    assert rank_names([2, 0, 1, 3]) == "ranks 0-3"
    assert rank_names([0, 1, 3, 7]) == "ranks 0-1, 3 and 7"
    assert rank_names(range(0, 100, 2)) == "50 ranks (0, 2, 4, 6, 8, 10, 12, 14, …)"
    assert item_name([1, 2]) == "item [1, 2]"
    assert item_name([]) == "its only item"
