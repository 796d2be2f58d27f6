"""Restores plain values and containers from their nodes: new, or in place where the target has them."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final

from tenuto.errors import CorruptionError, ShardMismatch
from tenuto.model.leaf import join
from tenuto.model.records import Json
from tenuto.state import frameworks
from tenuto.state.declarations import MARKS, Shard
from tenuto.state.encode.atoms import DECODERS, ENCODERS, FACTORIES, decode_atom, random_state
from tenuto.state.frameworks import Tagged, is_stateful, type_name
from tenuto.state.restore.class_fields import enum_member, named_fields, refused, stand_in, tagged
from tenuto.state.restore.entries import key_thunk, matched, spell, spelled, stateful, structured
from tenuto.state.restore.restorer import ABSENT, Restorer, Thunk
from tenuto.state.restore.selection import Selection
from tenuto.state.tree import (
    FIRST_RANK,
    LEAVES,
    OBJECTS,
    OWN,
    ROOT,
    STRUCTURE,
    holds_objects,
    items,
    kind_of,
    name_of,
    segment,
    sequence,
)


def declared_value(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    """Plans the value of `node` where the checkpoint or the target has a mark. A mark in the target stays around the
    value."""
    if kind_of(node) == OWN:
        return _own(plan, node, like, path, keep)
    if not keep:
        return plan.rebuild(node, path, like.value)
    if isinstance(like, Shard):
        adapter = frameworks.adapter_for(type(like.value))
        if adapter is None:
            return plan.mismatch(like, path, plan.words(node), f"a shard of a {type_name(type(like.value))}")
        if not plan.takes(path):
            return lambda: like
        if plan.private:
            return _in_mark(plan, like, plan.value(node, like.value, path), path)
        return _in_mark(plan, like, adapter.restore_shard(like, node, path, plan), path)
    return _in_mark(plan, like, plan.value(node, like.value, path), path)


def _in_mark(plan: Restorer, mark: Any, thunk: Thunk, path: str) -> Thunk:
    def take() -> Any:
        now = thunk()
        if now is not mark.value:
            plan.kept.replace(vars(mark), "value", now, path)
        return mark

    return take


def _own(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    """Plans a value that each rank saved for itself: from the private tree at hand, or unchanged without one."""
    at = str(node.get("at"))
    found = plan.own(at)
    if found is ABSENT:
        plan.skipped.append(path or ROOT)
        plan.notes.append(f"{path or ROOT}: belongs to each rank alone, and nothing was saved for this one")
        return lambda: like if keep else ABSENT
    with plan.private_tree_at(at):
        if keep and like is not ABSENT:
            return plan.value(found, like, path)
        return plan.rebuild(found, path, like.value if type(like) in MARKS else like)


_KEYED_TYPES: Final[dict[str, type]] = {
    "dict": dict,
    "ordereddict": collections.OrderedDict,
    "counter": collections.Counter,
    "defaultdict": collections.defaultdict,
}
_FACTORY_BY_NAME: Final = {name: kind for kind, name in FACTORIES.items()}
_FOREIGN_ATOMS: Final = ("torch.size", "torch.dtype", "torch.device")


def value(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    """Plans the value of `node`. With `keep`, `like` is the target, changed in place; else it only offers classes."""
    kind = kind_of(node)
    if kind == FIRST_RANK:
        raise ShardMismatch(
            f"{path or ROOT} is the first rank's, and this image in memory is another rank's: it has no value of it",
            subject=path or ROOT,
            hint="a checkpoint in the store has it for every rank",
        )
    if kind == OWN or type(like) in MARKS:
        return declared_value(plan, node, like, path, keep)
    if keep and like is not ABSENT and type(like) not in ENCODERS:
        adapter = frameworks.adapter_for(type(like))
        if adapter is not None:
            if kind in LEAVES and not plan.takes(path):
                return lambda: like
            return adapter.restore(like, node, path, plan)
        if is_stateful(like) and frameworks.registered(type(like)) is None:
            return stateful(plan, node, like, path)
        if isinstance(like, dict | list | MutableMapping) and structured(node, like):
            return matched(plan, node, like, path)
        if (mismatch := refused(plan, node, like, path)) is not None:
            return mismatch
    if plan.taken_by_objects and not keep and kind in OBJECTS:
        return _object(plan, node, like, path)
    if keep and type(like) in ENCODERS and holds_objects(node):
        return _nobody_takes(plan, node, like, path)
    if keep and kind not in _TRANSPARENT and not plan.takes(path):
        return lambda: like
    if keep and kind == "random" and isinstance(like, random.Random):
        plan.restored.append(path or ROOT)
        state = random_state(node, path)

        def set_state() -> None:
            before = like.getstate()
            plan.kept.undo(path, lambda: like.setstate(before))
            like.setstate(state)

        plan.later(path, set_state)
        return lambda: like
    if keep and kind not in STRUCTURE:
        plan.restored.append(path or ROOT)
    return _build(plan, node, like, path, keep)


def _nobody_takes(plan: Restorer, node: Json, like: Any, path: str) -> Thunk:
    """Refuses an object's state where the target has None, or a number or text: as plain entries it would look
    restored, and whoever makes the object later would go on with a fresh one."""
    if not plan.takes_some(node, path):
        return lambda: like
    ours = "None, and not yet the object that takes it," if like is None else f"the value {like!r}"[:60]
    return plan.mismatch(like, path, plan.words(node), ours)


def _object(plan: Restorer, node: Json, like: Any, path: str) -> Thunk:
    """Restores an object inside another one's state into the object that the target's own state has at this place: as
    plain entries, the outer one would take them for the object and fail steps later."""
    if like is not ABSENT and (is_stateful(like) or frameworks.adapter_for(type(like)) is not None):
        return value(plan, node, like, path, True)
    ours = "no object" if like is ABSENT else f"a {type_name(type(like))}"
    return plan.mismatch(None if like is ABSENT else like, path, plan.words(node), f"{ours} that would take it")


_TRANSPARENT: Final = frozenset({"dataclass", "namedtuple", "tuple"})


def _build(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    kind = kind_of(node)
    if kind in LEAVES:
        return plan.new_leaf(node, path)
    builder = _BUILDERS.get(kind)
    if builder is not None:
        return builder(plan, node, like, path, keep)
    if kind == "" or kind in DECODERS:
        done = decode_atom(node, path)
        return lambda: done
    if frameworks.has_kind(kind):
        return _foreign(plan, node, kind, path)
    raise CorruptionError(
        f"{path or ROOT}: {kind!r} is not a kind of value that is known here",
        subject=path,
        hint="a newer Tenuto may read it",
    )


def _foreign(plan: Restorer, node: Json, kind: str, path: str) -> Thunk:
    try:
        adapter = frameworks.adapter_of_kind(kind)
    except ImportError:
        if kind in ("module", "optimizer"):
            return plan.rebuild({"!": "dict", "i": node["i"]} if kind == "module" else node["v"], path)
        tagged = Tagged(kind, node.get("v"))
        return lambda: tagged
    return adapter.fresh(node, path, plan)


def plain(node: Json) -> Any:
    """Returns the value of a node without leaves."""
    return Restorer((), None, Selection(), None, False).rebuild(node, "")()


def _hint(plan: Restorer, like: Any, key: Any, child: Json) -> Any:
    """Returns the present value at a key, or any sibling, which may offer a class: but not for what an object of its
    own has to take."""
    exact = plan.taken_by_objects and holds_objects(child)
    if isinstance(like, Mapping):
        return like[key] if key in like else ABSENT if exact else next(iter(like.values()), ABSENT)
    if isinstance(like, list | tuple | collections.deque) and like and type(key) is int:
        return like[key] if key < len(like) else ABSENT if exact else like[-1]
    return ABSENT


def _mapping(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    kind = _KEYED_TYPES[kind_of(node)]
    pairs = items(node)
    known = (
        {spell(one): one for one in like}
        if isinstance(like, Mapping) and any(type(key) is not str for key, _ in pairs)
        else {}
    )
    thunks: list[tuple[Thunk, Thunk]] = []
    for key, child in pairs:
        where = join(path, segment(key))
        present = key if type(key) is str else known.get(spelled(key), ABSENT)
        in_place = keep and isinstance(like, Mapping) and present is not ABSENT and present in like
        hint = _hint(plan, like, present, child)
        thunks.append(
            (
                key_thunk(plan, key, known, where),
                value(plan, child, hint, where, True) if in_place else plan.rebuild(child, where, hint),
            )
        )
    in_target = keep and type(like) is kind

    def made() -> dict[Any, Any]:
        return {key(): one for key, child in thunks if (one := child()) is not ABSENT}

    if node.get("factory") == "?" and not in_target and not isinstance(like, collections.defaultdict):
        return stand_in(plan, path, "collections.defaultdict", made)

    def build() -> Any:
        found = made()
        if in_target:
            plan.kept.content(like, path)
            like.clear()
        return _filled(like if in_target else _empty(node, kind, like), found)

    return build


def _empty(node: Json, kind: type, like: Any) -> Any:
    if kind is not collections.defaultdict:
        return kind()
    name = node.get("factory")
    if isinstance(like, collections.defaultdict) and name == "?":
        return collections.defaultdict(like.default_factory)
    return collections.defaultdict(_FACTORY_BY_NAME.get(str(name)) if name is not None else None)


def _filled(target: Any, made: dict[Any, Any]) -> Any:
    for key, one in made.items():
        target[key] = one
    return target


def _children(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> list[Thunk]:
    found = sequence(node)
    same = keep and isinstance(like, list | tuple | collections.deque) and len(like) == len(found)
    thunks: list[Thunk] = []
    for number, child in enumerate(found):
        where, hint = join(path, str(number)), _hint(plan, like, number, child)
        made = value(plan, child, hint, where, True) if same else plan.rebuild(child, where, hint)
        thunks.append(made if kind_of(child) != OWN else _none_where_absent(made))
    return thunks


def _none_where_absent(thunk: Thunk) -> Thunk:
    """Replaces an absent value by None: a sequence has no gaps."""

    def value() -> Any:
        found = thunk()
        return None if found is ABSENT else found

    return value


def _list(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    thunks = _children(plan, node, like, path, keep)

    def build() -> Any:
        made = [thunk() for thunk in thunks]
        if keep and type(like) is list:
            plan.kept.content(like, path)
            like[:] = made
            return like
        return made

    return build


def _tuple(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    thunks = _children(plan, node, like, path, keep)
    return lambda: tuple(thunk() for thunk in thunks)


def _deque(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    thunks = _children(plan, node, like, path, keep)
    length = node.get("maxlen")
    if length is not None and (type(length) is not int or not len(thunks) <= length < 2**63):
        raise CorruptionError(f"{path or ROOT}: a deque of at most {length!r} items", subject=path)

    def build() -> Any:
        made = [thunk() for thunk in thunks]
        if keep and type(like) is collections.deque and like.maxlen == length:
            plan.kept.content(like, path)
            like.clear()
            like.extend(made)
            return like
        return collections.deque(made, length)

    return build


def _set(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    known = {spell(one): one for one in like} if isinstance(like, set | frozenset) else {}
    thunks = [key_thunk(plan, child, known, path) for child in sequence(node)]

    def build() -> Any:
        made = {thunk() for thunk in thunks}
        if kind_of(node) == "frozenset":
            return frozenset(made)
        if keep and type(like) is set:
            plan.kept.content(like, path)
            like.clear()
            like.update(made)
            return like
        return made

    return build


def _slice(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    parts = [plan.rebuild(part, path) for part in sequence({"!": "slice", "i": node.get("v")})]
    if len(parts) != 3:
        raise CorruptionError(f"{path or ROOT}: a malformed slice", subject=path)
    return lambda: slice(*(part() for part in parts))


def _inner(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    """Plans the state of an object that the target lacks, as plain values."""
    return plan.rebuild(node.get("v"), path)


Builder = Callable[[Restorer, Json, Any, str, bool], Thunk]
_BUILDERS: Final[Mapping[str, Builder]] = {
    **dict.fromkeys(_KEYED_TYPES, _mapping),
    "list": _list,
    "tuple": _tuple,
    "deque": _deque,
    "set": _set,
    "frozenset": _set,
    "slice": _slice,
    "enum": enum_member,
    "dataclass": named_fields,
    "namedtuple": named_fields,
    "tagged": tagged,
    "object": _inner,
    "bypath": lambda plan, node, like, path, keep: _by_path(plan, items(node), path),
}


def _by_path(plan: Restorer, pairs: Sequence[tuple[Any, Json]], path: str) -> Thunk:
    thunks = {name_of(key): plan.rebuild(child, join(path, key)) for key, child in pairs}
    return lambda: {key: thunk() for key, thunk in thunks.items()}
