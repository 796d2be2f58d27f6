"""Dictionary keys and elements of sets: spelled for comparing, and back as values that can be hashed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

from holdfast.errors import CorruptionError
from holdfast.model.checkpoint import Json
from holdfast.state.restorer import Restorer, Thunk
from holdfast.state.writer import Writer


def spelled(key: Json) -> str:
    return encode_basestring_ascii(key) if type(key) is str else json.dumps(key, sort_keys=True)


def spell(key: Any) -> str:
    return spelled(key_node(key))


def key_node(key: Any) -> Json:
    return key if type(key) is str and key.isascii() else Writer(None).closed(key, "a key")


def key_thunk(plan: Restorer, node: Json, known: Mapping[str, Any], path: str) -> Thunk:
    if type(node) is str:
        return lambda: node
    text = spelled(node)
    if text in known:
        return lambda: known[text]
    made = plan.rebuild(node, f"{path} (a key)")

    def key() -> Any:
        found = made()
        try:
            hash(found)
        except TypeError:
            raise CorruptionError(f"{path}: a {type(found).__name__} as a key or element", subject=path) from None
        return found

    return key
