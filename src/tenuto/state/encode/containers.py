"""Encodes Python's containers as nodes; the walker encodes their children."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from tenuto.model.paths import join
from tenuto.model.records import Json
from tenuto.state.encode.atoms import INLINE_BYTES, encode_bytes
from tenuto.state.frameworks import Tagged
from tenuto.state.tree import ROOT

if TYPE_CHECKING:
    from tenuto.state.encode.walker import StateWalker


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
