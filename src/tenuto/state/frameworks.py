"""The registry of frameworks, and what else represents a value: a type that a user has registered.

A framework is one declaration: which module of its integration represents values, positions loaders, captures random
generators, guards updates, and knows what makes a resume inexact. Nothing of an integration is imported before the
program has imported the framework itself, and no checkpoint names a module of ours. Another package declares a
framework with an entry point in the group `tenuto.frameworks`, whose name is the framework's top-level module and whose
value is a `Framework`; `tenuto.testing.adapter_suite` says what an integration has to keep.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from tenuto.errors import UsageError
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Json
from tenuto.record import record
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


@record
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


GROUP: Final = "tenuto.frameworks"


@record
class Framework:
    """A framework, and the modules of its integration. Every module but the adapter's is an optional ability.

    name: the framework's top-level module.
    adapter: the module whose `adapter` represents values of the framework (`tenuto.state.frameworks.Adapter`).
    kinds: the kinds of nodes that only this framework has, which its adapter makes anew where a target lacks them.
    rng: the module whose `capture`, `apply` and `derived` know the framework's global random generators.
    positions: the module whose `attach` knows the framework's data loaders.
    loaders: top-level modules besides `name` whose loaders `positions` knows.
    certificate: the module whose `findings` says what makes a resume inexact.
    iteration: the module whose `follow` begins to note every loader that is iterated, and whose `iterated` names those
        that training is in the middle of.
    gate: the module whose `gate` guards the updates of optimizers, for fenced captures.
    state_dicts: the module whose `owner` knows what `state_dict()` of the framework's objects returns.
    structures: the module whose `knows` tells types of any package that the adapter takes apart.
    """

    name: str
    adapter: str
    kinds: frozenset[str] = frozenset()
    rng: str = ""
    positions: str = ""
    loaders: frozenset[str] = frozenset()
    certificate: str = ""
    iteration: str = ""
    gate: str = ""
    state_dicts: str = ""
    files: str = ""
    structures: str = ""

    @property
    def loaded(self) -> bool:
        """Whether the program has imported the framework."""
        return sys.modules.get(self.name) is not None

    def ability(self, name: str) -> Any:
        """Returns the module of one ability, such as "rng"; None where the framework has none of the kind."""
        module: str = getattr(self, name)
        return importlib.import_module(module) if module else None


_TORCH: Final = "tenuto.integrations.torch"
_JAX: Final = "tenuto.integrations.jax"
BUILT_IN: Final = (
    Framework("numpy", adapter="tenuto.state.numpy_arrays", kinds=frozenset({"nprandom"})),
    Framework(
        "torch",
        adapter=f"{_TORCH}.adapter",
        kinds=frozenset(
            {"module", "optimizer", "sparse", "subclass", "generator", "torch.size", "torch.dtype", "torch.device"}
        ),
        rng=f"{_TORCH}.rng",
        positions=f"{_TORCH}.data.loaders",
        loaders=frozenset({"torchdata", "accelerate"}),
        certificate=f"{_TORCH}.certificate",
        iteration=f"{_TORCH}.data.iteration",
        gate=f"{_TORCH}.fence",
        state_dicts=f"{_TORCH}.state_dicts",
        files=f"{_TORCH}.for_commands",
    ),
    Framework(
        "jax",
        adapter=f"{_JAX}.adapter",
        kinds=frozenset({"prngkey"}),
        positions=f"{_JAX}.data",
        loaders=frozenset({"grain"}),
        certificate=f"{_JAX}.certificate",
        structures=f"{_JAX}.pytrees",
    ),
    Framework("tenuto", adapter="tenuto.formats.state_adapter"),
)
_BUILT_IN_NAMES: Final = frozenset(framework.name for framework in BUILT_IN)

_by_type: dict[type, Adapter | None] = {}


@cache
def declared() -> dict[str, Framework]:
    """Returns every framework by its name: the built-in ones, and those of installed packages."""
    from importlib.metadata import entry_points  # slow to import

    found = {framework.name: framework for framework in BUILT_IN}
    for point in entry_points(group=GROUP):
        if point.name not in _BUILT_IN_NAMES:
            found[point.name] = cast(Framework, point.load())
    return found


def loaded(ability: str) -> Iterator[tuple[Framework, Any]]:
    """Yields the frameworks that the program has imported and that have the ability, each with its module."""
    for framework in declared().values():
        if getattr(framework, ability) and framework.loaded:
            yield framework, framework.ability(ability)


def named(name: str) -> Framework | None:
    """Returns the framework of a top-level module; None where nobody declares it.

    Entry points are looked up only for modules that are neither built in nor Python's own.
    """
    for framework in BUILT_IN:
        if framework.name == name:
            return framework
    if name in sys.stdlib_module_names or name == "__main__":
        return None
    return declared().get(name)


@cache
def adapter_of(name: str) -> Adapter:
    """Returns the adapter of a declared framework. Raises ImportError where the framework is not installed."""
    framework = named(name)
    assert framework is not None, f"{name} is declared"
    return cast(Adapter, framework.ability("adapter").adapter)


def adapter_for(kind: type) -> Adapter | None:
    """Returns the adapter that represents values of this type, or None."""
    try:
        return _by_type[kind]
    except KeyError:
        found: Adapter | None = None
        for name in dict.fromkeys(base.__module__.partition(".")[0] for base in kind.__mro__):
            if named(name) is not None and (candidate := adapter_of(name)).claims(kind):
                found = candidate
                break
        if found is None:
            owners = (one.name for one, module in loaded("structures") if module.knows(kind))
            found = next(map(adapter_of, owners), None)
        _by_type[kind] = found
        return found


def move(value: Any, device: Any) -> None:
    """Moves a module to a device; does nothing with what is none."""
    adapter = adapter_for(type(value))
    if adapter is not None and hasattr(adapter, "move"):
        adapter.move(value, device)


def has_kind(kind: str) -> bool:
    """Returns whether nodes of this kind belong to one framework alone."""
    return _of_kind(kind) is not None


def adapter_of_kind(kind: str) -> Adapter:
    """Returns the adapter of the framework that alone has nodes of this kind.

    Raises ImportError where the framework is not installed.
    """
    framework = _of_kind(kind)
    assert framework is not None, f"some framework has the kind {kind}"
    return adapter_of(framework.name)


def _of_kind(kind: str) -> Framework | None:
    for frameworks in (BUILT_IN, declared().values()):
        for framework in frameworks:
            if kind in framework.kinds:
                return framework
    return None


def positions_of(top_level: str) -> Any:
    """Returns the module whose `attach` knows loaders of a top-level module; None where nobody does."""
    for framework in BUILT_IN:
        if top_level in (framework.name, *framework.loaders) and framework.positions:
            return framework.ability("positions")
    framework_of = named(top_level)
    return framework_of.ability("positions") if framework_of is not None else None


def gate(state: Any, warn: Callable[[str], None]) -> UpdateGate | None:
    """Returns what guards the updates of the optimizers in `state`; None while no framework that has any is loaded."""
    for _, module in loaded("gate"):
        return cast(UpdateGate, module.gate(state, warn))
    return None


@record
class Snapshot:
    """A mapping that some object's `state_dict()` has returned. keys: where it lies in the state; owner: what kind of
    object that was, such as "optimizer"."""

    keys: tuple[Any, ...]
    owner: str


def find_snapshot(state: Mapping[Any, Any]) -> Snapshot | None:
    """Returns the first snapshot in `state` or in containers inside it; None if there is none. Objects that say their
    state by themselves are not looked into: what they return is asked for at every save."""
    modules = [module for _, module in loaded("state_dicts")]
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), state)] if modules else []
    seen: set[int] = set()
    while waiting:
        keys, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            for module in modules:
                if owner := module.owner(value):
                    return Snapshot(keys, owner)
        inner = list(value.items() if isinstance(value, Mapping) else enumerate(value))
        waiting += [
            ((*keys, key), one)
            for key, one in reversed(inner)
            if isinstance(one, Mapping | list | tuple) and not is_stateful(one)
        ]
    return None


@record
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
    _by_type.pop(kind, None)


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
