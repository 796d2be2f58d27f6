"""How one checkpoint differs from another: its leaves and their values, plain values, and how it was saved.

Leaves are read lazily, a block of each side at a time on every thread, and every byte is verified on the way. A leaf
whose chunks have equal digests on both sides is not read.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.engine.read.opened import Leaf, Opened
from tenuto.errors import LeafNotFound, did_you_mean
from tenuto.history.value_diff import Sums, add_block
from tenuto.model.leaf import Box, dtype
from tenuto.record import record
from tenuto.sharding.slices import Block, blocks, box_region
from tenuto.state.contract import Buffer

BLOCK_BYTES: Final = 4 << 20
"""Bytes of one side that a thread holds."""
_NO_GAP: Final = 1 << 62
_SKIPPED: Final = frozenset({"timing", "encoding"})
"""Of the environment: of the save, not of where it ran."""

Change = Literal["same", "changed", "retyped", "reshaped", "added", "removed"]
CHANGES: Final[tuple[Change, ...]] = ("removed", "added", "reshaped", "retyped", "changed", "same")
DIGITS: Final = 6
"""How many digits of a norm, a relative change or a cosine mean something: sums of float32 are exact to about 1e-7."""


@record
class LeafDiff:
    """How one leaf differs.

    change: "added" and "removed" say that only the second, or only the first has it; "reshaped" that its shape differs,
        "retyped" that its element type does, "changed" that values do.
    dtypes, shapes: of both; None where there is no such leaf.
    norms: the root of the sum of squares of both, of finite values; None where they were not read.
    largest: the largest absolute difference of two values. It, relative and cosine are of values that both have finite.
    relative: the norm of the difference, divided by that of the first.
    cosine: of the angle between both as vectors; None where one is nought.
    differing: the fraction of elements that differ.
    nonfinite: how many values are NaN or infinite, of both.
    """

    path: str
    change: Change
    dtypes: tuple[str | None, str | None]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    norms: tuple[float, float] | None = None
    largest: float | None = None
    relative: float | None = None
    cosine: float | None = None
    differing: float | None = None
    nonfinite: tuple[int, int] | None = None


@record
class ValueDiff:
    """A plain value that differs. `before`, `after`: None where there is none."""

    path: str
    before: Any
    after: Any


@record
class Diff:
    """How the second of two checkpoints differs from the first.

    leaves: each leaf that either has, also those that are the same, in the order of the first.
    values: plain values of the state; environment, certificate: what the records say.
    bytes_read: of leaves, of both.
    """

    first: str
    second: str
    leaves: tuple[LeafDiff, ...]
    values: tuple[ValueDiff, ...] = ()
    environment: tuple[ValueDiff, ...] = ()
    certificate: tuple[ValueDiff, ...] = ()
    bytes_read: int = 0

    @property
    def same(self) -> bool:
        """Whether leaves and plain values are equal; where they were saved may differ."""
        return not self.values and all(leaf.change == "same" for leaf in self.leaves)

    def by_change(self) -> list[LeafDiff]:
        """Returns the leaves that differ: those whose structure does first, then by the relative change, largest
        first."""
        found = [leaf for leaf in self.leaves if leaf.change != "same"]
        return sorted(found, key=lambda leaf: (CHANGES.index(leaf.change), -_size(leaf), leaf.path))


def _size(leaf: LeafDiff) -> float:
    if leaf.nonfinite is not None and leaf.nonfinite[0] != leaf.nonfinite[1]:
        return math.inf
    size = leaf.relative if leaf.relative is not None else leaf.differing or 0.0
    return float(f"{size:.{DIGITS}g}")  # sums of float32 differ behind that from one processor to another


class LeafSource(Protocol):
    """A leaf of which nothing has been read yet."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, out: Buffer, block: Block) -> None:
        """Fills `out` with the bytes of a block of the whole leaf, verified. May be called by several threads."""
        ...

    def digests(self) -> tuple[Any, ...] | None:
        """Returns what is equal only of leaves with equal bytes; None where that is not known."""
        ...


@record
class Side:
    """One of the two. `name`: in words."""

    name: str
    leaves: Mapping[str, LeafSource]
    values: Mapping[str, Any]
    environment: Mapping[str, Any]
    certificate: Mapping[str, Any]
    plain: bool = True
    """Whether it has plain values and records at all: a file of weights has none, which is no difference."""


class _CheckpointLeaf(NamedTuple):
    leaf: Leaf

    @property
    def dtype(self) -> str:
        return self.leaf.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.shape

    def read(self, out: Buffer, block: Block) -> None:
        counts = block.counts
        offsets = tuple(part.start for part in block.where)
        self.leaf.read_into(out, Box(offsets, counts))

    def digests(self) -> tuple[Any, ...] | None:
        return self.leaf.digests()


def side_of(opened: Opened, entry: str | None = None) -> Side:
    """Returns an open checkpoint as one side. `entry`: only what is at or below this path. Raises LeafNotFound if that
    is nothing."""
    paths = [path for path in opened if _below(path, entry)]
    values = {path: opened.plain(path) for path in opened.plain_paths() if _below(path, entry)}
    if entry is not None and not paths and not values:
        known = sorted({path.partition("/")[0] for path in (*opened, *opened.plain_paths())})
        raise LeafNotFound(
            f"{opened.id} has nothing at or below {entry!r}; its entries are {', '.join(known)}",
            subject=entry,
            hint=did_you_mean(entry, known) or f"--entry {known[0] if known else ''}".strip(),
        )
    leaves: dict[str, LeafSource] = {path: _CheckpointLeaf(opened[path]) for path in paths}
    return Side(str(opened.id), leaves, values, opened.environment, opened.certificate)


def _below(path: str, entry: str | None) -> bool:
    return entry is None or path == entry or path.startswith(f"{entry}/")


def compare(first: Side, second: Side, *, progress: Callable[[int, int], None] | None = None) -> Diff:
    """Returns how the second differs from the first. `progress`: called with the bytes compared so far and their sum,
    from any thread. Raises CorruptionError for damaged bytes that are read."""
    found: dict[str, LeafDiff] = {}
    pairs: list[tuple[str, LeafSource, LeafSource]] = []
    paths = [*first.leaves, *(path for path in second.leaves if path not in first.leaves)]
    for path in paths:
        a, b = first.leaves.get(path), second.leaves.get(path)
        if a is None or b is None:
            found[path] = _one_sided(path, a, b)
        elif a.shape != b.shape:
            found[path] = LeafDiff(path, "reshaped", (a.dtype, b.dtype), (a.shape, b.shape))
        elif a.dtype == b.dtype and (digests := a.digests()) is not None and digests == b.digests():
            both = (a.dtype, b.dtype), (a.shape, b.shape)
            found[path] = LeafDiff(path, "same", *both, largest=0.0, relative=0.0, differing=0.0)
        else:
            pairs.append((path, a, b))
    reader = _Reader(pairs, progress)
    found |= reader.run()
    plain = first.plain and second.plain
    return Diff(
        first.name,
        second.name,
        tuple(found[path] for path in paths),
        _values(first.values, second.values) if plain else (),
        _values(_flat(first.environment), _flat(second.environment)) if plain else (),
        _values(_flat(first.certificate), _flat(second.certificate)) if plain else (),
        reader.nbytes,
    )


def _one_sided(path: str, a: LeafSource | None, b: LeafSource | None) -> LeafDiff:
    dtypes = None if a is None else a.dtype, None if b is None else b.dtype
    shapes = None if a is None else a.shape, None if b is None else b.shape
    return LeafDiff(path, "added" if a is None else "removed", dtypes, shapes)


class _Reader:
    """Reads pairs of leaves, block by block, and compares them."""

    def __init__(
        self, pairs: Sequence[tuple[str, LeafSource, LeafSource]], progress: Callable[[int, int], None] | None
    ) -> None:
        self._pairs = pairs
        self._progress = progress
        self._sums = [Sums() for _ in pairs]
        self._own = threading.local()
        self._lock = threading.Lock()
        self._done = 0
        self.nbytes = sum(_nbytes(a) + _nbytes(b) for _, a, b in pairs)

    def run(self) -> dict[str, LeafDiff]:
        work = [(number, block) for number, (_, a, b) in enumerate(self._pairs) for block in self._cut(a, b)]
        parallel_for(self._block, work, min(8, os.cpu_count() or 1))
        return {path: self._diff(path, a, b, self._sums[at]) for at, (path, a, b) in enumerate(self._pairs)}

    def _cut(self, a: LeafSource, b: LeafSource) -> Iterable[Block]:
        """Yields the blocks in which both are read, in bytes of the first."""
        itemsize = max(dtype(a.dtype).size, dtype(b.dtype).size)
        whole = box_region(a.shape, (0,) * len(a.shape), a.shape)
        for block in blocks(whole, itemsize, block_bytes=BLOCK_BYTES, gap_bytes=_NO_GAP):
            yield replace(block, start=block.start // itemsize, stop=block.stop // itemsize)  # in items

    def _block(self, one: tuple[int, Block]) -> None:
        number, block = one
        _, a, b = self._pairs[number]
        first, second = self._buffer(0, a, block), self._buffer(1, b, block)
        for leaf, out in ((a, first), (b, second)):
            size = dtype(leaf.dtype).size
            leaf.read(out, replace(block, start=block.start * size, stop=block.stop * size))
        add_block(self._sums[number], first, second, (a.dtype, b.dtype))
        if self._progress is not None:
            with self._lock:
                self._done += len(first) + len(second)
                self._progress(self._done, self.nbytes)

    def _buffer(self, place: int, leaf: LeafSource, block: Block) -> Buffer:
        """Returns this thread's own memory for one side of a block."""
        nbytes = (block.stop - block.start) * dtype(leaf.dtype).size
        held: dict[int, Buffer] = self._own.__dict__.setdefault("held", {})
        if place not in held or len(held[place]) < nbytes:
            held[place] = np.empty(max(nbytes, min(BLOCK_BYTES, _nbytes(leaf))), np.uint8)
        return held[place][:nbytes]

    @staticmethod
    def _diff(path: str, a: LeafSource, b: LeafSource, sums: Sums) -> LeafDiff:
        change: Change = "retyped" if a.dtype != b.dtype else "changed" if sums.differing else "same"
        norm = sums.norms
        relative: float | None = math.sqrt(sums.dd) / norm[0] if norm[0] else 0.0 if not sums.dd else math.inf
        largest: float | None = sums.largest
        if any(sums.bad) and not (sums.aa or sums.bb):
            relative = largest = None  # nothing of what both have finite says how much has changed
        return LeafDiff(
            path,
            change,
            (a.dtype, b.dtype),
            (a.shape, b.shape),
            norm,
            largest,
            relative,
            sums.cosine,
            sums.differing / sums.elements if sums.elements else 0.0,
            sums.bad,
        )


def _nbytes(leaf: LeafSource) -> int:
    return math.prod(leaf.shape) * dtype(leaf.dtype).size


def _flat(record: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Returns the single values of nested records by their path."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if not above and name in _SKIPPED:
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value
    return found


def _values(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[ValueDiff, ...]:
    paths = [*before, *(path for path in after if path not in before)]
    pairs = ((path, before.get(path), after.get(path)) for path in paths)
    return tuple(ValueDiff(path, a, b) for path, a, b in pairs if not _equal(a, b))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is type(b) and bool(a == b)
