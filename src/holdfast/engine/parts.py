"""Leaves out of a checkpoint of several ranks: each wanted box is put together from the boxes that ranks have written.

What a rank wants as it was saved is read like any leaf, straight into its place. What lies otherwise is cut out of the
rows that hold some of it. Every chunk is verified either way, and only the indexes of ranks that hold something wanted
are opened.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np

from holdfast.engine.lazy import LazyReader
from holdfast.engine.read import read_leaves
from holdfast.engine.threads import READ_THREADS, hand_out
from holdfast.errors import CorruptionError
from holdfast.events import Emitter, Progress
from holdfast.model.box import Box
from holdfast.model.checkpoint import Index, Json, Manifest
from holdfast.model.dtypes import dtype
from holdfast.plan.columns import Column, every
from holdfast.plan.holdings import Holdings
from holdfast.plan.regions import Taken, bands
from holdfast.plan.reshard import Reshard, reshard
from holdfast.plan.slices import box_region
from holdfast.repo.agreeing import check_rank
from holdfast.repo.boxes import BoxTable
from holdfast.repo.index import Table
from holdfast.repo.layout import BOXES
from holdfast.repo.repository import Repo
from holdfast.repo.specs import Specs
from holdfast.state import leaf_paths
from holdfast.state.contract import Buffer, Prepared, Sink

PIECE_BYTES: Final = 16 << 20
"""What is held at once of a part whose items do not lie side by side where they go."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What a checkpoint says of its leaves, each as a whole, and the private tree of the rank that reads. `private`:
    None where the checkpoint has none for it."""

    specs: Sequence[Any]
    private: Json


class Parts:
    """One checkpoint, read as rank `own` of as many as have saved it, or (None) as none of them."""

    def __init__(self, repo: Repo, manifest: Manifest, own: int | None, emitter: Emitter) -> None:
        self._repo = repo
        self._manifest = manifest
        self._emitter = emitter
        self._paths: Sequence[str] = leaf_paths(manifest.tree)
        self._tables: dict[int, Table] = {}
        self._boxes = repo.boxes(manifest)
        self._table = _table_of(self._of(0)) if self._boxes is None else self._boxes
        self._own = own
        self._done = 0
        self._total = 0
        self._count = threading.Lock()
        private = self._of(self._own).private if self._own is not None else None
        self.whole = Whole(self._specs(private), private)

    def read(self, prepared: Prepared) -> int:
        """Fills every sink; returns the bytes of what was wanted. CorruptionError names the leaf, the pack and the
        offset; ShardMismatch the leaf, where the checkpoint does not hold all of what is wanted."""
        boxes = prepared.boxes or [None] * len(prepared.wants)
        shared = [(leaf, sink, box) for (leaf, sink), box in zip(prepared.wants, boxes, strict=True)
                  if leaf < self._table.leaves]  # fmt: skip
        private = [(leaf, sink) for leaf, sink in prepared.wants if leaf >= self._table.leaves]
        wanted, saved = self._wanted(shared), saved_boxes(self._table, self._paths)
        self._total = int(wanted.nbytes().sum()) + sum(self.whole.specs[leaf].nbytes for leaf, _ in private)
        plan = reshard(saved, wanted)
        exact = every(plan.shape == saved.shape[plan.saved]) & every(plan.shape == wanted.shape[plan.wanted])
        sinks = [sink for _, sink, _ in shared]
        self._read_exact(plan, exact, saved, sinks, private)
        self._read_cut(plan, np.flatnonzero(~exact), saved, wanted, sinks)
        for line in np.flatnonzero(~every(wanted.shape > 0)).tolist():
            sink = sinks[int(wanted.row[line])]
            if sink.buffer is None:
                sink.fill(np.empty(0, np.uint8))
        return self._total

    @property
    def boxes(self) -> BoxTable:
        """Which rank has which part of which leaf."""
        return self._table

    def table(self, rank: int) -> Table:
        """The rows of a rank's index, found to agree with `boxes`."""
        return self._of(rank)

    # -- what there is -------------------------------------------------------------------------------------------------

    def _of(self, rank: int) -> Table:
        """The rows of a rank's index, once."""
        found = self._tables.get(rank)
        if found is None:
            found = self._repo.table(self._manifest, rank)
            if self._boxes is not None:
                check_rank(self._boxes, found, f"{self._manifest.id.directory}/{BOXES}")
            self._tables[rank] = found
        return found

    def _index(self, rank: int) -> Index:
        return self._of(rank).index(self._manifest.tree)

    def _specs(self, private: Json) -> Specs:
        """The shared leaves, each as a whole, then those of the private tree."""
        table = self._table
        names, code, dims, bounds = list(table.dtypes), table.code, table.whole, table.ends
        paths = list(self._paths)
        if private is not None:
            assert self._own is not None
            own = self._of(self._own)
            paths = [*paths, *leaf_paths(private)]
            if len(paths) != table.leaves + len(own) - own.shared:
                raise CorruptionError(f"{own.name} does not list the private leaves that it names", subject=own.name)
            first = int(own.bounds[own.shared])
            names, code = [*names, *own.names], np.concatenate([code, own.code[own.shared :] + len(names)])
            dims = np.concatenate([dims, own.dims[first:]])
            bounds = np.concatenate([bounds, own.bounds[own.shared + 1 :] - first + int(bounds[-1])])
        return Specs(
            paths,
            names=names,
            code=code,
            dims=dims,
            bounds=bounds,
            shared=table.leaves,
            trees=(self._manifest.tree, private),
        )

    def _wanted(self, shared: Sequence[tuple[int, Sink, Box | None]]) -> Holdings:
        """What is wanted of shared leaves: line i is `shared[row[i]]`."""
        specs = self.whole.specs
        boxes = [Box.whole(specs[leaf].shape) if box is None else box for leaf, _, box in shared]
        axes = _axes(self._table)
        leaf = np.array([leaf for leaf, _, _ in shared], np.int64)
        return Holdings(
            leaf=leaf,
            rank=np.zeros(len(leaf), np.int32),
            row=np.arange(len(leaf)),
            offsets=_padded([box.offsets for box in boxes], axes, 0),
            shape=_padded([box.shape for box in boxes], axes, 1),
            itemsize=_sizes(self._table)[leaf],
            whole=_spread(self._table.whole, self._table.ends, axes, 1),
            ndim=np.diff(self._table.ends),
            paths=self._paths,
        )

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read_exact(
        self,
        plan: Reshard,
        exact: np.ndarray[Any, Any],
        saved: Holdings,
        sinks: Sequence[Sink],
        private: Sequence[tuple[int, Sink]],
    ) -> None:
        """What is wanted as one rank has written it, and what is this rank's own: row by row, as of one rank."""
        lines = np.flatnonzero(exact)
        wants: dict[int, list[tuple[int, Sink]]] = {}
        held = plan.saved[lines]
        for rank, row, line in zip(
            saved.rank[held].tolist(), saved.row[held].tolist(), plan.wanted[lines].tolist(), strict=True
        ):
            wants.setdefault(rank, []).append((row, sinks[line]))
        if private:
            assert self._own is not None
            own = self._of(self._own).shared - self._table.leaves
            wants.setdefault(self._own, []).extend((leaf + own, sink) for leaf, sink in private)
        for rank, some in sorted(wants.items()):
            self._add(read_leaves(self._repo, self._manifest, self._index(rank), some))

    def _read_cut(self, plan: Reshard, lines: Column, saved: Holdings, wanted: Holdings, sinks: Sequence[Sink]) -> None:
        """What has to be cut out of what ranks have written."""
        if not len(lines):
            return
        targets = {
            line: _Target(sinks[int(wanted.row[line])], wanted, line) for line in set(plan.wanted[lines].tolist())
        }
        ranks = sorted(set(saved.rank[plan.saved[lines]].tolist()))
        readers: dict[int, LazyReader] = {}
        try:
            for rank in ranks:
                readers[rank] = LazyReader(self._repo, self._manifest.id, self._of(rank))
            # In the order in which it lies in the packs.
            order = lines[np.lexsort((saved.row[plan.saved[lines]], saved.rank[plan.saved[lines]]))]

            def one(line: int) -> None:
                held, want = int(plan.saved[line]), int(plan.wanted[line])
                axes = int(saved.ndim[saved.leaf[held]])
                cut = _Cut(
                    int(saved.row[held]),
                    saved.path(held),
                    tuple(saved.shape[held, :axes].tolist()),
                    tuple(plan.saved_offsets[line, :axes].tolist()),
                    tuple(plan.wanted_offsets[line, :axes].tolist()),
                    tuple(plan.shape[line, :axes].tolist()),
                )
                self._add(cut.read(readers[int(saved.rank[held])], targets[want]))

            hand_out(one, order.tolist(), READ_THREADS)
        finally:
            for reader in readers.values():
                reader.close()
        for target in targets.values():
            target.finish()

    def _add(self, nbytes: int) -> None:
        with self._count:
            self._done += nbytes
            done = self._done
        self._emitter.emit(Progress("restore", str(self._manifest.id), done, self._total))


class _Target:
    """Where one wanted box arrives: its sink's own memory, or memory of ours that the sink is filled from."""

    def __init__(self, sink: Sink, wanted: Holdings, line: int) -> None:
        axes = int(wanted.ndim[wanted.leaf[line]])
        shape = tuple(wanted.shape[line, :axes].tolist())
        self.itemsize = int(wanted.itemsize[line])
        nbytes = self.itemsize * int(np.prod(shape, dtype=np.int64))
        buffer = sink.buffer
        self._ours: Sink | None = sink if buffer is None else None
        self._memory: Buffer = np.empty(nbytes, np.uint8) if buffer is None else buffer
        if len(self._memory) != nbytes:
            path = wanted.path(line)
            raise CorruptionError(
                f"{path} has {nbytes} bytes in the checkpoint and {len(self._memory)} in the target", subject=path
            )
        self.items: Any = np.ndarray((*shape, self.itemsize), np.uint8, self._memory)

    def finish(self) -> None:
        if self._ours is not None:
            self._ours.fill(self._memory)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A box of `shape` items at `there` of a saved row, itself of `saved` items; it goes to `here` of a wanted box."""

    row: int
    path: str
    saved: tuple[int, ...]
    there: tuple[int, ...]
    here: tuple[int, ...]
    shape: tuple[int, ...]

    def read(self, reader: LazyReader, target: _Target) -> int:
        place = tuple(slice(begin, begin + extent) for begin, extent in zip(self.here, self.shape, strict=True))
        into = target.items[place]
        size = target.itemsize
        if into.flags.c_contiguous:
            reader.read(self.row, self.path, box_region(self.saved, self.there, self.shape), size, into.reshape(-1))
            return int(into.nbytes)
        whole = Taken(box_region(self.saved, self.there, self.shape), place)
        for band in bands(whole, PIECE_BYTES // size):
            held = np.empty(band.region.size * size, np.uint8)
            reader.read(self.row, self.path, band.region, size, held)
            target.items[band.where] = held.reshape(*band.region.counts, size)
        return int(into.nbytes)


def _table_of(index: Table) -> BoxTable:
    """What one rank has saved alone: every row is a whole leaf."""
    stop = int(index.bounds[index.shared])
    count, dims, bounds = index.shared, index.dims[:stop], index.bounds[: index.shared + 1]
    return BoxTable(
        leaf=np.arange(count),
        rank=np.zeros(count, np.int64),
        row=np.arange(count),
        origin=np.zeros(stop, np.int64),
        shape=dims,
        bounds=bounds,
        dtypes=index.names,
        code=index.code[:count].astype(np.int64),
        whole=dims,
        ends=bounds,
    )


def saved_boxes(table: BoxTable, paths: Sequence[str]) -> Holdings:
    """The rows of all ranks, by rank and row."""
    axes = _axes(table)
    order = np.lexsort((table.row, table.rank))
    return Holdings(
        leaf=table.leaf[order],
        rank=table.rank[order].astype(np.int32),
        row=table.row[order],
        offsets=_spread(table.origin, table.bounds, axes, 0)[order],
        shape=_spread(table.shape, table.bounds, axes, 1)[order],
        itemsize=_sizes(table)[table.leaf][order],
        whole=_spread(table.whole, table.ends, axes, 1),
        ndim=np.diff(table.ends),
        paths=paths,
    )


def _axes(table: BoxTable) -> int:
    """The largest number of dimensions of a leaf; one that has none has one item along one axis."""
    return max(int(np.diff(table.ends).max(initial=1)), 1)


def _spread(flat: Column, bounds: Column, axes: int, fill: int) -> Any:
    """A ragged column as a matrix, padded behind."""
    count = np.diff(bounds)
    found = np.full((len(count), axes), fill, np.int64)
    found[np.arange(axes) < count[:, None]] = flat
    return found


def _sizes(table: BoxTable) -> Column:
    """Bytes of an item, by leaf."""
    sizes = np.array([dtype(name).size for name in table.dtypes], np.int64)
    return sizes[table.code] if len(table.code) else np.zeros(0, np.int64)


def _padded(lines: Sequence[tuple[int, ...]], axes: int, fill: int) -> Any:
    flat = np.array([place for line in lines for place in line], np.int64)
    return _spread(flat, np.array([0, *accumulate(map(len, lines))], np.int64), axes, fill)
