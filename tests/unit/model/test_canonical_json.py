"""Canonical JSON: one spelling per value, read back strictly."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import CorruptionError, Unserialisable
from tenuto.model import canonical_json

numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(), max_size=20) | st.sampled_from(
    ["", '"', "\\", '\\"', "[{", "}]", '"[', "\ud800", "é", " "]
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=25,
)
quick = settings(max_examples=100, derandomize=True, deadline=None)


def same(a: object, b: object) -> bool:
    """Equal, types and signs of nought included."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and repr(a) == repr(b)


@quick
@given(values)
def test_what_is_written_reads_back_equal_and_is_spelled_one_way(value: object) -> None:
    data = canonical_json.dumps(value)
    assert same(canonical_json.loads(data), value)
    assert data.isascii() and b"\n" not in data
    assert canonical_json.dumps(json.loads(data)) == data


@quick
@given(st.integers() | st.floats())
def test_numbers_beyond_json_are_tagged_and_come_back_to_the_bit(number: float) -> None:
    back = canonical_json.untag_number(canonical_json.loads(canonical_json.dumps(canonical_json.tag_number(number))))
    assert type(back) is type(number)
    if isinstance(number, float):
        assert struct.pack(">d", back) == struct.pack(">d", number)
    else:
        assert back == number


def test_every_nan_keeps_its_bits() -> None:
    for bits in (0x7FF8000000000000, 0x7FF8000000000001, 0xFFF8000000000000):
        number = struct.unpack(">d", struct.pack(">Q", bits))[0]
        tagged = canonical_json.tag_number(number)
        assert struct.pack(">d", canonical_json.untag_number(tagged)) == struct.pack(">Q", bits)
    assert canonical_json.tag_number(math.nan) == {"!": "float", "v": "nan"}


def test_the_spelling_is_pinned() -> None:
    value = {"b": [1, 1.0, -0.0, 1e16, 5e-324, True, None], "a": 'é\u2028\ud83d\ude00"\\\n', "digest": {}, "Z": []}
    assert canonical_json.dumps(value) == (
        rb'{"Z":[],"a":"\u00e9\u2028\ud83d\ude00\"\\\n","b":[1,1.0,-0.0,1e+16,5e-324,true,null],"digest":{}}'
    )


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        2**53 + 1,
        -(2**53) - 1,
        {1: 2},
        {None: 2},
        {"a": (1, 2)},
        {"a": b"bytes"},
        {"a": {1, 2}},
        [Ellipsis],
    ],
    ids=repr,
)
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(Unserialisable):
        canonical_json.dumps(value)


@quick
@given(st.dictionaries(texts.filter(lambda key: key not in ("digest", "path")), values, max_size=4))
def test_members_that_are_spelled_already_make_the_same_object(body: dict[str, object]) -> None:
    plain = canonical_json.seal({**body, "path": "a/b.json"})
    spelled = {key: canonical_json.spell(value) for key, value in body.items()}
    assert all(one.text == canonical_json.dumps(one.value) for one in spelled.values())
    assert canonical_json.seal({**spelled, "path": "a/b.json"}) == plain
    assert plain.startswith(canonical_json.dumps({**body, "path": "a/b.json"})[:-1])


def test_a_member_may_be_nested_one_level_less() -> None:
    deep: object = 1
    for _ in range(canonical_json.MAX_DEPTH - 1):
        deep = [deep]
    sealed = canonical_json.seal({"path": "here", "v": canonical_json.spell(deep)})
    assert canonical_json.unseal(sealed, name="here")["v"] == deep
    assert canonical_json.dumps([deep])
    for spell in (canonical_json.spell, lambda value: canonical_json.seal({"path": "here", "v": value})):
        with pytest.raises(Unserialisable, match="nested deeper"):
            spell([deep])


def test_depth_is_bounded_both_ways() -> None:
    deep: object = 1
    for _ in range(canonical_json.MAX_DEPTH):
        deep = [deep]
    assert canonical_json.loads(canonical_json.dumps(deep)) == deep
    with pytest.raises(Unserialisable, match="nested deeper"):
        canonical_json.dumps([deep])
    with pytest.raises(CorruptionError, match="nested deeper"):
        canonical_json.loads(b"[" + canonical_json.dumps(deep) + b"]")
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(Unserialisable):
        canonical_json.dumps(loop)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" 1",
        b"1 ",
        b"[1, 2]",
        b'{"a" :1}',
        b"1\n",
        b'{"a":1,"a":2}',
        b'{"a":1,"\\u0061":2}',
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b"1e999",
        b"9007199254740993",
        b"1" * 5000,
        b"-0",
        b"01",
        b"1]",
        b"[1",
        b"{}{}",
        b'"\xc3\xa9"',
        b'"\xff"',
        b'"\n"',
        b'"\\x"',
        b"tru",
        b"\xef\xbb\xbf1",
        "1".encode("utf-16"),
        b"\x00",
    ],
    ids=lambda data: repr(data[:20]),
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        canonical_json.loads(data)


def test_hostile_depth_and_length_cost_little() -> None:
    for data in (b"[" * 1_000_000, b'{"a":' * 500_000, b'["\\"[[[' + b"[" * 1_000_000, b'"' * 1_000_001):
        with pytest.raises(CorruptionError):
            canonical_json.loads(data)


@quick
@given(st.binary(max_size=60) | st.text('[]{}",:\\ 0123456789eE.-truefalsn', max_size=60).map(str.encode))
def test_any_bytes_either_read_or_are_refused(data: bytes) -> None:
    try:
        value = canonical_json.loads(data)
    except CorruptionError:
        return
    assert same(canonical_json.loads(canonical_json.dumps(value)), value)


@quick
@given(st.dictionaries(texts.filter(lambda key: key != "digest"), values, max_size=4), st.data())
def test_any_changed_byte_breaks_the_seal(body: dict[str, object], data: st.DataObject) -> None:
    sealed = canonical_json.seal({**body, "path": "a/b.json"})
    assert same(
        {k: v for k, v in canonical_json.unseal(sealed, name="a/b.json").items() if k != "digest"},
        {**body, "path": "a/b.json"},
    )
    at = data.draw(st.integers(0, len(sealed) - 1))
    bit = data.draw(st.integers(0, 7))
    broken = sealed[:at] + bytes([sealed[at] ^ (1 << bit)]) + sealed[at + 1 :]
    with pytest.raises(CorruptionError) as caught:
        canonical_json.unseal(broken, name="a/b.json")
    assert caught.value.subject == "a/b.json"
    for cut in (sealed[:at], sealed + b"x"):
        with pytest.raises(CorruptionError):
            canonical_json.unseal(cut, name="a/b.json")


def test_a_copy_is_told_from_damage() -> None:
    sealed = canonical_json.seal({"path": "here"})
    with pytest.raises(CorruptionError, match="a copy of 'here'"):
        canonical_json.unseal(sealed, name="there")
    assert canonical_json.open_seal(sealed, name="there")["path"] == "here"


BAD_TAGS: list[object] = [
    None,
    True,
    "1",
    [],
    {"!": "int", "v": "5"},
    {"!": "int", "v": "1" * 5000},
    {"!": "int", "v": "0x10"},
    {"!": "float", "v": "1.5"},
    {"!": "float", "v": "nan:7ff0000000000000"},
    {"!": "float", "v": "nan:"},
    {"!": "float"},
    {"!": "float", "v": "inf", "x": 1},
]


@pytest.mark.parametrize("value", BAD_TAGS, ids=lambda value: str(value)[:40])
def test_a_tag_that_was_never_written_is_refused(value: object) -> None:
    with pytest.raises(CorruptionError):
        canonical_json.untag_number(value)
