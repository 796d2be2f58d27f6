"""Which tensors of a state an optimizer may hold, and where they lie."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.model.paths import join
from holdfast.state import registry
from holdfast.state.atoms import ENCODERS
from holdfast.state.declared import MARKS
from holdfast.state.nodes import segment
from holdfast.state.stateful import is_stateful


def owners(root: Any, path: str = "") -> dict[int, tuple[Any, str]]:
    """Identity -> (tensor, path) for every tensor that an optimizer may hold, the first path winning.

    The tensors are held, so that no identity is reused while the table lives.
    """
    found: dict[int, tuple[Any, str]] = {}
    stack: set[int] = set()

    def visit(value: Any, where: str) -> None:
        kind = type(value)
        if kind in ENCODERS or id(value) in stack:
            return
        if kind in MARKS:
            visit(value.value, where)
            return
        stack.add(id(value))
        adapter = registry.adapter_for(kind)
        if adapter is not None:
            for tensor, name in adapter.owners(value, where):
                found.setdefault(id(tensor), (tensor, name))
        else:
            for key, child in _members(value):
                visit(child, join(where, key))
        stack.discard(id(value))

    visit(root, path)
    return found


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            if type(key) is str or type(key) in ENCODERS:
                yield segment(ENCODERS[type(key)](key)), child
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip((segment(name) for name in value._fields), value, strict=True)
    elif isinstance(value, list | tuple | collections.deque):
        for number, child in enumerate(value):
            yield str(number), child
    elif dataclasses.is_dataclass(value) and not is_stateful(value):
        for one in dataclasses.fields(value):
            if hasattr(value, one.name):
                yield segment(one.name), getattr(value, one.name)
