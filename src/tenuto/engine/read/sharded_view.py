"""A checkpoint of several ranks opened for looking into it: its leaves as wholes, put together from their parts."""

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
from tenuto.engine.read.sharded_reader import PIECE_BYTES, ShardedReader
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
"""So many of those stay open, the ones that were read last: a process may have no more than a thousand files open."""


class ShardedOutline:
    """As `Outline` for one rank: what the checkpoint says of its leaves, and where in the tree they are. Row n is leaf
    n of the manifest's tree; the private leaves of the rank that was asked for come behind."""

    def __init__(self, parts: ShardedReader, manifest: Manifest) -> None:
        self.manifest = manifest
        self.shared = parts.boxes.leaves
        self._whole = parts.whole
        self._found: dict[str, tuple[int, Json]] | None = None
        self._lock = threading.Lock()

    def find(self, path: str) -> tuple[int, Json] | None:
        """Row and node of the leaf or alias at `path`; None where there is none."""
        return self.leaves().get(path)

    def leaves(self) -> dict[str, tuple[int, Json]]:
        """Row and node of every leaf and alias by path, in the order of the state; private ones last."""
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
        """What this row is, under this path, which may be an alias."""
        spec = self._whole.specs[row]
        return LeafSpec(path, spec.dtype, spec.shape, spec.private)

    def trees(self) -> list[Json]:
        return [self.manifest.tree, *([] if self._whole.private is None else [self._whole.private])]


@dataclass(slots=True)
class _Further:
    """A rank's packs that were opened when needed. `users`: how many read from them now."""

    reader: LazyReader
    users: int = 0


class ShardedLazyReader:
    """As `LazyReader`: reads by the rows of a `JoinedOutline`, every chunk verified. May be used by several threads."""

    def __init__(self, repo: Repo, manifest: Manifest, parts: ShardedReader, own: int | None) -> None:
        """Opens the packs of every rank. CorruptionError where an index or a pack is not what was saved."""
        self._repo = repo
        self._manifest = manifest
        self._parts = parts
        self._own = own
        self._first: dict[int, LazyReader] = {}
        self._further: OrderedDict[int, _Further] = OrderedDict()
        self._let_go = 0
        self._proven: set[int] = set()
        self._lock = threading.Lock()
        self._closed = False
        try:
            for rank in range(min(len(manifest.indexes), OPENED_AT_ONCE)):
                self._first[rank] = self._opened(rank)
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        with self._lock:
            return self._let_go + sum(reader.bytes_read for reader in self._readers())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for reader in self._readers():
                reader.close()

    def parts(self, row: int) -> list[tuple[int, Box]]:
        """Which rank has which box of a row."""
        boxes = self._parts.boxes
        if row < boxes.leaves:
            return [(rank, Box(offsets, shape)) for rank, _, offsets, shape in parts_of(boxes, row)]
        shape = self._parts.whole.specs[row].shape
        return [(self._of_own(row)[0], Box.whole(shape))]

    def read(self, row: int, path: str, region: Region, itemsize: int, out: Buffer) -> None:
        """Fills `out` with the items of a region in row-major order. CorruptionError as `LazyReader.read`, and where
        the parts are not all of the leaf; `out` is undefined then."""
        boxes = self._parts.boxes
        if row >= boxes.leaves:
            rank, at = self._of_own(row)
            with self._reader(rank) as reader:
                reader.read(at, path, region, itemsize, out)
            return
        if not region.size or not itemsize:
            return
        whole = self._proved(row, path)
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
                    held = np.empty(band.region.size * itemsize, np.uint8)
                    reader.read(at, path, band.region, itemsize, held)
                    target[band.where] = held.reshape(*band.region.counts, itemsize)

    def _of_own(self, row: int) -> tuple[int, int]:
        """Rank, and row of its index, of a private leaf."""
        assert self._own is not None, "no other rows are there"
        return self._own, row - self._parts.boxes.leaves + self._parts.table(self._own).shared

    def _opened(self, rank: int) -> LazyReader:
        return LazyReader(self._repo, self._manifest.id, self._parts.table(rank))

    def _readers(self) -> Iterator[LazyReader]:
        yield from self._first.values()
        yield from (one.reader for one in self._further.values())

    @contextmanager
    def _reader(self, rank: int) -> Iterator[LazyReader]:
        """A rank's, which stays open for as long as the block lasts, unless all are closed."""
        with self._lock:
            if self._closed:
                id = str(self._manifest.id)
                raise UsageError(f"{id} is closed", subject=id, hint="read inside `with tenuto.open(…)`")
            first = self._first.get(rank)
            further = self._take(rank) if first is None else None
        if further is None:
            assert first is not None
            yield first
            return
        try:
            yield further.reader
        finally:
            with self._lock:
                further.users -= 1

    def _take(self, rank: int) -> _Further:
        """One of the further ones, for one more user; others that nobody uses make room for it."""
        found = self._further.get(rank)
        if found is None:
            idle = [other for other, one in self._further.items() if not one.users]
            for other in idle[: max(len(self._further) + 1 - FURTHER, 0)]:
                gone = self._further.pop(other).reader
                gone.close()
                self._let_go += gone.bytes_read
            found = self._further[rank] = _Further(self._opened(rank))
        self._further.move_to_end(rank)
        found.users += 1
        return found

    def _proved(self, row: int, path: str) -> tuple[int, ...]:
        """The leaf's whole shape; its parts have been shown to have every item once."""
        boxes = self._parts.boxes
        whole = tuple(boxes.whole[int(boxes.ends[row]) : int(boxes.ends[row + 1])].tolist())
        if row not in self._proven:
            found = list(parts_of(boxes, row))
            # A leaf without axes has one item along one axis.
            offsets = np.array([part[2] or (0,) for part in found], np.int64).reshape(len(found), -1)
            shape = np.array([part[3] or (1,) for part in found], np.int64).reshape(len(found), -1)
            table = np.array([whole or (1,)], np.int64)
            if not found or first_fault(np.zeros(len(found), np.int64), offsets, shape, table) is not None:
                name = f"{self._manifest.id.directory}/{BOXES}"
                message = f"{name} does not have every item of {path} once"
                raise CorruptionError(message, subject=path, hint=typed("tenuto", "verify", self._repo.url))
            self._proven.add(row)
        return whole


def parts_of(boxes: BoxTable, leaf: int) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Rank, row of its index, offsets and shape of each part of a leaf."""
    low, high = np.searchsorted(boxes.leaf, (leaf, leaf + 1)).tolist()
    bounds = boxes.bounds[low : high + 1].tolist()
    for at, (begin, end) in zip(range(low, high), pairwise(bounds), strict=True):
        yield (
            int(boxes.rank[at]),
            int(boxes.row[at]),
            tuple(boxes.origin[begin:end].tolist()),
            tuple(boxes.shape[begin:end].tolist()),
        )
