"""Leaves of a tree: the usual way finds what the strict way finds, and leaves the rest to it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import CorruptionError, TenutoError
from tenuto.state.encode.flattener import flatten
from tenuto.state.tree import _slow_leaf_nodes, _usual, leaf_nodes, leaf_paths

keys = st.sampled_from(
    ["a", "b", "w0", "a/b", "", "#x", "~", "é", "@", "\ud800", 3, None, True, 1.5, ["t"], {"!": "tuple"}]
)
leaves = st.builds(
    lambda kind, number: {"!": kind, "n": number, "as": "numpy"},
    st.sampled_from(["leaf", "leaf", "leaf", "alias"]),
    st.sampled_from([0, 1, 2, 3, True, -1, "0"]),
)
atoms = st.sampled_from(
    [None, 1, 1.5, "text", {"!": "float", "v": "nan"}, {}, {"!": 3}, {"!": ["leaf"]}, {"!": "unknown", "i": 3}]
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = (
        st.lists(st.tuples(keys, inner).map(list), max_size=4) | st.just("ab") | st.just([["a"]]) | st.just([{"a": 1}])
    )
    many = st.lists(inner, min_size=17, max_size=18).map(lambda some: [[f"k{n}", one] for n, one in enumerate(some)])
    kinds = ["dict", "ordereddict", "module", "bypath", "namedtuple", "sparse"]
    named = st.builds(lambda kind, found: {"!": kind, "i": found}, st.sampled_from(kinds), pairs | many)
    rows = st.lists(inner, max_size=3)
    wrapped = st.builds(
        lambda kind, one: {"!": kind, "v": one}, st.sampled_from(["object", "optimizer", "private"]), inner
    )
    ordered = st.builds(
        lambda kind, found: {"!": kind, "i": found}, st.sampled_from(["tuple", "deque", "list", "set"]), rows
    )
    return named | rows | wrapped | ordered | st.just({"!": "dict"}) | st.just({"!": "object"})


trees = st.recursive(leaves | atoms, containers, max_leaves=12)


@settings(derandomize=True, deadline=None, max_examples=125)
@given(trees)
def test_the_usual_way_finds_what_the_strict_way_finds(tree: Any) -> None:
    before = copy.deepcopy(tree)
    usual = _usual(tree)
    try:
        strict = _slow_leaf_nodes(tree)
    except TenutoError:
        assert usual is None
        with pytest.raises(TenutoError):
            leaf_nodes(tree)
    else:
        assert usual is None or usual == strict
        assert leaf_nodes(tree) == strict
    assert tree == before


def test_it_is_the_usual_way_that_reads_a_usual_tree() -> None:
    state = {
        "model": {f"layers.{n}.weight": np.ones(1) for n in range(40)},
        "optimizer": {
            "state": {n: {"exp_avg": np.ones(1)} for n in range(3)},
            "groups": [{"lr": 0.1, "w": np.ones(1)}],
        },
        "t": (np.ones(1), 5),
    }
    tree = flatten(state).tree
    assert _usual(tree) == _slow_leaf_nodes(tree)
    assert leaf_paths(tree) == [spec.path for spec in flatten(state).specs]


def test_a_deep_tree_is_refused_without_a_deep_stack() -> None:
    deep: Any = {"!": "leaf", "n": 0, "as": "numpy"}
    for _ in range(100_000):
        deep = [deep]
    assert _usual(deep) is None
    with pytest.raises(CorruptionError, match="deep"):
        leaf_nodes(deep)
