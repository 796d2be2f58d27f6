"""Selects the leaves of a load, and renames paths."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tenuto.errors import StateMismatch, UsageError
from tenuto.model.leaf import join, lineage
from tenuto.model.records import Json
from tenuto.state.contract import Rename
from tenuto.state.tree import KEYED, NAMED, items, kind_of, segment, sequence

Pattern = str | re.Pattern[str]
Patterns = Pattern | Sequence[Pattern]


def _matchers(patterns: Patterns | None) -> list[Callable[[str], Any]] | None:
    if patterns is None:
        return None
    found: list[Callable[[str], Any]] = []
    for pattern in [patterns] if isinstance(patterns, str | re.Pattern) else patterns:
        if isinstance(pattern, re.Pattern):
            found.append(pattern.search)
        elif isinstance(pattern, str):
            found.append(re.compile(fnmatch.translate(pattern)).match)
        else:
            raise UsageError(
                f"{pattern!r} is not a pattern", hint="use a glob such as 'model/*', or a compiled regular expression"
            )
    return found


class Selection:
    """`include` and `exclude`: globs over full paths (`*` crosses `/`), or compiled expressions that are searched for.

    A pattern that matches a path includes everything below it. Paths are those of the target, after `rename`.
    """

    def __init__(self, include: Patterns | None = None, exclude: Patterns | None = None) -> None:
        self._include = _matchers(include)
        self._exclude = _matchers(exclude) or []
        self.everything = self._include is None and not self._exclude

    def takes(self, path: str) -> bool:
        if self.everything:
            return True
        if any(match(one) for one in lineage(path) for match in self._exclude):
            return False
        return self._include is None or any(match(one) for one in lineage(path) for match in self._include)


def renamer(rename: Rename) -> Callable[[str], str]:
    """Returns `rename` as a function. A mapping replaces the longest prefix that ends at a `/`, a `.` or the path's
    end."""
    if not isinstance(rename, Mapping):
        return rename
    prefixes = sorted(rename, key=len, reverse=True)

    def renamed(path: str) -> str:
        for prefix in prefixes:
            if path.startswith(prefix) and (
                len(path) == len(prefix) or path[len(prefix)] in "/." or prefix[-1:] in ("/", ".")
            ):
                return str(rename[prefix]) + path[len(prefix) :]
        return path

    return renamed


class Renaming:
    """Moves the nodes of a tree to the paths that `rename` returns; leaves keep their numbers."""

    def __init__(self, rename: Rename) -> None:
        self._renamed = renamer(rename)
        self._moved: list[tuple[str, Json]] = []

    def apply(self, tree: Json) -> Json:
        moved = self._node(tree, "", "")
        for path, node in sorted(self._moved, key=lambda pair: pair[0].count("/")):
            moved = _insert(moved, path, path, node)
        return moved

    def _node(self, node: Json, old: str, new: str) -> Json:
        kind = kind_of(node)
        if kind in KEYED or kind in NAMED:
            return {**node, "i": self._pairs(node, old, new)}
        if kind == "bypath":
            return {
                **node,
                "i": [
                    [self._renamed(path), self._node(child, join(old, path), join(new, self._renamed(path)))]
                    for path, child in items(node)
                ],
            }
        if kind == "list":
            return [self._node(child, join(old, str(n)), join(new, str(n))) for n, child in enumerate(sequence(node))]
        if kind in ("tuple", "deque"):
            return {
                **node,
                "i": [
                    self._node(child, join(old, str(n)), join(new, str(n))) for n, child in enumerate(sequence(node))
                ],
            }
        if kind == "optimizer":
            return {**node, "v": self._optimizer(node["v"], old, new)}
        if kind in ("object", "tagged"):
            return {**node, "v": self._node(node["v"], old, new)}
        return node

    def _pairs(self, node: Json, old: str, new: str) -> list[Json]:
        remaining: list[Json] = []
        for key, child in items(node):
            before, here = join(old, segment(key)), join(new, segment(key))
            after = self._renamed(before)
            moved = self._node(child, before, after)
            if after in (here, before):
                remaining.append([key, moved])
            else:
                self._moved.append((after, moved))
        return remaining

    def _optimizer(self, node: Json, old: str, new: str) -> Json:
        found = self._node(node, old, new)
        for key, groups in items(found):
            if key == "param_groups":
                for group in sequence(groups):
                    for pair in group.get("i", ()) if isinstance(group, dict) else ():
                        if pair[0] == "params":
                            pair[1] = [self._renamed(path) if isinstance(path, str) else path for path in pair[1]]
        return found


def _insert(node: Json, path: str, left: str, child: Json) -> Json:
    """Returns the tree with `child` at `path`; `left` is the part of the path below `node`."""
    kind = kind_of(node)
    if kind in KEYED or kind in NAMED:
        found = items(node)
        for number, (key, below) in enumerate(found):
            name = segment(key)
            if left == name:
                raise StateMismatch(f"rename puts two entries at {path}", subject=path)
            if left.startswith(name + "/"):
                pairs = [[one, it] for one, it in found]
                pairs[number] = [key, _insert(below, path, left[len(name) + 1 :], child)]
                return {**node, "i": pairs}
        head, _, rest = left.partition("/")
        value = child if not rest else _insert({"!": "dict", "i": []}, path, rest, child)
        return {**node, "i": [*([one, it] for one, it in found), [_key(head), value]]}
    raise StateMismatch(f"rename puts an entry at {path}, below something that has no named entries", subject=path)


def _key(name: str) -> Json:
    from tenuto.model.leaf import unescape

    return int(name[3:]) if name.startswith("#i:") and name[3:].lstrip("-").isdigit() else unescape(name)
