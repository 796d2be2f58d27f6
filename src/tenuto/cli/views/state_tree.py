"""Formats a checkpoint's state as lines: leaves with dtype, shape and bytes, shortened plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto.cli.console.output import NARROWEST, cells, clipped, padded, width
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Json
from tenuto.printable import clean
from tenuto.record import record
from tenuto.state.tree import KEYED, LEAVES, NAMED, OWN, children, is_plain, items, kind_of, sequence
from tenuto.units import count, size

SHOWN_TEXT = 56
"""Maximum characters of a plain value."""


@record
class TreeLine:
    """One entry: a leaf (`what`: dtype and shape), a plain value (`what`: its text), or a group."""

    path: str
    name: str
    depth: int
    what: str = ""
    bytes: int | None = None
    group: bool = False


def lines(tree: Json, specs: Sequence[LeafSpec], *, depth: int | None = None) -> list[TreeLine]:
    """Returns the entries of `tree`, whose leaf n is `specs[n]`; deeper than `depth` they are summarised."""
    printer = _TreePrinter(specs)
    if _is_single(tree, ""):
        printer.add("", "", tree, 0)
    else:
        printer.fill("", tree, 0)
    return [line for line in printer.found if depth is None or line.depth < depth]


def entries_below(node: Json, path: str, specs: Sequence[LeafSpec], *, depth: int | None = None) -> list[TreeLine]:
    """Returns the entries below one node of a tree; none for a plain value."""
    printer = _TreePrinter(specs)
    if not _is_single(node, path):
        printer.fill(path, node, 0)
    return [line for line in printer.found if depth is None or line.depth < depth]


@dataclass(slots=True)
class _TreePrinter:
    specs: Sequence[LeafSpec]
    found: list[TreeLine] = field(default_factory=list)

    def fill(self, path: str, node: Json, level: int) -> None:
        """Appends everything below `node`, each group with the sum of its leaves."""
        for where, child in _entries(node, path):
            name = where[len(path) + 1 :] if path else where
            if _is_single(child, where):
                self.add(where, name, child, level)
                continue
            place = len(self.found)
            self.found.append(TreeLine(where, name, level, group=True))
            self.fill(where, child, level + 1)
            below = self.found[place + 1 :]
            leaves = [line.bytes for line in below if line.bytes is not None and not line.group]
            self.found[place] = TreeLine(where, name, level, count(len(leaves), "leaf"), sum(leaves), group=True)

    def add(self, path: str, name: str, node: Json, level: int) -> None:
        kind = kind_of(node)
        if kind == "leaf":
            spec = self.specs[int(node["n"])]
            self.found.append(TreeLine(path, name, level, array_text(spec, node), spec.nbytes))
        elif kind == "alias":
            self.found.append(TreeLine(path, name, level, f"the same as {self.specs[int(node['n'])].path}"))
        else:
            self.found.append(TreeLine(path, name, level, plain_text(node)))


def _is_single(node: Json, path: str) -> bool:
    """Returns whether the node takes one line: a leaf, or a plain value of any size."""
    return kind_of(node) in LEAVES or not _entries(node, path) or is_plain(node)


def _entries(node: Json, path: str) -> list[tuple[str, Json]]:
    """Returns the children, skipping wrappers that add nothing to the path."""
    found = children(node, path)
    while len(found) == 1 and found[0][0] == path:
        found = children(found[0][1], path)
    return found


def array_text(spec: LeafSpec, node: Json) -> str:
    if node.get("as") == "bytes":
        return "bytes"
    return f"{spec.dtype} [{', '.join(map(str, spec.shape))}]" if spec.shape else spec.dtype


def plain_text(node: Json, limit: int = SHOWN_TEXT) -> str:
    """Returns a plain value, shortened."""
    text = _text(node)
    return text if len(text) <= limit else text[: limit - 2].rstrip() + " …"


def _text(node: Json) -> str:
    kind = kind_of(node)
    if kind == "":
        return repr(node)
    if kind in KEYED or kind in NAMED:
        inside = ", ".join(
            f"{key if isinstance(key, str) else _text(key)}: {_text(value)}" for key, value in items(node)
        )
        return "{" + inside + "}"
    if kind == "list":
        return "[" + ", ".join(map(_text, node)) + "]"
    if kind in ("tuple", "set", "frozenset", "deque"):
        return f"{'' if kind == 'tuple' else kind}({', '.join(map(_text, sequence(node)))})"
    if kind == "enum":
        return f"{node.get('type', 'enum').rpartition('.')[2]}.{node.get('name')}"
    if kind in ("float", "int"):
        return str(node.get("v"))
    if kind in ("object", "tagged", "optimizer"):
        return f"{str(node.get('type', kind)).rpartition('.')[2]}({_text(node.get('v'))})"
    if kind == "path":
        return str(node.get("v"))
    if kind == OWN:
        return "each rank's own"
    return kind


def columns(found: Sequence[TreeLine], spread: Mapping[str, str] | None = None) -> list[str]:
    """Returns aligned lines: name, description, bytes; then the entry of `spread` for the path."""
    names = ["  " * line.depth + (clean(line.name) or "(the whole state)") for line in found]
    what = min(max((cells(clean(line.what)) for line in found if line.bytes is not None), default=0), 30)
    beside = max(map(len, (spread or {}).values()), default=0)
    room = max(width() - what - beside - len("          9.99 KiB  "), NARROWEST)
    wide = min(max(map(cells, names), default=0), 48, room)
    out = []
    for name, line in zip(names, found, strict=True):
        beside_name = cells(name) <= wide
        if not beside_name:
            out.append(f"  {name}")
        value = clean(line.what)
        if line.bytes is None:
            value = clipped(value, max(width() - wide - 4, NARROWEST))
        text = f"  {padded(name if beside_name else '', wide)}  {padded(value, what)}"
        if line.bytes is not None:
            text += f"  {size(line.bytes):>9}"
        if not line.group and spread and line.path in spread:
            text += f"  {spread[line.path]}"
        out.append(text.rstrip())
    return out


def values(found: Sequence[TreeLine]) -> Mapping[str, Any]:
    """Returns the plain values by path, shortened."""
    return {line.path: line.what for line in found if line.bytes is None}
