"""Matches entries one by one with the target, for containers with tensors or objects in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import groupby
from json.encoder import encode_basestring_ascii
from typing import Any, Final

from tenuto.errors import CorruptionError, StateMismatch
from tenuto.model.leaf import join
from tenuto.model.records import Json
from tenuto.state import frameworks
from tenuto.state.declarations import Late
from tenuto.state.encode.walker import StateWalker
from tenuto.state.frameworks import type_name
from tenuto.state.restore.class_fields import holds_structure
from tenuto.state.restore.restorer import ABSENT, Restorer, Thunk
from tenuto.state.tree import (
    KEYED,
    ROOT,
    are_segments,
    holds_objects,
    is_plain,
    items,
    kind_of,
    segment,
    sequence,
)

# -- keys of dictionaries and elements of sets: spelled for comparison, and restored as hashable values


def spelled(key: Json) -> str:
    return encode_basestring_ascii(key) if type(key) is str else json.dumps(key, sort_keys=True)


def spell(key: Any) -> str:
    return spelled(key_node(key))


def key_node(key: Any) -> Json:
    return key if type(key) is str and key.isascii() else StateWalker(None).closed(key, "a key")


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


_Entry = tuple[Any, Json, Any, str]
"""Key, the checkpoint's node (ABSENT without one), the present value, and the path."""

_MANY: Final = 16
"""From this many leaves on, handling them together pays."""


def structured(node: Json, like: Any) -> bool:
    """Returns whether either side contains tensors or objects: then entries are matched one by one."""
    return kind_of(node) in (*KEYED, "list", "module") and (not is_plain(node) or holds_structure(like))


def matched(plan: Restorer, node: Json, like: Any, path: str) -> Thunk:
    if isinstance(like, list) != (kind_of(node) == "list"):
        return plan.mismatch(like, path, plan.words(node), f"a {type(like).__name__}")
    return _list_entries(plan, node, like, path) if isinstance(like, list) else mapping_entries(plan, node, like, path)


def mapping_entries(plan: Restorer, node: Json, like: Any, path: str, *, root: bool = False) -> Thunk:
    """Matches every entry of a mapping with the checkpoint's entry of the same key. At the root, unnamed entries are
    skipped."""
    pairs = items(node)
    theirs: list[tuple[Any, Json]] = []
    thunks: list[tuple[Any, Thunk]] = []
    same = _all_at_once(plan, pairs, like, path)
    if same is None:
        entries, theirs = _paired(pairs, like, path)
        thunks, same = _restored(plan, entries)
    for key, child in theirs:
        where = join(path, segment(key))
        if root:
            plan.skipped.append(where)
        elif not plan.takes(where):
            continue
        elif _fills(plan, child, like) or (is_plain(child) and kind_of(node) != "module"):
            thunks.append((key_thunk(plan, key, {}, where)(), plan.rebuild(child, where)))
        else:
            plan.unexpected.append(where)

    def apply() -> Any:
        for key, now in same.items():
            if key not in like or like[key] is not now:
                _assign(plan, like, key, now, path)
        for key, thunk in thunks:
            now = thunk()
            if now is not ABSENT and (key not in like or like[key] is not now):
                _assign(plan, like, key, now, path)
        return like

    return apply


def _fills(plan: Restorer, child: Json, like: Sized) -> bool:
    """Returns whether an empty target takes what the checkpoint has. With other ranks around, it takes no tensors
    except its own: where its stage or experts have none, they belong to others. An object's state needs the object."""
    if len(like):
        return False
    return plan.private or is_plain(child) or (not plan.apart and not holds_objects(child))


def _paired(pairs: list[tuple[Any, Json]], like: Any, path: str) -> tuple[list[_Entry], list[tuple[Any, Json]]]:
    """Returns the target's entries with the checkpoint's nodes (ABSENT without one), and the remaining nodes."""
    entries: list[_Entry] = []
    if set(map(type, like)) == {str} and are_segments([key for key, _ in pairs]):
        below = f"{path}/" if path else ""
        theirs = dict(pairs)
        for key, present in like.items():
            child = theirs.pop(key, ABSENT)
            where = below + key if child is not ABSENT else join(path, segment(key_node(key)))
            entries.append((key, child, present, where))
        return entries, list(theirs.items())
    others = {spelled(key): (key, child) for key, child in pairs}
    for key, present in like.items():
        spelling = key_node(key)
        found = others.pop(spelled(spelling), None)
        entries.append((key, ABSENT if found is None else found[1], present, join(path, segment(spelling))))
    return entries, list(others.values())


def _all_at_once(plan: Restorer, pairs: list[tuple[Any, Json]], like: Any, path: str) -> dict[Any, Any] | None:
    """Fills all entries at once and returns them, if all are ordinary leaves under the same keys in the same order as
    in the checkpoint; else returns None."""
    if len(pairs) < _MANY or len(pairs) != len(like) or not plan.selection.everything:
        return None
    keys, values = [*like], [*like.values()]
    adapters = {id(found): found for found in map(frameworks.adapter_for, {*map(type, values)})}
    adapter: Any = adapters.popitem()[1]
    if adapters or not hasattr(adapter, "restore_all") or [key for key, _ in pairs] != keys or not are_segments(keys):
        return None
    paths = [f"{path}/{key}" for key in keys] if path else keys
    nodes = [child for _, child in pairs]
    return dict(zip(keys, values, strict=True)) if adapter.restore_all(values, nodes, paths, plan) else None


def _restored(plan: Restorer, entries: list[_Entry]) -> tuple[list[tuple[Any, Thunk]], dict[Any, Any]]:
    """Restores the entries. Returns thunks, and the entries whose own value is filled and stays; runs of leaves go at
    once."""
    thunks: list[tuple[Any, Thunk]] = []
    same: dict[Any, Any] = {}
    for adapter, run in _in_a_row(entries) if plan.selection.everything else ((None, entries),):
        if adapter is not None:
            keys, nodes, values, paths = zip(*run, strict=True)
            if adapter.restore_all(values, nodes, paths, plan):
                same.update(zip(keys, values, strict=True))
                continue
        for key, child, present, where in run:
            if type(present) is Late:
                continue
            if child is not ABSENT:
                thunks.append((key, plan.value(child, present, where)))
            elif plan.takes(where):
                plan.missing.append(where)
    return thunks, same


def _in_a_row(entries: list[_Entry]) -> Iterator[tuple[Any, list[_Entry]]]:
    """Yields runs of entries with the same adapter, in order; the adapter if it can restore the run at once, else
    None."""
    kinds = {type(present) for _, _, present, _ in entries}
    adapters = {kind: frameworks.adapter_for(kind) for kind in kinds}
    if len({*map(id, adapters.values())}) == 1:
        runs: Iterable[tuple[Any, Iterable[_Entry]]] = [(adapters[kinds.pop()], entries)]
    else:
        runs = groupby(entries, lambda entry: adapters[type(entry[2])])
    for adapter, group in runs:
        run = list(group)
        yield adapter if len(run) >= _MANY and hasattr(adapter, "restore_all") else None, run


def _assign(plan: Restorer, like: Any, key: Any, now: Any, path: str) -> None:
    try:
        plan.kept.replace(like, key, now, path)
    except TypeError:
        where = join(path, segment(key_node(key)))
        raise StateMismatch(
            f"{where}: a {type(like).__name__} takes no new value", subject=where, hint="give a dict"
        ) from None


def _list_entries(plan: Restorer, node: Json, like: list[Any], path: str) -> Thunk:
    theirs = sequence(node)
    thunks = [
        plan.value(child, present, join(path, str(n)))
        for n, (child, present) in enumerate(zip(theirs, like, strict=False))
    ]
    plan.missing.extend(join(path, str(n)) for n in range(len(theirs), len(like)) if plan.takes(join(path, str(n))))
    for number in range(len(like), len(theirs)):
        where = join(path, str(number))
        if _fills(plan, theirs[number], like) or is_plain(theirs[number]):
            thunks.append(plan.rebuild(theirs[number], where))
        else:
            plan.unexpected.append(where)

    def apply() -> Any:
        plan.kept.content(like, path)
        for number, thunk in enumerate(thunks):
            now = thunk()
            if number < len(like):
                like[number] = now
            else:
                like.append(now)
        return like

    return apply


def stateful(plan: Restorer, node: Json, like: Any, path: str) -> Thunk:
    if kind_of(node) != "object":
        return plan.mismatch(like, path, plan.words(node), f"an object ({type_name(type(like))})")
    if not plan.takes_some(node, path):
        return lambda: like
    if node.get("type") != type_name(type(like)):
        plan.notes.append(f"{path or ROOT}: saved by a {node.get('type')}, restored into a {type_name(type(like))}")
    before = len(plan.created)
    with plan.for_an_object(node["v"]):
        asked = plan.taken_by_objects or not plan.selection.everything
        state = _selected(plan, node["v"], like.state_dict() if asked else ABSENT, path)
    plan.restored.extend(plan.created[before:] or [path or ROOT])
    del plan.created[before:]

    def load() -> None:
        plan.kept.object(like, path)
        like.load_state_dict(state())

    plan.asks = True
    plan.later(path, load)
    return lambda: like


def _selected(plan: Restorer, node: Json, present: Any, path: str) -> Thunk:
    """Plans a new value of a node, where entries that include and exclude leave out keep their present value."""
    if plan.selection.everything or kind_of(node) != "dict" or not isinstance(present, Mapping):
        return plan.rebuild(node, path, present)
    entries, theirs = _paired(items(node), present, path)
    unchanged: dict[Any, Any] = {}
    thunks: dict[Any, Thunk] = {}
    for key, child, now, where in entries:
        if child is not ABSENT and plan.takes_some(child, where):
            thunks[key] = _selected(plan, child, now, where)
        elif child is not ABSENT or not plan.selection.takes(where):
            unchanged[key] = now
    for key, child in theirs:
        where = join(path, segment(key))
        if plan.takes_some(child, where):
            thunks[key_thunk(plan, key, {}, where)()] = plan.rebuild(child, where)
    return lambda: unchanged | {key: thunk() for key, thunk in thunks.items()}
