"""Plain values come back as the type and the bits that they were."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import math
import pathlib
import random
import struct
import uuid
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import CorruptionError, StateError, Unserialisable
from tenuto.model import canonical_json
from tenuto.state.encode.flattener import flatten
from tenuto.state.frameworks import Tagged, register
from tenuto.state.restore.match import match_state


def same(one: Any, other: Any) -> bool:
    """Equal in type and in every bit, keys' order included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True) if len(one) == len(other) else None
        return pairs is not None and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, list | tuple | collections.deque):
        return (
            len(one) == len(other)
            and all(map(same, one, other))
            and getattr(one, "maxlen", 0) == getattr(other, "maxlen", 0)
        )
    if isinstance(one, decimal.Decimal):
        return one.as_tuple() == other.as_tuple()
    if isinstance(one, dt.datetime | dt.time):
        return one == other and one.fold == other.fold and repr(one) == repr(other)
    if isinstance(one, np.longdouble):
        return one.tobytes()[:10] == other.tobytes()[:10]  # behind them is what was in the memory before
    if isinstance(one, np.generic | np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)


def through_json(state: Any) -> Any:
    flattened = flatten({"it": state})
    assert not flattened.specs or flattened.specs[0].dtype == "uint8"
    tree = canonical_json.loads(canonical_json.dumps(flattened.tree))
    prepared = match_state(tree, None, flattened.specs)
    for number, sink in prepared.wants:
        source = flattened.sources[number]
        sink.buffer[:] = (
            np.frombuffer(source, np.uint8) if isinstance(source, bytes) else source.reshape(-1).view(np.uint8)
        )
    return prepared.apply()["it"]


nans = st.integers(0, 2**52 - 1).map(lambda bits: struct.unpack(">d", struct.pack(">Q", 0x7FF0000000000000 | bits))[0])
any_float = st.floats() | nans
zones = st.none() | st.builds(
    dt.timezone, st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)), st.text("ABC", min_size=1, max_size=3)
) | st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(dt.timezone)  # fmt: skip
hashable = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | any_float
    | st.text(st.characters(), max_size=8)
    | st.complex_numbers()
    | st.binary(max_size=20)
    | st.datetimes(timezones=zones)
    | st.dates()
    | st.times(timezones=zones)
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
    | st.text("ab/.", max_size=6).map(pathlib.PurePosixPath)
    | st.builds(range, st.integers(), st.integers(), st.integers(1, 9))
)
plain = st.recursive(
    hashable | st.binary(max_size=20).map(bytearray),
    lambda below: (
        st.lists(below, max_size=4)
        | st.lists(below, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.integers() | st.booleans(),
            below,
            max_size=4,
        )
        | st.lists(below, max_size=4).map(lambda one: collections.deque(one, maxlen=5))
        | st.dictionaries(st.text(max_size=3), below, max_size=3).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=75, deadline=None, derandomize=True)
@given(plain)
def test_a_plain_value_comes_back_exactly(value: Any) -> None:
    assert same(value, through_json(value))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.frozensets(
        hashable.filter(lambda one: not (isinstance(one, float | complex) and one != one)),
        max_size=5,
    ),
    plain,
)
def test_a_plain_value_comes_back_into_any_other(elements: frozenset[Any], before: Any) -> None:
    state = {"it": [set(elements), elements, before]}
    flattened = flatten(state)
    target = {"it": before if isinstance(before, list) else [before]}
    prepared = match_state(canonical_json.loads(canonical_json.dumps(flattened.tree)), None, flattened.specs, target)
    found = prepared.apply()["it"]
    assert type(found[0]) is set and found[0] == elements and found[1] == elements


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        math.inf,
        2**53,
        2**53 + 1,
        -(10**400),
        "\ud800",
        "\ud83d\ude00",
        "😀",
        collections.Counter(a=3, b=-1),
        collections.defaultdict(list, {"a": [1]}),
        collections.defaultdict(None, {"a": 1}),
        collections.deque([1, 2], maxlen=2),
        slice(1, None, 2),
        ...,
        dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=dt.UTC),
        dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(0), "UTC+0")),
        fractions.Fraction(10**300, 7),
        decimal.Decimal("sNaN123"),
        pathlib.Path("/tmp/\udcff"),
        pathlib.PureWindowsPath("c:\\x"),
        uuid.UUID(int=5),
        {1: "a", True + 1: "b", None: 0, 2.5: 1, (1, "x"): 2, b"k": 3, "": 4, "#i:1": 5, "~/@": 6},
        b"x" * 5000,
        bytearray(b"y" * 1024),
        np.float32(1.5),
        np.array(0x7FC00123, np.uint32).view(np.float32)[()],
        np.datetime64("2020-01-01T00:00:00.5"),
        np.str_("hé"),
        np.str_(""),
        np.longdouble(1) / 3,
        np.bool_(True),
    ],
    ids=repr,
)
def test_values_that_json_has_not(value: Any) -> None:
    found = through_json(value)
    assert same(value, found)
    assert getattr(found, "default_factory", 0) is getattr(value, "default_factory", 0)


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Progress:
    step: int
    colour: Colour = Colour.RED
    best: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: int


class Pair(NamedTuple):
    left: Any
    right: Any


def test_classes_come_back_into_values_of_their_class(carrier: Any) -> None:
    saved = carrier.save(
        {
            "c": Colour.BLUE,
            "f": Flags.A | Flags.B,
            "p": Progress(7, Colour.BLUE, [1]),
            "z": Frozen(3),
            "n": Pair(1, Colour.RED),
        }
    )
    progress = Progress(0)
    target = {"c": Colour.RED, "f": Flags.A, "p": progress, "z": Frozen(0), "n": Pair(0, Colour.BLUE)}
    carrier.load(saved, target)
    assert target == {
        "c": Colour.BLUE,
        "f": Flags.A | Flags.B,
        "p": Progress(7, Colour.BLUE, [1]),
        "z": Frozen(3),
        "n": Pair(1, Colour.RED),
    }
    assert target["p"] is progress


def test_classes_without_a_value_come_back_tagged_and_can_be_saved_again(carrier: Any) -> None:
    found = carrier.round_trip({"c": Colour.BLUE, "p": Progress(7), "n": Pair(1, 2)})
    assert found["c"] == Tagged(f"{__name__}.Colour", "BLUE")
    assert found["p"].value["step"] == 7 and found["p"].value["colour"].value == "RED"
    assert found["n"] == Tagged(f"{__name__}.Pair", {"left": 1, "right": 2})
    assert carrier.round_trip(found) == found


class Custom:
    def __init__(self, content: Any) -> None:
        self.content = content


def test_a_registered_type_comes_back_where_there_was_none(carrier: Any) -> None:
    with pytest.raises(Unserialisable, match=r"^a/0: a .*Custom"):
        flatten({"a": [Custom(1)]})
    register(Custom, lambda one: one.content, Custom)
    found = carrier.round_trip({"a": [Custom({"x": np.arange(3)})]})
    assert type(found["a"][0]) is Custom and found["a"][0].content["x"].tolist() == [0, 1, 2]


def test_random_generators_go_on_where_they_were(carrier: Any) -> None:
    state = {
        "python": random.Random(5),
        "numpy": np.random.default_rng(6),
        "old": np.random.RandomState(7),
        "bits": np.random.Philox(8),
    }
    state["python"].gauss(0, 1)
    state["old"].standard_normal()
    saved = carrier.save(state)
    wanted = [
        state["python"].gauss(0, 1),
        state["numpy"].random(),
        state["old"].standard_normal(),
        state["bits"].random_raw(),
    ]
    target = {
        "python": random.Random(),
        "numpy": np.random.default_rng(),
        "old": np.random.RandomState(),
        "bits": np.random.Philox(),
    }
    held = dict(target)
    for found in (carrier.load(saved), carrier.load(saved, target)):
        drawn = [
            found["python"].gauss(0, 1),
            found["numpy"].random(),
            found["old"].standard_normal(),
            found["bits"].random_raw(),
        ]
        assert drawn == wanted
    assert all(target[name] is held[name] for name in held)
    assert set(carrier.report.restored) >= held.keys()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (np.random.default_rng, np.random.Generator.random),
        (np.random.RandomState, np.random.RandomState.random_sample),
        (np.random.Philox, np.random.Philox.random_raw),
        (np.float32, float),
        (random.Random, random.Random.random),
    ],
)
def test_what_is_left_out_stays_as_it_is(carrier: Any, make: Any, told: Any) -> None:
    saved = carrier.save({"left": make(1), "taken": make(1)})
    for how in ({"exclude": "left"}, {"include": "taken"}):
        found = carrier.load(saved, {"left": make(2), "taken": make(2)}, **how)
        assert (told(found["left"]), told(found["taken"])) == (told(make(2)), told(make(1)))
        assert carrier.report.skipped == ("left",) and "taken" in carrier.report.restored
    other = {"left": np.random.RandomState(2) if make is not np.random.RandomState else np.random.default_rng(2)}
    carrier.load(saved, other, exclude="left")
    assert carrier.report.skipped == ("left", "taken") and carrier.report.mismatched == ()


def test_what_cannot_be_saved_is_named_by_its_path() -> None:
    looped: list[Any] = []
    looped.append({"again": looped})
    deep: Any = 0
    for _ in range(200):
        deep = [deep]
    for value, path in [
        ({"f": [lambda: 0]}, "f/0"),
        ({"loop": looped}, "loop/0/again"),
        ({"deep": deep}, "deep"),
        ({"s": {np.int64: 1}}, "s"),
        ({"o": np.array([None])}, "o"),
        ({"r": np.zeros(2, [("a", "f4")])}, "r"),
        ({"\ud800": np.zeros(1)}, None),
        ({"__metadata__": np.zeros(1)}, "__metadata__"),
        ({"m": np.ma.array([1], mask=[True])}, "m"),
        ({"z": dt.datetime(2020, 1, 1, tzinfo=type("Z", (dt.tzinfo,), {})())}, "z"),
        ({"i": type("I", (int,), {})(3)}, "i"),
    ]:
        with pytest.raises(Unserialisable) as caught:
            flatten(value)
        assert path is None or str(caught.value.subject).startswith(path), caught.value


def test_a_tree_with_an_unknown_or_malformed_kind_is_corruption() -> None:
    for node in [
        {"!": "os.system", "v": "x"},
        {"!": 3},
        {},
        {"!": "dict"},
        {"!": "dict", "i": [["a"]]},
        {"!": "datetime", "v": [1]},
        {"!": "range", "v": [1, 2, 0]},
        {"!": "npscalar", "dtype": "|O", "v": "AAAAAAAAAAA="},
        {"!": "npscalar", "dtype": "<f4", "v": "AAAAAAAAAAA="},
        {"!": "set", "i": [[1]]},
        {"!": "deque", "maxlen": -1, "i": []},
        {"!": "leaf", "n": 0, "as": "pickle"},
        {"!": "leaf", "n": True, "as": "numpy"},
        {"!": "fraction", "v": [1, 0]},
        {"!": "path", "type": "Popen", "v": "x"},
        {"!": "random", "v": "", "gauss": None},
        {"!": "torch.dtype", "v": "Tensor"},
        {"!": "bytes", "v": 3},
        {"!": "enum", "type": 3, "name": "x"},
    ]:
        tree = {"!": "dict", "i": [["a", node]]}
        with pytest.raises((CorruptionError, StateError)):
            match_state(tree, None, ()).apply()
        with pytest.raises((CorruptionError, StateError)):
            match_state(tree, None, (), {"a": None}).apply()
