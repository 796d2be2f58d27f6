"""A checkpoint of several ranks opened for lazy reads: its leaves in full, built from their parts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from tenuto.engine.read.lazy_reader import LazyReader
from tenuto.engine.read.read_segments import PIECE_BYTES
from tenuto.engine.read.sharded_reader import ShardedReader
from tenuto.errors import CorruptionError, UsageError, typed
from tenuto.model.leaf import Box, LeafSpec
from tenuto.model.records import Json, Manifest
from tenuto.repo.format.object_names import BOXES
from tenuto.repo.format.shard_table import BoxTable
from tenuto.repo.repository import Repo
from tenuto.sharding.coverage import first_fault
from tenuto.sharding.reshard import bands, overlap
from tenuto.sharding.slices import Region
from tenuto.state.contract import Buffer
from tenuto.state.tree import leaf_nodes, number_of

OPENED_AT_ONCE: Final = 256
"""Ranks whose packs are opened with the checkpoint, so that it can be read on after its removal; further ones when
needed."""
FURTHER: Final = 64
"""How many of those stay open, the ones read last: a process may have only a thousand files open."""


class ShardedOutline:
    """Like `Outline` for one rank: the leaves of the checkpoint and their places in the tree. Row n is leaf n of the
    manifest's tree; the private leaves of the rank that reads follow."""

    def __init__(self, parts: ShardedReader, manifest: Manifest) -> None:
        self.manifest = manifest
        self.shared = parts.boxes.leaves
        self._whole = parts.full
        self._found: dict[str, tuple[int, Json]] | None = None
        self._lock = threading.Lock()

    def find(self, path: str) -> tuple[int, Json] | None:
        """Returns row and node of the leaf or alias at `path`; None where there is none."""
        return self.leaves().get(path)

    def leaves(self) -> dict[str, tuple[int, Json]]:
        """Returns row and node of every leaf and alias by path, in the order of the state; private ones last."""
        with self._lock:
            if self._found is None:
                self._found = {}
                base, count = 0, self.shared
                for tree in self.trees():
                    for path, node in leaf_nodes(tree):
                        self._found[path] = (base + number_of(node, count, path), node)
                    base, count = count, len(self.specs()) - count
            return self._found

    def specs(self) -> Sequence[LeafSpec]:
        return self._whole.specs

    def spec(self, row: int, path: str) -> LeafSpec:
        """Returns the description of a row under this path, which may be an alias."""
        spec = self._whole.specs[row]
        return LeafSpec(path, spec.dtype, spec.shape, spec.private)

    def trees(self) -> list[Json]:
        return [self.manifest.tree, *([] if self._whole.private is None else [self._whole.private])]


@dataclass(slots=True)
class _RankReader:
    """The open packs of a rank. `users`: how many threads read from them now."""

    reader: LazyReader
    users: int = 0


class ShardedLazyReader:
    """Like `LazyReader`: reads rows of a `ShardedOutline`, every chunk verified. May be used by several threads."""

    def __init__(self, repo: Repo, manifest: Manifest, parts: ShardedReader, own: int | None) -> None:
        """Opens the packs of every rank. Raises CorruptionError where an index or a pack is not what was saved."""
        self._repo = repo
        self._manifest = manifest
        self._parts = parts
        self._own = own
        self._readers: OrderedDict[int, _RankReader] = OrderedDict()
        self._closed_bytes = 0
        self._checked: set[int] = set()
        self._lock = threading.Lock()
        self._closed = False
        try:
            for rank in range(min(len(manifest.indexes), OPENED_AT_ONCE)):
                self._readers[rank] = _RankReader(self._opened(rank))
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        with self._lock:
            return self._closed_bytes + sum(one.reader.bytes_read for one in self._readers.values())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for one in self._readers.values():
                one.reader.close()

    def digests(self, row: int) -> tuple[Any, ...] | None:
        """Returns None: chunks are those of the parts that ranks hold, which may be cut otherwise elsewhere."""
        return None

    def parts(self, row: int) -> list[tuple[int, Box]]:
        """Returns the parts of a row: the rank that has each, and its box."""
        boxes = self._parts.boxes
        if row < boxes.leaves:
            return [(rank, Box(offsets, shape)) for rank, _, offsets, shape in parts_of(boxes, row)]
        shape = self._parts.full.specs[row].shape
        return [(self._of_own(row)[0], Box.whole(shape))]

    def read(self, row: int, path: str, region: Region, itemsize: int, out: Buffer) -> None:
        """Fills `out` with the items of a region in row-major order. Raises CorruptionError like `LazyReader.read`, and
        where the parts are not all of the leaf; `out` is undefined then."""
        boxes = self._parts.boxes
        if row >= boxes.leaves:
            rank, at = self._of_own(row)
            with self._reader(rank) as reader:
                reader.read(at, path, region, itemsize, out)
            return
        if not region.size or not itemsize:
            return
        whole = self._checked_shape(row, path)
        target: Any = np.ndarray((*region.counts, itemsize), np.uint8, out)
        for rank, at, offsets, shape in parts_of(boxes, row):
            found = overlap(region, whole, offsets, shape)
            if found is None:
                continue
            with self._reader(rank) as reader:
                if target[found.where].flags.c_contiguous:
                    reader.read(at, path, found.region, itemsize, target[found.where].reshape(-1))
                    continue
                for band in bands(found, max(PIECE_BYTES // itemsize, 1)):
                    items = np.empty(band.region.size * itemsize, np.uint8)
                    reader.read(at, path, band.region, itemsize, items)
                    target[band.where] = items.reshape(*band.region.counts, itemsize)

    def _of_own(self, row: int) -> tuple[int, int]:
        """Returns rank, and row of its index, of a private leaf."""
        assert self._own is not None, "no other rows are there"
        return self._own, row - self._parts.boxes.leaves + self._parts.table(self._own).shared

    def _opened(self, rank: int) -> LazyReader:
        return LazyReader(self._repo, self._manifest.id, self._parts.table(rank))

    @contextmanager
    def _reader(self, rank: int) -> Iterator[LazyReader]:
        """Yields the reader of a rank, which stays open for as long as the block lasts, unless all are closed."""
        with self._lock:
            if self._closed:
                id = str(self._manifest.id)
                raise UsageError(f"{id} is closed", subject=id, hint="read inside `with tenuto.open(…)`")
            found = self._take(rank)
        try:
            yield found.reader
        finally:
            with self._lock:
                found.users -= 1

    def _take(self, rank: int) -> _RankReader:
        """Returns the reader of a rank, for one more user; unused ones are closed to make room for a new one."""
        found = self._readers.get(rank)
        if found is None:
            further = [(other, one) for other, one in self._readers.items() if other >= OPENED_AT_ONCE]
            idle = [other for other, one in further if not one.users]
            for other in idle[: max(len(further) + 1 - FURTHER, 0)]:
                unused = self._readers.pop(other).reader
                unused.close()
                self._closed_bytes += unused.bytes_read
            found = self._readers[rank] = _RankReader(self._opened(rank))
        self._readers.move_to_end(rank)
        found.users += 1
        return found

    def _checked_shape(self, row: int, path: str) -> tuple[int, ...]:
        """Returns the leaf's full shape, after checking that its parts have every item once."""
        boxes = self._parts.boxes
        whole = tuple(boxes.whole[int(boxes.ends[row]) : int(boxes.ends[row + 1])].tolist())
        if row not in self._checked:
            found = list(parts_of(boxes, row))
            # A leaf without axes has one item along one axis.
            offsets = np.array([part[2] or (0,) for part in found], np.int64).reshape(len(found), -1)
            shape = np.array([part[3] or (1,) for part in found], np.int64).reshape(len(found), -1)
            table = np.array([whole or (1,)], np.int64)
            if not found or first_fault(np.zeros(len(found), np.int64), offsets, shape, table) is not None:
                name = f"{self._manifest.id.directory}/{BOXES}"
                message = f"{name} does not have every item of {path} once"
                raise CorruptionError(message, subject=path, hint=typed("tenuto", "verify", self._repo.url))
            self._checked.add(row)
        return whole


def parts_of(boxes: BoxTable, leaf: int) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Yields rank, row of its index, offsets and shape of each part of a leaf."""
    low, high = np.searchsorted(boxes.leaf, (leaf, leaf + 1)).tolist()
    bounds = boxes.bounds[low : high + 1].tolist()
    for at, (begin, end) in zip(range(low, high), pairwise(bounds), strict=True):
        yield (
            int(boxes.rank[at]),
            int(boxes.row[at]),
            tuple(boxes.origin[begin:end].tolist()),
            tuple(boxes.shape[begin:end].tolist()),
        )
