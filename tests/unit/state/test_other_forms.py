"""A target that holds arrays or objects is filled, or what does not fit is told: nothing takes its place in silence."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field, make_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from tenuto.errors import StateMismatch
from tenuto.state.frameworks import Tagged


@dataclass
class Training:
    weights: Any
    step: int = 0


@dataclass(frozen=True)
class Fixed:
    weights: Any
    step: int = 0


class Networks(NamedTuple):
    generator: Any
    judge: Any


class Renamed(NamedTuple):
    generator: Any
    judge: Any


@dataclass
class Grown:
    weights: Any
    step: int = 0
    average: Any = None
    rate: float = 0.5


@dataclass
class Plain:
    rate: float = 0.5
    kind: Any = field(default_factory=lambda: np.float32(1))


def ones() -> np.ndarray[Any, Any]:
    return np.ones(3)


def zeros() -> np.ndarray[Any, Any]:
    return np.zeros(3)


def under_the_name_of(kind: type, saved: dict[str, Any], name: str) -> None:
    """What `kind` saved, as if its class had had another name."""
    node = saved["tree"]["i"][0][1]
    assert node["type"] == f"{__name__}.{kind.__qualname__}"
    node["type"] = name


@pytest.mark.parametrize("kind", [Training, Fixed])
def test_a_dataclass_of_another_name_with_the_same_fields_is_filled_with_a_note(carrier: Any, kind: type) -> None:
    saved = carrier.save({"t": kind(ones(), 7)})
    under_the_name_of(kind, saved, "__main__.Training")
    weights = zeros()
    target = {"t": kind(weights)}
    held = target["t"]
    carrier.load(saved, target)
    assert weights.all() and target["t"].weights is weights and target["t"].step == 7
    assert (target["t"] is held) is (kind is Training)
    assert carrier.report.notes == (f"t: saved by a __main__.Training, restored into a {__name__}.{kind.__qualname__}",)


def test_a_namedtuple_of_another_name_with_the_same_fields_is_filled_with_a_note(carrier: Any) -> None:
    saved = carrier.save({"n": Networks(ones(), [ones()])})
    generator, judge = zeros(), zeros()
    target = {"n": Renamed(generator, [judge])}
    carrier.load(saved, target)
    assert generator.all() and judge.all() and type(target["n"]) is Renamed and target["n"].generator is generator
    assert carrier.report.notes == (f"n: saved by a {__name__}.Networks, restored into a {__name__}.Renamed",)


def test_fields_that_are_new_and_hold_an_array_are_missing(carrier: Any) -> None:
    saved = carrier.save({"t": Training(ones(), 7)})
    for name in ("__main__.Training", f"{__name__}.Grown"):
        saved["tree"]["i"][0][1]["type"] = name
        target = Grown(zeros(), average={"w": zeros()}, rate=0.25)
        with pytest.raises(StateMismatch, match=r"t/average: not in the checkpoint"):
            carrier.load(saved, {"t": target})
        assert not target.weights.any() and target.step == 0
        carrier.load(saved, {"t": target}, strict=False)
        assert target.weights.all() and (target.step, target.rate) == (7, 0.25) and not target.average["w"].any()
        assert carrier.report.missing == ("t/average",)
        carrier.load(saved, {"t": target}, exclude="t/average")
        carrier.load(saved, {"t": Grown(zeros())})


Other = make_dataclass("Other", ["weights", "steps"])


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        pytest.param((ones(), ones(), ones()), (zeros(), zeros()), id="a tuple of another length"),
        pytest.param(collections.deque([ones()]), collections.deque([zeros(), zeros()]), id="a deque"),
        pytest.param([ones()], (zeros(), zeros()), id="a list for a tuple"),
        pytest.param(None, {"w": zeros()}, id="None for a dictionary"),
        pytest.param(None, [zeros()], id="None for a list"),
        pytest.param(None, Training(zeros()), id="None for a dataclass"),
        pytest.param(3, {"inner": collections.deque([Training(zeros())])}, id="a number for what is deep inside"),
        pytest.param(ones(), {"w": zeros()}, id="an array for a dictionary"),
        pytest.param({"weights": ones(), "step": 1}, Training(zeros()), id="a dictionary for a dataclass"),
        pytest.param(Training(ones()), {"weights": zeros()}, id="a dataclass for a dictionary"),
        pytest.param(Training(ones()), Other(zeros(), 0), id="a dataclass with other fields"),
        pytest.param(Networks(ones(), ones()), (zeros(), zeros()), id="a namedtuple for a tuple"),
        pytest.param({1, 2}, (zeros(),), id="a set"),
    ],
)
def test_a_form_that_does_not_fill_what_the_target_holds_is_a_mismatch(carrier: Any, saved: Any, target: Any) -> None:
    carried = carrier.save({"x": saved, "k": 1})
    into = {"x": target, "k": 0}
    with pytest.raises(StateMismatch, match=r"^.*\n  x: .* in the checkpoint, .* in the target"):
        carrier.load(carried, into)
    assert into["x"] is target and into["k"] == 0
    carrier.load(carried, into, strict=False)
    assert into["x"] is target and into["k"] == 1 and len(carrier.report.mismatched) == 1
    assert "x" not in carrier.report.restored
    carrier.load(carried, into, exclude="x")
    assert into["x"] is target


def test_what_is_plain_is_replaced_as_a_whole(carrier: Any) -> None:
    target: dict[str, Any] = {
        "t": (np.float64(1), 2, 3),
        "n": {"a": 1},
        "p": Plain(),
        "d": collections.deque([np.float32(1)]),
        "z": Tagged("somewhere.Else", {"w": zeros()}),
        "l": [np.float64(0)] * 3,
    }
    saved = carrier.save(
        {"t": (1,), "n": None, "p": Plain(0.25), "d": collections.deque([2, 3]), "z": Tagged("here", 1), "l": [1.5]}
    )
    saved["tree"]["i"][2][1]["type"] = "__main__.Plain"
    carrier.load(saved, target)
    assert target["t"] == (1,) and target["n"] is None and list(target["d"]) == [2, 3] and target["l"] == [1.5]
    assert target["p"] == Tagged("__main__.Plain", {"rate": 0.25, "kind": np.float32(1)})
    assert target["z"] == Tagged("here", 1)


def test_sequences_of_one_length_fill_one_another(carrier: Any) -> None:
    target = {"a": [zeros(), 1], "b": (zeros(), 1), "c": collections.deque([zeros()])}
    held = [target["a"][0], target["b"][0], target["c"][0]]
    carrier.round_trip({"a": (ones(), 2), "b": [ones(), 2], "c": collections.deque([ones()])}, target)
    assert all(one.all() for one in held) and target["a"][0] is held[0] and target["b"][1] == 2


def test_a_target_that_holds_itself_is_looked_through_once(carrier: Any) -> None:
    looped: dict[str, Any] = {"k": 0}
    looped["again"] = Training([looped])
    target = {"x": looped}
    carrier.round_trip({"x": 5}, target)
    assert target["x"] == 5
