"""The columns of an index say what each leaf is, without an object for each."""

from __future__ import annotations

import numpy as np
import pytest

from tenuto.model.leaf import LeafSpec
from tenuto.repo.format.leaf_table import LeafSpecs
from tenuto.state.contract import Rows


@pytest.mark.parametrize(
    "shapes",
    [
        [],
        [()],
        [(), ()],
        [(3,), (4,)],
        [(3, 1), (4, 2), (0, 5)],
        [(3,), (4, 2)],
        [(4, 2), (3,), (1, 2, 3)],
        [(2, 2), (), (3, 3, 3, 3)],
        [(1, 2), (3,), (4, 5, 6), (7, 8)],
    ],
)
def test_forms_are_those_of_the_leaves(shapes: list[tuple[int, ...]]) -> None:
    code = np.arange(len(shapes)) % 2
    specs = LeafSpecs(
        [f"leaf{number}" for number in range(len(shapes))],
        names=["float32", "int8"],
        code=code,
        dims=np.array([length for shape in shapes for length in shape], np.int64),
        bounds=np.cumsum([0, *map(len, shapes)]),
        shared=len(shapes),
    )
    expected = [(("float32", "int8")[number % 2], shape) for number, shape in enumerate(shapes)]
    assert specs.forms() == expected and isinstance(specs, Rows)
    assert list(specs) == [LeafSpec(f"leaf{number}", *form) for number, form in enumerate(expected)]
