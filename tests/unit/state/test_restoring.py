"""What a target gets, what is refused, and that nothing is touched before every leaf has arrived."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tenuto.errors import CorruptionError, DuplicatePath, StateError, StateMismatch
from tenuto.model.leaf import LeafSpec
from tenuto.state.encode.flattener import flatten
from tenuto.state.restore.match import match_state
from tenuto.state.tree import leaf_paths


class Counter:
    """Something that says its state itself."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "table": np.arange(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert state["table"].tolist() == list(range(self.count))


def test_containers_keep_their_identity_and_get_their_contents(carrier: Any) -> None:
    saved = carrier.save(
        {"d": {"a": [1, {"b": 2}], "gone": {}}, "l": [1, 2, 3], "t": (1, [2]), "n": None, "c": Counter(4)}
    )
    inner, items, counter = {"b": 0}, [9], Counter()
    outer = {"a": [0, inner], "extra": 5}
    target = {"d": outer, "l": items, "t": (0, [0]), "n": 5, "c": counter}
    carrier.load(saved, target)
    assert target == {"d": {"a": [1, {"b": 2}], "gone": {}}, "l": [1, 2, 3], "t": (1, [2]), "n": None, "c": counter}
    assert target["d"] is outer and outer["a"][1] is inner and target["l"] is items and counter.count == 4


def test_arrays_are_filled_where_they_lie(carrier: Any) -> None:
    whole = np.arange(24.0).reshape(4, 6)
    state = {
        "strided": whole[::2, 1::2],
        "fortran": np.asfortranarray(whole),
        "zero": np.array(3, ">i2"),
        "none": np.zeros((0, 3), "U5"),
        "text": np.array(["ab", "c"]),
        "when": np.array(["2020-01-01"], "M8[D]"),
        "big": np.arange(3, dtype=">f8"),
        "void": np.zeros(2, "V3"),
    }
    saved = carrier.save(state)
    target = {name: np.zeros_like(array) for name, array in state.items()}
    target["strided"] = np.zeros((4, 6))[::2, 1::2]
    held = dict(target)
    carrier.load(saved, target)
    fresh = carrier.load(saved)
    for name, array in state.items():
        assert target[name] is held[name]
        for found in (target[name], fresh[name]):
            assert found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes(), (
                name
            )


def test_one_array_twice_is_stored_once_and_is_one_again(carrier: Any) -> None:
    array = np.arange(4)
    flattened = flatten({"a": array, "b": [array], "c": array[1:]})
    assert [spec.path for spec in flattened.specs] == ["a", "c"]
    assert flattened.reports == ("a and c share memory without being the same tensor: each is stored by itself",)
    found = carrier.load(carrier.capture(flattened))
    assert found["a"] is found["b"][0] and found["c"].tolist() == [1, 2, 3]
    apart = {"a": np.zeros(4, int), "b": [np.zeros(4, int)], "c": np.zeros(3, int)}
    carrier.load(carrier.capture(flattened), apart)
    assert apart["a"].tolist() == apart["b"][0].tolist() == [0, 1, 2, 3]


def test_all_that_does_not_fit_is_told_at_once_and_nothing_is_touched(carrier: Any) -> None:
    saved = carrier.save({"m": {f"w{n}": np.ones(n + 1) for n in range(20)}, "k": 1})
    target = {"m": {f"w{n}": np.zeros(n + 2) for n in range(12)} | {"more": np.zeros(1)}, "k": 0}
    with pytest.raises(StateMismatch) as caught:
        carrier.load(saved, target)
    text = str(caught.value)
    assert "m/w3: float64 [4] in the checkpoint, float64 [5] in the target" in text
    assert "(21)" in text and "and 11 more" in text and "strict=False" in text
    assert target["k"] == 0 and not any(array.any() for array in target["m"].values())
    carrier.load(saved, target, strict=False)
    assert target["k"] == 1 and not target["m"]["w3"].any()
    assert carrier.report.missing == ("m/more",) and len(carrier.report.mismatched) == 12
    assert "m/w15" in carrier.report.unexpected


def test_entries_that_the_target_does_not_name_are_skipped(carrier: Any) -> None:
    saved = carrier.save({"a": np.ones(2), "b": np.ones(3), "c": 1})
    target = {"a": np.zeros(2)}
    carrier.load(saved, target)
    assert list(target) == ["a"] and target["a"].all() and carrier.report.skipped == ("b", "c")


def test_a_missing_entry_is_an_error_unless_asked_for(carrier: Any) -> None:
    saved = carrier.save({"a": 1})
    target = {"a": 0, "b": 2}
    with pytest.raises(StateMismatch, match="b: not in the checkpoint"):
        carrier.load(saved, target)
    carrier.load(saved, target, strict=False)
    assert target == {"a": 1, "b": 2}


def test_include_and_exclude(carrier: Any) -> None:
    saved = carrier.save({"m": {"head": np.ones(2), "body": np.ones(2)}, "s": 3, "c": Counter(2)})

    def target() -> dict[str, Any]:
        return {"m": {"head": np.zeros(2), "body": np.zeros(2)}, "s": 0, "c": Counter()}

    for how, wanted in [
        ({"exclude": "m/head"}, (0, 1, 3, 2)),
        ({"include": ["m/*"]}, (1, 1, 0, 0)),
        ({"include": "m", "exclude": re.compile("bod")}, (1, 0, 0, 0)),
        ({"include": ["s", "c"]}, (0, 0, 3, 2)),
        ({"exclude": ["c/*", "c"]}, (1, 1, 3, 0)),
    ]:
        found = carrier.load(saved, target(), **how)
        assert (found["m"]["head"][0], found["m"]["body"][0], found["s"], found["c"].count) == wanted, how
    found = carrier.load(saved, None, include="m/h*")
    assert list(found) == ["m"] and list(found["m"]) == ["head"]
    assert "m/body" in carrier.report.skipped


def test_rename_by_prefix_and_by_function(carrier: Any) -> None:
    saved = carrier.save({"net": {"enc.w": np.ones(2), "enc2.w": np.full(2, 2.0)}, "k": 1})
    for rename in (
        {"net/enc": "model/encoder", "net": "model"},
        lambda path: path.replace("net", "model").replace("enc.", "encoder."),
    ):
        target = {"model": {"encoder.w": np.zeros(2), "enc2.w": np.zeros(2)}, "k": 0}
        carrier.load(saved, target, rename=rename)
        assert target["model"]["encoder.w"][0] == 1 and target["model"]["enc2.w"][0] == 2 and target["k"] == 1
    with pytest.raises(StateMismatch, match="two entries"):
        carrier.load(saved, None, rename={"net/enc.w": "net/enc2.w"})


def test_an_object_takes_the_one_entry_that_its_kind_has_saved(carrier: Any) -> None:
    class Other(Counter):
        pass

    target = Counter()
    assert carrier.load(carrier.save({"other": Other(7), "counter": Counter(1), "k": 2}), target) is target
    assert target.count == 1
    assert carrier.load(carrier.save({"other": Other(7), "k": 2}), target) is target and target.count == 7
    with pytest.raises(StateMismatch, match="2 of them fit it: a, b") as caught:
        carrier.load(carrier.save({"a": Counter(1), "b": Counter(2)}), target)
    assert caught.value.hint == 'into={"a": …} names the entry' and target.count == 7


def test_one_object_at_the_root(carrier: Any) -> None:
    target = Counter()
    assert carrier.round_trip(Counter(5), target) is target and target.count == 5
    assert carrier.round_trip(Counter(2))["count"] == 2


def test_private_values_have_paths_of_their_own(carrier: Any) -> None:
    saved = carrier.save({"a": np.ones(2)}, {"a": np.zeros(3), "rng": 5})
    assert [(spec.path, spec.private) for spec in saved["specs"]] == [("a", False), ("#private/a", True)]
    assert leaf_paths(saved["private"]) == ["#private/a"]
    target, private = {"a": np.zeros(2)}, {"a": np.ones(3), "rng": 0}
    carrier.load(saved, target, private_into=private)
    assert target["a"].all() and not private["a"].any() and private["rng"] == 5
    assert "#private/a" not in carrier.load(saved) and carrier.report.skipped == ("#private/a",)


def test_an_object_that_refuses_its_state_is_named(carrier: Any) -> None:
    class Picky(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("no")

    with pytest.raises(StateMismatch, match=r"^c: its state could not be set"):
        carrier.round_trip({"c": Counter(1)}, {"c": Picky()})


def test_two_leaves_at_one_path_are_an_error() -> None:
    with pytest.raises(DuplicatePath, match="a/#k:"):
        flatten({"a": {float("nan"): np.ones(1), float("nan"): np.ones(1)}})
    odd = {
        "": np.ones(1),
        "a": {"b": np.ones(1)},
        "a/b": np.ones(1),
        "x": {"#i:1": np.ones(1), 1: np.ones(1), "1": np.ones(1)},
        "#value": np.zeros(1),
    }
    assert len({spec.path for spec in flatten(odd).specs}) == 7


def test_leaf_paths_refuses_trees_that_nobody_made() -> None:
    def leaf(number: Any, kind: str = "leaf") -> dict[str, Any]:
        return {"!": kind, "n": number, "as": "numpy"}

    assert leaf_paths({"!": "dict", "i": [["b", leaf(1)], ["a", leaf(0)]]}) == ["a", "b"]
    for pairs in [
        [["a", leaf(1)]],
        [["a", leaf(-1)]],
        [["a", leaf(0)], ["b", leaf(0)]],
        [["a", leaf(0, "alias")]],
        [["a", leaf("0")]],
    ]:
        with pytest.raises(CorruptionError):
            leaf_paths({"!": "dict", "i": pairs})
    with pytest.raises(DuplicatePath):
        leaf_paths({"!": "dict", "i": [["a", leaf(0)], ["a", leaf(1)]]})
    deep: Any = leaf(0)
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CorruptionError, match="deep"):
        leaf_paths(deep)
    with pytest.raises(CorruptionError, match="index"):
        match_state({"!": "dict", "i": [["a", leaf(0)]]}, None, [LeafSpec("b", "uint8", (1,))])


def test_a_read_only_mapping_takes_no_plain_value(carrier: Any) -> None:
    import types

    with pytest.raises(StateError, match="k"):
        carrier.round_trip({"k": 1}, types.MappingProxyType({"k": 0}))
