"""Walks a state down: values become nodes, tensors become leaves.

One walk serves the first pass and every later one. Values of frameworks go through `_foreign`: the first pass lets the
adapter encode and keeps its *refresh*; later ones call the refresh, which records the current sources and raises
`StructureChanged` if the structure differs.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from tenuto.errors import StateError, TenutoError, Unserialisable
from tenuto.model.leaf import METADATA, LeafSpec, Placement, join
from tenuto.model.records import Json
from tenuto.state import frameworks
from tenuto.state.contract import Device
from tenuto.state.declarations import MARKS, FirstRank, Late, PerRank, Replicated, Shard, ShardLayout
from tenuto.state.encode.aliasing import Geometry
from tenuto.state.encode.atoms import CONTAINERS, DICTIONARIES, ENCODERS, encode_bytes
from tenuto.state.frameworks import is_stateful, type_name
from tenuto.state.tree import FIRST_RANK, MAX_DEPTH, OWN, PRIVATE, ROOT, segment


@dataclass(slots=True)
class LeafSequence:
    """Every leaf in the order met, aliases included, as columns."""

    sources: list[Any] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    geometries: list[Geometry] = field(default_factory=list)
    specs: list[LeafSpec] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """The row of each, or of the one it aliases."""
    leaf: list[int] = field(default_factory=list)
    """The leaf number of each row: a leaf has several rows where this rank has several boxes of it."""
    without: list[LeafSpec] = field(default_factory=list)
    """The leaves of which this rank has no part, in full shape: they have no row."""

    def firsts(self) -> list[int]:
        """Returns for each leaf met the position of the one that is stored: its own unless it is an alias."""
        stored: list[int] = []
        found: list[int] = []
        for position, number in enumerate(self.numbers):
            if number == len(stored):
                stored.append(position)
            found.append(stored[number])
        return found


def owners(root: Any, path: str = "") -> dict[int, tuple[Any, str]]:
    """Returns identity -> (tensor, path) for every tensor that an optimizer may own; the first path wins.

    The table keeps the tensors alive, so that no identity is reused.
    """
    found: dict[int, tuple[Any, str]] = {}
    stack: set[int] = set()

    def visit(value: Any, where: str) -> None:
        kind = type(value)
        if kind in ENCODERS or id(value) in stack:
            return
        if kind in MARKS:
            visit(value.value, where)
            return
        stack.add(id(value))
        adapter = frameworks.adapter_for(kind)
        if adapter is not None:
            for tensor, name in adapter.owners(value, where):
                found.setdefault(id(tensor), (tensor, name))
        else:
            for key, child in _members(value):
                visit(child, join(where, key))
        stack.discard(id(value))

    visit(root, path)
    return found


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            if type(key) is str or type(key) in ENCODERS:
                yield segment(ENCODERS[type(key)](key)), child
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip((segment(name) for name in value._fields), value, strict=True)
    elif isinstance(value, list | tuple | collections.deque):
        for number, child in enumerate(value):
            yield str(number), child
    elif dataclasses.is_dataclass(value) and not is_stateful(value):
        for one in dataclasses.fields(value):
            if hasattr(value, one.name):
                yield segment(one.name), getattr(value, one.name)


SeenLeaf = tuple[Any, int, Geometry]
"""One row: its source, address and geometry."""


class LeafRecorder:
    """The leaves that one walk has met: shared ones first, then those of this rank alone."""

    def __init__(self) -> None:
        self.leaves = LeafSequence()
        self.count = 0
        self._private = False
        self._placement: Placement = "whole"
        self._base = 0
        self._first: dict[int, int] = {}
        """Address -> position of the leaf that was met there first."""
        self._others: dict[int, dict[Geometry, int]] = {}
        """Address -> row of every leaf that was met there, where there are several."""
        self._without_part: dict[int, tuple[Any, int]] = {}
        """Identity -> a tensor of which this rank has no part, kept alive during the walk, and its leaf."""

    def begin_private(self) -> None:
        """Switches to the leaves of this rank alone, numbered from 0 again in their own tree."""
        self._private = True
        self._placement = "per_rank"
        self._without_part.clear()
        self._base = self.count
        self._first.clear()
        self._others.clear()

    @property
    def private(self) -> bool:
        """Whether the leaves recorded now belong to this rank alone."""
        return self._private

    @contextmanager
    def placed(self, placement: Placement) -> Iterator[None]:
        """Sets the placement of leaves recorded inside; leaves of one rank keep theirs."""
        before = self._placement
        self._placement = before if self._private else placement
        try:
            yield
        finally:
            self._placement = before

    def leaf(
        self,
        path: str,
        about: Json,
        spec: tuple[str, tuple[int, ...]],
        source: Any,
        *,
        device: Device,
        address: int,
        geometry: Geometry,
    ) -> Json:
        """Records a leaf, or an alias of one seen before. Returns its node with `about` added."""
        where = _checked_path(path)
        leaves = self.leaves
        row = self._row_of(source, address, geometry)
        if row != len(leaves.specs):
            return {"!": "alias", "n": leaves.leaf[row] - self._base, **about}
        leaves.specs.append(LeafSpec(where, spec[0], spec[1], self._private, placement=self._placement))
        leaves.leaf.append(self.count)
        leaves.devices.append(device)
        self.count += 1
        return {"!": "leaf", "n": leaves.leaf[row] - self._base, **about}

    def rows(
        self,
        path: str,
        about: Json,
        dtype: str,
        layout: ShardLayout,
        seen: Sequence[SeenLeaf],
        *,
        device: Device,
        tensor: Any,
    ) -> Json:
        """Records a leaf of which this rank has the parts of `layout`, with one row of `seen` each, or an alias of one
        seen before. Returns its node.

        The node has dtype and global shape too, because a rank without a part has no row for them. `tensor` identifies
        two names of such a leaf.
        """
        where, leaves = _checked_path(path), self.leaves
        about = {**about, "dtype": dtype, "shape": list(layout.whole)}
        if not seen:
            number = self._without_part.setdefault(id(tensor), (tensor, self.count))[1]
            if number == self.count:
                leaves.without.append(LeafSpec(where, dtype, layout.whole))
                self.count += 1
                return {"!": "leaf", "n": number - self._base, **about}
            return {"!": "alias", "n": number - self._base, **about}
        first, new = -1, len(leaves.specs)
        placement = layout.placement if self._placement != "per_rank" else "per_rank"
        for part, (source, address, geometry) in zip(layout.parts, seen, strict=True):
            row = self._row_of(source, address, geometry)
            first = row if first < 0 else first
            if row == len(leaves.specs):
                # A part that covers the global tensor is an ordinary leaf, so one rank can save what many can.
                cut = layout.placement == "box" and part.shape != layout.whole
                begin, whole = (part.offsets, layout.whole) if cut else (None, None)
                leaves.specs.append(
                    LeafSpec(where, dtype, part.shape, self._private, begin, whole, placement=placement)
                )
                leaves.leaf.append(self.count)
                leaves.devices.append(device)
        if first < new:
            return {"!": "alias", "n": leaves.leaf[first] - self._base, **about}
        self.count += 1
        return {"!": "leaf", "n": self.count - 1 - self._base, **about}

    def _row_of(self, source: Any, address: int, geometry: Geometry) -> int:
        """Returns the row of the leaf's memory: an existing one, or the next."""
        leaves = self.leaves
        position, row = len(leaves.sources), len(leaves.specs)
        leaves.sources.append(source)
        leaves.addresses.append(address)
        leaves.geometries.append(geometry)
        if self._first.setdefault(address, position) != position:
            row = self._among_others(address, geometry)
        leaves.numbers.append(row)
        return row

    def _among_others(self, address: int, geometry: Geometry) -> int:
        """Returns the row of exactly this memory, where another row has the same address."""
        found = self._others.get(address)
        if found is None:
            first = self._first[address]
            found = self._others[address] = {self.leaves.geometries[first]: self.leaves.numbers[first]}
        return found.setdefault(geometry, len(self.leaves.specs))

    def again(self, source: Any, address: int) -> None:
        """Records a leaf at the place it had in the first pass."""
        self.leaves.sources.append(source)
        self.leaves.addresses.append(address)


def _checked_path(path: str) -> str:
    where = path or ROOT
    if where == METADATA:
        raise Unserialisable(f"a leaf cannot be called {METADATA}", subject=where, hint="rename the entry")
    if '#k:{"!":"str"' in where:
        raise Unserialisable(f"{where}: a key with a lone surrogate cannot name a tensor", subject=where)
    return where


class StructureChanged(Exception):
    """The structure differs from that of the last full walk."""


@dataclass(slots=True)
class WalkStep:
    """One value of a framework met on the walk, or a dictionary encoded as a unit: its place and its refresh."""

    path: str
    kind: type
    refresh: frameworks.Refresh | None = None
    values: frozenset[type] = frozenset()
    """For a dictionary encoded as a unit: the types of its values."""


class _Entries:
    """The kind of a step for a dictionary encoded as a unit; no value has it."""


class StateWalker(LeafRecorder):
    """One walk over a state. Parameters of optimizers are looked up in `root`."""

    def __init__(
        self, root: Any, private_root: Any = None, *, script: Sequence[WalkStep] | None = None, rank: int = 0
    ) -> None:
        super().__init__()
        self._rank = rank
        self.script: list[WalkStep] = list(script) if script is not None else []
        self.root = root
        self.extra: dict[str, Any] = {}
        """Scratch space of adapters for one walk."""
        self._private_root = private_root
        self._replaying = script is not None
        self._cursor = 0
        self._open: set[int] = set()
        self._inline = False
        self._owners: dict[int, tuple[Any, str]] | None = None
        self._own: list[tuple[str, Any]] = []
        """Path and value of everything found to belong to this rank alone."""

    # -- walk

    def own(self) -> list[tuple[str, Any]]:
        """Returns and clears the values found to belong to this rank alone, with their paths."""
        found, self._own = self._own, []
        return found

    def mark(self, value: Any, path: str) -> Json:
        """Returns the node of a marked value."""
        if isinstance(value, Shard):
            kind = type(value.value)
            adapter = frameworks.adapter_for(kind)
            if adapter is None:
                raise Unserialisable(
                    f"{path or ROOT}: a {type_name(kind)} is not a tensor that can be a shard", subject=path
                )
            return self._foreign(value, Shard, path, adapter.encode_shard)
        if isinstance(value, PerRank) and not self._private:
            if self._inline:
                raise Unserialisable(f"{path}: a key cannot belong to one rank", subject=path)
            self._note(PerRank, path)
            self._own.append((path or ROOT, value.value))
            return {"!": OWN, "at": path or ROOT}
        if isinstance(value, FirstRank) and not self._private:
            self._note(FirstRank, path)
            if self._rank == 0:
                return self.encode(value.value, path)
            if is_stateful(value.value) and frameworks.adapter_for(type(value.value)) is None:
                _state_of(value.value, path)  # it may be a collective, which rank 0 is in as well
            return {"!": FIRST_RANK}
        self._note(PerRank if isinstance(value, PerRank) else Replicated, path)
        with self.placed("replicated"):
            return self.encode(value.value, path)

    def _note(self, kind: type, path: str) -> None:
        """Adds a script step without content, so that a mark that appears or disappears is noticed."""
        if self._inline:
            return
        if not self._replaying:
            self.script.append(WalkStep(path, kind))
            return
        step = self.script[self._cursor] if self._cursor < len(self.script) else None
        if step is None or step.kind is not kind or step.path != path:
            raise StructureChanged
        self._cursor += 1

    def encode(self, value: Any, path: str) -> Json:
        """Returns the node of any value. Raises Unserialisable with the path if it has none."""
        kind = type(value)
        if self._replaying and not self._inline and self._cursor < len(self.script):
            step = self.script[self._cursor]
            # The walk below would decide the same: no type of a framework is an atom or a container.
            if step.kind is kind and step.path == path and frameworks.registered(kind) is None and step.refresh:
                self._cursor += 1
                return step.refresh(value, self)
        encoder = ENCODERS.get(kind)
        if encoder is not None:
            try:
                return encoder(value)
            except Unserialisable as error:
                raise _located(error, path) from None
        container = CONTAINERS.get(kind)
        if container is not None:
            with self._inside(value, path):
                return container(self, value, path)
        return self._other(value, kind, path)

    def encode_root(self, state: Any, path: str = "") -> Json:
        """Encodes the top of a state: any mapping is entries, even if it is no dict."""
        if (
            isinstance(state, Mapping)
            and frameworks.adapter_for(type(state)) is None
            and frameworks.registered(type(state)) is None
        ):
            if Late in map(type, state.values()):
                state = {key: value for key, value in state.items() if type(value) is not Late}
            with self._inside(state, path):
                return {"!": "dict", "i": self.entries(state, path)}
        return self.encode(state, path)

    def entries(self, mapping: Mapping[Any, Any], path: str) -> list[Json]:
        """Encodes the pairs of a dictionary; one that an adapter encodes as a unit is one script step."""
        if self._inline or type(mapping) not in DICTIONARIES:
            return self.pairs(mapping.items(), path)
        if self._replaying:
            step = self.script[self._cursor] if self._cursor < len(self.script) else None
            if step is None or step.kind is not _Entries or step.path != path or step.refresh is None:
                return self.pairs(mapping.items(), path)
            if any(map(frameworks.registered, step.values)):
                raise StructureChanged
            self._cursor += 1
            again: list[Json] = step.refresh(mapping, self)
            return again
        kinds = frozenset(map(type, mapping.values()))
        adapter = _adapter_of_all(kinds)
        if adapter is None or not all(type(key) is str and key.isascii() for key in mapping):
            return self.pairs(mapping.items(), path)
        seen = adapter.encode_entries(mapping, path, self)
        if seen is None:
            return self.pairs(mapping.items(), path)
        self.script.append(WalkStep(path, _Entries, seen[1], kinds))
        return seen[0]

    def pairs(self, entries: Iterable[tuple[Any, Any]], path: str) -> list[Json]:
        found: list[Json] = []
        for key, value in entries:
            node = key if type(key) is str and key.isascii() else self.closed(key, f"{path or ROOT} (a key)")
            found.append([node, self.encode(value, join(path, segment(node)))])
        return found

    def closed(self, value: Any, path: str) -> Json:
        """Encodes a key or a set element, which have no path of their own and so cannot contain leaves."""
        before, outer, self._inline = len(self.leaves.sources), self._inline, True
        try:
            node = self.encode(value, path)
        finally:
            self._inline = outer
        if len(self.leaves.sources) != before:
            raise Unserialisable(f"{path} cannot hold tensors or arrays", subject=path, hint="use a list")
        return node

    @contextmanager
    def _inside(self, value: Any, path: str) -> Iterator[None]:
        mark = id(value)
        if mark in self._open:
            raise Unserialisable(f"{path or ROOT}: the state contains itself here", subject=path)
        if len(self._open) >= MAX_DEPTH:
            raise Unserialisable(f"{path or ROOT}: more than {MAX_DEPTH} containers inside each other", subject=path)
        self._open.add(mark)
        try:
            yield
        finally:
            self._open.discard(mark)

    def _other(self, value: Any, kind: type, path: str) -> Json:
        known = frameworks.registered(kind)
        if known is not None:
            with self._inside(value, path):
                return {"!": "tagged", "type": known.name, "v": self.encode(known.to_plain(value), path)}
        adapter = frameworks.adapter_for(kind)
        if adapter is not None:
            return self._foreign(value, kind, path, adapter.encode)
        if kind in MARKS:
            with self._inside(value, path):
                return self.mark(value, path)
        if isinstance(value, enum.Enum):
            return {
                "!": "enum",
                "type": type_name(kind),
                "name": value.name,
                "v": self.encode(value.value if type(value.value) in ENCODERS else None, path),
            }
        if is_stateful(value):
            with self._inside(value, path):
                return {"!": "object", "type": type_name(kind), "v": self.encode(_state_of(value, path), path)}
        if dataclasses.is_dataclass(value):
            entries = [
                (one.name, getattr(value, one.name)) for one in dataclasses.fields(value) if hasattr(value, one.name)
            ]
            return self._fields("dataclass", value, kind, entries, path)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._fields("namedtuple", value, kind, zip(value._fields, value, strict=True), path)
        raise Unserialisable(
            f"{path or ROOT}: a {type_name(kind)} has no representation", subject=path, hint=_hint(value)
        )

    def _fields(self, name: str, value: Any, kind: type, entries: Iterable[tuple[str, Any]], path: str) -> Json:
        with self._inside(value, path):
            return {"!": name, "type": type_name(kind), "i": self.pairs(entries, path)}

    def long_bytes(self, value: bytes | bytearray, path: str) -> Json:
        if self._inline:
            return encode_bytes(value)
        return self._foreign(value, type(value), path, frameworks.adapter_of("numpy").encode)

    def _foreign(self, value: Any, kind: type, path: str, encode: frameworks.Encode) -> Json:
        if self._replaying:
            if self._cursor >= len(self.script):
                raise StructureChanged
            step = self.script[self._cursor]
            self._cursor += 1
            if step.kind is not kind or step.path != path or step.refresh is None:
                raise StructureChanged
            return step.refresh(value, self)
        step = WalkStep(path, kind)
        self.script.append(step)
        node, step.refresh = encode(value, path, self)
        return node

    def finish_replay(self) -> None:
        if self._cursor != len(self.script):
            raise StructureChanged

    # -- parameters

    def owner(self, tensor: Any) -> str | None:
        """Returns the path of this very tensor in the state, or None."""
        if self._owners is None:
            self._owners = owners(self.root)
            if self._private_root is not None:
                for mark, (mapping, path) in owners(self._private_root, PRIVATE).items():
                    self._owners.setdefault(mark, (mapping, path))
        found = self._owners.get(id(tensor))
        return None if found is None else found[1]


def _adapter_of_all(kinds: Iterable[type]) -> frameworks.Adapter | None:
    """Returns the one adapter for values of all these types, if there is one."""
    found: frameworks.Adapter | None = None
    for kind in kinds:
        if kind in ENCODERS or kind in CONTAINERS or frameworks.registered(kind) is not None:
            return None
        adapter = frameworks.adapter_for(kind)
        if adapter is None or (found is not None and adapter is not found):
            return None
        found = adapter
    return found


def _state_of(value: Any, path: str) -> Any:
    try:
        return value.state_dict()
    except TenutoError:
        raise
    except Exception as error:
        raise StateError(
            f"{path or ROOT}: state_dict() of {type_name(type(value))} failed: {error!r}", subject=path
        ) from error


_CODE: Final = (
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    functools.partial,
)


def _hint(value: Any) -> str:
    if isinstance(value, datetime.tzinfo):
        return "use datetime.timezone with a fixed offset"
    if isinstance(value, Late):
        return "tenuto.late() stands for an entry of the state itself, not for something inside one"
    if isinstance(value, _CODE):
        return "functions, classes and modules are code, not state; leave it out of the state"
    return "give it state_dict and load_state_dict, or call tenuto.register with its type"


def _located(error: Unserialisable, path: str) -> Unserialisable:
    return Unserialisable(f"{path or ROOT}: {error.message}", subject=path, hint=error.hint)
