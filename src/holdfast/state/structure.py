"""Tensors, modules and objects in what a target holds: nothing of the checkpoint takes their place, it fills them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from holdfast.model.checkpoint import Json
from holdfast.state import registry
from holdfast.state.atoms import ENCODERS
from holdfast.state.declared import MARKS
from holdfast.state.nodes import KEYED, SEQUENCES, is_plain, items, kind_of, name_of, sequence
from holdfast.state.restorer import Restorer, Thunk
from holdfast.state.stateful import is_stateful
from holdfast.state.tagged import Tagged, type_name

CLASSES: Final = frozenset({"dataclass", "namedtuple"})


def holds_structure(like: Any) -> bool:
    """Whether a value is or holds anything that is filled in its place."""
    waiting, seen = [like], dict[int, Any]()
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if kind in ENCODERS or id(one) in seen:
            continue
        seen[id(one)] = one
        adapter = registry.adapter_for(kind)
        if kind in MARKS or is_stateful(one) or (adapter is not None and not adapter.plain(kind)):
            return True
        if isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, list | tuple | collections.deque):
            waiting.extend(one)
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            waiting.extend(fields_of(one).values())
    return False


def fields_of(like: Any) -> dict[str, Any]:
    """The fields of a dataclass's value that are set."""
    return {one.name: getattr(like, one.name) for one in dataclasses.fields(like) if hasattr(like, one.name)}


def class_like(node: Json, like: Any) -> type | None:
    """The class of `like`, if it is one of the kind that a dataclass's or namedtuple's node was saved from."""
    kind = type(like)
    is_data = kind_of(node) == "dataclass"
    same = dataclasses.is_dataclass(kind) if is_data else issubclass(kind, tuple) and hasattr(kind, "_fields")
    return kind if same else None


def field_names(kind: type) -> set[str]:
    names: Any = [one.name for one in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else kind._fields  # type: ignore[attr-defined]
    return set(names)


def fields_fit(node: Json, kind: type) -> bool:
    """Whether a class has the fields saved: all of them where it is a namedtuple, else others beside them too."""
    theirs, ours = {name_of(key) for key, _ in items(node)}, field_names(kind)
    return theirs == ours or (theirs < ours and kind_of(node) == "dataclass")


def offered(node: Json, like: Any, *, keep: bool) -> type | None:
    """The class that the target offers for a dataclass's or namedtuple's node: the one saved; or, where there is
    anything to fill in its place, one of another name with the same fields."""
    kind = class_like(node, like)
    if kind is None or type_name(kind) == node.get("type"):
        return kind
    return kind if keep and fields_fit(node, kind) and (not is_plain(node) or holds_structure(like)) else None


def refused(plan: Restorer, node: Json, like: Any, path: str) -> Thunk | None:
    """The mismatch, where the target holds structure and the checkpoint has a form that does not fill it; else None."""
    kind = type(like)
    if kind in ENCODERS or kind is Tagged or registry.registered(kind) is not None:
        return None  # replaced as a whole
    if _fills(node, like) or not holds_structure(like):
        return None
    if not plan.takes_some(node, path):
        return lambda: like
    return plan.mismatch(like, path, _theirs(plan, node), _ours(like))


def _fills(node: Json, like: Any) -> bool:
    kind = kind_of(node)
    if kind in KEYED:
        return isinstance(like, Mapping)
    if kind in CLASSES:
        return (found := class_like(node, like)) is not None and fields_fit(node, found)
    if kind in SEQUENCES or kind == "list":
        return isinstance(like, list | tuple | collections.deque) and len(like) == len(sequence(node))
    return False


def _theirs(plan: Restorer, node: Json) -> str:
    kind, words = kind_of(node), plan.words(node)
    if kind in SEQUENCES or kind == "list":
        return f"{words} of {len(sequence(node))}"
    return f"{words} with fields {sorted(name_of(key) for key, _ in items(node))}" if kind in CLASSES else words


def _ours(like: Any) -> str:
    kind = type(like)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return f"a {type_name(kind)} with fields {sorted(field_names(kind))}"
    return (
        f"a {kind.__name__} of {len(like)}"
        if isinstance(like, list | tuple | collections.deque)
        else (f"a {kind.__name__}")
    )
