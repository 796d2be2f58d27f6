"""Orders of columns: the quick way gives what the plain one does."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.sharding.holdings import renumbered, rising


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5) | st.integers(0, 2**62 - 1)), st.booleans())
def test_equal_numbers_stay_in_order(numbers: list[int], large: bool) -> None:
    key = np.array(numbers if large else [one % 7 for one in numbers], np.int64)
    assert rising(key).tolist() == sorted(range(len(key)), key=key.tolist().__getitem__)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 9)), st.sampled_from([10, 10_000]))
def test_numbers_without_gaps(numbers: list[int], size: int) -> None:
    ranks = {one: place for place, one in enumerate(sorted(set(numbers)))}
    assert renumbered(np.array(numbers, np.int64), size).tolist() == [ranks[one] for one in numbers]
