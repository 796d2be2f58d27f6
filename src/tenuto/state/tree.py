"""The tree of a state: which nodes have children, at which paths, and access to nodes by path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

from tenuto.errors import CorruptionError, DuplicatePath
from tenuto.model.leaf import escape, join
from tenuto.model.records import Json

MAX_DEPTH: Final = 90
"""The nesting limit of containers; canonical JSON allows 400 brackets, and a dictionary takes three."""

WRAPPING: Final = 16
"""Levels of a tree without a container: an object's state, an optimizer's parts, the private root."""

PRIVATE: Final = "#private"
OWN: Final = "per_rank"
"""Marks in the shared tree a value that belongs to each rank alone; in a private tree, the entry with all of these by
path."""
BETWEEN: Final = "between"
"""In the private tree of an adopted checkpoint, alone there: the bytes of its files that belong to no tensor."""
FIRST_RANK: Final = "first_rank"
"""Stands in the tree of any other rank for what the first rank saves. No tree that is committed has it."""
ROOT: Final = "#value"

KEYED: Final = frozenset({"dict", "ordereddict", "defaultdict", "counter"})
NAMED: Final = frozenset({"module", "dataclass", "namedtuple", "sparse", "subclass"})
SEQUENCES: Final = frozenset({"tuple", "deque"})
WRAPPERS: Final = frozenset({"object", "optimizer", "tagged", "nprandom", "generator", "prngkey", "private"})
LEAVES: Final = frozenset({"leaf", "alias"})
STRUCTURE: Final = frozenset(
    {"leaf", "alias", "module", "optimizer", "object", "sparse", "subclass", "generator", "nprandom", "random"}
)
"""Kinds with tensors or inside an object. A value without any of them is plain, and replaced as a unit."""


def kind_of(node: Json) -> str:
    """Returns the kind of a node: "" for what JSON has itself, "list" for an array."""
    if type(node) is dict:
        kind = node.get("!")
        if type(kind) is not str:
            raise CorruptionError("the tree holds an object without a kind")
        return kind
    return "list" if type(node) is list else ""


def segment(key: Json) -> str:
    """Returns the path segment for the node of a dictionary key."""
    if type(key) is str:
        return escape(key) if key else "#s:"
    if key is None:
        return "#n"
    if type(key) is bool:
        return f"#b:{str(key).lower()}"
    if type(key) is int:
        return f"#i:{key}"
    if type(key) is float:
        return f"#f:{key!r}"
    return "#k:" + escape(json.dumps(key, sort_keys=True, separators=(",", ":")))


def items(node: Json, field: str = "i") -> list[tuple[Any, Json]]:
    """Returns the pairs of a node. Raises CorruptionError for anything else in their place."""
    found = node.get(field)
    if type(found) is not list or (found and (set(map(type, found)) != {list} or set(map(len, found)) != {2})):
        raise CorruptionError(f"a {node.get('!')} node without pairs")
    return [(key, child) for key, child in found]


def sequence(node: Json) -> list[Json]:
    found = node if type(node) is list else node.get("i")
    if type(found) is not list:
        raise CorruptionError(f"a {node.get('!')} node without items")
    return found


def name_of(key: Any) -> str:
    if type(key) is not str:
        raise CorruptionError("a name in the tree is not a string")
    return key


def children(node: Json, path: str) -> list[tuple[str, Json]]:
    """Returns the nodes below `node` that can contain leaves, with their paths."""
    kind = kind_of(node)
    if kind in KEYED:
        return [(join(path, segment(key)), child) for key, child in items(node)]
    if kind in NAMED:
        return [(join(path, segment(name_of(key))), child) for key, child in items(node)]
    if kind == "bypath":
        return [(join(path, name_of(key)), child) for key, child in items(node)]
    if kind in SEQUENCES or kind == "list":
        return [(join(path, str(number)), child) for number, child in enumerate(sequence(node))]
    if kind in WRAPPERS:
        if "v" not in node:
            raise CorruptionError(f"a {kind} node without content", subject=path)
        return [(join(path, PRIVATE) if kind == "private" else path, node["v"])]
    return []


def terminals(node: Json, path: str = "") -> list[str]:
    """Returns the paths of all leaves, plain values and empty containers, in tree order."""
    below = children(node, path) if isinstance(node, dict | list) else []
    return [path] if not below else [one for where, child in below for one in terminals(child, where)]


def walk(node: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yields `node` and every node below, parents first, in order. Raises CorruptionError if nested too deeply."""
    stack: list[tuple[int, str, Json]] = [(0, path, node)]
    while stack:
        depth, where, at = stack.pop()
        yield where, at
        if type(at) is list or (type(at) is dict and at.get("!") not in LEAVES):
            below = children(at, where)
            if below and depth > MAX_DEPTH + WRAPPING:
                raise CorruptionError("the tree is nested too deeply", subject=where)
            stack.extend([(depth + 1, *child) for child in reversed(below)])


OBJECTS: Final = frozenset({"module", "optimizer", "object"})
"""Kinds whose content an existing object has to take: without one it is entries, and no longer what was saved."""
NEED_TARGET: Final = OBJECTS | {"enum", "dataclass", "namedtuple", "defaultdict", "tagged", "subclass"}
"""Kinds of values that only something of the target, or of the program, can make what they were."""


def holds_objects(node: Json) -> bool:
    """Returns whether the node is or contains the state of an object."""
    return any(kind_of(one) in OBJECTS for _, one in walk(node))


def is_plain(node: Json) -> bool:
    """Returns whether the node contains neither leaves (except long bytes) nor objects."""
    waiting = [node]
    while waiting:
        at = waiting.pop()
        if kind_of(at) in STRUCTURE and not is_bytes(at):
            return False
        waiting.extend(_below(at))
    return True


def _below(node: Json) -> list[Json]:
    """Returns the nodes of `children` without their paths."""
    kind = kind_of(node)
    if kind in KEYED or kind in NAMED or kind == "bypath":
        return [child for _, child in items(node)]
    if kind in SEQUENCES or kind == "list":
        return sequence(node)
    return [child for _, child in children(node, "")] if kind in WRAPPERS else []


def is_bytes(node: Json) -> bool:
    return kind_of(node) in LEAVES and node.get("as") == "bytes"


def is_part(node: Json) -> bool:
    """Returns whether a node is a leaf saved as a global tensor, of which each rank may have a part."""
    return kind_of(node) in LEAVES and "shape" in node


def number_of(node: Json, count: int, path: str = "") -> int:
    """Returns the leaf number of a leaf or alias node, below `count`."""
    number = node.get("n")
    if type(number) is not int or not 0 <= number < count:
        raise CorruptionError(f"{path}: the tree names leaf {number!r} of {count}", subject=path)
    return number


def leaf_nodes(tree: Json) -> list[tuple[str, Json]]:
    """Returns every leaf and alias with its path, in order. Strict as `walk`; raises DuplicatePath for two at one
    path."""
    found = _usual(tree)
    return _slow_leaf_nodes(tree) if found is None else found


def _slow_leaf_nodes(tree: Json) -> list[tuple[str, Json]]:
    found: dict[str, Json] = {}
    for path, node in walk(tree):
        if kind_of(node) in LEAVES:
            where = path or ROOT
            if where in found:
                raise DuplicatePath(f"two leaves lie at {where}", subject=where)
            found[where] = node
    return list(found.items())


class _Unusual(Exception):
    """Something that only the slow path can judge."""


def _usual(tree: Json) -> list[tuple[str, Json]] | None:
    """Returns the result of `_slow_leaf_nodes` for trees without rare or invalid parts, else None."""
    found: list[tuple[str, Json]] = []
    try:
        if type(tree) is dict and tree["!"] in LEAVES:
            return [(ROOT, tree)]
        _gather(tree, "", 0, found, {})
    except (_Unusual, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None
    return found if len(dict(found)) == len(found) else None


def _gather(node: Json, path: str, depth: int, found: list[tuple[str, Json]], segments: dict[str, str]) -> None:
    """Appends the leaves below a node that is no leaf. `segments` caches the usual keys."""
    if depth > MAX_DEPTH:
        raise _Unusual
    kind = "list" if type(node) is list else node["!"]
    if kind in WRAPPERS:
        _gather_one(node["v"], join(path, PRIVATE) if kind == "private" else path, depth + 1, found, segments)
        return
    below = f"{path}/" if path else ""
    if kind in KEYED or kind in NAMED:
        pairs = _checked_pairs(node)
        names = _segments(pairs, segments, kind in NAMED)
        inside = [child for _, child in pairs]
        if set(map(type, inside)) == {dict} and LEAVES.issuperset(map(itemgetter("!"), inside)):
            found.extend(zip([below + name for name in names] if below else names, inside, strict=True))
            return
        for name, (_, child) in zip(names, pairs, strict=True):
            if type(child) is dict:
                if child["!"] in LEAVES:
                    found.append((below + name, child))
                    continue
            elif type(child) is not list:
                continue
            _gather(child, below + name, depth + 1, found, segments)
    elif kind == "bypath":
        for key, child in _checked_pairs(node):
            if type(key) is not str or not key:
                raise _Unusual
            _gather_one(child, below + key, depth + 1, found, segments)
    elif kind in SEQUENCES or kind == "list":
        inside = node if type(node) is list else node["i"]
        if type(inside) is not list:
            raise _Unusual
        for number, child in enumerate(inside):
            if type(child) is dict or type(child) is list:
                _gather_one(child, f"{below}{number}", depth + 1, found, segments)
    elif type(kind) is not str:
        raise _Unusual


def _gather_one(node: Json, path: str, depth: int, found: list[tuple[str, Json]], segments: dict[str, str]) -> None:
    if type(node) is dict and node["!"] in LEAVES:
        found.append((path or ROOT, node))
    elif type(node) is dict or type(node) is list:
        _gather(node, path, depth, found, segments)


def _checked_pairs(node: Json) -> list[list[Json]]:
    pairs: list[list[Json]] = node["i"]
    if type(pairs) is not list or (pairs and set(map(type, pairs)) != {list}):
        raise _Unusual
    return pairs


def _segments(pairs: list[list[Json]], known: dict[str, str], named: bool) -> list[str]:
    """Returns the path segments of the keys."""
    keys = [key for key, _ in pairs]
    if len(keys) > _MANY and are_segments(keys):
        return keys
    names = []
    for key in keys:
        if type(key) is str:
            name = known.get(key)
            if name is None:
                name = known[key] = segment(key)
        elif named:
            raise _Unusual
        else:
            name = segment(key)
        names.append(name)
    return names


def are_segments(keys: Sequence[Json]) -> bool:
    """Returns whether every key is its own path segment, as nearly all are. Tests all of them at once."""
    if set(map(type, keys)) != {str} or "" in keys:
        return False
    every = "".join(keys)
    return every.isascii() and _SPECIAL.search(every) is None


_MANY: Final = 16
_SPECIAL: Final = re.compile("[~/@#]")
"""The characters that `escape` changes anywhere."""


def leaf_paths(tree: Json) -> list[str]:
    """Returns the path of each leaf, by leaf number.

    Raises CorruptionError for a tree that `flatten` cannot have made (numbers other than 0..n-1 once each, aliases of
    nothing, malformed nodes), DuplicatePath for two leaves at one path.
    """
    nodes = leaf_nodes(tree)
    numbers = [node.get("n") for _, node in nodes if node["!"] == "leaf"]
    if numbers == list(range(len(nodes))) and {*map(type, numbers)} <= {int}:
        return [where for where, _ in nodes]  # as `flatten` numbers them where none are tied
    found: dict[int, str] = {}
    aliases: list[tuple[str, Json]] = []
    for where, node in nodes:
        if node["!"] == "alias":
            aliases.append((where, node))
            continue
        number = node.get("n")
        if type(number) is not int or number in found:
            raise CorruptionError(f"{where}: leaf number {number!r} is not a number, or is named twice", subject=where)
        found[number] = where
    for where, node in aliases:
        number_of(node, len(found), where)
    if found and (min(found) < 0 or max(found) != len(found) - 1):
        raise CorruptionError("the tree's leaf numbers have gaps")
    return [found[number] for number in range(len(found))]


# -- single nodes by path

NOTHING: Final[Any] = object()
"""There is no node at a path; None is a value."""


def node_at(tree: Json, path: str, at: str = "") -> Json:
    """Returns the outermost node at `path`, or NOTHING. `tree` is at `at`, and its depth is checked."""
    if at == path:
        return tree
    for where, child in children(tree, at):
        if where in (at, path) or path.startswith(f"{where}/"):
            found = node_at(child, path, where)
            if found is not NOTHING:
                return found
    return NOTHING


def leaves_below(node: Json, path: str) -> list[str]:
    """Returns the paths of leaves and aliases at and below a node."""
    return [where for where, below in walk(node, path) if kind_of(below) in LEAVES]


def plain_paths(tree: Json) -> list[str]:
    """Returns the path of every plain value without children: numbers, texts, sets, empty lists. Values of one rank are
    in the private trees."""
    other = LEAVES | {OWN}
    return [where for where, node in walk(tree) if kind_of(node) not in other and not children(node, where)]
