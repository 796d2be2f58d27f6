import json
import math
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import CorruptionError
from tenuto.repo.format.safetensors import MAX_HEADER, SIZES, HeaderEntry, build_header, header_length, parse_header


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, str) else json.dumps(header)
    return struct.pack("<Q", len(text.encode())) + text.encode() + data


def entry(code: str = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": code, "shape": shape, "data_offsets": offsets}


EMPTY = '"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
GOOD = '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'


def test_a_good_file_is_read() -> None:
    header = parse_header(file_of(GOOD, b"abcd"), name="x")
    assert dict(header) == {"a": HeaderEntry("U8", (4,), 8 + len(GOOD), 12 + len(GOOD))}
    assert header.length == 8 + len(GOOD)
    assert header.metadata == {}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ("", b"", "cannot hold an object"),
        ("[]", b"", "not a JSON object"),
        (" " + GOOD, b"abcd", "not a JSON object"),
        ("{", b" ", "cannot hold"),
        ("{ ", b"", "something other than a string"),
        ("{}x", b"", "continues after its end"),
        ("{}{}", b"", "continues after its end"),
        (GOOD + "\n", b"abcd", "continues after its end"),
        (GOOD[:-1], b"abcd", "ends where"),
        (GOOD[:-1] + ",}", b"abcd", "something other than a string"),
        (GOOD[:-1] + ";}", b"abcd", "has ';' where"),
        ('{"a" {}}', b"", "without a colon"),
        ("{1:{}}", b"", "something other than a string"),
        ('{"a":{"dtype":"U8"', b"", "not a flat object"),
        ('{"a":[]}', b"", "not a flat object"),
        ('{"a":{"dtype":{},"shape":[],"data_offsets":[0,1]}}', b"a", "not a flat object"),
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":' + " " * 70_000 + "1}}", b"a", "a flat object"),
        ('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"a", "not valid JSON"),
        ('{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', b"a", "not valid JSON"),
        ('{"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}}', b"a", "not valid JSON"),
        ('{"a":{"dtype":"U8","shape":' + "[" * 60_000 + ',"data_offsets":[0,1]}}', b"a", "not valid JSON"),
        ('{"a":{"dtype":"U8","shape":[' + "9" * 5000 + '],"data_offsets":[0,1]}}', b"a", "not valid JSON"),
        ('{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a", "exactly dtype"),
        ('{"a":{"dtype":"U8","shape":[1]}}', b"a", "exactly dtype"),
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}}', b"a", "exactly dtype"),
        ({"a": entry("U9")}, b"abcd", "dtype 'U9'"),
        ({"a": entry(code=["U8"])}, b"abcd", "which is not known"),  # type: ignore[arg-type]
        ({"a": entry(shape=4)}, b"abcd", "not a list of sizes"),
        ({"a": entry(shape=[-4])}, b"abcd", "not a list of sizes"),
        ({"a": entry(shape=[True])}, b"abcd", "not a list of sizes"),
        ({"a": entry(shape=["4"])}, b"abcd", "not a list of sizes"),
        ({"a": entry(shape=[2**64])}, b"abcd", "not a list of sizes"),
        ({"a": entry(offsets=[4, 0])}, b"abcd", "not a begin and an end"),
        ({"a": entry(offsets=[0])}, b"abcd", "not a begin and an end"),
        ({"a": entry(offsets=[-1, 3])}, b"abcd", "not a begin and an end"),
        ({"a": entry(offsets=None)}, b"abcd", "not a begin and an end"),
        ({"a": entry(shape=[5])}, b"abcd", "has 4 bytes, where its shape needs 5"),
        ({"a": entry("F64", [2**61], [0, 2**63 - 1])}, b"", "more than 2^63"),
        ({"a": entry("U8", [2**40] * 900, [0, 4])}, b"abcd", "more than 2^63"),
        ({"a": entry()}, b"abc", "ends at byte"),
        ({"a": entry()}, b"abcde", "belong to no tensor"),
        ({}, b"a", "belong to no tensor"),
        ({"a": entry(offsets=[1, 5])}, b"abcde", "belong to no tensor"),
        ({"a": entry(), "b": entry(offsets=[5, 9])}, b"abcdefghi", "belong to no tensor"),
        ({"a": entry(), "b": entry(offsets=[3, 7])}, b"abcdefg", "inside the tensor before"),
        ({"a": entry(), "b": entry()}, b"abcd", "inside the tensor before"),
        ("{" + EMPTY + "," + EMPTY + "}", b"", "twice"),
        ("{" + EMPTY + ',"\\u0061":' + json.dumps(entry()) + "}", b"abcd", "twice"),
        ('{"__metadata__":{},"__metadata__":{}}', b"", "__metadata__ twice"),
        ('{"__metadata__":{"a":"b","a":"b"}}', b"", "metadata name 'a' twice"),
        ('{"__metadata__":{"a":1}}', b"", "something other than a string"),
        ('{"__metadata__":{"a":{"b":"c"}}}', b"", "something other than a string"),
        ('{"__metadata__":[]}', b"", "'[' where '{'"),
        ('{"__metadata__":null}', b"", "'n' where '{'"),
        ('{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b"", "lone surrogate"),
        ('{"\\x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b"", "string that is not JSON's: Invalid"),
        ('{"a\nb":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b"", "string that is not JSON's: Invalid control"),
    ],
)  # fmt: skip
def test_each_way_to_lie_has_its_message(header: object, data: bytes, message: str) -> None:
    with pytest.raises(CorruptionError) as caught:
        parse_header(file_of(header, data), name="runs/x/rank-00000.safetensors")
    assert message in caught.value.message
    assert "rank-00000.safetensors" in caught.value.message
    assert caught.value.subject == "runs/x/rank-00000.safetensors"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (b"", "too short"),
        (b"1234567", "too short"),
        (struct.pack("<Q", MAX_HEADER + 1) + b"{}", "at most"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "at most"),
        (struct.pack("<Q", 3) + b"{}", "ends after 2"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_length_is_checked_before_it_is_believed(block: bytes, message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        parse_header(block, name="x")


def test_a_header_read_in_part_is_refused() -> None:
    with pytest.raises(CorruptionError, match="were read"):
        parse_header(file_of(GOOD)[:20], name="x", file_length=1000)


def test_the_header_alone_suffices_with_the_length_of_the_file() -> None:
    block = file_of(GOOD)
    assert parse_header(block, name="x", file_length=len(block) + 4)["a"].stop == len(block) + 4
    assert header_length(block[:8], name="x", file_length=len(block) + 4) == len(block)
    with pytest.raises(CorruptionError, match="ends at byte"):
        parse_header(block, name="x", file_length=len(block) + 3)


def test_what_others_write_is_read() -> None:
    """Keys in any order, white space, empty tensors at the same offset, names outside ASCII."""
    text = (
        '{ "é\\n" : {"data_offsets":[0, 0],\n"shape":[ 0, 7 ],"dtype":"F32"}\t, "b{}":{"dtype":"U8","shape":[],'
        '"data_offsets":[0,1]},"__metadata__":{"{\\"":"}"}}   '
    )
    header = parse_header(file_of(text, b"x"), name="x")
    assert [(key, one.shape, one.stop - one.start) for key, one in header.items()] == [
        ("é\n", (0, 7), 0),
        ("b{}", (), 1),
    ]
    assert header.metadata == {'{"': "}"}


def test_a_hundred_thousand_empty_lists_cost_no_memory_worth_the_name() -> None:
    import tracemalloc

    hostile = file_of('{"a":{"dtype":"U8","shape":[' + "[]," * 1_000_000 + '[]],"data_offsets":[0,1]}}', b"x")
    tracemalloc.start()
    with pytest.raises(CorruptionError, match="flat object"):
        parse_header(hostile, name="x")
    assert tracemalloc.get_traced_memory()[1] < 4 * len(hostile)
    tracemalloc.stop()


NAMES = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name != "__metadata__")
TENSORS = st.dictionaries(
    NAMES, st.tuples(st.sampled_from(sorted(SIZES)), st.lists(st.integers(0, 4), max_size=4)), max_size=8
)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(TENSORS, st.dictionaries(NAMES, NAMES, max_size=3), st.sampled_from([1, 8, 512, 4096]))
def test_what_is_built_is_read_back(
    tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str], align: int
) -> None:
    block = build_header(((name, code, shape) for name, (code, shape) in tensors.items()), metadata, align=align)
    assert len(block) % align == 0
    nbytes = sum(SIZES[code] * int(np.prod(shape, dtype=int)) for code, shape in tensors.values())
    header = parse_header(block, name="x", file_length=len(block) + nbytes)
    assert {name: (one.code, list(one.shape)) for name, one in header.items()} == tensors
    assert header.metadata == metadata
    assert header.length == len(block)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.data())
def test_a_mutated_header_is_an_error_or_still_covers_the_file(data: st.DataObject) -> None:
    """Whatever single byte changes: an error of ours, or a header that safetensors, too, would accept."""
    whole = bytearray(build_header([("a", "F32", (2, 3)), ("b", "U8", (5,))], {"k": "v"}, align=64) + bytes(29))
    at = data.draw(st.integers(0, len(whole) - 30))
    whole[at] = data.draw(st.integers(0, 255))
    try:
        header = parse_header(bytes(whole), name="x")
    except CorruptionError:
        return
    assert sum(one.stop - one.start for one in header.values()) == 29
    safetensors.deserialize(bytes(whole))


def test_what_safetensors_writes_is_read() -> None:
    arrays = {"x/y": np.arange(6, dtype=np.float32).reshape(2, 3), "z": np.zeros((0, 2), np.int64)}
    data = safetensors.numpy.save(arrays, {"k": "v"})
    header = parse_header(data, name="x")
    assert header.metadata == {"k": "v"}
    for name, array in arrays.items():
        assert data[header[name].start : header[name].stop] == array.tobytes()
        assert header[name].shape == array.shape


@pytest.mark.parametrize(
    ("text", "character"),
    [
        ("[]", 0),
        ("{}x", 2),
        (GOOD[:-1] + ";}", len(GOOD) - 1),
        ('{"é":{}}', 5),
        ("{ 1:{}}", 2),
        ('{"a" {}}', 4),
        ('{"a":[]}', 5),
        ('{"a": []}', 6),
        ("{" + EMPTY + ',"é":{"dtype":1}}', 1 + len(EMPTY) + 5),
        ('{"__metadata__":{"a":1}}', 21),
        ('{"__metadata__":{"a" 1}}', 21),
        ('{"__metadata__":[]}', 16),
        ('{"__metadata__":{},"__metadata__":{}}', 34),
    ],
)
def test_a_lie_is_pointed_at_by_the_byte(text: str, character: int) -> None:
    """Counted from the file's first byte; a letter outside ASCII is more than one."""
    with pytest.raises(CorruptionError) as caught:
        parse_header(file_of(text), name="x")
    assert caught.value.message.startswith("x: the ")
    assert caught.value.message.endswith(f"(at byte {8 + len(text[:character].encode())})")
    assert caught.value.hint == "tenuto verify finds the checkpoints that are whole"


@pytest.mark.parametrize(
    ("entries", "total", "message"),
    [
        ({"a": (0, 4), "b": (5, 9)}, 9, "bytes {4} to {5} belong to no tensor (at byte {4})"),
        ({"a": (0, 4), "b": (3, 7)}, 7, "'b' begins at byte {3}, inside the tensor before it (at byte {3})"),
        ({"b": (0, 4)}, 3, "'b' ends at byte {4}, but the file has {3} (at byte {0})"),
        ({"b": (0, 4)}, 6, "bytes {4} to {6} belong to no tensor (at byte {4})"),
        ({}, 1, "bytes {0} to {1} belong to no tensor (at byte {0})"),
    ],
)
def test_what_does_not_cover_the_file_is_told_by_its_bytes(
    entries: dict[str, tuple[int, int]], total: int, message: str
) -> None:
    header = file_of(
        {name: entry(shape=[stop - start], offsets=[start, stop]) for name, (start, stop) in entries.items()}
    )
    with pytest.raises(CorruptionError) as caught:
        parse_header(header, name="x", file_length=len(header) + total)
    at = [len(header) + number for number in range(10)]
    assert caught.value.message == "x: " + message.format(*at)


@pytest.mark.parametrize(
    ("block", "options", "message"),
    [
        (b"1234567", {}, "the file has 7 bytes, which is too short for a header (at byte 0)"),
        (b"12345678" * 2, {"file_length": 7}, "the file has 7 bytes, which is too short for a header (at byte 0)"),
        (
            struct.pack("<Q", 11) + b"{}" + b" " * 9,
            {"max_header": 10},
            "the header claims 11 bytes; at most 10 are read (at byte 0)",
        ),
        (
            struct.pack("<Q", 3) + b"{}",
            {},
            "the header claims 3 bytes, but the file ends after 2 of them (at byte 0)",
        ),
        (struct.pack("<Q", 1) + b"{", {}, "the header claims 1 bytes, which cannot hold an object (at byte 0)"),
        (
            struct.pack("<Q", 10) + b"{}",
            {"file_length": 18},
            "only 10 of the header's 18 bytes were read (at byte 10)",
        ),
        (struct.pack("<Q", 4) + b'{"\xff}', {}, "the header is not UTF-8 (at byte 10)"),
    ],
)
def test_a_length_that_lies_is_told_in_numbers(block: bytes, options: dict[str, int], message: str) -> None:
    with pytest.raises(CorruptionError) as caught:
        parse_header(block, name="x", **options)
    assert caught.value.message == f"x: {message}"


def test_the_longest_header_that_is_allowed_is_read() -> None:
    block = file_of("{}" + " " * 8)
    assert parse_header(block, name="x", max_header=10).length == 18
    assert header_length(block, name="x", file_length=18, max_header=10) == 18
    assert parse_header(file_of("{}"), name="x").length == 10


def test_an_entry_may_be_as_long_as_it_may_be() -> None:
    text = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]'
    longest = text + " " * (65_536 - len(text) - 1) + "}"
    assert "a" in parse_header(file_of('{"a":' + longest + "}"), name="x")
    with pytest.raises(CorruptionError, match="'a' is not a flat object of at most 65536 characters"):
        parse_header(file_of('{"a":' + longest.replace("}", " }") + "}"), name="x")


def test_the_largest_shape_that_a_file_can_have_is_known() -> None:
    from tenuto.repo.format.safetensors import _product

    assert _product([]) == 1
    assert _product([2, 3, 4]) == 24
    assert _product([2**40, 2**40, 0]) == 0
    assert _product([2, 5], 10) == 10
    assert _product([2, 5], 9) == 10 == _product([3, 7, 1000], 9), "no more than one above the cap"


def test_metadata_of_others_with_white_space_is_read() -> None:
    text = '{"__metadata__" : { "a" : "b" , "c":"d" } , ' + EMPTY + " }"
    header = parse_header(file_of(text), name="x")
    assert header.metadata == {"a": "b", "c": "d"}
    assert list(header) == ["a"]
    assert parse_header(file_of('{"__metadata__":{ }}'), name="x").metadata == {}


def test_a_header_without_metadata_has_no_place_for_any() -> None:
    assert build_header([], {}, align=1) == struct.pack("<Q", 2) + b"{}"
    assert build_header([], {"k": "é"}, align=1)[8:] == b'{"__metadata__":{"k":"\\u00e9"}}'
    block = build_header([("a", "F32", (2, 3)), ("é", "U8", ())], {}, align=64)
    assert len(block) == 128
    assert json.loads(block[8:]) == {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "é": {"dtype": "U8", "shape": [], "data_offsets": [24, 25]},
    }
    assert b" " not in block[8:].rstrip(b" ")
    assert len(build_header([], {})) == 4096


@pytest.mark.parametrize("sizes", ["", "0", "4", "2,2", "1,4,1"])
def test_the_usual_spelling_and_another_are_one_header(sizes: str) -> None:
    shape = [int(one) for one in sizes.split(",") if one]
    data = bytes(math.prod(shape))
    usual = f'{{"a/é":{{"dtype":"U8","shape":[{sizes}],"data_offsets":[0,{len(data)}]}}}}'
    other = json.dumps({"a/é": {"shape": shape, "data_offsets": [0, len(data)], "dtype": "U8"}})
    one, two = (parse_header(file_of(text, data), name="x") for text in (usual, other))
    assert [entry.shape for entry in one.values()] == [entry.shape for entry in two.values()] == [tuple(shape)]
    assert {name: entry.stop - entry.start for name, entry in one.items()} == {"a/é": len(data)}
    assert one.keys() == two.keys()


@pytest.mark.parametrize("text", ["[04]", "[4,]", "[,4]", "[4,,1]", "[4 1]"])
def test_what_only_looks_usual_is_refused(text: str) -> None:
    with pytest.raises(CorruptionError, match="not valid JSON"):
        parse_header(file_of(f'{{"a":{{"dtype":"U8","shape":{text},"data_offsets":[0,4]}}}}', b"abcd"), name="x")
