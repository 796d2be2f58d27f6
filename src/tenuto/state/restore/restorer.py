"""Plans a restore: matches nodes with the target, and changes nothing yet.

Each node becomes a *thunk*: called once every leaf has arrived, it returns the value, changed in place if its identity
stays. Sinks are the destinations of leaves. Problems are collected and reported together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Final

from tenuto.errors import CorruptionError, StateMismatch, TenutoError
from tenuto.model.leaf import Box, LeafSpec
from tenuto.model.records import Json
from tenuto.state import frameworks
from tenuto.state.contract import Buffer, Form, Memory, Rows, Sink
from tenuto.state.encode.aliasing import Geometry
from tenuto.state.encode.walker import owners
from tenuto.state.frameworks import type_name
from tenuto.state.restore.kept import Kept
from tenuto.state.restore.selection import Selection
from tenuto.state.tree import LEAVES, NEED_TARGET, ROOT, kind_of, leaf_nodes, number_of, terminals, walk

Thunk = Callable[[], Any]
_TargetMemory = tuple[int, str, Callable[[], Geometry]]
"""Memory of the target: its leaf, its path, and its geometry."""


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()
"""The target has no value; a thunk that returns it leaves the entry out."""

SWAPS, MODULES, OBJECTS, OPTIMIZERS = range(4)
"""The order of actions: tensors first, optimizers last, because some schedulers set rates on load."""


class TiedLeaf:
    """One leaf with several destinations: tied when saved, separate in the target."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    @property
    def buffer(self) -> Buffer | None:
        return None

    def span(self) -> None:
        return None

    def fill(self, data: Buffer) -> None:
        for sink in self._sinks:
            sink.fill(data)

    @property
    def fill_part(self) -> None:
        return None


def _order(item: tuple[Box, Any]) -> tuple[int, ...]:
    return item[0].offsets


class Restorer:
    """The plan of one restore. Parameters of optimizers are looked up in `target`."""

    def __init__(
        self,
        specs: Sequence[LeafSpec],
        target: Any,
        selection: Selection,
        device: Any,
        strict: bool,
        *,
        apart: bool = False,
    ) -> None:
        self.device = device
        self.strict = strict
        self.apart = apart
        """Whether other ranks have targets of their own, which take what this one leaves over."""
        self.selection = selection
        self.restored: list[str] = []
        self.created: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.skipped: list[str] = []
        self.mismatched: list[str] = []
        self.notes: list[str] = []
        self.replaced: list[str] = []
        self.extra: dict[str, Any] = {}
        """Scratch space of adapters for one restore."""
        self.faults: list[str] = []
        """Problems that even strict=False cannot overlook."""
        self.plainer: list[str] = []
        """New tensors that were of a class which the program has not loaded."""
        self.kept = Kept()
        self.asks = False
        """Whether code of others will run when tensors are filled already, and may refuse."""
        self._filled: list[tuple[str, Memory]] = []
        self.taken_by_objects = False
        """Whether new values are planned for an object's own load, which has no use for a stand-in."""
        self._specs = specs
        self._target = target
        self._base = 0
        self._end = 0
        self._forms: Sequence[Form] | None = None
        self._sinks: dict[int, Sink] = {}
        self._more: dict[int, list[Sink]] = {}
        """Leaf number -> all its sinks, where it has several."""
        self._memory: dict[int, _TargetMemory] = {}
        """Address -> the part of the target that was met there first."""
        self._others: dict[int, dict[Geometry, _TargetMemory]] = {}
        """Address -> everything that was met there, where there are several."""
        self._parts: dict[int, dict[Box, list[Sink]]] = {}
        """Leaf number -> its wanted boxes, with their sinks."""
        self._bases: dict[tuple[int, str], Any] = {}
        self._views: dict[str, Any] = {}
        self._actions: list[tuple[int, str, Callable[[], Any]]] = []
        self._owners: dict[int, tuple[Any, str]] | None = None
        self._tree: Json = None
        self._places: dict[str, tuple[int, Json]] | None = None
        self._own: tuple[Json, int, int] = (None, 0, 0)
        self._own_nodes: dict[str, Json] = {}
        self._own_taken: set[str] = set()
        from tenuto.state.restore.rebuild import value

        self._planned = value

    # -- checkpoint

    def begin(self, tree: Json, base: int, count: int) -> None:
        """Switches to a tree of `count` leaves whose leaf 0 is leaf `base`. Its paths are those of the target."""
        self._base, self._end = base, base + count
        self._tree, self._places = tree, None

    def begin_own(self, tree: Json, base: int, count: int, nodes: dict[str, Json]) -> None:
        """Sets the private tree and its nodes that belong at paths of the shared one."""
        self._own, self._own_nodes = (tree, base, count), nodes

    def own(self, path: str) -> Json:
        """Returns the node of this rank's private tree for what was saved at `path`, ABSENT without one."""
        return self._own_nodes.get(path, ABSENT)

    @contextmanager
    def private_tree_at(self, path: str) -> Iterator[None]:
        """Switches to the private tree for the nodes below what was saved at `path`."""
        before = (self._base, self._end, self._tree, self._places)
        self.begin(*(self._own[0], self._own[1], self._own[2]))
        self._own_taken.add(path)
        try:
            yield
        finally:
            self._base, self._end, self._tree, self._places = before

    @property
    def private(self) -> bool:
        """Whether the nodes at hand belong to a private tree."""
        return self._own[0] is not None and self._tree is self._own[0]

    def own_left(self) -> list[str]:
        """Returns the paths of the shared tree whose private values were not requested."""
        return [path for path in self._own_nodes if path not in self._own_taken]

    def _located(self) -> dict[str, tuple[int, Json]]:
        """Returns path -> (leaf number, node) of the tree at hand."""
        if self._places is None:
            self._places = {path: (self.spec(node, path)[0], node) for path, node in leaf_nodes(self._tree)}
        return self._places

    def number_at(self, path: str) -> int | str:
        """Returns the leaf number saved at `path`, the same for every name of a tied tensor; `path` without one."""
        found = self._located().get(path)
        return path if found is None else found[0]

    def device_at(self, path: str) -> str:
        """Returns the type of the device of the tensor saved at `path`."""
        return str((self.leaf_at(path) or {}).get("device", "cpu"))

    def leaf_at(self, path: str) -> Json | None:
        """Returns the node of the tensor saved at `path`."""
        return self._located().get(path, (0, None))[1]

    def spec(self, node: Json, path: str) -> tuple[int, LeafSpec]:
        """Returns number (over shared and private leaves) and spec of a leaf or alias node."""
        base = self._base
        number = base + number_of(node, self._end - base, path)
        return number, self._specs[number]

    def forms(self, nodes: Sequence[Json]) -> tuple[list[int], list[Form]] | None:
        """Returns numbers and forms of many nodes at once. None unless all are leaves."""
        if self._forms is None:
            specs = self._specs
            self._forms = specs.forms() if isinstance(specs, Rows) else [(one.dtype, one.shape) for one in specs]
        if set(map(type, nodes)) != {dict}:
            return None
        try:
            kinds, found = {*map(itemgetter("!"), nodes)}, [*map(itemgetter("n"), nodes)]
        except KeyError:
            return None
        if (
            kinds != {"leaf"}
            or set(map(type, found)) != {int}
            or min(found) < 0
            or max(found) >= self._end - self._base
        ):
            return None
        numbers = [self._base + number for number in found] if self._base else found
        return numbers, [*map(self._forms.__getitem__, numbers)]

    def words(self, node: Json) -> str:
        """Describes a node for a person."""
        kind = kind_of(node)
        if kind in LEAVES:
            _, spec = self.spec(node, "")
            return f"{spec.dtype} {list(spec.shape)}"
        if kind == "":
            return f"the value {node!r}"[:60]
        named = {
            "dict": "a dict of entries",
            "list": "a list",
            "module": "a module's entries",
            "object": "an object's state",
            "optimizer": "an optimizer's state",
        }
        return named.get(kind, f"a {kind}") + (
            f" ({node['type']})" if isinstance(node, dict) and "type" in node else ""
        )

    # -- target

    def owner(self, tensor: Any) -> str | None:
        """Returns the path of this very tensor in the target."""
        if self._owners is None:
            self._owners = owners(self._target)
        found = self._owners.get(id(tensor))
        return None if found is None else found[1]

    def takes(self, path: str) -> bool:
        """Returns whether to restore `path`; notes a skipped one."""
        taken = self.selection.takes(path)
        if not taken:
            self.skipped.append(path)
        return taken

    def takes_some(self, node: Json, path: str) -> bool:
        """Returns whether to restore anything of `node`; notes a skipped one."""
        taken = self.selection.everything or any(map(self.selection.takes, terminals(node, path)))
        if not taken:
            self.skipped.append(path)
        return taken

    def want(self, number: int, sink: Sink) -> None:
        """Sends leaf `number` to `sink`."""
        first = self._sinks.setdefault(number, sink)
        if first is not sink:
            self._more.setdefault(number, [first]).append(sink)

    def want_existing(
        self, number: int, sink: Memory, path: str, address: int, geometry: Callable[[], Geometry]
    ) -> None:
        """Sends leaf `number` to the target's memory at `path`, which is filled once and from one leaf only. `geometry`
        is called if something else of the target has the same address."""
        if self._is_new(number, path, address, geometry):
            self._filled.append((path, sink))
            self.want(number, sink)

    def want_parts(
        self,
        number: int,
        parts: Sequence[tuple[Box, Memory]],
        path: str,
        address: int,
        geometry: Callable[[], Geometry],
    ) -> None:
        """Sends boxes of leaf `number` to the target's memory at `path`, at one address; otherwise as `want_existing`.
        No `parts`: this rank has nothing of it."""
        if not parts:
            self.restored.append(path)
        elif self._is_new(number, path, address, geometry):
            self._filled.extend((path, sink) for _, sink in parts)
            self.want_boxes(number, parts)

    def want_boxes(self, number: int, parts: Sequence[tuple[Box, Sink]]) -> None:
        """Sends boxes of leaf `number` to these sinks."""
        wanted = self._parts.setdefault(number, {})
        for box, sink in parts:
            wanted.setdefault(box, []).append(sink)

    def _is_new(self, number: int, path: str, address: int, geometry: Callable[[], Geometry]) -> bool:
        """Returns whether this memory of the target is met for the first time, so must be filled."""
        self.restored.append(path)
        entry = (number, path, geometry)
        first = self._memory.setdefault(address, entry)
        if first is not entry:
            others = self._others.setdefault(address, {first[2](): first})
            other = others.setdefault(geometry(), entry)
            if other[0] != number:
                self.mismatched.append(f"{path}: one tensor with {other[1]} in the target, two in the checkpoint")
            return other is entry
        return True

    def want_apart(
        self,
        numbers: Sequence[int],
        sinks: Sequence[Memory],
        paths: Sequence[str],
        addresses: Sequence[int],
        geometries: Iterable[Callable[[], Geometry]],
    ) -> bool:
        """`want_existing` for many. Returns False, without effect, if two of them, or one and an earlier one, share a
        leaf or an address."""
        for found, known in ((numbers, self._sinks), (addresses, self._memory)):
            if len(set(found)) < len(found) or not known.keys().isdisjoint(found):
                return False
        self.restored.extend(paths)
        self._filled.extend(zip(paths, sinks, strict=True))
        self._sinks.update(zip(numbers, sinks, strict=True))
        self._memory.update(zip(addresses, zip(numbers, paths, geometries, strict=True), strict=True))
        return True

    def mismatch(self, value: Any, path: str, theirs: str, ours: str) -> Thunk:
        self.mismatched.append(f"{path or ROOT}: {theirs} in the checkpoint, {ours} in the target")
        return lambda: value

    def later(self, path: str, action: Callable[[], Any], phase: int = OBJECTS) -> None:
        """Runs `action` when every leaf has arrived, before plain values are set."""
        self._actions.append((phase, path, action))

    # -- new values

    def rebuild(self, node: Json, path: str, like: Any = ABSENT) -> Thunk:
        """Plans a new value; `like` only offers classes that the checkpoint cannot name."""
        return self._planned(self, node, like, path, False)

    def value(self, node: Json, like: Any, path: str) -> Thunk:
        """Plans restoring `like` in place."""
        return self._planned(self, node, like, path, True)

    @contextmanager
    def for_an_object(self, node: Json) -> Iterator[None]:
        """Makes what `node` has of objects and classes go, inside, into those of the target, or be a mismatch."""
        before = self.taken_by_objects
        self.taken_by_objects = before or any(kind_of(one) in NEED_TARGET for _, one in walk(node))
        try:
            yield
        finally:
            self.taken_by_objects = before

    @contextmanager
    def on(self, device: Any) -> Iterator[None]:
        """Makes new tensors inside go to `device`."""
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before

    def new_leaf(self, node: Json, path: str, device: Any = None) -> Thunk:
        """Plans a new tensor, array or bytes for a leaf, shared by all its aliases."""
        number, spec = self.spec(node, path)
        self.created.append(path or ROOT)
        adapter, framework, where = *self._framework(node, path), device if device is not None else self.device
        base = self.new_base(number, spec, node, path, device)
        about = json.dumps(
            [number, framework, str(where), {name: node[name] for name in sorted(node) if name not in ("!", "n")}]
        )

        def view() -> Any:
            if about not in self._views:
                made = self._views[about] = adapter.view(base, node)
                if node.get("class", type_name(type(made))) != type_name(type(made)):
                    self.plainer.append(f"{path or ROOT} (a {node['class']})")
            return self._views[about]

        return view

    def new_base(self, number: int, spec: LeafSpec, node: Json, path: str, device: Any = None) -> Any:
        """Returns the memory of a new leaf, shared by all its names."""
        adapter, framework = self._framework(node, path)
        where = device if device is not None else self.device
        key = (number, f"{framework} {where}")
        if key not in self._bases:
            self._bases[key], sink = adapter.allocate(spec, node, where)
            self.want(number, sink)
        return self._bases[key]

    def _framework(self, node: Json, path: str) -> tuple[frameworks.Adapter, str]:
        name = node.get("as")
        if name in ("torch", "jax"):
            try:
                return frameworks.adapter_of(name), name
            except ImportError:
                return frameworks.adapter_of("numpy"), "numpy"
        if name not in ("numpy", "bytes"):
            raise CorruptionError(f"{path}: a leaf of {name!r} is not known here", subject=path)
        return frameworks.adapter_of("numpy"), "numpy"

    # -- end

    def keep_filled(self) -> None:
        """Keeps the target's memory that is going to be filled, where code of others may refuse the load then."""
        self.kept.sinks(self._filled, needed=self.asks)
        self._filled.clear()

    def wants(self) -> tuple[list[tuple[int, Sink]], list[Box | None] | None]:
        """Returns the sinks by leaf number, and the box of each unless all take full leaves."""
        several = {number: TiedLeaf(sinks) for number, sinks in self._more.items()}
        whole = sorted((self._sinks | several).items(), key=itemgetter(0))
        if not self._parts:
            return whole, None
        every: list[tuple[int, Box | None, Sink]] = [(number, None, sink) for number, sink in whole]
        for number, parts in self._parts.items():
            every += [
                (number, box, sinks[0] if len(sinks) == 1 else TiedLeaf(sinks))
                for box, sinks in sorted(parts.items(), key=_order)
            ]
        every.sort(key=itemgetter(0))
        return [(number, sink) for number, _, sink in every], [box for _, box, _ in every]

    def act(self) -> None:
        """Runs the deferred actions. An error of a user's object becomes a StateMismatch that names it."""
        for _, path, action in sorted(self._actions, key=lambda item: item[0]):
            try:
                action()
            except TenutoError:
                raise
            except Exception as error:
                raise StateMismatch(f"{path or ROOT}: its state could not be set: {error}", subject=path) from error
