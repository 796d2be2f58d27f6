"""Canonical JSON: one value has one spelling, so that bytes can be digested, compared and read back strictly.

One line of ASCII: everything else is escaped, there are no spaces, keys are sorted by code point, floats are in the
shortest form that reads back equal and always have a `.` or an exponent (so that 1 and 1.0 stay two things), integers
are at most 2^53 in magnitude, and nan and infinities do not occur: `tag_number` spells what JSON cannot hold.

A *sealed* object is a dictionary that contains its own `path` and ends in `"digest"`, the xxh3-128 of every byte before
`,"digest":`. The seal is against accidents; it is no signature.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
import xxhash

from tenuto.errors import CorruptionError, Unserialisable
from tenuto.model.records import Json

MAX_INTEGER: Final = 2**53
MAX_DEPTH: Final = 400
"""Brackets inside brackets. The C parser recurses once a level, and a process may have raised Python's own limit."""

_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=True, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
)
_SEAL: Final = b',"digest":"'
TAIL: Final = len(_SEAL) + 32 + len(b'"}')
"""Bytes of the seal, the closing brace included."""
_NOT_SHAPE: Final = bytes(byte for byte in range(256) if byte not in b'"[]{} \t\r\n')
_DIGITS: Final = bytes(ord("0") if chr(byte) in "0123456789" else byte for byte in range(256))
_LONG: Final = b"0" * 16
_BRACKETS: Final = b"[]{}"
_SHORT: Final = 4096
"""Bytes of a text that is decoded strictly at once: looking whether it need be would cost more."""
_MINUS_NOUGHT: Final = re.compile(rb"-0(?:[,\]}]|\Z)")
_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)
_QUIET_NAN: Final = 0x7FF8000000000000
_TAGGED_NAN: Final = re.compile(r"nan:[0-9a-f]{16}")
_DECIMAL: Final = re.compile(r"-?[1-9][0-9]*")


@dataclass(frozen=True, slots=True, eq=False)
class Spelled:
    """A value with its spelling, where it becomes a member of several objects: `spell` makes it."""

    value: Json
    text: bytes


def dumps(value: Json) -> bytes:
    """The canonical spelling of `value`. Raises Unserialisable for what it cannot spell; depth is checked first."""
    _check(value, MAX_DEPTH)
    return _ENCODER.encode(value).encode("ascii")


def spell(value: Json) -> Spelled:
    """As `dumps`, for a direct member of an object or a list: it may be nested one level less deeply."""
    _check(value, MAX_DEPTH - 1)
    return Spelled(value, _ENCODER.encode(value).encode("ascii"))


def loads(data: bytes) -> Json:
    """Reads canonical JSON from bytes that nobody has vouched for; linear in their number.

    Raises CorruptionError for anything that `dumps` could not have written as to structure: duplicate keys, nan and
    infinities, integers beyond 2^53, spaces, other characters than ASCII, trailing bytes, nesting beyond MAX_DEPTH.
    """
    _check_shape(data)
    try:
        text = data.decode("ascii")
        return _usual(data, text) if len(data) > _SHORT and _has_usual_integers(data) else _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CorruptionError):
            raise
        raise CorruptionError(f"not canonical JSON: {error}") from None


def tag_number(value: float) -> Json:
    """A number as JSON: itself, or `{"!":"float","v":…}` or `{"!":"int","v":…}` where JSON has no number for it."""
    if isinstance(value, int):
        return value if abs(value) <= MAX_INTEGER else {"!": "int", "v": _decimal(value)}
    if math.isfinite(value):
        return value
    if math.isinf(value):
        return {"!": "float", "v": "inf" if value > 0 else "-inf"}
    bits = struct.unpack(">Q", struct.pack(">d", value))[0]
    return {"!": "float", "v": "nan" if bits == _QUIET_NAN else f"nan:{bits:016x}"}


def untag_number(value: Json) -> float:
    """The number that `tag_number` wrote; CorruptionError for anything else. nan keeps its 64 bits."""
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
    raise CorruptionError(f"{str(value)[:80]!r} is no number")


def seal(obj: dict[str, Json | Spelled]) -> bytes:
    """`obj` (which has its `path`, and no `digest` yet) in canonical form, with its digest last."""
    assert "path" in obj and "digest" not in obj
    members = ((key, value if type(value) is Spelled else spell(value)) for key, value in sorted(obj.items()))
    body = b"{" + b",".join(b"%b:%b" % (dumps(key), spelled.text) for key, spelled in members)
    return body + _SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"}'


def is_sealed(data: bytes, name: str) -> bool:
    """Whether `open_seal` reads it."""
    try:
        open_seal(data, name=name)
    except CorruptionError:
        return False
    return True


def open_seal(data: bytes, *, name: str) -> dict[str, Json]:
    """The object in `data`, its digest checked, wherever it lies. `name` is for the error alone."""
    check_seal(data, name=name)
    try:
        found = loads(data)
    except CorruptionError as error:
        raise CorruptionError(f"{name}: {error.message}", subject=name) from None
    if not isinstance(found, dict):
        raise CorruptionError(f"{name} is no JSON object", subject=name)
    return found


def check_seal(data: bytes, *, name: str) -> None:
    """CorruptionError where the bytes are not those that were sealed, whatever they say."""
    body, tail = memoryview(data)[:-TAIL], data[-TAIL:]
    if not body or tail != _SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"}':
        raise CorruptionError(f"{name} is damaged: its digest does not match its bytes", subject=name)


def unseal(data: bytes, *, name: str) -> dict[str, Json]:
    """The object in `data`, checked to be whole and to be the one that was written under `name`."""
    found = open_seal(data, name=name)
    if found.get("path") != name:
        raise CorruptionError(
            f"{name} is a copy of {str(found.get('path'))[:300]!r}, not an object of this place", subject=name
        )
    return found


def _check(value: Json, levels: int) -> None:
    """Level by level, so that a hostile or accidental depth costs no stack."""
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
                        raise Unserialisable(f"the key {key!r} is no string")
                below.extend(item.values())
            elif kind is float:
                if not math.isfinite(item):
                    raise Unserialisable(f"{item} has to be tagged")
            else:
                raise Unserialisable(f"a {kind.__module__}.{kind.__qualname__} is no JSON value")
        if not below:
            return
        level = below
    raise Unserialisable(f"nested deeper than {MAX_DEPTH} levels, or within itself")


def _check_shape(data: bytes) -> None:
    """Bounds the depth and refuses spaces between tokens, before a recursive parser sees the bytes."""
    plain = _ESCAPE.sub(b"", data) if b"\\" in data else data
    # Two quotes in a row can go: whatever remains is inside or outside a string as before.
    text = plain.translate(None, _NOT_SHAPE).replace(b'""', b"")
    if b'"' not in text and not text.strip(_BRACKETS) and text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return  # nothing but a few brackets: no column need be made of them
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
    """Whether no integer can be beyond 2^53 or minus nought, so that none need be looked at."""
    return _MINUS_NOUGHT.search(data) is None and _LONG not in data.translate(_DIGITS)


def _usual(data: bytes, text: str) -> Json:
    """As the strict decoder reads it, for a text whose integers are usual: keys are counted in the bytes and in what
    came of them, and only where the two differ is each object looked at."""
    objects: list[dict[str, Json]] = []

    def remember(found: dict[str, Json]) -> dict[str, Json]:
        objects.append(found)
        return found

    decoder = json.JSONDecoder(object_hook=remember, parse_float=_float, parse_constant=_constant, strict=True)
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
        raise CorruptionError("not canonical JSON: an integer beyond 2^53, or minus nought")
    return number


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise CorruptionError("not canonical JSON: a float beyond the range of doubles")
    return number


def _constant(text: str) -> NoReturn:
    raise CorruptionError(f"not canonical JSON: {text}")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant, strict=True
)


def _decimal(value: int) -> str:
    """str(value) without Python's limit on digits, which is a defence against strangers' numbers, not one's own."""
    try:
        return str(value)
    except ValueError:
        raise Unserialisable("an integer of more than 4,300 digits cannot be saved") from None


def _from_decimal(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise CorruptionError("an integer of more than 4,300 digits") from None
