"""Records are what `dataclass(frozen=True, slots=True)` makes, to a program that does not assign to them."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import tenuto
from tenuto.events import warn
from tenuto.record import record


@record
class Point:
    """Two numbers, a name, and what is neither compared nor shown."""

    x: int
    y: int = 0
    name: str = field(default="", kw_only=True)
    cache: dict[str, int] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: int
    y: int = 0
    name: str = field(default="", kw_only=True)
    cache: dict[str, int] = field(default_factory=dict, compare=False, repr=False)


@record
class Far(Point):
    away: float = 1.0


@record
class Nothing:
    pass


@record
class OfItsOwn:
    x: int

    def __repr__(self) -> str:
        return "its own"

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 7


@record
class One:
    x: float


@record(eq=False)
class Itself:
    x: int


def test_it_is_shown_compared_and_hashed_as_a_frozen_dataclass() -> None:
    one, same, other = Point(1, 2, name="a", cache={"k": 1}), Point(1, 2, name="a"), Point(1, 3, name="a")
    frozen = Frozen(1, 2, name="a")
    assert repr(one) == repr(frozen).replace("Frozen", "Point")
    assert one == same and one != other and one != frozen and hash(one) == hash(same) == hash(frozen)
    assert len({one, same, other}) == 2
    assert Far(1) != Point(1) and Far(1) == Far(1, away=1.0)
    assert repr(Far(1)) == "Far(x=1, y=0, name='', away=1.0)"
    assert Nothing() == Nothing() and hash(Nothing()) == hash(Nothing()) and repr(Nothing()) == "Nothing()"


def test_a_single_field_is_compared_as_part_of_a_tuple() -> None:
    """By identity first: a NaN equals itself there."""
    assert Itself.__eq__ is object.__eq__
    assert One(math.nan) == One(math.nan) and hash(One(1.0)) == hash((1.0,)) and One(1.0) != One(2.0)


def test_what_a_class_defines_stays() -> None:
    one: Any = OfItsOwn(1)
    assert repr(one) == "its own" and one == OfItsOwn(2) and hash(one) == 7
    assert Itself(1) != Itself(1) and len({Itself(1), Itself(1)}) == 2


def test_the_functions_for_dataclasses_work_on_it_and_it_is_copied() -> None:
    one = Point(1, name="a")
    assert is_dataclass(Point) and [each.name for each in fields(Point)] == ["x", "y", "name", "cache"]
    assert replace(one, y=5) == Point(1, 5, name="a") and asdict(one) == {"x": 1, "y": 0, "name": "a", "cache": {}}
    assert copy.deepcopy(one) == one == copy.copy(one)
    match one:
        case Point(x, y):
            assert (x, y) == (1, 0)
    with pytest.raises(AttributeError):
        one.z = 1  # type: ignore[attr-defined]  # it has slots
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]


def test_public_ones_are_made_so() -> None:
    assert tenuto.events.Event.__eq__ is Point.__eq__


def test_what_a_reason_holds_moves_no_cursor_when_it_is_printed(tmp_path: Path) -> None:
    with tenuto.Checkpointer(tmp_path, {"w": 1.0}) as ckpt:
        assert len(list(ckpt.steps(1))) == 1
    hostile = "\x1b[2Jgone\x07\u202e"
    plan = tenuto.Repository(tmp_path).fork(1, "b", reason=hostile)
    assert plan.reason == hostile, "what is stored stays as it is"
    assert str(plan).splitlines()[1:] == ["  reason: \\x1b[2Jgone\\x07\\u202e"]
    error = tenuto.TenutoError(f"{hostile}: no", hint=f"rm {hostile}")
    assert "\x1b" not in str(error) and str(error).count("\n") == 1 and error.message.startswith(hostile)
    with pytest.warns(tenuto.TenutoWarning, match=r"^\\x1b"):
        warn(hostile)
