"""Walking the state down: values become nodes, tensors become leaves.

One walk serves both the first look and every later one. What only frameworks know goes through `_foreign`: at first the
adapter encodes and leaves a *refresh* behind; later that refresh tells the present sources, and raises `Changed` where
the structure is no longer what it was.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.errors import HoldfastError, StateError, Unserialisable
from holdfast.model.checkpoint import Json
from holdfast.model.paths import join
from holdfast.state import registry
from holdfast.state.atoms import ENCODERS, encode_bytes
from holdfast.state.containers import CONTAINERS, DICTIONARIES
from holdfast.state.declared import MARKS, PerRank, Replicated, Shard
from holdfast.state.nodes import MAX_DEPTH, OWN, PRIVATE, ROOT, segment
from holdfast.state.owners import owners
from holdfast.state.stateful import is_stateful
from holdfast.state.tagged import type_name
from holdfast.state.telling import Telling


class Changed(Exception):
    """The structure is not what it was at the last full look."""


@dataclass(slots=True)
class Step:
    """One value of a framework met on the walk, or a dictionary of nothing else: where, and how to tell its sources
    again."""

    path: str
    kind: type
    refresh: registry.Refresh | None = None
    values: frozenset[type] = frozenset()
    """Of a dictionary told as a whole: the types of its values."""


class _Entries:
    """What a step for a dictionary as a whole has for a kind: no value is one."""


class Writer(Telling):
    """One walk over a state. `root` is what optimizers' parameters are looked up in."""

    def __init__(self, root: Any, private_root: Any = None, *, script: Sequence[Step] | None = None) -> None:
        super().__init__()
        self.script: list[Step] = list(script) if script is not None else []
        self.root = root
        self.extra: dict[str, Any] = {}
        """What an adapter keeps for the time of one walk."""
        self._private_root = private_root
        self._replaying = script is not None
        self._cursor = 0
        self._open: set[int] = set()
        self._inline = False
        self._owners: dict[int, tuple[Any, str]] | None = None
        self._own: list[tuple[str, Any]] = []
        """Path and value of what was found to belong to this rank alone."""

    # -- the walk ------------------------------------------------------------------------------------------

    def own(self) -> list[tuple[str, Any]]:
        """What the walk has found to belong to this rank alone, path by path, and no longer has to be told."""
        found, self._own = self._own, []
        return found

    def mark(self, value: Any, path: str) -> Json:
        """The node of what a user's mark says about a value."""
        if isinstance(value, Shard):
            kind = type(value.value)
            adapter = registry.adapter_for(kind)
            if adapter is None:
                raise Unserialisable(
                    f"{path or ROOT}: a {type_name(kind)} is no tensor that can be a shard", subject=path
                )
            return self._foreign(value, Shard, path, adapter.encode_shard)
        if isinstance(value, PerRank) and not self._private:
            if self._inline:
                raise Unserialisable(f"{path}: a key cannot belong to one rank", subject=path)
            self._note(PerRank, path)
            self._own.append((path or ROOT, value.value))
            return {"!": OWN, "at": path or ROOT}
        self._note(PerRank if isinstance(value, PerRank) else Replicated, path)
        with self.placed("replicated"):
            return self.encode(value.value, path)

    def _note(self, kind: type, path: str) -> None:
        """Leaves a step of the script that has nothing to tell, so that a mark which comes or goes is seen."""
        if self._inline:
            return
        if not self._replaying:
            self.script.append(Step(path, kind))
            return
        step = self.script[self._cursor] if self._cursor < len(self.script) else None
        if step is None or step.kind is not kind or step.path != path:
            raise Changed
        self._cursor += 1

    def encode(self, value: Any, path: str) -> Json:
        """The node of any value. Unserialisable, naming the path, for what has none."""
        kind = type(value)
        if self._replaying and not self._inline and self._cursor < len(self.script):
            step = self.script[self._cursor]
            # What the walk below would come to as well: no type of a framework is an atom or a container.
            if step.kind is kind and step.path == path and registry.registered(kind) is None and step.refresh:
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
        """The state as a whole: any mapping is entries, also one that is no dict."""
        if (
            isinstance(state, Mapping)
            and registry.adapter_for(type(state)) is None
            and registry.registered(type(state)) is None
        ):
            with self._inside(state, path):
                return {"!": "dict", "i": self.entries(state, path)}
        return self.encode(state, path)

    def entries(self, held: Mapping[Any, Any], path: str) -> list[Json]:
        """The pairs of a dictionary; one that a framework's adapter tells as a whole is one step of the script."""
        if self._inline or type(held) not in DICTIONARIES:
            return self.pairs(held.items(), path)
        if self._replaying:
            step = self.script[self._cursor] if self._cursor < len(self.script) else None
            if step is None or step.kind is not _Entries or step.path != path or step.refresh is None:
                return self.pairs(held.items(), path)
            if any(map(registry.registered, step.values)):
                raise Changed
            self._cursor += 1
            again: list[Json] = step.refresh(held, self)
            return again
        kinds = frozenset(map(type, held.values()))
        adapter = _adapter_of_all(kinds)
        if adapter is None or not all(type(key) is str and key.isascii() for key in held):
            return self.pairs(held.items(), path)
        told = adapter.encode_entries(held, path, self)
        if told is None:
            return self.pairs(held.items(), path)
        self.script.append(Step(path, _Entries, told[1], kinds))
        return told[0]

    def pairs(self, entries: Iterable[tuple[Any, Any]], path: str) -> list[Json]:
        found: list[Json] = []
        for key, value in entries:
            node = key if type(key) is str and key.isascii() else self.closed(key, f"{path or ROOT} (a key)")
            found.append([node, self.encode(value, join(path, segment(node)))])
        return found

    def closed(self, value: Any, path: str) -> Json:
        """The node of a key or a set's element, which have no path of their own and so hold no leaves."""
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
        known = registry.registered(kind)
        if known is not None:
            with self._inside(value, path):
                return {"!": "tagged", "type": known.name, "v": self.encode(known.to_plain(value), path)}
        adapter = registry.adapter_for(kind)
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
                "v": self.encode(_enum_value(value), path),
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
        return self._foreign(value, type(value), path, registry.home("numpy").encode)

    def _foreign(self, value: Any, kind: type, path: str, encode: registry.Encode) -> Json:
        if self._replaying:
            if self._cursor >= len(self.script):
                raise Changed
            step = self.script[self._cursor]
            self._cursor += 1
            if step.kind is not kind or step.path != path or step.refresh is None:
                raise Changed
            return step.refresh(value, self)
        step = Step(path, kind)
        self.script.append(step)
        node, step.refresh = encode(value, path, self)
        return node

    def finish_replay(self) -> None:
        if self._cursor != len(self.script):
            raise Changed

    # -- parameters ----------------------------------------------------------------------------------------

    def owner(self, tensor: Any) -> str | None:
        """The path at which the state holds this very tensor, or None."""
        if self._owners is None:
            self._owners = owners(self.root)
            if self._private_root is not None:
                for mark, (held, path) in owners(self._private_root, PRIVATE).items():
                    self._owners.setdefault(mark, (held, path))
        found = self._owners.get(id(tensor))
        return None if found is None else found[1]


def _adapter_of_all(kinds: Iterable[type]) -> registry.Adapter | None:
    """The one adapter that the walk would come to for values of each of these types, if there is one."""
    found: registry.Adapter | None = None
    for kind in kinds:
        if kind in ENCODERS or kind in CONTAINERS or registry.registered(kind) is not None:
            return None
        adapter = registry.adapter_for(kind)
        if adapter is None or (found is not None and adapter is not found):
            return None
        found = adapter
    return found


def _state_of(value: Any, path: str) -> Any:
    try:
        return value.state_dict()
    except HoldfastError:
        raise
    except Exception as error:
        raise StateError(
            f"{path or ROOT}: state_dict() of {type_name(type(value))} failed: {error!r}", subject=path
        ) from error


def _enum_value(value: enum.Enum) -> Any:
    return value.value if type(value.value) in ENCODERS else None


def _hint(value: Any) -> str:
    if isinstance(value, datetime.tzinfo):
        return "use datetime.timezone with a fixed offset"
    if callable(value):
        return "functions are code, not state; leave it out of the state"
    return "give it state_dict and load_state_dict, or holdfast.state.register its type"


def _located(error: Unserialisable, path: str) -> Unserialisable:
    return Unserialisable(f"{path or ROOT}: {error.message}", subject=path, hint=error.hint)
