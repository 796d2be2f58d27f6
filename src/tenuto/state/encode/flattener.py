"""Flattens a state: the first time with a full walk, then at the cost of checking for changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final

from tenuto.concurrency.worker_threads import gc_paused
from tenuto.errors import DuplicatePath, StateError
from tenuto.model.leaf import LeafSpec, join
from tenuto.model.records import Json
from tenuto.state.contract import Flattened
from tenuto.state.declarations import declarations
from tenuto.state.encode.aliasing import Arrangement, Geometry, first_of_each, overlaps
from tenuto.state.encode.walker import LeafSequence, StateWalker, StructureChanged, WalkStep
from tenuto.state.tree import OWN, PRIVATE, items, kind_of


@dataclass(slots=True)
class _Known:
    """The result of the last full walk, without the state's tensors: a state that replaces them must not keep both
    alive."""

    about: Flattened
    """Without tree and sources."""
    script: Sequence[WalkStep]
    addresses: list[int]
    geometries: Sequence[Geometry]
    firsts: Sequence[int]
    arrangement: Arrangement
    boundary: int
    """The number of shared leaves met."""
    declared: int
    """The number of declarations by then."""


class Flattener:
    """Flattens one state repeatedly. `state` and `private` are references, read anew each time.

    `flatten()` equals `flatten(state, private=private)`; while the structure is unchanged it costs a few microseconds
    per leaf.
    """

    def __init__(self, state: Any, *, private: Any = None, rank: int = 0) -> None:
        self._state = state
        self._rank = rank
        self._private = private
        self._known: _Known | None = None
        self.full_walks = 0
        """The number of full walks."""

    def flatten(self) -> Flattened:
        if self._known is not None and self._known.declared == declarations():
            try:
                return self._replay(self._known)
            except StructureChanged:
                self._known = None
        return self._full_walk()

    def _replay(self, known: _Known) -> Flattened:
        writer = StateWalker(self._state, self._private, script=known.script, rank=self._rank)
        tree, private, boundary, _ = _walk(writer, self._state, self._private)
        writer.finish_replay()
        leaves = writer.leaves
        if boundary != known.boundary:
            raise StructureChanged
        if leaves.addresses != known.addresses:
            _check_memory(leaves.addresses, known)
            known.addresses = leaves.addresses
        about = known.about
        sources = leaves.sources if len(leaves.sources) == len(about.specs) else _pick(leaves.sources, known.firsts)
        return Flattened(
            tree,
            private,
            about.specs,
            sources,
            about.devices,
            about.device,
            about.fingerprint,
            about.reports,
            about.leaf,
            about.shared,
        )

    @gc_paused
    def _full_walk(self) -> Flattened:
        self.full_walks += 1
        writer = StateWalker(self._state, self._private, rank=self._rank)
        declared = declarations()
        tree, private, boundary, shared = _walk(writer, self._state, self._private)
        leaves = writer.leaves
        plain = not leaves.without and leaves.leaf == list(range(len(leaves.leaf)))
        _check_paths(leaves)
        firsts = leaves.firsts()
        arrangement = Arrangement(leaves.geometries, firsts, boundary)
        apart = arrangement.holds(leaves.addresses)
        reports = () if apart else _reports(leaves.addresses, leaves.geometries, firsts, leaves.specs)
        devices = tuple({id(device): device for device in leaves.devices}.values())
        numbers = {id(device): number for number, device in enumerate(devices)}
        about = Flattened(
            None,
            None,
            tuple(leaves.specs),
            (),
            devices,
            tuple(numbers[id(device)] for device in leaves.devices),
            _fingerprint(leaves, None if plain else (writer.count, shared)),
            reports,
            None if plain else tuple(leaves.leaf),
            None if plain else shared,
        )
        self._known = _Known(
            about, writer.script, leaves.addresses, leaves.geometries, firsts, arrangement, boundary, declared
        )
        return replace(about, tree=tree, private=private, sources=_pick(leaves.sources, firsts))


def flatten(state: Any, *, private: Any = None, rank: int = 0) -> Flattened:
    """Flattens the training state into leaves. `private`: a mapping that belongs to this rank alone, `rank`. Copies
    nothing.

    Raises Unserialisable, DuplicatePath or StateError with the path.
    """
    return Flattener(state, private=private, rank=rank).flatten()


def _walk(writer: StateWalker, state: Any, private: Any) -> tuple[Json, Json, int, int]:
    """Returns the two trees, the number of shared leaves met, and the number of shared leaves."""
    tree = writer.encode_root(state)
    boundary = len(writer.leaves.sources)
    own, shared = writer.own(), writer.count
    if private is None and not own:
        return tree, None, boundary, shared
    writer.begin_private()
    node = writer.encode_root(private if private is not None else {}, PRIVATE)
    if own:
        if kind_of(node) != "dict" or any(key == OWN for key, _ in items(node)):
            raise StateError(f"the private state has an entry {OWN!r} of its own", subject=PRIVATE)
        where = join(PRIVATE, OWN)
        pairs = [[path, writer.encode(value, join(where, path))] for path, value in own]
        node = {**node, "i": [*node["i"], [OWN, {"!": "bypath", "i": pairs}]]}
    return tree, {"!": "private", "v": node}, boundary, shared


def _check_memory(addresses: list[int], known: _Known) -> None:
    """Raises StructureChanged if leaves at these addresses have other aliases or overlaps than before."""
    if not known.about.reports and known.arrangement.holds(addresses):
        return
    firsts = _firsts(addresses, known.geometries, known.boundary)
    if firsts != known.firsts:
        raise StructureChanged
    if _reports(addresses, known.geometries, firsts, known.about.specs) != known.about.reports:
        raise StructureChanged


def _firsts(addresses: Sequence[int], geometries: Sequence[Geometry], boundary: int) -> list[int]:
    """Returns for each leaf met the position of the one that is stored. Private leaves never alias shared ones."""
    shared = first_of_each(addresses[:boundary], geometries[:boundary])
    private = first_of_each(addresses[boundary:], geometries[boundary:])
    return [*shared, *(boundary + position for position in private)]


def _pick(sources: Sequence[Any], firsts: Sequence[int]) -> Sequence[Any]:
    stored = [position for position, first in enumerate(firsts) if position == first]
    if len(stored) == len(sources):
        return sources
    return itemgetter(*stored)(sources) if len(stored) > 1 else [sources[position] for position in stored]


def _reports(
    addresses: Sequence[int], geometries: Sequence[Geometry], firsts: Sequence[int], specs: Sequence[LeafSpec]
) -> tuple[str, ...]:
    stored = [position for position, first in enumerate(firsts) if position == first]
    number = {position: leaf for leaf, position in enumerate(stored)}
    return tuple(
        f"{specs[number[one]].path} and {specs[number[other]].path} share memory without being the same tensor: "
        "each is stored by itself"
        for one, other in overlaps(addresses, geometries, stored)
    )


def _check_paths(leaves: LeafSequence) -> None:
    paths = [spec.path for spec, leaf, before in zip(leaves.specs, leaves.leaf, [-1, *leaves.leaf], strict=False)
             if leaf != before]  # fmt: skip
    seen: set[str] = set()
    for path in (*paths, *(spec.path for spec in leaves.without)):
        if path in seen:
            raise DuplicatePath(f"two leaves lie at {path}", subject=path, hint="rename one of them")
        seen.add(path)


def _fingerprint(leaves: LeafSequence, counts: tuple[int, int] | None) -> str:
    specs = leaves.specs
    columns: list[Any] = [
        [spec.path for spec in specs],
        [spec.dtype for spec in specs],
        [spec.shape for spec in specs],
        [spec.private for spec in specs],
        [device.name for device in leaves.devices],
    ]
    if counts is not None:
        columns += [counts, leaves.leaf, leaves.without]
    if any(spec.placement not in _UNDECLARED for spec in specs):
        columns += [[(spec.offsets, spec.whole, spec.placement) for spec in specs]]
    encoded = repr(tuple(columns)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


_UNDECLARED: Final = frozenset({"whole", "per_rank"})
