"""Single nodes of a tree, by path."""

from __future__ import annotations

from typing import Any, Final

from holdfast.model.checkpoint import Json
from holdfast.state.nodes import LEAVES, OWN, children, kind_of, walk

NOTHING: Final[Any] = object()
"""There is no node at a path: None is a value."""


def node_at(tree: Json, path: str, at: str = "") -> Json:
    """The outermost node at `path`, or NOTHING. `tree` lies at `at`, and has been checked not to be too deep."""
    if at == path:
        return tree
    for where, child in children(tree, at):
        if where in (at, path) or path.startswith(f"{where}/"):
            found = node_at(child, path, where)
            if found is not NOTHING:
                return found
    return NOTHING


def leaves_below(node: Json, path: str) -> list[str]:
    """The paths of leaves and aliases at and below a node."""
    return [where for where, below in walk(node, path) if kind_of(below) in LEAVES]


def plain_paths(tree: Json) -> list[str]:
    """The path of everything that is no leaf and holds nothing further: numbers, texts, sets, empty lists. What is each
    rank's own is in the private trees."""
    other = LEAVES | {OWN}
    return [where for where, node in walk(tree) if kind_of(node) not in other and not children(node, where)]
