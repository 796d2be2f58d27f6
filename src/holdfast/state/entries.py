"""Entries matched one by one with what the target holds: those of containers with tensors or objects in them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, Final

from holdfast.errors import StateMismatch
from holdfast.model.checkpoint import Json
from holdfast.model.paths import join
from holdfast.state import registry
from holdfast.state.atoms import ENCODERS
from holdfast.state.keys import key_node, key_thunk, spelled
from holdfast.state.nodes import KEYED, ROOT, are_segments, is_plain, items, kind_of, segment, sequence, walk
from holdfast.state.restorer import ABSENT, Restorer, Thunk
from holdfast.state.tagged import type_name
from holdfast.state.writer import is_stateful

_Entry = tuple[Any, Json, Any, str]
"""Key, the checkpoint's node (ABSENT where it has none), the present value, and the path."""

_MANY: Final = 16
"""From so many leaves on it pays to look at all of them together."""

_NEEDS_CLASS: Final = frozenset({"enum", "dataclass", "namedtuple", "defaultdict"})


def structured(node: Json, like: Any) -> bool:
    """Whether either side holds tensors or objects: then entries are matched one by one."""
    return kind_of(node) in (*KEYED, "list", "module") and (not is_plain(node) or holds_structure(like))


def holds_structure(like: Any) -> bool:
    kind = type(like)
    if kind in ENCODERS:
        return False
    if registry.adapter_for(kind) is not None or is_stateful(like):
        return True
    if isinstance(like, Mapping):
        return any(holds_structure(one) for one in like.values())
    return isinstance(like, list | tuple) and any(holds_structure(one) for one in like)


def matched(plan: Restorer, node: Json, like: Any, path: str) -> Thunk:
    if isinstance(like, list) != (kind_of(node) == "list"):
        return plan.mismatch(like, path, plan.words(node), f"a {type(like).__name__}")
    return _list_entries(plan, node, like, path) if isinstance(like, list) else mapping_entries(plan, node, like, path)


def mapping_entries(plan: Restorer, node: Json, like: Any, path: str, *, root: bool = False) -> Thunk:
    """Every entry of a mapping with the checkpoint's of the same key. At the root, entries not named are skipped."""
    entries, theirs = _paired(items(node), like, path)
    thunks, same = _restored(plan, entries)
    empty = len(like) == 0
    for key, child in theirs:
        where = join(path, segment(key))
        if root:
            plan.skipped.append(where)
        elif not plan.takes(where):
            continue
        elif empty or (is_plain(child) and kind_of(node) != "module"):
            thunks.append((key_thunk(plan, key, {}, where)(), plan.rebuild(child, where)))
        else:
            plan.unexpected.append(where)

    def apply() -> Any:
        for key, now in same:
            if key not in like or like[key] is not now:
                _assign(like, key, now, path)
        for key, thunk in thunks:
            now = thunk()
            if now is not ABSENT and (key not in like or like[key] is not now):
                _assign(like, key, now, path)
        return like

    return apply


def _paired(pairs: list[tuple[Any, Json]], like: Any, path: str) -> tuple[list[_Entry], list[tuple[Any, Json]]]:
    """The target's entries with the checkpoint's nodes for them (ABSENT where it has none), and what of the checkpoint
    is left."""
    entries: list[_Entry] = []
    if set(map(type, like)) == {str} and are_segments([key for key, _ in pairs]):
        theirs = dict(pairs)
        below = f"{path}/" if path else ""
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


def _restored(plan: Restorer, entries: list[_Entry]) -> tuple[list[tuple[Any, Thunk]], list[tuple[Any, Any]]]:
    """What comes of the entries: thunks, and those whose own value is filled and stays, leaves in a row at once."""
    thunks: list[tuple[Any, Thunk]] = []
    same: list[tuple[Any, Any]] = []
    at_once = len(entries) >= _MANY and plan.selection.everything
    for adapter, group in groupby(entries, _leaf_adapter) if at_once else ((None, entries),):
        run = list(group)
        if adapter is not None and len(run) >= _MANY:
            keys, nodes, values, paths = zip(*run, strict=True)
            if adapter.restore_all(values, nodes, paths, plan):
                same.extend(zip(keys, values, strict=True))
                continue
        for key, child, present, where in run:
            if child is not ABSENT:
                thunks.append((key, plan.value(child, present, where)))
            elif plan.takes(where):
                plan.missing.append(where)
    return thunks, same


def _leaf_adapter(entry: _Entry) -> Any:
    """What can restore this entry together with others like it; None for whatever is no leaf."""
    if type(entry[1]) is not dict or entry[1].get("!") != "leaf":
        return None
    found = registry.adapter_for(type(entry[2]))
    return found if hasattr(found, "restore_all") else None


def _assign(like: Any, key: Any, now: Any, path: str) -> None:
    try:
        like[key] = now
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
        if not like or is_plain(theirs[number]):
            thunks.append(plan.rebuild(theirs[number], where))
        else:
            plan.unexpected.append(where)

    def apply() -> Any:
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
    if not plan.takes(path):
        return lambda: like
    if node.get("type") != type_name(type(like)):
        plan.notes.append(f"{path or ROOT}: saved by a {node.get('type')}, restored into a {type_name(type(like))}")
    hints = like.state_dict() if any(kind_of(one) in _NEEDS_CLASS for _, one in walk(node["v"])) else ABSENT
    before = len(plan.created)
    state = plan.rebuild(node["v"], path, hints)
    plan.restored.extend(plan.created[before:] or [path or ROOT])
    del plan.created[before:]
    plan.later(path, lambda: like.load_state_dict(state()))
    return lambda: like
