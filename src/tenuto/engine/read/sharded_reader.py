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

from tenuto.codec.chunk_map import ChunkMap
from tenuto.concurrency.worker_threads import COPY_THREADS, READ_THREADS, parallel_for
from tenuto.engine.read.lazy_reader import LazyReader, item_dtype
from tenuto.engine.read.leaf_reader import LeafReader
from tenuto.engine.read.node_share import NodeSharedReads, RequestedReads
from tenuto.engine.read.packs import OpenPack, from_any_copy, open_pack
from tenuto.errors import CorruptionError, ShardMismatch, StoreError, typed
from tenuto.events import Emitter, Progress
from tenuto.model.box import Box
from tenuto.model.records import Index, Json, Manifest, PackEntry
from tenuto.repo.format.index import Table
from tenuto.repo.format.leaf_table import LeafSpecs
from tenuto.repo.format.object_names import BOXES
from tenuto.repo.format.shard_table import (
    BoxTable,
    axes_of,
    check_rank,
    check_sizes,
    padded,
    saved_boxes,
    sizes,
    spread,
    table_of,
)
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo
from tenuto.sharding.coalesce import cut
from tenuto.sharding.coverage import check_coverage
from tenuto.sharding.holdings import Column, Holdings, every
from tenuto.sharding.reshard import Overlap, Reshard, bands, pieces, reshard, runs
from tenuto.sharding.slices import Region, box_region
from tenuto.state.contract import Buffer, Prepared, Sink
from tenuto.state.restore.match import match_state
from tenuto.state.tree import leaf_paths
from tenuto.store.contract import is_unreadable

# --------------------------------------------------------------------------------------------------
# What is read of a checkpoint of several ranks, in pieces: runs of bytes that stay side by side, and cut-out boxes.

PIECE_BYTES: Final = 8 << 20
"""What is cut out at once, by one of several threads."""


@dataclass(frozen=True, slots=True, eq=False)
class ContiguousReads:
    """Run i: bytes `first[i] .. stop[i] - 1` of row `row[i]` of rank `saver[i]`. They go to `sinks[i]`."""

    saver: Column
    row: Column
    first: Column
    stop: Column
    sinks: Sequence[Sink]

    def __len__(self) -> int:
        return len(self.saver)

    def some(self, lines: Column) -> ContiguousReads:
        chosen = [self.sinks[line] for line in lines.tolist()]
        return ContiguousReads(self.saver[lines], self.row[lines], self.first[lines], self.stop[lines], chosen)

    def split(self, step: int) -> ContiguousReads:
        """The same runs in pieces that lie within `step` bytes of their row each; those to sinks without memory of
        their own stay as they are."""
        begin = self.first // step
        count = -(-self.stop // step) - begin
        memory = {line: buffer for line in np.flatnonzero(count > 1).tolist()
                  if (buffer := self.sinks[line].buffer) is not None}  # fmt: skip
        divided = np.isin(np.arange(len(self)), list(memory))
        line, at = cut(np.where(divided, count, 1), 1)
        low, whole = (begin[line] + at) * step, ~divided[line]
        first = np.where(whole, self.first[line], np.maximum(low, self.first[line]))
        stop = np.where(whole, self.stop[line], np.minimum(low + step, self.stop[line]))
        sinks: list[Sink] = []
        for number, inside, length in zip(
            line.tolist(), (first - self.first[line]).tolist(), (stop - first).tolist(), strict=True
        ):
            buffer = memory.get(number)
            sinks.append(self.sinks[number] if buffer is None else SubSink(buffer[inside : inside + length]))
        return ContiguousReads(self.saver[line], self.row[line], first, stop, sinks)


class SubSink:
    """A sink that is a part of another one's memory."""

    def __init__(self, memory: Buffer) -> None:
        self._memory = memory

    @property
    def buffer(self) -> Buffer | None:
        return self._memory

    def span(self) -> None:
        return None

    def fill(self, data: Buffer) -> None:
        self._memory[:] = data


class BoxTarget:
    """Where one wanted box arrives: its sink's own memory, or memory of ours that the sink is filled from."""

    def __init__(self, sink: Sink, wanted: Holdings, line: int) -> None:
        axes = int(wanted.ndim[wanted.leaf[line]])
        shape = tuple(wanted.shape[line, :axes].tolist())
        self.itemsize = int(wanted.itemsize[line])
        nbytes = self.itemsize * int(np.prod(shape, dtype=np.int64))
        buffer = sink.buffer
        self._ours: Sink | None = sink if buffer is None else None
        self.memory: Buffer = np.empty(nbytes, np.uint8) if buffer is None else buffer
        if len(self.memory) != nbytes:
            path = wanted.path(line)
            raise CorruptionError(
                f"{path} has {nbytes} bytes in the checkpoint and {len(self.memory)} in the target", subject=path
            )
        self.items: Any = np.ndarray(shape, item_dtype(self.itemsize), self.memory)

    def finish(self) -> None:
        if self._ours is not None:
            self._ours.fill(self.memory)


@dataclass(frozen=True, slots=True)
class BoxRead:
    """The items of `taken.region` of a row of `saver` go to `taken.where` of the target's array."""

    saver: int
    row: int
    path: str
    taken: Overlap
    target: BoxTarget

    @property
    def span(self) -> tuple[int, int]:
        """From the first to behind the last of its bytes in the row."""
        region, size = self.taken.region, self.target.itemsize
        last = region.first + sum((count - 1) * step for count, step in zip(region.counts, region.strides, strict=True))
        return region.first * size, (last + 1) * size

    def read(self, reader: LazyReader) -> int:
        into = self.target.items[self.taken.where]
        reader.read_items(self.row, self.path, self.taken.region, into)
        return int(into.nbytes)


class ReadSegments:
    """All that a restore reads: `runs`, `cuts`, and the targets that are finished once both have arrived."""

    def __init__(
        self,
        plan: Reshard,
        saved: Holdings,
        wanted: Holdings,
        sinks: Sequence[Sink],
        private: Sequence[tuple[int, int, int, Sink]],
    ) -> None:
        """`sinks[wanted.row[i]]` is that of line i of `wanted`; `private`: rank, row, bytes and sink of what is read as
        it was saved."""
        self._saved = saved
        self._wanted = wanted
        self._sinks = sinks
        self._targets: dict[int, BoxTarget] = {}
        count, _ = runs(plan, saved, wanted)
        self.runs = self._runs(_some(plan, np.flatnonzero(count == 1)), private)
        self._plan = plan
        self._to_cut = np.flatnonzero(count > 1).tolist()

    def cuts(self, piece_bytes: int | None = None) -> list[BoxRead]:
        """What has to be cut out, in pieces that take up about `piece_bytes` of their rows."""
        nbytes = piece_bytes or PIECE_BYTES
        return [part for line in self._to_cut for part in self._cuts(self._plan, line, nbytes)]

    def finish(self) -> None:
        for target in self._targets.values():
            target.finish()

    def _target(self, line: int) -> BoxTarget:
        found = self._targets.get(line)
        if found is None:
            found = self._targets[line] = BoxTarget(self._sinks[int(self._wanted.row[line])], self._wanted, line)
        return found

    def _runs(self, plan: Reshard, private: Sequence[tuple[int, int, int, Sink]]) -> ContiguousReads:
        saved, wanted = self._saved, self._wanted
        found = pieces(plan, saved, wanted)
        want = plan.wanted[found.line]
        whole = found.length == wanted.nbytes()[want]
        sinks: list[Sink] = []
        rows = zip(want.tolist(), whole.tolist(), found.target.tolist(), found.length.tolist(), strict=True)
        places = wanted.row.tolist()
        for line, alone, at, length in rows:
            if alone and length <= PIECE_BYTES:
                sinks.append(self._sinks[places[line]])
            else:
                sinks.append(SubSink(self._target(line).memory[at : at + length]))
        have = plan.saved[found.line]
        rank, row, length = (np.array([one[at] for one in private], np.int64) for at in range(3))
        return ContiguousReads(
            np.concatenate([saved.rank[have].astype(np.int64), rank]),
            np.concatenate([saved.row[have], row]),
            np.concatenate([found.source, np.zeros(len(rank), np.int64)]),
            np.concatenate([found.source + found.length, length]),
            [*sinks, *(sink for _, _, _, sink in private)],
        )

    def _cuts(self, plan: Reshard, line: int, piece_bytes: int) -> list[BoxRead]:
        saved, have = self._saved, int(plan.saved[line])
        axes = int(saved.ndim[saved.leaf[have]])
        shape = tuple(plan.shape[line, :axes].tolist())
        here = tuple(plan.wanted_offsets[line, :axes].tolist())
        there = tuple(plan.saved_offsets[line, :axes].tolist())
        where = tuple(slice(begin, begin + extent) for begin, extent in zip(here, shape, strict=True))
        region: Region = box_region(tuple(saved.shape[have, :axes].tolist()), there, shape)
        target = self._target(int(plan.wanted[line]))
        row, path, saver = int(saved.row[have]), saved.path(have), int(saved.rank[have])
        # Bands by what is passed over in the row, not only by what is taken of it.
        thin = max(int(np.prod(saved.shape[have, 1:axes])) // max(int(np.prod(shape[1:])), 1), 1)
        items = max(piece_bytes // target.itemsize // thin, 1)
        return [BoxRead(saver, row, path, band, target) for band in bands(Overlap(region, where), items)]


def _some(plan: Reshard, lines: Column) -> Reshard:
    return Reshard(
        plan.wanted[lines], plan.saved[lines], plan.wanted_offsets[lines], plan.saved_offsets[lines], plan.shape[lines]
    )


SAVERS_AT_ONCE: Final = 32
"""Ranks whose packs are open at once while cuts are read: a process may have no more than a thousand files open."""


@dataclass(frozen=True, slots=True)
class ShardedLeafTable:
    """What a checkpoint says of its leaves, each as a whole, and the private tree of the rank that reads. `private`:
    None where the checkpoint has none for it."""

    specs: Sequence[Any]
    private: Json


class ShardedReader:
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
        self.whole = ShardedLeafTable(self._specs(private), private)

    def read(self, prepared: Prepared, node: NodeSharedReads | None = None) -> int:
        """Fills every sink; returns the bytes of what was wanted. `node`: the ranks that want some of it too, each of
        which calls this. CorruptionError names the leaf, the pack and the offset; ShardMismatch the leaf, where the
        checkpoint does not hold all of what is wanted."""
        shared, private, wanted, saved, plan = self._laid_out(prepared)
        self._total = int(wanted.nbytes().sum()) + sum(self.whole.specs[leaf].nbytes for leaf, _ in private)
        sinks = [sink for _, sink, _ in shared]
        portions = ReadSegments(plan, saved, wanted, sinks, self._private(private))
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
                    hint=typed("tenuto", "verify", self._repo.url),
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

    def _specs(self, private: Json) -> LeafSpecs:
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

    def _read_from_any(self, portions: ReadSegments) -> None:
        from_any_copy(self._repo, lambda: self._read_alone(portions))

    def _read_alone(self, portions: ReadSegments) -> None:
        """Rank by rank what lies side by side; then what has to be cut out, in the order in which it lies."""
        self._read_runs(portions.runs)
        cuts = sorted(portions.cuts(), key=lambda one: (one.saver, one.row))
        batch = {saver: at // SAVERS_AT_ONCE for at, saver in enumerate(sorted({one.saver for one in cuts}))}
        for _, some in groupby(cuts, key=lambda one: batch[one.saver]):
            self._read_batch(list(some))

    def _read_batch(self, cuts: Sequence[BoxRead]) -> None:
        readers: dict[int, LazyReader] = {}
        try:
            for one in cuts:
                if one.saver not in readers:
                    readers[one.saver] = LazyReader(self._repo, self._manifest.id, self._of(one.saver))
            self._read_cuts(cuts, readers)
        finally:
            for reader in readers.values():
                reader.close()

    def _read_together(self, portions: ReadSegments, node: NodeSharedReads) -> None:
        """The same beside neighbours who read some of it for us, and for whom we do. What seems to be damaged is read
        once more without them: shared memory is not the store."""
        try:
            self._read_beside(portions, node)
        except (CorruptionError, StoreError) as error:
            if isinstance(error, StoreError) and not is_unreadable(error):
                raise
            if not (node.shares or isinstance(self._repo.store, ReplicatedStore)):
                raise
            self._read_from_any(portions)
        finally:
            node.done()

    def _read_beside(self, portions: ReadSegments, node: NodeSharedReads) -> None:
        piece = node.piece(self._manifest.chunk_bytes)
        runs, cuts = portions.runs.split(piece), portions.cuts(piece)
        savers = sorted({*runs.saver.tolist(), *(one.saver for one in cuts)})
        packs = {number: pack for saver in savers for number, pack in self._open(saver, node.resources)}
        places = self._places(runs, cuts)
        asking = np.isin(places.pack, [number for number, pack in packs.items() if pack.view is None])
        dealt = node.join(RequestedReads.of(places.pack[asking], places.low[asking], places.high[asking]), packs)
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

    def _lazy(self, saver: int, node: NodeSharedReads) -> LazyReader:
        table = self._of(saver)
        return LazyReader(self._repo, self._manifest.id, table, lambda entry: node.pack(_number_of(table, entry)))

    def _places(self, runs: ContiguousReads, cuts: Sequence[BoxRead]) -> _PackRanges:
        """Returns where the chunks of each run, then of each cut, lie in the packs."""
        spans = [one.span for one in cuts]
        saver = np.concatenate([runs.saver, np.array([one.saver for one in cuts], np.int64)])
        row = np.concatenate([runs.row, np.array([one.row for one in cuts], np.int64)])
        low = np.concatenate([runs.first, np.array([begin for begin, _ in spans], np.int64)])
        high = np.concatenate([runs.stop, np.array([end for _, end in spans], np.int64)])
        found = _PackRanges(np.zeros_like(row), np.zeros_like(row), np.zeros_like(row))
        for one in np.unique(saver).tolist():
            table, at = self._of(one), np.flatnonzero(saver == one)
            pack, found.low[at], found.high[at] = ChunkMap.of(table).stored_ranges(row[at], low[at], high[at])
            found.pack[at] = _pack_number(one, pack)
        return found

    def _read_cuts(self, cuts: Sequence[BoxRead], readers: Mapping[int, LazyReader]) -> None:
        views = all(readers[saver].views(row) for saver, row in {(one.saver, one.row) for one in cuts})
        threads = COPY_THREADS if views else READ_THREADS
        parallel_for(lambda one: self._add(one.read(readers[one.saver])), cuts, threads)

    def _read_runs(self, runs: ContiguousReads, node: NodeSharedReads | None = None) -> None:
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


class _PackRanges(NamedTuple):
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


# --------------------------------------------------------------------------------------------------
# What one rank alone has saved, read by another: where a run is gone on with by another number of ranks.


def private_index_entry(repo: Repo, manifest: Manifest, rank: int, name: str, emitter: Emitter) -> dict[str, Any]:
    """One entry of the private tree of a rank, as new values; empty where it has none. CorruptionError where what holds
    it is damaged."""
    parts = ShardedReader(repo, manifest, rank, emitter)
    if parts.whole.private is None:
        return {}
    found: dict[str, dict[str, Any]] = {name: {}}
    prepared = match_state(manifest.tree, parts.whole.private, parts.whole.specs, {}, private_into=found)
    parts.read(prepared)
    prepared.apply()
    return found[name]
