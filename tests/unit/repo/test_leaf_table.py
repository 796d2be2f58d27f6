"""The leaves of an index behave as the tuple of them would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tenuto.model.leaf import LeafSpec
from tenuto.repo.format.leaf_table import LeafSpecs

LEAVES = (
    LeafSpec("a", "float32", (2, 3)),
    LeafSpec("b", "int64", ()),
    LeafSpec("c", "float32", (0, 4, 5)),
    LeafSpec("d", "int64", (7,), True),
)


@pytest.fixture
def specs() -> LeafSpecs:
    return LeafSpecs(
        ["a", "b", "c", "d"],
        names=["float32", "int64"],
        code=np.array([0, 1, 0, 1]),
        dims=np.array([2, 3, 0, 4, 5, 7]),
        bounds=np.array([0, 2, 2, 5, 6]),
        shared=3,
    )


def test_each_row_is_its_leaf_from_either_end(specs: LeafSpecs) -> None:
    assert len(specs) == 4
    for row in range(-4, 4):
        assert specs[row] == LEAVES[row]
        assert specs[row] is specs[row % 4], "made once"
    for row in (-5, 4, 100):
        with pytest.raises(IndexError):
            specs[row]


def test_slices_are_tuples(specs: LeafSpecs) -> None:
    for cut in (slice(None), slice(1, 3), slice(None, None, -1), slice(-2, None), slice(9, 2)):
        assert specs[cut] == LEAVES[cut]


def test_all_rows_come_in_order_however_many_were_made_before(specs: LeafSpecs) -> None:
    first = specs[2]
    assert list(specs) == list(LEAVES)
    assert list(specs) == list(LEAVES)
    assert specs[2] == first
    assert [spec.private for spec in specs] == [False, False, False, True]


def test_it_equals_what_holds_equal_leaves(specs: LeafSpecs) -> None:
    assert specs == LEAVES and specs == list(LEAVES) and hash(specs) == hash(LEAVES)
    assert specs != LEAVES[:3] and specs != LEAVES[::-1]
    others: list[Any] = [4, None, {*LEAVES}]
    assert all(specs != other for other in others)
    assert LEAVES[1] in specs and LeafSpec("z", "int64", ()) not in specs
    assert specs.index(LEAVES[3]) == 3
    assert repr(specs) == "Specs(4 leaves)"
