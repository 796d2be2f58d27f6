"""Reads leaves of a checkpoint of several ranks: builds each wanted box from the boxes that ranks have written.

What a rank wants as it was saved is read like any leaf, straight into its place. Anything else is cut out of the rows
that hold some of it. Every chunk is verified either way, and only the indexes of ranks that hold something wanted are
opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import groupby
from typing import Any, Final, NamedTuple, overload

import numpy as np

from tenuto.codec.chunk_map import ChunkMap, Span
from tenuto.concurrency.worker_threads import parallel_for
from tenuto.engine.read.choose import FullLeaves
from tenuto.engine.read.chunk_reader import threads_for
from tenuto.engine.read.lazy_reader import LazyReader
from tenuto.engine.read.leaf_reader import LeafReader
from tenuto.engine.read.local_state import LocalState, Part
from tenuto.engine.read.node_share import NodeSharedReads, PackRanges
from tenuto.engine.read.packs import OpenPack, open_pack
from tenuto.engine.read.read_segments import PIECE_BYTES, BoxRead, ContiguousReads, ReadSegments
from tenuto.errors import CorruptionError, ShardMismatch, StoreError, typed
from tenuto.events import Emitter, Progress
from tenuto.model.leaf import Box
from tenuto.model.records import Index, Json, Manifest, PackEntry
from tenuto.repo.format.index import Table
from tenuto.repo.format.leaf_table import LeafSpecs
from tenuto.repo.format.object_names import BOXES
from tenuto.repo.format.shard_table import (
    BoxTable,
    axes_of,
    check_rank,
    check_sizes,
    saved_boxes,
    sizes,
    table_of,
)
from tenuto.repo.replicated.places import places_of
from tenuto.repo.repository import Repo
from tenuto.sharding.coverage import check_coverage
from tenuto.sharding.holdings import Column, Holdings, every, padded, spread
from tenuto.sharding.reshard import Reshard, reshard, saved_spans
from tenuto.state.contract import Prepared, Sink
from tenuto.state.restore.match import match_state
from tenuto.state.tree import leaf_paths
from tenuto.store.contract import is_unreadable

SAVERS_AT_ONCE: Final = 32
"""Ranks whose packs are open at once while cuts are read: a process may have only a thousand files open."""


class ShardedReader:
    """Reads one checkpoint as rank `own` of the ranks that saved it, or (None) as none of them."""

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
        self._threads = threads_for(repo)
        self._planned: tuple[Prepared, _RestorePlan] | None = None
        self._done = 0
        self._total = 0
        self._count = threading.Lock()
        private = self._of(self._own).private if self._own is not None else None
        self.full = FullLeaves(self._specs(private), private)

    def read(self, prepared: Prepared, node: NodeSharedReads | None = None, local: LocalState | None = None) -> int:
        """Fills every sink; returns the bytes that were wanted.

        node: shared reads with the other ranks of the node, each of which calls this too.
        local: what this rank has in memory, which is not read.

        Raises CorruptionError, which names the leaf, the pack and the offset, and ShardMismatch, which names a leaf
        that the checkpoint does not hold completely.
        """
        shared, private, wanted, saved, plan = self._plan_of(prepared)
        self._total = int(wanted.nbytes().sum()) + sum(self.full.specs[leaf].nbytes for leaf, _ in private)
        sinks = [sink for _, sink, _ in shared]
        segments = ReadSegments(plan, saved, wanted, sinks, self._private(private))
        if local is not None and self._repo.keys is None:
            specs = self.full.specs

            def part(want: int) -> Part:
                if want < 0:
                    return Part.of(specs[private[-1 - want][0]], private=True)
                leaf, _, box = shared[int(wanted.row[want])]
                spec = specs[leaf]
                return Part(spec.path, spec.dtype, Box.whole(spec.shape) if box is None else box, private=False)

            segments.take(local, part, lambda saver: ChunkMap.of(self._of(saver)), self._threads.copy)
        if node is None:
            self._read_all(segments)
        else:
            self._threads = node.threads
            if self._manifest.stored is None:
                self._read_with_node(segments, node)
            else:  # what is decoded is no range of a pack that the ranks of a node could read for each other
                node.finish()
                self._read_all(segments)
        segments.finish()
        for line in np.flatnonzero(~every(wanted.shape > 0)).tolist():
            sink = sinks[int(wanted.row[line])]
            if sink.buffer is None:
                sink.fill(np.empty(0, np.uint8))
        return self._total

    def needs(self, prepared: Prepared) -> dict[str, Span]:
        """Returns what `read` reads: by the name of a pack ranges of it, in whole chunks. Raises like it."""
        laid = self._plan_of(prepared)
        saved, plan = laid.saved, laid.plan
        own = self._private(laid.private)
        rank, row, length = (np.array([one[at] for one in own], np.int64) for at in range(3))
        low, high = saved_spans(plan, saved)
        stored = self._needed(
            np.concatenate([saved.rank[plan.saved].astype(np.int64), rank]),
            np.concatenate([saved.row[plan.saved], row]),
            (np.concatenate([low, np.zeros_like(length)]), np.concatenate([high, length])),
        )
        found = stored.merged(gap=0)
        needs: dict[str, Span] = {}
        for number in np.unique(stored.pack).tolist():  # also one of which only rows of no bytes are read
            lines = slice(*np.searchsorted(found.pack, (number, number + 1)).tolist())
            saver, pack = divmod(number, _pack_number(1, 0))
            name = self._of(saver).packs[pack].object_name(self._manifest.id)
            needs[name] = found.low[lines], found.high[lines]
        return needs

    def _plan_of(self, prepared: Prepared) -> _RestorePlan:
        """Plans what is wanted and where it is, once."""
        if self._planned is None or self._planned[0] is not prepared:
            boxes = prepared.boxes or [None] * len(prepared.wants)
            shared = [(leaf, sink, box) for (leaf, sink), box in zip(prepared.wants, boxes, strict=True)
                      if leaf < self._table.leaves]  # fmt: skip
            private = [(leaf, sink) for leaf, sink in prepared.wants if leaf >= self._table.leaves]
            wanted, saved = self._wanted(shared), saved_boxes(self._table, self._paths)
            self._planned = prepared, _RestorePlan(shared, private, wanted, saved, self._resharded(saved, wanted))
        return self._planned[1]

    @property
    def boxes(self) -> BoxTable:
        """The parts of all leaves, with their ranks."""
        return self._table

    def table(self, rank: int) -> Table:
        """Returns the rows of a rank's index, which agree with `boxes`."""
        return self._of(rank)

    def _resharded(self, saved: Holdings, wanted: Holdings) -> Reshard:
        """Plans the change of layout. Raises CorruptionError where something wanted is missing, or there twice, because
        the table of parts does not have every item once: no save commits that, so it is damage. Raises ShardMismatch
        where the table is not at fault."""
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
                    hint=typed("tenuto", "verify", self._repo.url),
                ) from error
            raise

    # -- what there is -------------------------------------------------------------------------------------------------

    def _of(self, rank: int) -> Table:
        """Returns the rows of a rank's index, which is read once."""
        found = self._tables.get(rank)
        if found is None:
            found = self._repo.table(self._manifest, rank)
            if self._boxes is not None:
                check_rank(self._boxes, found, f"{self._manifest.id.directory}/{BOXES}")
            self._tables[rank] = found
        return found

    def _index(self, rank: int) -> Index:
        return self._of(rank).index(self._manifest.tree, self._paths)

    def _specs(self, private: Json) -> LeafSpecs:
        """Returns the shared leaves, each in full, then those of the private tree."""
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
        return LeafSpecs(
            paths,
            names=names,
            code=code,
            dims=dims,
            bounds=bounds,
            shared=table.leaves,
            trees=(self._manifest.tree, private),
        )

    def _wanted(self, shared: Sequence[tuple[int, Sink, Box | None]]) -> Holdings:
        """Returns the wanted boxes of shared leaves: line i is that of `shared[row[i]]`."""
        specs = self.full.specs
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
        """Returns rank, row, bytes and sink of each private leaf."""
        if not wants:
            return []
        assert self._own is not None
        rows = self._of(self._own).shared - self._table.leaves
        return [(self._own, leaf + rows, self.full.specs[leaf].nbytes, sink) for leaf, sink in wants]

    def _read_all(self, segments: ReadSegments) -> None:
        """Reads the runs, saver by saver, then the cuts, in the order in which they lie."""
        self._read_runs(segments.runs)
        cuts = sorted(segments.cuts(PIECE_BYTES), key=lambda one: (one.saver, one.row))
        batch = {saver: at // SAVERS_AT_ONCE for at, saver in enumerate(sorted({one.saver for one in cuts}))}
        for _, some in groupby(cuts, key=lambda one: batch[one.saver]):
            self._read_batch(list(some))

    def _read_batch(self, cuts: Sequence[BoxRead]) -> None:
        readers: dict[int, LazyReader] = {}
        try:
            for one in cuts:
                if one.saver not in readers:
                    table = self._of(one.saver)
                    rows = np.array([cut.row for cut in cuts if cut.saver == one.saver], np.int64)
                    packs = np.unique(table.pack[rows]).tolist() if table.stored is None else ()
                    readers[one.saver] = LazyReader(self._repo, self._manifest.id, table, opened=packs)
            self._read_cuts(cuts, readers)
        finally:
            for reader in readers.values():
                reader.close()

    def _read_with_node(self, segments: ReadSegments, node: NodeSharedReads) -> None:
        """Reads the same, some of it through the other ranks of the node. What seems to be damaged is read once more
        without them: shared memory is not the store."""
        try:
            self._read_shared(segments, node)
        except (CorruptionError, StoreError) as error:
            if isinstance(error, StoreError) and not is_unreadable(error):
                raise
            if not node.shares and places_of(self._repo.store) is None:
                raise
            self._read_all(segments)
        finally:
            node.finish()

    def _read_shared(self, segments: ReadSegments, node: NodeSharedReads) -> None:
        piece = node.piece_bytes(self._manifest.chunk_bytes)
        runs, cuts = segments.runs.split(piece), segments.cuts(piece)
        savers = sorted({*runs.saver.tolist(), *(one.saver for one in cuts)})
        places = self._places(runs, cuts)
        packs = {number: self._open(number, node.resources) for number in np.unique(places.pack).tolist()}
        asking = np.isin(places.pack, [number for number, pack in packs.items() if pack.view is None])
        shared = node.join(places.take(np.flatnonzero(asking)).merged().worth_sharing(), packs)
        step = np.zeros(len(places), np.int64) if shared is None else shared.group_of(places.pack, places.high)
        id, readers = self._manifest.id, {}
        for saver in savers:
            table = self._of(saver)
            readers[saver] = LazyReader(self._repo, id, table, _packs_of(node, table), opened=())
        for group in np.unique(step).tolist():
            node.advance(group)
            lines = np.flatnonzero(step == group)
            self._read_runs(runs.take(lines[lines < len(runs)]), node)
            self._read_cuts([cuts[line - len(runs)] for line in lines[lines >= len(runs)].tolist()], readers)

    def _open(self, number: int, stack: ExitStack) -> OpenPack:
        """Opens the pack of this number, which is the same on all ranks."""
        saver, pack = divmod(number, _pack_number(1, 0))
        found = open_pack(self._repo, self._manifest.id, self._of(saver).packs[pack], header=True)
        stack.callback(found.close)
        return found

    def _places(self, runs: ContiguousReads, cuts: Sequence[BoxRead]) -> PackRanges:
        """Returns where the chunks of each run, then of each cut, lie in the packs."""
        spans = [one.span for one in cuts]
        saver = np.concatenate([runs.saver, np.array([one.saver for one in cuts], np.int64)])
        row = np.concatenate([runs.row, np.array([one.row for one in cuts], np.int64)])
        low = np.concatenate([runs.first, np.array([begin for begin, _ in spans], np.int64)])
        high = np.concatenate([runs.stop, np.array([end for _, end in spans], np.int64)])
        return self._stored(saver, row, (low, high))

    def _needed(self, saver: Column, row: Column, span: Span) -> PackRanges:
        """Returns where all lies that these bytes of these rows are decoded from, in no order."""
        found = [PackRanges(row[:0], row[:0], row[:0])]
        for one in np.unique(saver).tolist():
            table, at = self._of(one), np.flatnonzero(saver == one)
            some = span[0][at], span[1][at]
            if table.stored is None:
                found.append(self._stored(saver[at], row[at], some))
                continue
            stored = table.stored
            numbers = stored.needed(ChunkMap.of(table).chunks(row[at], some).digest)
            low = stored.offset[numbers]
            pack = np.array(_pack_number(one, stored.pack[numbers]))
            found.append(PackRanges(pack, low, low + stored.stored[numbers]))
        pack, low, high = (np.concatenate([getattr(one, name) for one in found]) for name in ("pack", "low", "high"))
        return PackRanges(pack, low, high)

    def _stored(self, saver: Column, row: Column, span: Span) -> PackRanges:
        """Returns where the chunks with these bytes of these rows lie in the packs."""
        low, high = span
        found = PackRanges(np.zeros_like(row), np.zeros_like(row), np.zeros_like(row))
        for one in np.unique(saver).tolist():
            table, at = self._of(one), np.flatnonzero(saver == one)
            pack, found.low[at], found.high[at] = ChunkMap.of(table).stored_ranges(row[at], low[at], high[at])
            found.pack[at] = _pack_number(one, pack)
        return found

    def _read_cuts(self, cuts: Sequence[BoxRead], readers: Mapping[int, LazyReader]) -> None:
        views = all(readers[saver].views(row) for saver, row in {(one.saver, one.row) for one in cuts})
        threads = self._threads.copy if views else self._threads.read
        parallel_for(lambda one: self._add(one.read(readers[one.saver])), cuts, threads)

    def _read_runs(self, runs: ContiguousReads, node: NodeSharedReads | None = None) -> None:
        """Reads the runs, saver by saver."""
        for saver in np.unique(runs.saver).tolist():
            own = runs.take(np.flatnonzero(runs.saver == saver))
            table = self._of(saver)
            packs = None if node is None else _packs_of(node, table)
            reader = LeafReader(
                self._repo,
                self._manifest,
                self._index(saver),
                emitter=Emitter(),
                packs=packs,
                threads=self._threads,
            )
            self._add(reader.read(list(zip(own.row.tolist(), own.sinks, strict=True)), (own.first, own.stop)))

    def _add(self, nbytes: int) -> None:
        with self._count:
            self._done += nbytes
            done = self._done
        if self._emitter.listened:
            self._emitter.emit(Progress("restore", str(self._manifest.id), done, self._total))


class _RestorePlan(NamedTuple):
    """The wants of shared and of private leaves, and the saved boxes that each of the shared ones is built from."""

    shared: list[tuple[int, Sink, Box | None]]
    private: list[tuple[int, Sink]]
    wanted: Holdings
    saved: Holdings
    plan: Reshard


@overload
def _pack_number(saver: int, pack: int) -> int: ...


@overload
def _pack_number(saver: int, pack: Column) -> Column: ...


def _pack_number(saver: int, pack: int | Column) -> int | Column:
    """Returns the number of a pack that is the same on all ranks, in the order of savers."""
    return (saver << 20) + pack


def _packs_of(node: NodeSharedReads, table: Table) -> Callable[[PackEntry], OpenPack]:
    """Returns a function that opens the packs of a rank as the ranks of the node share them."""
    return lambda entry: node.pack(_pack_number(table.rank, table.packs.index(entry)))


# --------------------------------------------------------------------------------------------------
# Private values of one rank, read by another: where a run is resumed by another number of ranks.


class PrivateEntry:
    """One entry of the private tree of a rank, as new values; empty where it has none."""

    def __init__(self, repo: Repo, manifest: Manifest, rank: int, name: str, emitter: Emitter) -> None:
        self._arguments = repo, manifest, rank, emitter
        self._name = name
        self._found: dict[str, dict[str, Any]] = {name: {}}

    @cached_property
    def _parts(self) -> tuple[ShardedReader, Prepared] | None:
        repo, manifest, rank, emitter = self._arguments
        parts = ShardedReader(repo, manifest, rank, emitter)
        if parts.full.private is None:
            return None
        full = parts.full
        return parts, match_state(manifest.tree, full.private, full.specs, {}, private_into=self._found)

    def needs(self) -> dict[str, Span]:
        """Returns what `read` reads, as `ShardedReader.needs`."""
        return {} if self._parts is None else self._parts[0].needs(self._parts[1])

    def read(self) -> dict[str, Any]:
        """Returns the entry. Raises CorruptionError where its leaves are damaged."""
        if self._parts is not None:
            parts, prepared = self._parts
            parts.read(prepared)
            prepared.apply()
        return self._found[self._name]
