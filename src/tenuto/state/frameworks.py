"""Finds the representation of a value: the adapter of its framework, by the module of its type, or a registered type.

Adapters are imported when a value of their framework appears, by a name listed here and in no checkpoint.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from tenuto.errors import UsageError
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Json
from tenuto.state.contract import Sink
from tenuto.state.declarations import Shard
from tenuto.state.update_barrier import UpdateGate

if TYPE_CHECKING:
    from tenuto.state.encode.walker import StateWalker
    from tenuto.state.restore.restorer import Restorer, Thunk


def is_stateful(value: Any) -> bool:
    """Returns whether the value saves and loads its own state."""
    kind = type(value)
    return (
        not isinstance(value, type)
        and callable(getattr(kind, "state_dict", None))
        and callable(getattr(kind, "load_state_dict", None))
    )


@dataclass(frozen=True, slots=True)
class Tagged:
    """A value whose class the reading process did not offer. Nothing is imported by `type_name`.

    `value` is the member's name of an enum, the fields of a dataclass or namedtuple, or the plain form of a registered
    type.
    """

    type_name: str
    value: Any


def type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


Refresh = Callable[[Any, "StateWalker"], Json]
"""Given the current value: its node again, with its leaves recorded in the same order as at first. Raises
`StructureChanged` if the node needs a full walk."""

Encode = Callable[[Any, str, "StateWalker"], tuple[Json, Refresh]]
"""Given a value and its path: its node, and its `Refresh`."""


class Adapter(Protocol):
    """Turns values of one framework into nodes and back."""

    def claims(self, kind: type) -> bool:
        """Returns whether this adapter represents values of the type."""
        ...

    def plain(self, kind: type) -> bool:
        """Returns whether values of the type are replaced as numbers are, never filled."""
        ...

    def encode(self, value: Any, path: str, writer: StateWalker) -> tuple[Json, Refresh]: ...

    def encode_shard(self, value: Shard, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
        """Encodes a tensor whose mark gives its layout in a global one."""
        ...

    def encode_entries(
        self, entries: Mapping[str, Any], path: str, writer: StateWalker
    ) -> tuple[list[Json], Refresh] | None:
        """Encodes the pairs of a dictionary whose values all belong to this adapter, as `encode` of each would, with a
        `Refresh` for the dictionary that is cheaper than one per value.

        Returns None if it cannot; then nothing was recorded in the walker.
        """
        ...

    def owners(self, value: Any, path: str) -> Iterable[tuple[Any, str]]:
        """Yields the tensors an optimizer may own with their paths: the value itself, or the parameters of a module."""
        ...

    def restore(self, value: Any, node: Json, path: str, restorer: Restorer) -> Thunk:
        """Plans filling the existing `value` from `node`."""
        ...

    def restore_shard(self, value: Shard, node: Json, path: str, restorer: Restorer) -> Thunk:
        """Plans filling the existing tensor in `value` with its part of the leaf of `node`."""
        ...

    def fresh(self, node: Json, path: str, restorer: Restorer) -> Thunk:
        """Plans a new value for a node of a kind that only this framework has."""
        ...

    def allocate(self, spec: LeafSpec, node: Json, device: Any) -> tuple[Any, Sink]:
        """Allocates a new tensor for a leaf. Returns it with its sink."""
        ...

    def view(self, base: Any, node: Json) -> Any:
        """Returns the value that the `node` of a leaf or alias describes over the allocated `base`."""
        ...


_HOMES: Final = {"torch": "tenuto.integrations.torch.adapter", "numpy": "tenuto.state.numpy_arrays"}
KIND_HOMES: Final = {
    "module": "torch",
    "optimizer": "torch",
    "sparse": "torch",
    "subclass": "torch",
    "generator": "torch",
    "torch.size": "torch",
    "torch.dtype": "torch",
    "torch.device": "torch",
    "nprandom": "numpy",
}

_GATES: Final = {"torch": "tenuto.integrations.torch.fence"}
"""The modules that know which leaves the optimizers of a framework own."""

_adapters: dict[str, Adapter] = {}
_by_type: dict[type, Adapter | None] = {}


def home(name: str) -> Adapter:
    """Returns the adapter of a framework. Raises ImportError if the framework is not installed."""
    found = _adapters.get(name)
    if found is None:
        found = _adapters[name] = importlib.import_module(_HOMES[name]).adapter
    return found


def gate(state: Any, report: Callable[[str], None]) -> UpdateGate | None:
    """Returns the guard of the updates of the optimizers in `state`; None unless a framework that has any is loaded."""
    for name, module in _GATES.items():
        if name in sys.modules:
            found: UpdateGate = importlib.import_module(module).gate(state, report)
            return found
    return None


def adapter_for(kind: type) -> Adapter | None:
    """Returns the adapter for values of this type, if any."""
    try:
        return _by_type[kind]
    except KeyError:
        found: Adapter | None = None
        for name in dict.fromkeys(base.__module__.partition(".")[0] for base in kind.__mro__):
            if name in _HOMES and (candidate := home(name)).claims(kind):
                found = candidate
                break
        _by_type[kind] = found
        return found


@dataclass(frozen=True, slots=True)
class Registered:
    name: str
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


_registered: dict[type, Registered] = {}
_by_name: dict[str, tuple[type, Registered]] = {}


def register(
    kind: type,
    to_plain: Callable[[Any], Any] | None = None,
    from_plain: Callable[[Any], Any] | None = None,
    *,
    name: str | None = None,
) -> None:
    """Makes values of exactly this type representable, and restorable where none exists yet.

    - `to_plain`: returns a form that Tenuto can represent (tensors too).
    - `from_plain`: takes it back. Both are optional for an enum, a dataclass or a namedtuple.
    - `name`: the name in the checkpoint (default: module and qualified name).

    Raises UsageError if the name belongs to another type.
    """
    tag = name or type_name(kind)
    if (known := _by_name.get(tag)) is not None and known[0] is not kind:
        raise UsageError(f"{tag!r} is registered for {type_name(known[0])} already", subject=tag, hint="pass name=")
    if to_plain is None or from_plain is None:
        defaults = _defaults(kind)
        to_plain, from_plain = to_plain or defaults[0], from_plain or defaults[1]
    entry = Registered(tag, to_plain, from_plain)
    _registered[kind] = entry
    _by_name[tag] = (kind, entry)


def _defaults(kind: type) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if issubclass(kind, enum.Enum):
        return (lambda value: value.value), kind
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return (lambda value: {name: getattr(value, name) for name in names}), (
            lambda plain: rebuild_dataclass(kind, plain)
        )
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return (lambda value: value._asdict()), (lambda plain: kind(**plain))
    raise UsageError(f"{type_name(kind)} needs to_plain and from_plain", subject=type_name(kind))


def rebuild_dataclass(kind: type, fields: dict[str, Any]) -> Any:
    """Makes a dataclass value with these fields without `__init__`: saved fields are the value, derived ones
    included."""
    made: Any = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def registered(kind: type) -> Registered | None:
    return _registered.get(kind)


def registered_name(name: str) -> tuple[type, Registered] | None:
    return _by_name.get(name)
