"""Aliases and overlaps judged by columns agree with the judgement of each leaf by itself."""

from __future__ import annotations

import gc
import weakref

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.state.encode.aliasing import Arrangement, Geometry, first_of_each, overlaps
from tenuto.state.encode.flattener import Flattener

GEOMETRIES = [
    Geometry(space, extent, (space, extent, kind))
    for space in ("cpu", "cuda:0")
    for extent in (0, 4, 8)
    for kind in "ab"
]
leaves = st.lists(st.tuples(st.integers(0, 12).map(lambda at: at * 4), st.sampled_from(GEOMETRIES)), max_size=8)


def _firsts(addresses: list[int], geometries: list[Geometry], boundary: int) -> list[int]:
    shared = first_of_each(addresses[:boundary], geometries[:boundary])
    private = first_of_each(addresses[boundary:], geometries[boundary:])
    return [*shared, *(boundary + position for position in private)]


@settings(derandomize=True, max_examples=200)
@given(leaves, st.data())
def test_an_arrangement_holds_exactly_where_each_leaf_by_itself_says_so(
    found: list[tuple[int, Geometry]], data: st.DataObject
) -> None:
    boundary = data.draw(st.integers(0, len(found)))
    addresses, geometries = [at for at, _ in found], [geometry for _, geometry in found]
    firsts = _firsts(addresses, geometries, boundary)
    arrangement = Arrangement(geometries, firsts, boundary)
    moved = data.draw(st.sampled_from([addresses, [at * 7 for at in addresses]]))
    again = [data.draw(st.sampled_from([at, at, at, at + 4, 200])) for at in moved]
    now = _firsts(again, geometries, boundary)
    stored = [position for position, first in enumerate(now) if first == position]
    assert arrangement.holds(again) == (now == firsts and not overlaps(again, geometries, stored))


def test_an_array_that_the_state_replaces_is_freed() -> None:
    state = {"weights": np.ones(1000), "others": [np.ones(10), np.zeros(10)]}
    flattener = Flattener(state)
    flattener.flatten()
    old = weakref.ref(state["weights"])
    state["weights"] = np.zeros(1000)
    gc.collect()
    assert old() is None
    assert flattener.flatten().sources[0] is state["weights"]
    assert flattener.full_walks == 1
