"""Resharding and coverage at their edges: what is refused, sizes that overflow, and many boxes at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tenuto.errors import ShardMismatch
from tenuto.model.leaf import Box
from tenuto.sharding import coverage
from tenuto.sharding.coverage import check_coverage
from tenuto.sharding.holdings import Holdings, gather, shards
from tenuto.sharding.reshard import pieces, reshard, runs

F32 = ("float32", 4)


def one(whole: tuple[int, ...], *boxes: Box, dtype: tuple[str, int] = F32, leaf: int = 0, leaves: int = 1) -> Holdings:
    """Box r of one leaf is rank r's."""
    said = [shards([leaf], [box], [whole], [dtype]) for box in boxes]
    return gather(said, leaves=leaves, paths=["model/w", "model/v"][:leaves])


def halves(rows: int) -> Holdings:
    return one((rows, 4), Box((0, 0), (rows // 2, 4)), Box((rows // 2, 0), (rows - rows // 2, 4)))


@pytest.mark.parametrize(
    ("saved", "what"),
    [
        (one((8, 4), Box.whole((8, 4))), r"of shape \(8, 4\) in the checkpoint, and of \(6, 4\) here"),
        (one((6, 4, 1), Box.whole((6, 4, 1))), r"of shape \(6, 4, 1\) in the checkpoint"),
        (one((6, 4), Box.whole((6, 4)), dtype=("float64", 8)), "items of 8 bytes in the checkpoint, and of 4 here"),
        (gather([shards([], [], [], [])], leaves=0), "the checkpoint has no such leaf"),
        (one((6, 4), Box((0, 0), (6, 3))), r"item \[0, 3\] is not in the checkpoint; rank 0 wants \[0:3, 0:4\]"),
        (one((6, 4), Box.whole((6, 4)), Box((2, 1), (1, 1))), r"item \[2, 1\] is 2 times in the checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(saved: Holdings, what: str) -> None:
    with pytest.raises(ShardMismatch, match=what) as caught:
        reshard(saved, halves(6))
    assert caught.value.subject == "model/w"


def test_only_what_one_rank_wants() -> None:
    saved, wanted = halves(6), one((6, 4), Box((2, 1), (2, 2)))
    plan = reshard(saved, wanted)
    assert (plan.wanted.tolist(), plan.saved.tolist()) == ([0, 0], [0, 1])
    assert plan.saved_offsets.tolist() == [[2, 1], [0, 1]] and plan.wanted_offsets.tolist() == [[0, 0], [1, 0]]
    assert plan.shape.tolist() == [[1, 2], [1, 2]]


def test_a_leaf_that_is_not_wanted_is_not_looked_at() -> None:
    saved = one((6, 4), Box.whole((6, 4)), leaf=1, leaves=2)
    wanted = one((6, 4), Box.whole((6, 4)), leaf=1, leaves=2)
    assert len(reshard(saved, wanted)) == 1
    assert len(reshard(saved, gather([shards([], [], [], [])], leaves=2))) == 0


def test_a_cut_along_the_first_axis_is_one_run() -> None:
    saved, wanted = halves(6), one((6, 4), Box((1, 0), (4, 4)))
    plan = reshard(saved, wanted)
    assert [column.tolist() for column in runs(plan, saved, wanted)] == [[1, 1], [32, 32]]
    found = pieces(plan, saved, wanted)
    assert (found.source.tolist(), found.target.tolist(), found.length.tolist()) == ([16, 0], [0, 32], [32, 32])
    assert all(plan.overlap(line, saved).region.is_run for line in range(len(plan)))


def test_a_cut_along_another_axis_is_a_run_for_each_row() -> None:
    saved, wanted = halves(6), one((6, 4), Box((0, 2), (3, 2)))
    plan = reshard(saved, wanted)
    found = pieces(plan, saved, wanted)
    assert found.source.tolist() == [8, 24, 40] and found.target.tolist() == [0, 8, 16] and len(found) == 3


def grid(leaves: int, rows: int, columns: int, whole: tuple[int, int]) -> Holdings:
    """Every leaf cut into rows x columns boxes, as even as can be, all on one rank."""
    down, across = (
        np.arange(count + 1) * length // count for count, length in zip((rows, columns), whole, strict=True)
    )
    row, column = np.divmod(np.arange(rows * columns), columns)
    offsets = np.stack([down[row], across[column]], axis=1)
    shape = np.stack([down[row + 1], across[column + 1]], axis=1) - offsets
    boxes = rows * columns
    return Holdings(
        leaf=np.repeat(np.arange(leaves), boxes),
        rank=np.zeros(leaves * boxes, np.int32),
        row=np.arange(leaves * boxes),
        offsets=np.tile(offsets, (leaves, 1)),
        shape=np.tile(shape, (leaves, 1)),
        itemsize=np.full(leaves * boxes, 4),
        whole=np.tile([whole], (leaves, 1)),
        ndim=np.full(leaves, 2),
    )


def test_many_boxes_of_large_leaves() -> None:
    """Also where the leaves together have more items than can be counted through at once."""
    held = grid(50, 40, 25, (1 << 26, 1 << 26))
    check_coverage(held)
    shape = held.shape.copy()
    shape[33_333, 1] -= 1
    place = held.offsets[33_333] + [0, shape[33_333, 1]]
    with pytest.raises(ShardMismatch, match=rf"leaf 33: item \[{place[0]}, {place[1]}\] .* is missing"):
        check_coverage(replace(held, shape=shape))
    plan = reshard(held, grid(50, 10, 50, (1 << 26, 1 << 26)))
    assert len(plan) == 50 * 40 * 50


def test_leaves_are_counted_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    held = grid(9, 3, 2, (6, 4))
    check_coverage(held)
    monkeypatch.setattr(coverage, "LIMIT", 4 * 80)
    assert len(list(coverage._batches(held.whole + 1))) > 3
    check_coverage(held)
    kept = np.arange(len(held)) != 5 * 6 + 3
    columns: dict[str, Any] = {
        name: getattr(held, name)[kept] for name in ("leaf", "rank", "row", "offsets", "shape", "itemsize")
    }
    with pytest.raises(ShardMismatch, match=r"leaf 5: item \[2, 2\] .* is missing"):
        check_coverage(replace(held, **columns))
    monkeypatch.setattr(coverage, "LIMIT", 40)
    with pytest.raises(ShardMismatch, match="too large"):
        check_coverage(held)


def test_more_axes_than_corners_can_be_counted() -> None:
    axes = coverage.MOST_SPLIT_AXES + 1
    boxes = [Box((0,) * axes, (1,) * axes)]
    with pytest.raises(ShardMismatch, match="divided along 13 axes"):
        check_coverage(one((2,) * axes, *boxes))
