"""Marks in the state: shards, replicas, and what belongs to one rank alone; in one process, with arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tenuto
from support.leaf_forms import forms_of
from tenuto.errors import CorruptionError, StateError, StateMismatch, Unserialisable
from tenuto.model import canonical_json
from tenuto.repo.format.leaf_table import LeafTable, leaf_forms
from tenuto.state.encode.flattener import Flattener, flatten
from tenuto.state.restore.match import match_state


def saved(state: Any, private: Any = None) -> dict[str, Any]:
    found = flatten(state, private=private)
    tree, own = (canonical_json.loads(canonical_json.dumps(one)) for one in (found.tree, found.private))
    arrays: dict[int, Any] = {}
    numbers = range(len(found.specs)) if found.leaf is None else found.leaf
    forms = forms_of(found)
    for number, spec, source in zip(numbers, found.specs, found.sources, strict=True):
        whole = arrays.setdefault(number, np.zeros(forms[number][1], forms[number][0]))
        begin = spec.offsets if spec.offsets is not None else (0,) * len(spec.shape)
        whole[tuple(slice(at, at + length) for at, length in zip(begin, spec.shape, strict=True))] = source
    return {"tree": tree, "private": own, "forms": forms, "arrays": arrays}


def load(about: dict[str, Any], into: Any, **how: Any) -> Any:
    prepared = match_state(
        about["tree"], about["private"], LeafTable(about["tree"], about["private"], about["forms"]), into, **how
    )
    for place, (number, sink) in enumerate(prepared.wants):
        box = prepared.boxes[place] if prepared.boxes else None
        piece = about["arrays"][number] if box is None else about["arrays"][number][box.slices]
        sink.fill(np.frombuffer(piece.tobytes(), np.uint8))
    return prepared.apply(), prepared.report


def parts(value: Any) -> Any:
    return tenuto.shard(
        value, whole=(4, 6), boxes=[((slice(None), slice(2)), (0, 0)), ((slice(None), slice(2, 4)), (0, 4))]
    )


def test_a_shard_has_a_row_for_each_of_its_boxes() -> None:
    array = np.arange(16.0).reshape(4, 4)
    found = flatten({"a": np.zeros(2), "x": parts(array), "z": np.ones(1)})
    assert [spec.path for spec in found.specs] == ["a", "x", "x", "z"]
    assert found.leaf == (0, 1, 1, 2) and found.shared == 3 and not found.reports
    one, two = found.specs[1:3]
    assert (one.offsets, one.shape, one.whole, one.placement) == ((0, 0), (4, 2), (4, 6), "box")
    assert (two.offsets, two.shape, two.leaf_shape) == ((0, 4), (4, 2), (4, 6))
    assert np.shares_memory(found.sources[2], array)
    assert leaf_forms(found.tree) == {1: ("float64", (4, 6))}
    assert forms_of(found) == [("float64", (2,)), ("float64", (4, 6)), ("float64", (1,))]


def test_a_state_without_marks_is_what_it_was() -> None:
    found = flatten({"a": np.zeros(2), "b": [np.ones(3)]})
    assert found.leaf is None and found.shared is None
    assert all(
        (spec.offsets, spec.whole, spec.placement, spec.leaf_shape) == (None, None, "whole", spec.shape)
        for spec in found.specs
    )
    assert leaf_forms(found.tree) == {}


def test_the_fingerprint_covers_where_rows_lie() -> None:
    array = np.arange(12.0).reshape(4, 3)
    states = [
        {"x": array},
        {"x": tenuto.replicated(array)},
        *({"x": tenuto.shard(array, whole=(8, 3), offsets=(at, 0))} for at in (0, 4)),
        {"x": tenuto.shard(array, whole=(9, 3), offsets=(0, 0))},
        {"x": tenuto.shard(array[:0], whole=(8, 3), offsets=(8, 0))},
        {"x": tenuto.shard(array[:0], whole=(9, 3), offsets=(9, 0))},
        {"x": tenuto.per_rank(array)},
        {},
    ]
    prints = [flatten(state).fingerprint for state in states]
    assert len(set(prints)) == len(prints)


def test_what_changes_is_seen_again_and_nothing_else() -> None:
    array = np.arange(16.0).reshape(4, 4)
    state: dict[str, Any] = {"x": parts(array), "own": tenuto.per_rank(1), "same": tenuto.replicated({"n": 1})}
    flattener = Flattener(state)
    first = flattener.flatten()
    state["x"], state["own"], state["same"].value["n"] = parts(array + 1), tenuto.per_rank(2), 3
    again = flattener.flatten()
    assert flattener.full_walks == 1 and again.fingerprint == first.fingerprint and again.leaf == first.leaf
    assert again.sources[0][0, 0] == 1 and again.tree != first.tree and again.private != first.private
    for change in (
        {"x": array},
        {"x": tenuto.shard(array, whole=(8, 4), offsets=(0, 0))},
        {"own": 2},
        {"own": tenuto.replicated(2)},
        {"same": {"n": 3}},
    ):
        before, looks = dict(state), flattener.full_walks
        state.update(change)
        assert flattener.flatten().tree == flatten(state).tree
        assert flattener.full_walks == looks + 1 or change.keys() == {"same"}
        assert flattener.flatten().fingerprint == flatten(state).fingerprint
        state.update(before)
        flattener.flatten()


def test_a_shard_takes_its_part_and_a_plain_target_the_whole() -> None:
    array = np.arange(16.0).reshape(4, 4)
    about = saved({"x": parts(array)})
    target = {"x": parts(np.zeros((4, 4)))}
    held = target["x"]
    load(about, target)
    assert target["x"] is held and np.array_equal(held.value, array)
    plain = {"x": np.full((4, 6), -1.0)}
    load(about, plain)
    assert np.array_equal(plain["x"][:, [0, 1, 4, 5]], array) and not plain["x"][:, 2:4].any()
    back = {"x": parts(np.zeros((4, 4)))}
    load(saved(plain), back)
    assert np.array_equal(back["x"].value, array)
    fresh, _ = load(about, None)
    assert np.array_equal(fresh["x"], plain["x"])


def test_shapes_that_differ_are_named() -> None:
    about = saved({"x": parts(np.zeros((4, 4)))})
    with pytest.raises(StateMismatch, match=r"\[4, 6\] in the checkpoint.*\[8, 4\] in the target"):
        load(about, {"x": tenuto.shard(np.zeros((4, 4)), whole=(8, 4), offsets=(0, 0))})
    with pytest.raises(StateMismatch, match=r"\[4, 6\] in the checkpoint.*\[4, 4\] in the target"):
        load(about, {"x": np.zeros((4, 4))})


def test_a_rank_that_holds_nothing_names_the_leaf() -> None:
    nothing = tenuto.shard(np.zeros((0, 3)), whole=(4, 3), offsets=(4, 0))
    found = flatten({"x": nothing, "again": nothing.value, "y": np.ones(2)})
    assert [spec.path for spec in found.specs] == ["again", "y"] and found.leaf == (1, 2)
    assert found.tree["i"][0] == ["x", {"!": "leaf", "n": 0, "as": "numpy", "dtype": "float64", "shape": [4, 3]}]
    about = saved({"x": tenuto.shard(np.ones((4, 3)), whole=(4, 3), offsets=(0, 0))})
    _, report = load(about, {"x": nothing})
    assert report.restored == ("x",)


def test_own_values_go_into_the_private_tree_and_back() -> None:
    def state(at: int) -> dict[str, Any]:
        inner = {"a": np.full(2, float(at)), "n": at}
        return {"own": tenuto.per_rank(inner), "list": [tenuto.per_rank(at), 7], "plain": at}

    about = saved(state(1), private={"random": {"seed": 3}})
    assert about["tree"]["i"][0] == ["own", {"!": "per_rank", "at": "own"}]
    assert about["forms"] == [("float64", (2,))]
    target, private = state(2), {"random": {}}
    array = target["own"].value["a"]
    load(about, target, private_into=private)
    assert target["own"].value["a"] is array and array.tolist() == [1, 1] and target["own"].value["n"] == 1
    assert target["list"][0].value == 1 and target["list"][1] == 7 and private == {"random": {"seed": 3}}
    bare = {"own": {"a": np.zeros(2), "n": 0}, "list": [0, 0], "plain": 0}
    load(about, bare)
    assert bare["own"]["n"] == 1 and bare["own"]["a"].tolist() == [1, 1] and bare["list"] == [1, 7]
    fresh, report = load(about, None)
    assert fresh["own"]["n"] == 1 and fresh["list"] == [1, 7] and not report.skipped


def test_without_a_private_tree_own_values_stay_what_they_are() -> None:
    about = saved({"own": tenuto.per_rank({"n": 1}), "list": [tenuto.per_rank(1)], "plain": 1})
    about["private"] = None
    target = {"own": tenuto.per_rank({"n": 5}), "list": [5], "plain": 5}
    _, report = load(about, target)
    assert target["own"].value == {"n": 5} and target["list"] == [5] and target["plain"] == 1
    assert "own" in report.skipped and any("own" in note for note in report.notes)
    fresh, _ = load(about, None)
    assert fresh == {"list": [None], "plain": 1}


def test_own_values_of_another_place_are_told_as_left_over() -> None:
    about = saved({"own": tenuto.per_rank(np.ones(2)), "x": 1})
    _, report = load(about, {"x": 0})
    assert "own" in report.skipped and "#private/per_rank/own" in report.skipped


def test_aliases_under_a_mark_are_aliases() -> None:
    array = np.arange(16.0).reshape(4, 4)
    found = flatten({"x": parts(array), "y": parts(array), "z": tenuto.replicated(array)})
    assert [spec.path for spec in found.specs] == ["x", "x", "z"] and found.leaf == (0, 0, 1)
    assert found.tree["i"][1][1]["!"] == "alias" and found.tree["i"][1][1]["n"] == 0
    assert found.reports  # z is the same memory in another form
    assert found.specs[2].placement == "replicated" and found.specs[2].whole is None


def test_marks_that_mean_nothing_are_refused() -> None:
    with pytest.raises(StateError, match="x: "):
        flatten({"x": tenuto.shard(np.zeros(3), whole=(6,), offsets=(0,)).__class__("text", None)})
    shard = tenuto.shard(np.zeros(3), whole=(6,), offsets=(0,))
    shard.value = np.zeros(4)
    with pytest.raises(Unserialisable, match="x: not the array of shape"):
        flatten({"x": shard})
    with pytest.raises(StateError, match="per_rank"):
        flatten({"x": tenuto.per_rank(1)}, private={"per_rank": 1})


def test_a_private_shard_is_this_ranks_own_tensor() -> None:
    state = {"x": tenuto.per_rank({"y": parts(np.ones((4, 4)))})}
    found = flatten(state)
    assert [(spec.shape, spec.whole, spec.placement) for spec in found.specs] == [((4, 4), None, "per_rank")]
    target = {"x": tenuto.per_rank({"y": parts(np.zeros((4, 4)))})}
    load(saved(state), target)
    assert target["x"].value["y"].value.tolist() == np.ones((4, 4)).tolist()


@pytest.mark.parametrize("shape", [None, [-1], [2.0], [True], "x"])
def test_nodes_that_say_no_shape_are_damage(shape: Any) -> None:
    with pytest.raises(CorruptionError):
        leaf_forms({"!": "leaf", "n": 0, "as": "numpy", "dtype": "float64", "shape": shape})
