"""Encodes plain values as nodes and back (the same type and bits return), and containers as nodes.

A node is JSON. What JSON has itself (null, true, integers up to 2^53, finite floats, strings) is its own node; anything
else is an object whose "!" names the kind. The walker encodes the children of containers.
"""

from __future__ import annotations

import base64
import binascii
import collections
import datetime as dt
import decimal
import fractions
import json
import pathlib
import random
import struct
import sys
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tenuto.errors import CorruptionError, Unserialisable
from tenuto.model.canonical_json import tag_number, untag_number
from tenuto.model.leaf import join
from tenuto.model.records import Json
from tenuto.state.frameworks import Tagged
from tenuto.state.tree import ROOT

if TYPE_CHECKING:
    from tenuto.state.encode.walker import StateWalker


INLINE_BYTES: Final = 1024
"""bytes of at least this length become a leaf."""

_PATHS: Final[dict[str, type[pathlib.PurePath]]] = {
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
    "PosixPath": pathlib.PosixPath if sys.platform != "win32" else pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
}


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unb64(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def encode_text(value: str) -> Json:
    """Encodes a string; with lone surrogates as tagged bytes, because JSON would join two halves into one character."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return {"!": "str", "v": _b64(value.encode("utf-8", "surrogatepass"))}
    return value


def _text(node: Json) -> str:
    value = decode_atom(node)
    if type(value) is not str:
        raise CorruptionError("a text is not a string")
    return value


def _offset(zone: dt.tzinfo | None) -> Json:
    if zone is None:
        return None
    if type(zone) is not dt.timezone:
        raise Unserialisable(
            f"a time zone of type {type(zone).__qualname__} has no exact representation",
            hint="use datetime.timezone with a fixed offset",
        )
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return [offset.days, offset.seconds, offset.microseconds, encode_text(name[0]) if name else None]


def _zone(node: Json) -> dt.timezone | None:
    if node is None:
        return None
    days, seconds, micros, name = node
    offset = dt.timedelta(days, seconds, micros)
    if name is not None:
        return dt.timezone(offset, _text(name))
    return dt.timezone(offset) if offset else dt.UTC


def _encode_time(value: dt.time) -> Json:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, _offset(value.tzinfo)]


def _time(parts: Json) -> dt.time:
    hour, minute, second, micro, fold, zone = parts
    return dt.time(hour, minute, second, micro, tzinfo=_zone(zone), fold=fold)


def _random_state(value: random.Random) -> Json:
    version, words, gauss = value.getstate()
    if version != 3:
        raise Unserialisable(f"a random.Random of state version {version} is not known")
    return {
        "!": "random",
        "v": _b64(struct.pack(f"<{len(words)}I", *words)),
        "gauss": None if gauss is None else tag_number(gauss),
    }


def _random_words(node: Json) -> tuple[int, tuple[int, ...], float | None]:
    data = _unb64(node["v"])
    if len(data) != 625 * 4:
        raise CorruptionError(f"the state of a random.Random has {len(data)} bytes, not 2500")
    return 3, struct.unpack("<625I", data), None if node["gauss"] is None else float(untag_number(node["gauss"]))


def _new_random(node: Json) -> random.Random:
    made = random.Random()
    made.setstate(_random_words(node))
    return made


def random_state(node: Json, path: str) -> Any:
    """Returns an argument for random.Random.setstate."""
    return decode_atom(node, path).getstate()


REGISTERED: Final = 2
"""`isbuiltin` of a type that another package has given numpy. Its string is that of another type, or of none."""


def encode_scalar(value: np.generic) -> Json:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.isbuiltin == REGISTERED or np.dtype(array.dtype.str) != array.dtype:
        raise Unserialisable(f"a numpy scalar of type {array.dtype} has no representation")
    return {"!": "npscalar", "dtype": array.dtype.str, "v": _b64(array.tobytes())}


def _scalar(node: Json) -> Any:
    kind, data = np.dtype(str(node["dtype"])), _unb64(node["v"])
    if kind.hasobject or kind.itemsize != len(data):
        raise CorruptionError(f"a numpy scalar of type {kind} has {len(data)} bytes")
    return np.zeros((), kind)[()] if not data else np.frombuffer(data, kind)[0]


def _path(value: pathlib.PurePath) -> Json:
    return {"!": "path", "type": type(value).__name__, "v": encode_text(str(value))}


Encoder = Callable[[Any], Json]

ENCODERS: Final[dict[type, Encoder]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: tag_number,
    float: tag_number,
    str: encode_text,
    complex: lambda v: {"!": "complex", "v": [tag_number(v.real), tag_number(v.imag)]},
    type(Ellipsis): lambda v: {"!": "ellipsis"},
    range: lambda v: {"!": "range", "v": [tag_number(v.start), tag_number(v.stop), tag_number(v.step)]},
    dt.datetime: lambda v: {"!": "datetime", "v": [v.year, v.month, v.day, _encode_time(v.timetz())]},
    dt.date: lambda v: {"!": "date", "v": [v.year, v.month, v.day]},
    dt.time: lambda v: {"!": "time", "v": _encode_time(v)},
    dt.timedelta: lambda v: {"!": "timedelta", "v": [v.days, v.seconds, v.microseconds]},
    decimal.Decimal: lambda v: {"!": "decimal", "v": str(v)},
    fractions.Fraction: lambda v: {"!": "fraction", "v": [tag_number(v.numerator), tag_number(v.denominator)]},
    uuid.UUID: lambda v: {"!": "uuid", "v": v.hex},
    random.Random: _random_state,
    **dict.fromkeys((pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath), _path),
}

DECODERS: Final[dict[str, Callable[[Json], Any]]] = {
    "int": untag_number,
    "float": untag_number,
    "str": lambda n: _unb64(n["v"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda n: _unb64(n["v"]),
    "bytearray": lambda n: bytearray(_unb64(n["v"])),
    "complex": lambda n: complex(*(float(untag_number(part)) for part in n["v"])),
    "ellipsis": lambda n: ...,
    "range": lambda n: range(*(int(untag_number(part)) for part in n["v"])),
    "datetime": lambda n: dt.datetime.combine(dt.date(*n["v"][:3]), _time(n["v"][3])),
    "date": lambda n: dt.date(*n["v"]),
    "time": lambda n: _time(n["v"]),
    "timedelta": lambda n: dt.timedelta(*n["v"]),
    "decimal": lambda n: decimal.Decimal(n["v"]),
    "fraction": lambda n: fractions.Fraction(*(int(untag_number(part)) for part in n["v"])),
    "uuid": lambda n: uuid.UUID(hex=n["v"]),
    "path": lambda n: _PATHS[n["type"]](_text(n["v"])),
    "npscalar": _scalar,
    "random": _new_random,
}


def encode_bytes(value: bytes | bytearray) -> Json:
    return {"!": type(value).__name__, "v": _b64(bytes(value))}


def decode_atom(node: Json, path: str = "") -> Any:
    """Returns the value of an atom's node. Raises CorruptionError for anything else."""
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise CorruptionError(f"{path or 'the state'}: a list where a single value belongs", subject=path)
        return node
    decoder = DECODERS.get(node["!"]) if isinstance(node.get("!"), str) else None
    if decoder is None:
        raise CorruptionError(
            f"{path or 'the state'}: {node.get('!')!r} is not a kind of plain value that is known here", subject=path
        )
    try:
        return decoder(node)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, ArithmeticError, binascii.Error) as error:
        raise CorruptionError(f"{path or 'the state'}: a malformed {node['!']} value ({error})", subject=path) from None


# --------------------------------------------------------------------------------------------------
# Containers.

FACTORIES: Final[dict[Any, str]] = {
    kind: kind.__name__
    for kind in (
        int,
        float,
        bool,
        str,
        bytes,
        complex,
        list,
        dict,
        set,
        tuple,
        frozenset,
        collections.deque,
        collections.Counter,
    )
}
"""Default factories that a checkpoint may name; a defaultdict with another one restores only into an existing one."""


def _sorted_elements(writer: StateWalker, value: Iterable[Any], path: str) -> list[Json]:
    found = [writer.closed(element, f"{path or ROOT} (an element)") for element in value]
    return sorted(found, key=lambda node: json.dumps(node, sort_keys=True))


def _defaultdict(writer: StateWalker, value: collections.defaultdict[Any, Any], path: str) -> Json:
    factory = value.default_factory
    name = None if factory is None else FACTORIES.get(factory, "?") if isinstance(factory, type) else "?"
    return {"!": "defaultdict", "factory": name, "i": writer.pairs(value.items(), path)}


def _deque(writer: StateWalker, value: collections.deque[Any], path: str) -> Json:
    return {
        "!": "deque",
        "maxlen": value.maxlen,
        "i": [writer.encode(one, join(path, str(n))) for n, one in enumerate(value)],
    }


def _bytes(writer: StateWalker, value: bytes | bytearray, path: str) -> Json:
    return encode_bytes(value) if len(value) < INLINE_BYTES else writer.long_bytes(value, path)


def _slice(writer: StateWalker, value: slice, path: str) -> Json:
    return {"!": "slice", "v": [writer.encode(part, path) for part in (value.start, value.stop, value.step)]}


DICTIONARIES: Final = frozenset({dict, collections.OrderedDict})
"""Dictionaries that an adapter may encode as a unit."""

CONTAINERS: Final[dict[type, Callable[[StateWalker, Any, str], Json]]] = {
    dict: lambda w, v, p: {"!": "dict", "i": w.entries(v, p)},
    collections.OrderedDict: lambda w, v, p: {"!": "ordereddict", "i": w.entries(v, p)},
    collections.Counter: lambda w, v, p: {"!": "counter", "i": w.pairs(v.items(), p)},
    collections.defaultdict: _defaultdict,
    list: lambda w, v, p: [w.encode(one, join(p, str(n))) for n, one in enumerate(v)],
    tuple: lambda w, v, p: {"!": "tuple", "i": [w.encode(one, join(p, str(n))) for n, one in enumerate(v)]},
    set: lambda w, v, p: {"!": "set", "i": _sorted_elements(w, v, p)},
    frozenset: lambda w, v, p: {"!": "frozenset", "i": _sorted_elements(w, v, p)},
    collections.deque: _deque,
    slice: _slice,
    bytes: _bytes,
    bytearray: _bytes,
    Tagged: lambda w, v, p: {"!": "tagged", "type": v.type_name, "v": w.encode(v.value, p)},
}
