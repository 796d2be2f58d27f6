"""Leaves out of a checkpoint of several ranks: each wanted box is put together from the boxes that ranks have written.

What a rank wants as it was saved is read like any leaf, straight into its place. What lies otherwise is cut out of the
rows that hold some of it. Every chunk is verified either way, and only the indexes of ranks that hold something wanted
are opened.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple, overload

import numpy as np

from holdfast.engine.boxes import axes_of, check_sizes, padded, saved_boxes, sizes, spread, table_of
from holdfast.engine.joint.together import NodeReads
from holdfast.engine.lazy import LazyReader
from holdfast.engine.packs import OpenPack, from_any_copy, open_pack
from holdfast.engine.portions import Cut, Portions, Runs
from holdfast.engine.read import LeafReader
from holdfast.engine.threads import COPY_THREADS, READ_THREADS, hand_out
from holdfast.errors import CorruptionError, ShardMismatch, StoreError, typed
from holdfast.events import Emitter, Progress
from holdfast.model.box import Box
from holdfast.model.checkpoint import Index, Json, Manifest, PackEntry
from holdfast.plan.columns import Column, every
from holdfast.plan.coverage import check_coverage
from holdfast.plan.holdings import Holdings
from holdfast.plan.joint_reads import Asked
from holdfast.plan.reshard import Reshard, reshard
from holdfast.repo.agreeing import check_rank
from holdfast.repo.boxes import BoxTable
from holdfast.repo.index import Table
from holdfast.repo.layout import BOXES
from holdfast.repo.places import Places
from holdfast.repo.repository import Repo
from holdfast.repo.specs import Specs
from holdfast.state import leaf_paths
from holdfast.state.contract import Prepared, Sink
from holdfast.store.contract import is_unreadable

SAVERS_AT_ONCE: Final = 32
"""Ranks whose packs are open at once while cuts are read: a process may have no more than a thousand files open."""


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
        self._boxes = repo.boxes(manifest, len(self._paths))
        if self._boxes is not None:
            check_sizes(self._boxes, manifest, self._paths)
        self._table = table_of(self._of(0)) if self._boxes is None else self._boxes
        self._own = own
        self._known: tuple[Prepared, _LaidOut] | None = None
        self._done = 0
        self._total = 0
        self._count = threading.Lock()
        private = self._of(self._own).private if self._own is not None else None
        self.whole = Whole(self._specs(private), private)

    def read(self, prepared: Prepared, node: NodeReads | None = None) -> int:
        """Fills every sink; returns the bytes of what was wanted. `node`: the ranks that want some of it too, each of
        which calls this. CorruptionError names the leaf, the pack and the offset; ShardMismatch the leaf, where the
        checkpoint does not hold all of what is wanted."""
        shared, private, wanted, saved, plan = self._laid_out(prepared)
        self._total = int(wanted.nbytes().sum()) + sum(self.whole.specs[leaf].nbytes for leaf, _ in private)
        sinks = [sink for _, sink, _ in shared]
        portions = Portions(plan, saved, wanted, sinks, self._private(private))
        if node is None:
            self._read_from_any(portions)
        else:
            self._read_together(portions, node)
        portions.finish()
        for line in np.flatnonzero(~every(wanted.shape > 0)).tolist():
            sink = sinks[int(wanted.row[line])]
            if sink.buffer is None:
                sink.fill(np.empty(0, np.uint8))
        return self._total

    def savers(self, prepared: Prepared) -> list[int]:
        """The ranks from whose packs `read` reads. Raises like it."""
        laid = self._laid_out(prepared)
        savers = set(np.unique(laid.saved.rank[laid.plan.saved]).tolist())
        if laid.private and self._own is not None:
            savers.add(self._own)
        return sorted(savers)

    def _laid_out(self, prepared: Prepared) -> _LaidOut:
        """What is wanted and where it is, reckoned once."""
        if self._known is None or self._known[0] is not prepared:
            boxes = prepared.boxes or [None] * len(prepared.wants)
            shared = [(leaf, sink, box) for (leaf, sink), box in zip(prepared.wants, boxes, strict=True)
                      if leaf < self._table.leaves]  # fmt: skip
            private = [(leaf, sink) for leaf, sink in prepared.wants if leaf >= self._table.leaves]
            wanted, saved = self._wanted(shared), saved_boxes(self._table, self._paths)
            self._known = prepared, _LaidOut(shared, private, wanted, saved, self._resharded(saved, wanted))
        return self._known[1]

    @property
    def boxes(self) -> BoxTable:
        """Which rank has which part of which leaf."""
        return self._table

    def table(self, rank: int) -> Table:
        """The rows of a rank's index, found to agree with `boxes`."""
        return self._of(rank)

    def _resharded(self, saved: Holdings, wanted: Holdings) -> Reshard:
        """CorruptionError where something that is wanted is missing, or there twice, because the table of parts has not
        every item once: no save lets that pass, so it is damage. ShardMismatch for what is no fault of the table."""
        try:
            return reshard(saved, wanted)
        except ShardMismatch as error:
            try:
                check_coverage(saved)
            except ShardMismatch as damage:
                name = f"{self._manifest.id.directory}/{BOXES}"
                raise CorruptionError(
                    f"{name} does not have every element of every leaf once: {damage.message}",
                    subject=damage.subject or name,
                    hint=typed("holdfast", "verify", self._repo.url),
                ) from error
            raise

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
        return self._of(rank).index(self._manifest.tree, self._paths)

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
        axes = axes_of(self._table)
        leaf = np.array([leaf for leaf, _, _ in shared], np.int64)
        return Holdings(
            leaf=leaf,
            rank=np.zeros(len(leaf), np.int32),
            row=np.arange(len(leaf)),
            offsets=padded([box.offsets for box in boxes], axes, 0),
            shape=padded([box.shape for box in boxes], axes, 1),
            itemsize=sizes(self._table)[leaf],
            whole=spread(self._table.whole, self._table.ends, axes, 1),
            ndim=np.diff(self._table.ends),
            paths=self._paths,
        )

    # -- reading -------------------------------------------------------------------------------------------------------

    def _private(self, wants: Sequence[tuple[int, Sink]]) -> list[tuple[int, int, int, Sink]]:
        """Rank, row, bytes and sink of what is this rank's own."""
        if not wants:
            return []
        assert self._own is not None
        rows = self._of(self._own).shared - self._table.leaves
        return [(self._own, leaf + rows, self.whole.specs[leaf].nbytes, sink) for leaf, sink in wants]

    def _read_from_any(self, portions: Portions) -> None:
        from_any_copy(self._repo, lambda: self._read_alone(portions))

    def _read_alone(self, portions: Portions) -> None:
        """Rank by rank what lies side by side; then what has to be cut out, in the order in which it lies."""
        self._read_runs(portions.runs)
        cuts = sorted(portions.cuts(), key=lambda one: (one.saver, one.row))
        batch = {saver: at // SAVERS_AT_ONCE for at, saver in enumerate(sorted({one.saver for one in cuts}))}
        for _, some in groupby(cuts, key=lambda one: batch[one.saver]):
            self._read_batch(list(some))

    def _read_batch(self, cuts: Sequence[Cut]) -> None:
        readers: dict[int, LazyReader] = {}
        try:
            for one in cuts:
                if one.saver not in readers:
                    readers[one.saver] = LazyReader(self._repo, self._manifest.id, self._of(one.saver))
            self._read_cuts(cuts, readers)
        finally:
            for reader in readers.values():
                reader.close()

    def _read_together(self, portions: Portions, node: NodeReads) -> None:
        """The same beside neighbours who read some of it for us, and for whom we do. What seems to be damaged is read
        once more without them: shared memory is not the store."""
        try:
            self._read_beside(portions, node)
        except (CorruptionError, StoreError) as error:
            if isinstance(error, StoreError) and not is_unreadable(error):
                raise
            if not (node.shares or isinstance(self._repo.store, Places)):
                raise
            self._read_from_any(portions)
        finally:
            node.done()

    def _read_beside(self, portions: Portions, node: NodeReads) -> None:
        piece = node.piece(self._manifest.chunk_bytes)
        runs, cuts = portions.runs.split(piece), portions.cuts(piece)
        savers = sorted({*runs.saver.tolist(), *(one.saver for one in cuts)})
        packs = {number: pack for saver in savers for number, pack in self._open(saver, node.resources)}
        places = self._places(runs, cuts)
        asking = np.isin(places.pack, [number for number, pack in packs.items() if pack.view is None])
        dealt = node.join(Asked.of(places.pack[asking], places.low[asking], places.high[asking]), packs)
        step = np.zeros(len(places.pack), np.int64) if dealt is None else dealt.step(places.pack, places.high)
        readers = {saver: self._lazy(saver, node) for saver in savers}
        for group in np.unique(step).tolist():
            node.at(group)
            lines = np.flatnonzero(step == group)
            self._read_runs(runs.some(lines[lines < len(runs)]), node)
            self._read_cuts([cuts[line - len(runs)] for line in lines[lines >= len(runs)].tolist()], readers)

    def _open(self, saver: int, stack: ExitStack) -> Iterator[tuple[int, OpenPack]]:
        """The packs of a rank by the numbers that all readers call them by."""
        for number, entry in enumerate(self._of(saver).packs):
            pack = open_pack(self._repo, self._manifest.id, entry, header=True)
            stack.callback(pack.close)
            yield _pack_number(saver, number), pack

    def _lazy(self, saver: int, node: NodeReads) -> LazyReader:
        table = self._of(saver)
        return LazyReader(self._repo, self._manifest.id, table, lambda entry: node.pack(_number_of(table, entry)))

    def _places(self, runs: Runs, cuts: Sequence[Cut]) -> _Places:
        """Where the chunks of each run, then of each cut, lie in the packs."""
        chunk = self._manifest.chunk_bytes
        spans = [one.span for one in cuts]
        saver = np.concatenate([runs.saver, np.array([one.saver for one in cuts], np.int64)])
        row = np.concatenate([runs.row, np.array([one.row for one in cuts], np.int64)])
        low = np.concatenate([runs.first, np.array([begin for begin, _ in spans], np.int64)])
        high = np.concatenate([runs.stop, np.array([end for _, end in spans], np.int64)])
        found = _Places(np.zeros_like(row), np.zeros_like(row), np.zeros_like(row))
        for one in np.unique(saver).tolist():
            table, at = self._of(one), np.flatnonzero(saver == one)
            offset = table.offset[row[at]].astype(np.int64)
            found.pack[at] = _pack_number(one, table.pack[row[at]].astype(np.int64))
            found.low[at] = offset + low[at] // chunk * chunk
            found.high[at] = offset + np.minimum(-(-high[at] // chunk) * chunk, table.length[row[at]].astype(np.int64))
        return found

    def _read_cuts(self, cuts: Sequence[Cut], readers: Mapping[int, LazyReader]) -> None:
        views = all(readers[saver].views(row) for saver, row in {(one.saver, one.row) for one in cuts})
        threads = COPY_THREADS if views else READ_THREADS
        hand_out(lambda one: self._add(one.read(readers[one.saver])), cuts, threads)

    def _read_runs(self, runs: Runs, node: NodeReads | None = None) -> None:
        """What lies side by side, row by row, as of one rank after the other."""
        for saver in np.unique(runs.saver).tolist():
            some = runs.some(np.flatnonzero(runs.saver == saver))
            table = self._of(saver)
            packs = None if node is None else (lambda entry, table=table: node.pack(_number_of(table, entry)))
            reader = LeafReader(self._repo, self._manifest, self._index(saver), emitter=Emitter(), packs=packs)
            self._add(reader.read(list(zip(some.row.tolist(), some.sinks, strict=True)), (some.first, some.stop)))

    def _add(self, nbytes: int) -> None:
        with self._count:
            self._done += nbytes
            done = self._done
        if self._emitter.listened:
            self._emitter.emit(Progress("restore", str(self._manifest.id), done, self._total))


class _LaidOut(NamedTuple):
    """Wants of shared and of private leaves, and which saved box each of the shared ones takes what from."""

    shared: list[tuple[int, Sink, Box | None]]
    private: list[tuple[int, Sink]]
    wanted: Holdings
    saved: Holdings
    plan: Reshard


class _Places(NamedTuple):
    """Bytes `low[i] .. high[i] - 1` of pack `pack[i]`, as all ranks number them."""

    pack: Column
    low: Column
    high: Column


@overload
def _pack_number(saver: int, pack: int) -> int: ...


@overload
def _pack_number(saver: int, pack: Column) -> Column: ...


def _pack_number(saver: int, pack: int | Column) -> int | Column:
    """What all ranks call a pack by: in the order of savers."""
    return (saver << 20) + pack


def _number_of(table: Table, entry: PackEntry) -> int:
    return _pack_number(table.rank, table.packs.index(entry))
