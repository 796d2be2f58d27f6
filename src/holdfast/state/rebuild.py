"""Plain values and containers, back from their nodes: new, or in place where the target has them already."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import random
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final

from holdfast.errors import CorruptionError, HoldfastError, StateMismatch
from holdfast.model.checkpoint import Json
from holdfast.model.paths import join
from holdfast.state import registry
from holdfast.state.atoms import DECODERS, ENCODERS, decode_atom, random_state
from holdfast.state.nodes import (
    KEYED,
    LEAVES,
    ROOT,
    STRUCTURE,
    is_plain,
    items,
    kind_of,
    name_of,
    segment,
    sequence,
    walk,
)
from holdfast.state.restorer import ABSENT, Restorer, Thunk
from holdfast.state.selection import Selection
from holdfast.state.tagged import Tagged, type_name
from holdfast.state.writer import FACTORIES, Writer, is_stateful

_KEYED_TYPES: Final[dict[str, type]] = {
    "dict": dict,
    "ordereddict": collections.OrderedDict,
    "counter": collections.Counter,
    "defaultdict": collections.defaultdict,
}
_FACTORY_BY_NAME: Final = {name: kind for kind, name in FACTORIES.items()}
_NEEDS_CLASS: Final = frozenset({"enum", "dataclass", "namedtuple", "defaultdict"})
_FOREIGN_ATOMS: Final = ("torch.size", "torch.dtype", "torch.device")


def value(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    """Plans the value of `node`. With `keep`, `like` is the target, changed in place; else it only offers classes."""
    kind = kind_of(node)
    if keep and like is not ABSENT and type(like) not in ENCODERS:
        adapter = registry.adapter_for(type(like))
        if adapter is not None:
            if kind in LEAVES and not plan.takes(path):
                return lambda: like
            return adapter.restore(like, node, path, plan)
        if is_stateful(like) and registry.registered(type(like)) is None:
            return _object(plan, node, like, path)
        if isinstance(like, dict | list | MutableMapping) and _structured(node, like):
            return _entries(plan, node, like, path)
    if keep and kind not in _TRANSPARENT and not plan.takes(path):
        return lambda: like
    if keep and kind == "random" and isinstance(like, random.Random):
        state = random_state(node, path)
        plan.later(path, lambda: like.setstate(state))
        return lambda: like
    if keep and kind not in STRUCTURE:
        plan.restored.append(path or ROOT)
    return _build(plan, node, kind, like, path, keep)


_TRANSPARENT: Final = frozenset({"dataclass", "namedtuple", "tuple"})


def _build(plan: Restorer, node: Json, kind: str, like: Any, path: str, keep: bool) -> Thunk:
    if kind in LEAVES:
        return plan.new_leaf(node, path)
    builder = _BUILDERS.get(kind)
    if builder is not None:
        return builder(plan, node, like, path, keep)
    if kind in registry.KIND_HOMES:
        return _foreign(plan, node, kind, path)
    if kind == "" or kind in DECODERS:
        done = decode_atom(node, path)
        return lambda: done
    raise CorruptionError(
        f"{path or ROOT}: {kind!r} is no kind of value that is known here",
        subject=path,
        hint="a newer Holdfast may read it",
    )


def _foreign(plan: Restorer, node: Json, kind: str, path: str) -> Thunk:
    try:
        adapter = registry.home(registry.KIND_HOMES[kind])
    except ImportError:
        if kind in ("module", "optimizer"):
            return plan.rebuild({"!": "dict", "i": node["i"]} if kind == "module" else node["v"], path)
        tagged = Tagged(kind, node.get("v"))
        return lambda: tagged
    return adapter.fresh(node, path, plan)


def plain(node: Json) -> Any:
    """The value of a node without leaves."""
    return Restorer((), None, Selection(), None, False).rebuild(node, "")()


# -- entries that are matched one by one ------------------------------------------------------------------------


def _structured(node: Json, like: Any) -> bool:
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


def _entries(plan: Restorer, node: Json, like: Any, path: str) -> Thunk:
    if isinstance(like, list) != (kind_of(node) == "list"):
        return plan.mismatch(like, path, plan.words(node), f"a {type(like).__name__}")
    return _list_entries(plan, node, like, path) if isinstance(like, list) else mapping_entries(plan, node, like, path)


def mapping_entries(plan: Restorer, node: Json, like: Any, path: str, *, root: bool = False) -> Thunk:
    """Every entry of a mapping with the checkpoint's of the same key. At the root, entries not named are skipped."""
    theirs = {_spelled(key): (key, child) for key, child in items(node)}
    thunks: list[tuple[Any, Thunk]] = []
    for key, present in like.items():
        spelled = _spell(key)
        where = join(path, segment(json.loads(spelled)))
        if spelled in theirs:
            thunks.append((key, plan.value(theirs.pop(spelled)[1], present, where)))
        elif plan.takes(where):
            plan.missing.append(where)
    empty = len(like) == 0
    for key, child in theirs.values():
        where = join(path, segment(key))
        if root:
            plan.skipped.append(where)
        elif not plan.takes(where):
            continue
        elif empty or (is_plain(child) and kind_of(node) != "module"):
            thunks.append((_key(plan, key, {}, where)(), plan.rebuild(child, where)))
        else:
            plan.unexpected.append(where)

    def apply() -> Any:
        for key, thunk in thunks:
            now = thunk()
            if now is not ABSENT and (key not in like or like[key] is not now):
                _assign(like, key, now, path)
        return like

    return apply


def _assign(like: Any, key: Any, now: Any, path: str) -> None:
    try:
        like[key] = now
    except TypeError:
        where = join(path, segment(json.loads(_spell(key))))
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


def _object(plan: Restorer, node: Json, like: Any, path: str) -> Thunk:
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


# -- values as a whole --------------------------------------------------------------------------------------------


def _spelled(key: Json) -> str:
    return json.dumps(key, sort_keys=True)


def _spell(key: Any) -> str:
    return _spelled(Writer(None).closed(key, "a key"))


def _key(plan: Restorer, node: Json, known: Mapping[str, Any], path: str) -> Thunk:
    if type(node) is str:
        return lambda: node
    spelled = _spelled(node)
    if spelled in known:
        return lambda: known[spelled]
    made = plan.rebuild(node, f"{path} (a key)")

    def key() -> Any:
        found = made()
        try:
            hash(found)
        except TypeError:
            raise CorruptionError(f"{path}: a {type(found).__name__} as a key or element", subject=path) from None
        return found

    return key


def _hint(like: Any, key: Any) -> Any:
    """The present value at a key, or any beside it: it may offer a class."""
    if isinstance(like, Mapping):
        return like[key] if key in like else next(iter(like.values()), ABSENT)
    if isinstance(like, list | tuple | collections.deque) and like and type(key) is int:
        return like[key] if key < len(like) else like[-1]
    return ABSENT


def _needs_key(key: Json) -> bool:
    return type(key) is not str


def _mapping(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    kind = _KEYED_TYPES[kind_of(node)]
    pairs = items(node)
    known = (
        {_spell(one): one for one in like}
        if isinstance(like, Mapping) and any(_needs_key(key) for key, _ in pairs)
        else {}
    )
    thunks: list[tuple[Thunk, Thunk]] = []
    for key, child in pairs:
        where = join(path, segment(key))
        present = key if type(key) is str else known.get(_spelled(key), ABSENT)
        in_place = keep and isinstance(like, Mapping) and present is not ABSENT and present in like
        hint = _hint(like, present)
        thunks.append(
            (
                _key(plan, key, known, where),
                value(plan, child, hint, where, True) if in_place else plan.rebuild(child, where, hint),
            )
        )
    in_target = keep and type(like) is kind

    def build() -> Any:
        made = {key(): child() for key, child in thunks}
        if in_target:
            like.clear()
            return _filled(like, made)
        return (
            _filled(_empty(node, kind, like), made)
            if node.get("factory") != "?" or isinstance(like, collections.defaultdict)
            else Tagged("collections.defaultdict", made)
        )

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
        where, hint = join(path, str(number)), _hint(like, number)
        thunks.append(value(plan, child, hint, where, True) if same else plan.rebuild(child, where, hint))
    return thunks


def _list(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    thunks = _children(plan, node, like, path, keep)

    def build() -> Any:
        made = [thunk() for thunk in thunks]
        if keep and type(like) is list:
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
            like.clear()
            like.extend(made)
            return like
        return collections.deque(made, length)

    return build


def _set(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    known = {_spell(one): one for one in like} if isinstance(like, set | frozenset) else {}
    thunks = [_key(plan, child, known, path) for child in sequence(node)]

    def build() -> Any:
        made = {thunk() for thunk in thunks}
        if kind_of(node) == "frozenset":
            return frozenset(made)
        if keep and type(like) is set:
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


# -- classes that the checkpoint cannot name for itself ---------------------------------------------------------------


def _class(node: Json, like: Any) -> type | None:
    """The class that the target offers for a node, if it is the one saved."""
    return type(like) if like is not ABSENT and type_name(type(like)) == node.get("type") else None


def _enum(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    name = name_of(node.get("name")) if node.get("name") is not None else None
    kind = _class(node, like)
    if kind is None or not issubclass(kind, enum.Enum):
        tagged = Tagged(name_of(node.get("type")), name)
        return lambda: tagged
    if name in kind.__members__:
        return lambda: kind.__members__[name]
    raw = plan.rebuild(node.get("v"), path)
    try:
        member = kind(raw())
    except ValueError:
        return plan.mismatch(like, path, f"{node.get('type')}.{name}", "no such member")
    return lambda: member


def _named(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    kind, is_data = _class(node, like), kind_of(node) == "dataclass"
    known = kind is not None and (
        dataclasses.is_dataclass(kind) if is_data else issubclass(kind, tuple) and hasattr(kind, "_fields")
    )
    thunks: dict[str, Thunk] = {}
    for key, child in items(node):
        name, where = name_of(key), join(path, segment(key))
        if known and hasattr(like, name):
            thunks[name] = value(plan, child, getattr(like, name), where, keep)
        else:
            thunks[name] = plan.rebuild(child, where)
    if not known or kind is None:
        tag = name_of(node.get("type"))
        return lambda: Tagged(tag, {name: thunk() for name, thunk in thunks.items()})
    fields = {one.name for one in dataclasses.fields(kind)} if is_data else set(kind._fields)  # type: ignore[attr-defined]
    if not set(thunks) <= fields or (not is_data and set(thunks) != fields):
        return plan.mismatch(like, path, f"{node.get('type')} with fields {sorted(thunks)}", f"fields {sorted(fields)}")
    if not is_data:
        return lambda: kind._make(thunks[name]() for name in kind._fields)  # type: ignore[attr-defined]
    frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return _data(kind, like, thunks, in_place=keep and not frozen)


def _data(kind: type, like: Any, thunks: dict[str, Thunk], *, in_place: bool) -> Thunk:
    def build() -> Any:
        made = {name: thunk() for name, thunk in thunks.items()}
        if not in_place:
            held = {one.name: getattr(like, one.name) for one in dataclasses.fields(kind) if hasattr(like, one.name)}
            return registry.rebuild_dataclass(kind, {**held, **made})
        for name, now in made.items():
            object.__setattr__(like, name, now)
        return like

    return build


def _tagged(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    tag = name_of(node.get("type"))
    inner = plan.rebuild(node.get("v"), path)
    known = registry.registered_name(tag)
    if known is None:
        return lambda: Tagged(tag, inner())

    def build() -> Any:
        try:
            return known[1].from_plain(inner())
        except HoldfastError:
            raise
        except Exception as error:
            raise StateMismatch(
                f"{path or ROOT}: {tag} could not be made from its plain form: {error!r}", subject=path
            ) from error

    return build


def _inner(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    """The state of an object that the target does not have: as plain values."""
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
    "enum": _enum,
    "dataclass": _named,
    "namedtuple": _named,
    "tagged": _tagged,
    "object": _inner,
    "bypath": lambda plan, node, like, path, keep: _by_path(plan, items(node), path),
}


def _by_path(plan: Restorer, pairs: Sequence[tuple[Any, Json]], path: str) -> Thunk:
    thunks = {name_of(key): plan.rebuild(child, join(path, key)) for key, child in pairs}
    return lambda: {key: thunk() for key, thunk in thunks.items()}
