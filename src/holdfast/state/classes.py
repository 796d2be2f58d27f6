"""Values of classes that a checkpoint only names: they come back where the target, or a registration, offers one."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from holdfast.errors import HoldfastError, StateMismatch
from holdfast.model.checkpoint import Json
from holdfast.model.paths import join
from holdfast.state import registry
from holdfast.state.nodes import ROOT, items, kind_of, name_of, segment
from holdfast.state.restorer import ABSENT, Restorer, Thunk
from holdfast.state.structure import field_names, fields_fit, fields_of, holds_structure, offered
from holdfast.state.tagged import Tagged, type_name


def _class(node: Json, like: Any) -> type | None:
    """The class that the target offers for a node, if it is the one saved."""
    return type(like) if like is not ABSENT and type_name(type(like)) == node.get("type") else None


def enum_member(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
    name = "" if node.get("name") is None else name_of(node["name"])
    kind = _class(node, like)
    if kind is None or not issubclass(kind, enum.Enum):
        stand_in = Tagged(name_of(node.get("type")), name)
        return lambda: stand_in
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
        return lambda: Tagged(tag, {name: thunk() for name, thunk in thunks.items()})
    if type_name(kind) != node.get("type"):
        plan.notes.append(f"{path or ROOT}: saved by a {node.get('type')}, restored into a {type_name(kind)}")
    if keep:
        new = [join(path, segment(name)) for name, value in present.items() if holds_structure(value)]
        plan.missing.extend(filter(plan.takes, new))
    if kind_of(node) == "namedtuple":
        return lambda: kind._make(thunks[name]() for name in kind._fields)  # type: ignore[attr-defined]
    frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return _data(kind, like, thunks, in_place=keep and not frozen)


def _data(kind: type, like: Any, thunks: dict[str, Thunk], *, in_place: bool) -> Thunk:
    def build() -> Any:
        made = {name: thunk() for name, thunk in thunks.items()}
        if not in_place:
            return registry.rebuild_dataclass(kind, {**fields_of(like), **made})
        for name, now in made.items():
            object.__setattr__(like, name, now)
        return like

    return build


def tagged(plan: Restorer, node: Json, like: Any, path: str, keep: bool) -> Thunk:
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
