"""Who represents a value: its framework's adapter, found by the module of its type, or what a user has registered.

Adapters are imported when a value of their framework is met, by a name that stands here and in no checkpoint.
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


# --------------------------------------------------------------------------------------------------
# Objects that say their state themselves.


def is_stateful(value: Any) -> bool:
    """Whether the value says its state itself, and takes it back."""
    kind = type(value)
    return (
        not isinstance(value, type)
        and callable(getattr(kind, "state_dict", None))
        and callable(getattr(kind, "load_state_dict", None))
    )


# --------------------------------------------------------------------------------------------------
# A value whose class the reading process has not offered: its type's name and what it held.


@dataclass(frozen=True, slots=True)
class Tagged:
    """An enum (`value` is the member's name), a dataclass or namedtuple (`value` maps fields), or a registered type's
    plain form, restored where no value of its class was at hand. Nothing is imported by `type_name`."""

    type_name: str
    value: Any


def type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


Refresh = Callable[[Any, "StateWalker"], Json]
"""Given a value's present form: its node again, its leaves told to the writer in the same order as at first.
Raises `Changed` where the node cannot be had without a fresh look."""

Encode = Callable[[Any, str, "StateWalker"], tuple[Json, Refresh]]
"""Given a value and its path: its node, and how to tell it again."""


class Adapter(Protocol):
    """How values of one framework become nodes and come back."""

    def claims(self, kind: type) -> bool:
        """Whether this adapter represents values of the type."""
        ...

    def plain(self, kind: type) -> bool:
        """Whether values of the type, which is this adapter's, are replaced as numbers are, and never filled."""
        ...

    def encode(self, value: Any, path: str, writer: StateWalker) -> tuple[Json, Refresh]: ...

    def encode_shard(self, value: Shard, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
        """`encode` for a tensor of which its mark says where it lies in a global one."""
        ...

    def encode_entries(
        self, entries: Mapping[str, Any], path: str, writer: StateWalker
    ) -> tuple[list[Json], Refresh] | None:
        """The pairs of a dictionary whose values are all this adapter's, as `encode` of each would give them, and how
        to tell them again (given the dictionary) at less cost than one by one. None where it cannot; then nothing was
        told to the writer."""
        ...

    def owners(self, value: Any, path: str) -> Iterable[tuple[Any, str]]:
        """The tensors that an optimizer may hold, each with its path: the value itself, or a module's parameters."""
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
        """A new tensor for a leaf, and where its bytes go."""
        ...

    def view(self, base: Any, node: Json) -> Any:
        """The value that a leaf's or alias's `node` describes over the allocated `base`."""
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
"""Who knows which leaves a framework's optimizers own."""

_adapters: dict[str, Adapter] = {}
_by_type: dict[type, Adapter | None] = {}


def home(name: str) -> Adapter:
    """The adapter of a framework; ImportError if the framework is not installed."""
    found = _adapters.get(name)
    if found is None:
        found = _adapters[name] = importlib.import_module(_HOMES[name]).adapter
    return found


def gate(state: Any, tell: Callable[[str], None]) -> UpdateGate | None:
    """What guards the updates of the optimizers in `state`; None while no framework that has any is loaded."""
    for name, module in _GATES.items():
        if name in sys.modules:
            found: UpdateGate = importlib.import_module(module).gate(state, tell)
            return found
    return None


def adapter_for(kind: type) -> Adapter | None:
    """The adapter that represents values of this type, if any."""
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

    `to_plain` returns what Tenuto can represent (tensors too), `from_plain` takes it back. Both may be left out for
    an enum, a dataclass or a namedtuple. `name` (default: module and qualified name) is what the checkpoint says.
    Raises UsageError if the name belongs to another type.
    """
    tag = name or type_name(kind)
    if (held := _by_name.get(tag)) is not None and held[0] is not kind:
        raise UsageError(f"{tag!r} is registered for {type_name(held[0])} already", subject=tag, hint="pass name=")
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
    """A dataclass value with these fields, its `__init__` not run: saved fields are the value, also derived ones."""
    made: Any = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def registered(kind: type) -> Registered | None:
    return _registered.get(kind)


def registered_name(name: str) -> tuple[type, Registered] | None:
    return _by_name.get(name)
