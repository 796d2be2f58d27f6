"""Values of classes: filled in place where the target has tensors, modules or objects in them, else rebuilt where the
target or a registration offers the class."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Final

from tenuto.errors import StateMismatch, TenutoError
from tenuto.model.leaf import join
from tenuto.model.records import Json
from tenuto.state import frameworks
from tenuto.state.declarations import MARKS
from tenuto.state.encode.atoms import ENCODERS
from tenuto.state.frameworks import Tagged, is_stateful, type_name
from tenuto.state.restore.restorer import ABSENT, Restorer, Thunk
from tenuto.state.tree import KEYED, ROOT, SEQUENCES, is_plain, items, kind_of, name_of, segment, sequence

CLASSES: Final = frozenset({"dataclass", "namedtuple"})


def holds_structure(like: Any) -> bool:
    """Returns whether a value is or contains anything that is filled in place."""
    waiting, seen = [like], dict[int, Any]()
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if kind in ENCODERS or id(one) in seen:
            continue
        seen[id(one)] = one
        adapter = frameworks.adapter_for(kind)
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
    """Returns the fields of a dataclass value that are set."""
    return {one.name: getattr(like, one.name) for one in dataclasses.fields(like) if hasattr(like, one.name)}


def class_like(node: Json, like: Any) -> type | None:
    """Returns the class of `like` if it is of the kind of a dataclass's or namedtuple's node."""
    kind = type(like)
    is_data = kind_of(node) == "dataclass"
    same = dataclasses.is_dataclass(kind) if is_data else issubclass(kind, tuple) and hasattr(kind, "_fields")
    return kind if same else None


def field_names(kind: type) -> set[str]:
    names: Any = [one.name for one in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else kind._fields  # type: ignore[attr-defined]
    return set(names)


def fields_fit(node: Json, kind: type) -> bool:
    """Returns whether a class has the saved fields: exactly those of a namedtuple, at least those of a dataclass."""
    theirs, ours = {name_of(key) for key, _ in items(node)}, field_names(kind)
    return theirs == ours or (theirs < ours and kind_of(node) == "dataclass")


def offered(node: Json, like: Any, *, keep: bool) -> type | None:
    """Returns the class that the target offers for a dataclass's or namedtuple's node: the saved one, or, if there is
    anything to fill in place, one of another name with the same fields."""
    kind = class_like(node, like)
    if kind is None or type_name(kind) == node.get("type"):
        return kind
    return kind if keep and fields_fit(node, kind) and (not is_plain(node) or holds_structure(like)) else None


def refused(plan: Restorer, node: Json, like: Any, path: str) -> Thunk | None:
    """Returns the mismatch if the target contains structure that the checkpoint's form does not fill; else None."""
    kind = type(like)
    if kind in ENCODERS or kind is Tagged or frameworks.registered(kind) is not None:
        return None  # replaced as a unit
    if _fills_structure(node, like) or not holds_structure(like):
        return None
    if not plan.takes_some(node, path):
        return lambda: like
    return plan.mismatch(like, path, _theirs(plan, node), _ours(like))


def _fills_structure(node: Json, like: Any) -> bool:
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


def _class(node: Json, like: Any) -> type | None:
    """Returns the class of the target if it is the saved one."""
    return type(like) if like is not ABSENT and type_name(type(like)) == node.get("type") else None


def stand_in(plan: Restorer, path: str, tag: str, value: Thunk) -> Thunk:
    """Plans a stand-in for a value whose class nothing offers. An object's own load has no use for one."""
    if plan.taken_by_objects:
        return plan.mismatch(None, path, f"a {tag}", "no class for it: tenuto.register makes it known")
    return lambda: Tagged(tag, value())


def enum_member(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    name = "" if node.get("name") is None else name_of(node["name"])
    kind = _class(node, like)
    if kind is None or not issubclass(kind, enum.Enum):
        return stand_in(plan, path, name_of(node.get("type")), lambda: name)
    if name in kind.__members__:
        return lambda: kind.__members__[name]
    raw = plan.rebuild(node.get("v"), path)
    try:
        member = kind(raw())
    except ValueError:
        return plan.mismatch(like, path, f"{node.get('type')}.{name}", "no such member")
    return lambda: member


def named_fields(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    kind = offered(node, like, keep=keep)
    if kind is not None and not fields_fit(node, kind):
        theirs = f"{node.get('type')} with fields {sorted(name_of(key) for key, _ in items(node))}"
        return plan.mismatch(like, path, theirs, f"fields {sorted(field_names(kind))}")
    present = {} if kind is None else fields_of(like) if dataclasses.is_dataclass(kind) else like._asdict()
    thunks: dict[str, Thunk] = {}
    for key, child in items(node):
        name, where = name_of(key), join(path, segment(key))
        now = present.pop(name, ABSENT)
        thunks[name] = plan.value(child, now, where) if keep and now is not ABSENT else plan.rebuild(child, where, now)
    if kind is None:
        tag = name_of(node.get("type"))
        return stand_in(plan, path, tag, lambda: {name: thunk() for name, thunk in thunks.items()})
    if type_name(kind) != node.get("type"):
        plan.notes.append(f"{path or ROOT}: saved by a {node.get('type')}, restored into a {type_name(kind)}")
    if keep:
        new = [join(path, segment(name)) for name, value in present.items() if holds_structure(value)]
        plan.missing.extend(filter(plan.takes, new))
    if kind_of(node) == "namedtuple":
        return lambda: kind._make(thunks[name]() for name in kind._fields)  # type: ignore[attr-defined]
    frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if keep and not frozen:
        return _in_place(plan, like, thunks, path)

    def build() -> Any:
        made = {name: thunk() for name, thunk in thunks.items()}
        return frameworks.rebuild_dataclass(kind, {**fields_of(like), **made})

    return build


def _in_place(plan: Restorer, like: Any, thunks: dict[str, Thunk], path: str) -> Thunk:
    def build() -> Any:
        made = {name: thunk() for name, thunk in thunks.items()}
        before = {name: value for name, value in fields_of(like).items() if name in made and value is not made[name]}
        plan.kept.undo(path, lambda: _set_fields(like, before))
        _set_fields(like, made)
        return like

    return build


def _set_fields(like: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        object.__setattr__(like, name, value)


def tagged(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    tag = name_of(node.get("type"))
    inner = plan.rebuild(node.get("v"), path)
    known = frameworks.registered_name(tag)
    if known is None:
        return stand_in(plan, path, tag, inner)

    plan.asks = True

    def build() -> Any:
        try:
            return known[1].from_plain(inner())
        except TenutoError:
            raise
        except Exception as error:
            raise StateMismatch(
                f"{path or ROOT}: {tag} could not be made from its plain form: {error!r}", subject=path
            ) from error

    return build
