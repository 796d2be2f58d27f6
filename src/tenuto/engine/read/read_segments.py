"""The reads of a restore, in pieces: runs of bytes that are contiguous on both sides, and boxes that are cut out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from tenuto.codec.chunk_map import ChunkMap
from tenuto.concurrency.worker_threads import parallel_for
from tenuto.engine.read.lazy_reader import LazyReader, item_dtype
from tenuto.engine.read.leaf_reader import MemorySink, SinkPart
from tenuto.engine.read.local_state import LocalState, Part, is_saved
from tenuto.errors import CorruptionError
from tenuto.record import record
from tenuto.sharding.coalesce import cut
from tenuto.sharding.holdings import Column, Holdings
from tenuto.sharding.reshard import Overlap, Reshard, bands, pieces, runs
from tenuto.state.contract import Buffer, Sink

PIECE_BYTES: Final = 8 << 20
"""The most that one of several threads cuts out at once."""


@record(eq=False)
class ContiguousReads:
    """Run i: bytes `first[i] .. stop[i] - 1` of row `row[i]` of rank `saver[i]`. They go to `sinks[i]`."""

    saver: Column
    row: Column
    first: Column
    stop: Column
    sinks: Sequence[Sink]

    def __len__(self) -> int:
        return len(self.saver)

    def take(self, lines: Column) -> ContiguousReads:
        chosen = [self.sinks[line] for line in lines.tolist()]
        return ContiguousReads(self.saver[lines], self.row[lines], self.first[lines], self.stop[lines], chosen)

    def split(self, step: int) -> ContiguousReads:
        """Returns the same runs in pieces that each lie within `step` bytes of their row; those to sinks that are
        filled as a whole stay as they are."""
        begin = self.first // step
        count = -(-self.stop // step) - begin
        parts = {line: part for line in np.flatnonzero(count > 1).tolist()
                 if (part := _part_of(self.sinks[line])) is not None}  # fmt: skip
        divided = np.isin(np.arange(len(self)), list(parts))
        line, at = cut(np.where(divided, count, 1), 1)
        low, whole = (begin[line] + at) * step, ~divided[line]
        first = np.where(whole, self.first[line], np.maximum(low, self.first[line]))
        stop = np.where(whole, self.stop[line], np.minimum(low + step, self.stop[line]))
        sinks: list[Sink] = []
        for number, inside, length in zip(
            line.tolist(), (first - self.first[line]).tolist(), (stop - first).tolist(), strict=True
        ):
            part = parts.get(number)
            sinks.append(self.sinks[number] if part is None else part(inside, length))
        return ContiguousReads(self.saver[line], self.row[line], first, stop, sinks)


def _part_of(sink: Sink) -> Callable[[int, int], Sink] | None:
    """Returns what makes sinks of so many bytes of this one, from a given one on; None where it has no parts."""
    if (buffer := sink.buffer) is not None:
        return lambda inside, length: MemorySink(buffer[inside : inside + length])
    if (fill := sink.fill_part) is not None:
        return lambda inside, length: SinkPart(fill, inside)
    return None


class BoxTarget:
    """The destination of one wanted box: its sink's own memory, or memory of ours that the sink is filled from."""

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


@record
class BoxRead:
    """The items of `taken.region` of a row of `saver` go to `taken.where` of the target's array."""

    saver: int
    row: int
    path: str
    taken: Overlap
    target: BoxTarget

    @property
    def span(self) -> tuple[int, int]:
        """The first of its bytes in the row, and the end of the last."""
        region, size = self.taken.region, self.target.itemsize
        last = region.first + sum((count - 1) * step for count, step in zip(region.counts, region.strides, strict=True))
        return region.first * size, (last + 1) * size

    def read(self, reader: LazyReader) -> int:
        into = self.target.items[self.taken.where]
        reader.read_items(self.row, self.path, self.taken.region, into)
        return int(into.nbytes)


class ReadSegments:
    """All reads of a restore: `runs`, `cuts`, and the targets that are finished once both have arrived."""

    def __init__(
        self,
        plan: Reshard,
        saved: Holdings,
        wanted: Holdings,
        sinks: Sequence[Sink],
        private: Sequence[tuple[int, int, int, Sink]],
    ) -> None:
        """
        sinks: that of line i of `wanted` is `sinks[wanted.row[i]]`.
        private: rank, row, bytes and sink of each private leaf, which is read as it was saved.
        """
        self._saved = saved
        self._wanted = wanted
        self._sinks = sinks
        self._targets: dict[int, BoxTarget] = {}
        count, _ = runs(plan, saved, wanted)
        self._private = private
        self._wants = self._at = np.zeros(0, np.int64)
        """What each run is for: a line of `wanted`, or below 0 a private leaf, the first of which is -1; and from which
        of its bytes on."""
        self._plan = plan
        self._to_cut = np.flatnonzero(count > 1).tolist()
        self.runs = self._runs(plan.take(np.flatnonzero(count == 1)), private)

    def cuts(self, piece_bytes: int) -> list[BoxRead]:
        """Returns the boxes to cut out, in pieces that span about `piece_bytes` of their rows."""
        return [part for line in self._to_cut for part in self._cuts(line, piece_bytes)]

    def finish(self) -> None:
        for target in self._targets.values():
            target.finish()

    def take(
        self, local: LocalState, part: Callable[[int], Part], chunks: Callable[[int], ChunkMap], threads: int
    ) -> None:
        """Fills from memory what lies there, verified, and leaves out the runs that have arrived that way. `part`:
        returns what is wanted, by its number in `_wants`; `chunks`: the chunks of a rank's rows."""
        runs, arrived = self.runs, np.zeros(len(self.runs), np.bool_)
        found = {want: local.find(part(want), self._nbytes(want)) for want in np.unique(self._wants).tolist()}

        def work(run: int) -> None:
            data = found[self._wants.item(run)]
            if data is None:
                return
            first, stop, at = runs.first.item(run), runs.stop.item(run), self._at.item(run)
            piece = data[at : at + stop - first]
            if is_saved(chunks(runs.saver.item(run)), runs.row.item(run), first, stop, piece):
                buffer = runs.sinks[run].buffer
                if buffer is None:
                    runs.sinks[run].fill(piece)
                else:
                    np.positive(piece, out=buffer)
                arrived[run] = True

        parallel_for(work, list(range(len(runs))), threads)
        local.taken += int((runs.stop - runs.first)[arrived].sum())
        self.runs = runs.take(np.flatnonzero(~arrived))

    def _nbytes(self, want: int) -> int:
        return self._private[-1 - want][2] if want < 0 else int(self._wanted.nbytes()[want])

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
        places, boxes = wanted.row.tolist(), set(self._plan.wanted[self._to_cut].tolist())
        for line, full, at, length in rows:
            sink = self._sinks[places[line]]
            if full and length <= PIECE_BYTES:
                sinks.append(sink)
            elif line not in boxes and sink.buffer is None and (fill := sink.fill_part) is not None:
                sinks.append(SinkPart(fill, at))
            else:
                sinks.append(MemorySink(self._target(line).memory[at : at + length]))
        self._wants = np.concatenate([want, -1 - np.arange(len(private))])
        self._at = np.concatenate([found.target, np.zeros(len(private), np.int64)])
        have = plan.saved[found.line]
        rank, row, length = (np.array([one[at] for one in private], np.int64) for at in range(3))
        return ContiguousReads(
            np.concatenate([saved.rank[have].astype(np.int64), rank]),
            np.concatenate([saved.row[have], row]),
            np.concatenate([found.source, np.zeros(len(rank), np.int64)]),
            np.concatenate([found.source + found.length, length]),
            [*sinks, *(sink for _, _, _, sink in private)],
        )

    def _cuts(self, line: int, piece_bytes: int) -> list[BoxRead]:
        saved, have = self._saved, int(self._plan.saved[line])
        taken = self._plan.overlap(line, saved)
        target = self._target(int(self._plan.wanted[line]))
        row, path, saver = int(saved.row[have]), saved.path(have), int(saved.rank[have])
        # Bands by what is passed over in the row, not only by what is taken of it.
        thin = max(int(np.prod(saved.shape[have, 1:])) // max(prod(taken.region.counts[1:]), 1), 1)
        items = max(piece_bytes // target.itemsize // thin, 1)
        return [BoxRead(saver, row, path, band, target) for band in bands(taken, items)]
