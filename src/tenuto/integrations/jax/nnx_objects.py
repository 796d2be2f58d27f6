"""Flax's NNX: modules, optimizers, random streams and states, whose Variables are filled in place.

An NNX object is saved as its state, `nnx.state(object)`: what two of its attributes share is there once. Everything
that holds an object goes on holding the same one after a restore.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from tenuto.model.records import Json
from tenuto.state.encode.walker import StateWalker
from tenuto.state.frameworks import type_name
from tenuto.state.restore.restorer import Restorer, Thunk
from tenuto.state.tree import KEYED, items, kind_of

Path = tuple[Any, ...]


def is_one(value: Any) -> bool:
    """Returns whether it is a Variable, a State or another object of NNX."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, (nnx.Variable, nnx.Pytree, nnx.State))


def node(value: Any, path: str, writer: StateWalker) -> Json:
    if _is_variable(value):
        return writer.encode(value.get_raw_value(), path)
    inner = writer.encode(_nested(_flat(value)), path)
    return {"!": "dataclass", "type": type_name(type(value)), "i": inner["i"]}


def restore(value: Any, node: Json, path: str, restorer: Restorer) -> Thunk:
    if _is_variable(value):
        inner = restorer.value(node, value.get_raw_value(), path)

        def take() -> None:
            before = value.get_raw_value()
            restorer.kept.value(before, lambda: value.set_raw_value(before), path)
            value.set_raw_value(inner())

        restorer.later(path, take)
        return lambda: value
    if kind_of(node) not in ("dataclass", *KEYED):
        return restorer.mismatch(value, path, restorer.words(node), f"a {type_name(type(value))}")
    flat = _flat(value)
    entries = {"!": "dict", "i": [[_text(key), child] for key, child in items(node)]}
    filled = restorer.value(entries, _nested(flat), path)
    bare = [keys for keys, one in flat if not _is_variable(one)]

    def fill() -> None:
        found = filled()
        for keys, one in flat:
            if not _is_variable(one):
                restorer.kept.value(one, partial(_put_back, value, {keys: one}), path)
        flat.clear()  # arrays that are replaced are freed
        _put_back(value, {keys: _at(found, keys) for keys in bare})

    restorer.later(path, fill)
    return lambda: value


def _is_variable(value: Any) -> bool:
    return isinstance(value, sys.modules["flax.nnx"].Variable)


def _flat(value: Any) -> list[tuple[Path, Any]]:
    """Returns the Variables, and the arrays that are attributes by themselves, with the keys on the way to each."""
    nnx = sys.modules["flax.nnx"]
    return list(nnx.to_flat_state(value if isinstance(value, nnx.State) else nnx.state(value)))


def _nested(flat: list[tuple[Path, Any]]) -> dict[str, Any]:
    """Returns them as dictionaries within each other; positions in lists are texts, as in other paths."""
    found: dict[str, Any] = {}
    for keys, one in flat:
        at = found
        for key in keys[:-1]:
            at = at.setdefault(_text(key), {})
        at[_text(keys[-1])] = one
    return found


def _text(key: Any) -> Any:
    return str(key) if type(key) is int else key


def _at(found: Any, keys: Path) -> Any:
    for key in keys:
        found = found[_text(key)]
    return found


def _put_back(value: Any, arrays: dict[Path, Any]) -> None:
    nnx = sys.modules["flax.nnx"]
    if not arrays:
        return
    if isinstance(value, nnx.State):
        for keys, one in arrays.items():
            at: Any = value
            for key in keys[:-1]:
                at = at[key]
            at[keys[-1]] = one
    else:
        nnx.update(value, nnx.from_flat_state(list(arrays.items())))
