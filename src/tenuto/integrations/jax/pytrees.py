"""Registered pytrees: Flax's TrainState and FrozenDict, Equinox modules, dataclasses, and whatever a user registers.

Such a value is saved as a class with named fields: its children, one level after the other. What a class keeps outside
its children (functions, sizes) is taken from the target, as are children that are functions. Containers that Tenuto
knows by itself (dict, list, tuple, namedtuple, as Optax has them) are never treated as pytrees.
"""

from __future__ import annotations

import collections
from typing import Any, Final

import jax

from tenuto.errors import DuplicatePath
from tenuto.integrations.jax.versions import private
from tenuto.model.leaf import join
from tenuto.model.records import Json
from tenuto.state import frameworks
from tenuto.state.encode.atoms import CONTAINERS, ENCODERS
from tenuto.state.encode.walker import StateWalker
from tenuto.state.frameworks import is_stateful, type_name
from tenuto.state.restore.restorer import Restorer, Thunk
from tenuto.state.tree import KEYED, ROOT, items, kind_of, segment

_CONTAINERS: Final = frozenset({*CONTAINERS, *ENCODERS, collections.Counter})
_FIELDS: Final = frozenset({"dataclass", "namedtuple", *KEYED})
"""Kinds of nodes that a pytree is filled from: its own, and those of other containers with the same names."""


def knows(kind: type) -> bool:
    """Returns whether values of the type are registered as pytrees, and nothing else says how to save them."""
    return (
        kind in private("registry")
        and kind not in _CONTAINERS
        and not callable(getattr(kind, "state_dict", None))
        and frameworks.registered(kind) is None
    )


def node(value: Any, path: str, writer: StateWalker) -> Json:
    pairs = [
        [name, writer.encode(child, join(path, segment(name)))]
        for name, child in _children(value, path)[0]
        if not _is_code(child)
    ]
    return {"!": "dataclass", "type": type_name(type(value)), "i": pairs}


def restore(value: Any, node: Json, path: str, restorer: Restorer) -> Thunk:
    """Plans a new value of the target's class; its children that are nodes of mutable containers stay what they are."""
    ours = type_name(type(value))
    if kind_of(node) not in _FIELDS:
        return restorer.mismatch(value, path, restorer.words(node), f"a {ours}")
    if node.get("type", ours) != ours:
        restorer.notes.append(f"{path or ROOT}: saved by a {node.get('type')}, restored into a {ours}")
    theirs = {key if type(key) is str else str(key): child for key, child in items(node)}
    children, structure = _children(value, path)
    thunks: list[Thunk] = []
    for name, child in children:
        where = join(path, segment(name))
        if name in theirs and not _is_code(child):
            thunks.append(restorer.value(theirs.pop(name), child, where))
            continue
        thunks.append(lambda child=child: child)  # type: ignore[misc]
        if not _is_code(child) and restorer.takes(where):
            restorer.missing.append(where)
    restorer.unexpected.extend(filter(restorer.takes, (join(path, segment(name)) for name in theirs)))
    return lambda: jax.tree_util.tree_unflatten(structure, [thunk() for thunk in thunks])


def _children(value: Any, path: str) -> tuple[list[tuple[str, Any]], Any]:
    """Returns the names and values of the children, and the structure around them."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda one: one is not value)
    found = [(_name(keys[0]), child) for keys, child in pairs]
    if len(dict(found)) < len(found):
        raise DuplicatePath(
            f"{path or ROOT}: two children of a {type_name(type(value))} have one name", subject=path or ROOT
        )
    return found, structure


def _name(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _is_code(child: Any) -> bool:
    kind = type(child)
    return (
        callable(child)
        and kind not in _CONTAINERS
        and frameworks.adapter_for(kind) is None
        and frameworks.registered(kind) is None
        and not is_stateful(child)
    )
