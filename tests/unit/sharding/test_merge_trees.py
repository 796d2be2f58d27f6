"""The ranks' trees as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import CorruptionError, ShardMismatch
from tenuto.model import canonical_json
from tenuto.sharding import merge_trees as union_module
from tenuto.sharding.merge_trees import Union, unite
from tenuto.state.encode.flattener import flatten
from tenuto.state.tree import leaf_paths


def of(number: int, **about: Any) -> dict[str, Any]:
    return {"!": "leaf", "n": number, "as": "torch", **about}


def alias(number: int) -> dict[str, Any]:
    return {"!": "alias", "n": number, "as": "torch"}


def mapping(*pairs: tuple[Any, Any], kind: str = "dict", **more: Any) -> dict[str, Any]:
    return {"!": kind, **more, "i": [list(pair) for pair in pairs]}


def module(*pairs: tuple[str, Any], meta: Sequence[Any] = (), name: str = "Stage") -> dict[str, Any]:
    return mapping(*pairs, kind="module", type=name, meta=list(meta))


def optimizer(states: Sequence[tuple[str, Any]], params: Sequence[str], lr: float = 0.1) -> dict[str, Any]:
    groups = [mapping(("lr", lr), ("params", list(params)))]
    inside = mapping(("state", mapping(*states, kind="bypath")), ("param_groups", groups))
    return {"!": "optimizer", "type": "torch.optim.SGD", "v": inside}


def told(found: Union, trees: Sequence[Any]) -> None:
    """Every rank's leaves are the union's at the same paths."""
    assert leaf_paths(found.tree) == found.paths
    for tree, numbers in zip(trees, found.numbers, strict=True):
        assert [found.paths[number] for number in numbers.tolist()] == leaf_paths(tree)


def test_equal_trees_stay_as_they_are_and_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = mapping(("b", of(1)), ("a", of(0)))
    monkeypatch.setattr(union_module, "_Merger", None)
    walked: list[Any] = []
    monkeypatch.setattr(canonical_json, "dumps", lambda tree: walked.append(tree) or b"")
    found = unite([tree] * 1000)
    assert found.tree is tree and len(walked) == 1
    assert found.numbers[999].tolist() == [0, 1] and found.paths == ["a", "b"]
    assert unite([mapping(("a", of(0))), None], ["x", "x"]).paths == ["a"] and len(walked) == 1, "digests are believed"


def test_trees_that_are_spelled_alike_are_equal() -> None:
    one, other = mapping(("a", of(0))), mapping(("a", of(0)))
    assert unite([one, other]).tree is one


def test_pipeline_stages() -> None:
    """Modules, optimizer states and parameter groups of stages are put together."""
    first = mapping(
        ("model", module(("embed", of(0)), ("layers.0.w", of(1)), meta=[["layers.0", 1]])),
        ("optim", optimizer([("model/layers.0.w", mapping(("m", of(2))))], ["model/embed", "model/layers.0.w"])),
        ("epoch", 3),
    )
    last = mapping(
        ("model", module(("layers.1.w", of(0)), ("head", of(1)), meta=[["head", 2]])),
        ("optim", optimizer([("model/layers.1.w", mapping(("m", of(2))))], ["model/layers.1.w", "model/head"])),
        ("epoch", 3),
    )
    trees = [first, last, first]
    found = unite(trees)
    told(found, trees)
    assert found.paths == [
        "model/embed",
        "model/layers.0.w",
        "model/layers.1.w",
        "model/head",
        "optim/state/model/layers.0.w/m",
        "optim/state/model/layers.1.w/m",
    ]
    model, optim = found.tree["i"][0][1], found.tree["i"][1][1]
    assert model["meta"] == [["layers.0", 1], ["head", 2]]
    assert optim["v"]["i"][1][1][0]["i"] == [
        ["lr", 0.1],
        ["params", ["model/embed", "model/layers.0.w", "model/layers.1.w", "model/head"]],
    ]
    assert found.numbers[0] is found.numbers[2]
    assert first["i"][0][1]["i"][1] == ["layers.0.w", of(1)], "what the ranks said is not changed"


def test_aliases_follow_their_leaves() -> None:
    one = mapping(("m", module(("a", of(0)))), ("tied", mapping(("a", alias(0)))))
    other = mapping(("m", module(("b", of(0)), ("a", of(1)))), ("tied", mapping(("b", alias(0)), ("a", alias(1)))))
    found = unite([one, other])
    told(found, [one, other])
    assert found.paths == ["m/a", "m/b"]
    assert found.tree["i"][1][1]["i"] == [["a", alias(0)], ["b", alias(1)]]


def test_keys_of_every_type_keep_theirs() -> None:
    one, other = mapping((1, of(0)), ("1", of(1))), mapping((None, of(0)), (1, of(1)))
    assert unite([one, other]).paths == ["#i:1", "1", "#n"]


@pytest.mark.parametrize(
    ("one", "other", "where", "what"),
    [
        (mapping(("epoch", 3)), mapping(("epoch", 4)), "epoch", "3 on rank 0, 4 on rank 1"),
        (mapping(("x", 1)), mapping(("x", True)), "x", "1 on rank 0, true on rank 1"),
        (mapping(("x", 1)), mapping(("x", 1.0)), "x", "1 on rank 0, 1.0 on rank 1"),
        (mapping(("x", 0.0)), mapping(("x", -0.0)), "x", "-0.0 on rank 1"),
        (mapping(("x", [1, 2])), mapping(("x", [1])), "x", r"\[1,2\] on rank 0"),
        (mapping(("w", of(0)), ("x", [1, 2])), mapping(("w", of(0)), ("x", [1, 3])), "x/1", "2 on rank 0, 3 on rank 1"),
        (mapping(("x", mapping(("a", 1)))), mapping(("x", mapping(("b", 1)))), "x/a", "on rank 0, and not on rank 1"),
        (mapping(("x", 1)), mapping(("x", of(0))), "x", "rank 0 no tensor, rank 1 holds a tensor"),
        (mapping(("a", of(0)), ("x", of(1))), mapping(("a", of(0)), ("x", alias(0))), "x", "rank 1 ties it"),
        (mapping(("x", of(0))), mapping(("x", of(0, param=True))), "x", "tensor of its own"),
        (module(("a", of(0))), module(("a", of(0)), name="Other"), "#value", "differs"),
        (
            module(("a", of(0)), meta=[["a", 1]]),
            module(("a", of(0)), meta=[["a", 2]]),
            "#value .metadata of 'a'.",
            "1 on",
        ),
        (optimizer([], []), optimizer([], [], 0.2), "param_groups/0/lr", "0.1 on rank 0, 0.2 on rank 1"),
        (
            mapping(("a", of(0)), ("b", of(1)), ("t", alias(0))),
            mapping(("a", of(0)), ("b", of(1)), ("t", alias(1))),
            "t",
            "rank 0 ties it to another",
        ),
        (
            mapping(("v", of(0)), ("x", mapping(("a", 1), kind="namedtuple", type="P"))),
            mapping(("v", of(0)), ("x", mapping(("b", 1), kind="namedtuple", type="P"))),
            "x",
            "differs",
        ),
        (
            mapping(("x", {"!": "tuple", "i": [1]})),
            mapping(("x", {"!": "deque", "maxlen": None, "i": [1]})),
            "x",
            "differs",
        ),
    ],
)
def test_what_differs_is_named(one: Any, other: Any, where: str, what: str) -> None:
    with pytest.raises(ShardMismatch, match=f"^{where}.*{what}") as caught:
        unite([one, other])
    assert caught.value.hint


def test_the_ranks_that_differ_are_named() -> None:
    same, other = mapping(("epoch", 3)), mapping(("epoch", 4))
    with pytest.raises(ShardMismatch, match="3 on ranks 0-1 and 3, 4 on rank 2") as caught:
        unite([same, same, other, same])
    assert caught.value.subject == "epoch" and "tenuto.per_rank" in str(caught.value)


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(ShardMismatch, match=r"x{39}… on rank 0"):
        unite([mapping(("a", "x" * 1000)), mapping(("a", "y" * 1000))])


def test_trees_that_no_rank_can_have_are_refused() -> None:
    for bad in (
        mapping(("a", of(1))),
        mapping(("a", of(0)), ("b", of(0))),
        mapping(("a", alias(0))),
        mapping(("a", of(True))),
    ):
        with pytest.raises(CorruptionError):
            unite([mapping(("z", of(0))), bad])


names = st.sampled_from(["a", "b", "c", 1, None])
states = st.recursive(
    st.just("tensor"), lambda below: st.dictionaries(names, below, max_size=3) | st.lists(below, min_size=2, max_size=2)
)


def built(shape: Any) -> Any:
    if shape == "tensor":
        return np.zeros(1)
    return [*map(built, shape)] if isinstance(shape, list) else {key: built(value) for key, value in shape.items()}


@settings(derandomize=True, deadline=None, max_examples=75)
@given(st.lists(st.dictionaries(names, states, max_size=3), min_size=1, max_size=4))
def test_the_union_has_every_ranks_leaves(shapes: list[Any]) -> None:
    """Of states as they are flattened; where two ranks cannot be one, that is said."""
    trees = [flatten(built(shape)).tree for shape in shapes]
    try:
        found = unite(trees)
    except ShardMismatch as error:
        assert error.subject is not None
        return
    told(found, trees)
    assert set(found.paths) == {path for tree in trees for path in leaf_paths(tree)}
    again = unite([found.tree] * 2)
    assert again.tree is found.tree
