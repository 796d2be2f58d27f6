"""Canonical JSON: each value has one spelling, so that its bytes can be digested, compared and parsed strictly.

The text is one line of ASCII: other characters are escaped, there are no spaces, keys are sorted by code point. A float
has the shortest form that reads back equal, always with a `.` or an exponent, so that 1 and 1.0 stay distinct. Integers
are at most 2^53 in magnitude. NaN and infinities do not occur: `tag_number` encodes what JSON cannot hold.

A *sealed* object is a dictionary that contains its own `path` and ends in `"digest"`, the xxh3-128 of every byte before
`,"digest":`. The seal detects accidents; it is no signature.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import numpy as np
import xxhash

from tenuto.errors import CorruptionError, Unserialisable
from tenuto.model.records import Json
from tenuto.record import record

MAX_INTEGER: Final = 2**53
MAX_DEPTH: Final = 400
"""Maximum nesting. The C parser recurses once for each level, and a process may have raised Python's own limit."""

_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=True, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
)
_SEAL: Final = b',"digest":"'
TAIL: Final = len(_SEAL) + 32 + len(b'"}')
"""Bytes of the seal, including the closing brace."""
_NOT_SHAPE: Final = bytes(byte for byte in range(256) if byte not in b'"[]{} \t\r\n')
_DIGITS: Final = bytes(ord("0") if chr(byte) in "0123456789" else byte for byte in range(256))
_LONG: Final = b"0" * 16
_BRACKETS: Final = b"[]{}"
_SHORT: Final = 4096
"""Texts up to this many bytes are decoded strictly at once: checking whether they need it would cost more."""
_MINUS_ZERO: Final = re.compile(rb"-0(?:[,\]}]|\Z)")
_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)
_QUIET_NAN: Final = 0x7FF8000000000000
_TAGGED_NAN: Final = re.compile(r"nan:[0-9a-f]{16}")
_DECIMAL: Final = re.compile(r"-?[1-9][0-9]*")


@record(eq=False)
class Spelled:
    """A value with its spelling, made by `spell`, for use in several objects."""

    value: Json
    text: bytes


def dumps(value: Json) -> bytes:
    """Returns the canonical spelling of `value`. Raises Unserialisable if it has none; checks depth first."""
    _check(value, MAX_DEPTH)
    return _ENCODER.encode(value).encode("ascii")


def spell(value: Json) -> Spelled:
    """Returns a direct member of an object or list with its spelling: like `dumps`, with one level less."""
    _check(value, MAX_DEPTH - 1)
    return Spelled(value, _ENCODER.encode(value).encode("ascii"))


def loads(data: bytes) -> Json:
    """Parses canonical JSON from untrusted bytes, in linear time.

    Raises CorruptionError for any structure that `dumps` cannot write: duplicate keys, NaN and infinities, integers
    beyond 2^53, spaces, non-ASCII characters, trailing bytes, nesting beyond MAX_DEPTH.
    """
    _check_shape(data)
    try:
        text = data.decode("ascii")
        return _decode_fast(data, text) if len(data) > _SHORT and _has_usual_integers(data) else _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CorruptionError):
            raise
        raise CorruptionError(f"not canonical JSON: {error}") from None


def tag_number(value: float) -> Json:
    """Encodes a number as JSON: itself, or `{"!":"float","v":…}` or `{"!":"int","v":…}` if JSON lacks it."""
    if isinstance(value, int):
        return value if abs(value) <= MAX_INTEGER else {"!": "int", "v": _decimal(value)}
    if math.isfinite(value):
        return value
    if math.isinf(value):
        return {"!": "float", "v": "inf" if value > 0 else "-inf"}
    bits = struct.unpack(">Q", struct.pack(">d", value))[0]
    return {"!": "float", "v": "nan" if bits == _QUIET_NAN else f"nan:{bits:016x}"}


def untag_number(value: Json) -> float:
    """Decodes what `tag_number` wrote; NaN keeps its 64 bits. Raises CorruptionError for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if isinstance(value, dict) and value.keys() == {"!", "v"} and isinstance(value["v"], str):
        kind, text = value["!"], value["v"]
        if kind == "int" and _DECIMAL.fullmatch(text):
            number = _from_decimal(text)
            if abs(number) > MAX_INTEGER:
                return number
        if kind == "float" and text in ("inf", "-inf", "nan"):
            return float(text)
        if kind == "float" and _TAGGED_NAN.fullmatch(text):
            found = struct.unpack(">d", bytes.fromhex(text[4:]))[0]
            if math.isnan(found):
                return float(found)
    raise CorruptionError(f"{str(value)[:80]!r} is not a number")


def seal(obj: dict[str, Json | Spelled]) -> bytes:
    """Serializes `obj`, which has its `path` and no `digest` yet, in canonical form with its digest last."""
    assert "path" in obj and "digest" not in obj
    members = ((key, value if type(value) is Spelled else spell(value)) for key, value in sorted(obj.items()))
    body = b"{" + b",".join(b"%b:%b" % (dumps(key), spelled.text) for key, spelled in members)
    return body + _SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"}'


def is_sealed(data: bytes, name: str) -> bool:
    """Returns whether `open_seal` accepts the bytes."""
    try:
        open_seal(data, name=name)
    except CorruptionError:
        return False
    return True


def open_seal(data: bytes, *, name: str) -> dict[str, Json]:
    """Returns the object in `data` after checking its digest, wherever it lies. `name` is used in errors only."""
    check_seal(data, name=name)
    try:
        found = loads(data)
    except CorruptionError as error:
        raise CorruptionError(f"{name}: {error.message}", subject=name) from None
    if not isinstance(found, dict):
        raise CorruptionError(f"{name} is not a JSON object", subject=name)
    return found


def check_seal(data: bytes, *, name: str) -> None:
    """Raises CorruptionError if the bytes are not those that were sealed."""
    body, tail = memoryview(data)[:-TAIL], data[-TAIL:]
    if not body or tail != _SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"}':
        raise CorruptionError(f"{name} is damaged: its digest does not match its bytes", subject=name)


def unseal(data: bytes, *, name: str) -> dict[str, Json]:
    """Returns the object in `data` after checking that it is intact and was written under `name`."""
    found = open_seal(data, name=name)
    if found.get("path") != name:
        raise CorruptionError(
            f"{name} is a copy of {str(found.get('path'))[:300]!r}, not an object of this location", subject=name
        )
    return found


def _check(value: Json, levels: int) -> None:
    """Checks level by level, so that a hostile or accidental depth costs no stack."""
    level: list[Any] = [value]
    for _ in range(levels + 1):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str or item is None or kind is bool:
                continue
            if kind is int:
                if not -MAX_INTEGER <= item <= MAX_INTEGER:
                    raise Unserialisable("an integer beyond 2^53 has to be tagged")
            elif kind is list:
                below.extend(item)
            elif kind is dict:
                for key in item:
                    if type(key) is not str:
                        raise Unserialisable(f"the key {key!r} is not a string")
                below.extend(item.values())
            elif kind is float:
                if not math.isfinite(item):
                    raise Unserialisable(f"{item} has to be tagged")
            else:
                raise Unserialisable(f"a {kind.__module__}.{kind.__qualname__} is not a JSON value")
        if not below:
            return
        level = below
    raise Unserialisable(f"nested deeper than {MAX_DEPTH} levels, or within itself")


def _check_shape(data: bytes) -> None:
    """Bounds the depth and rejects spaces between tokens before a recursive parser sees the bytes."""
    plain = _ESCAPE.sub(b"", data) if b"\\" in data else data
    # Removing two adjacent quotes keeps everything else inside or outside a string.
    text = plain.translate(None, _NOT_SHAPE).replace(b'""', b"")
    if b'"' not in text and not text.strip(_BRACKETS) and text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return  # a few brackets and nothing else: no array needed
    shape = np.frombuffer(text, dtype=np.uint8)
    if b'"' in text:
        shape = shape[(np.cumsum(shape == ord('"'), dtype=np.int64) & 1) == 0]
    if (shape <= ord(" ")).any():
        raise CorruptionError("not canonical JSON: spaces between tokens")
    brackets = shape[shape != ord('"')] & 0xDF  # "[" and "{" become 0x5B, "]" and "}" become 0x5D
    depth = np.cumsum(np.int64(0x5C) - brackets)
    if depth.size and int(depth.max()) > MAX_DEPTH:
        raise CorruptionError(f"not canonical JSON: nested deeper than {MAX_DEPTH} levels")


def _has_usual_integers(data: bytes) -> bool:
    """Returns whether no integer can exceed 2^53 or be minus zero, so that none needs checking."""
    return _MINUS_ZERO.search(data) is None and _LONG not in data.translate(_DIGITS)


def _decode_fast(data: bytes, text: str) -> Json:
    """Decodes as the strict decoder does, for texts with ordinary integers.

    Compares the number of keys in the bytes and in the result, and checks each object only if they differ.
    """
    objects: list[dict[str, Json]] = []

    def collect(found: dict[str, Json]) -> dict[str, Json]:
        objects.append(found)
        return found

    decoder = json.JSONDecoder(object_hook=collect, parse_float=_float, parse_constant=_reject_constant, strict=True)
    value = decoder.decode(text)
    plain = _ESCAPE.sub(b"", data) if b"\\" in data else data
    # Each key ends in these two bytes; a string that begins with a colon only makes the count too high.
    return value if sum(map(len, objects)) == plain.count(b'":') else _DECODER.decode(text)


def _object(pairs: Sequence[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CorruptionError("not canonical JSON: a key occurs twice in one object")
    return found


def _integer(text: str) -> int:
    if len(text) > 17 or not -MAX_INTEGER <= (number := int(text)) <= MAX_INTEGER or text == "-0":
        raise CorruptionError("not canonical JSON: an integer beyond 2^53, or minus zero")
    return number


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise CorruptionError("not canonical JSON: a float beyond the range of doubles")
    return number


def _reject_constant(text: str) -> NoReturn:
    raise CorruptionError(f"not canonical JSON: {text}")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_reject_constant, strict=True
)


def _decimal(value: int) -> str:
    """Returns str(value) with an error for integers beyond Python's digit limit."""
    try:
        return str(value)
    except ValueError:
        raise Unserialisable("an integer of more than 4,300 digits cannot be saved") from None


def _from_decimal(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise CorruptionError("an integer of more than 4,300 digits") from None
