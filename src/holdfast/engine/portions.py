"""What is read of a checkpoint of several ranks, in pieces: runs of bytes that stay side by side, and cut-out boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from holdfast.engine.lazy import LazyReader, item_dtype
from holdfast.errors import CorruptionError
from holdfast.plan.columns import Column
from holdfast.plan.holdings import Holdings
from holdfast.plan.pieces import pieces, runs
from holdfast.plan.reads import cut
from holdfast.plan.regions import Taken, bands
from holdfast.plan.reshard import Reshard
from holdfast.plan.slices import Region, box_region
from holdfast.state.contract import Buffer, Sink

PIECE_BYTES: Final = 8 << 20
"""What is cut out at once, by one of several threads."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Run i: bytes `first[i] .. stop[i] - 1` of row `row[i]` of rank `saver[i]`. They go to `sinks[i]`."""

    saver: Column
    row: Column
    first: Column
    stop: Column
    sinks: Sequence[Sink]

    def __len__(self) -> int:
        return len(self.saver)

    def some(self, lines: Column) -> Runs:
        chosen = [self.sinks[line] for line in lines.tolist()]
        return Runs(self.saver[lines], self.row[lines], self.first[lines], self.stop[lines], chosen)

    def split(self, step: int) -> Runs:
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
            sinks.append(self.sinks[number] if buffer is None else Within(buffer[inside : inside + length]))
        return Runs(self.saver[line], self.row[line], first, stop, sinks)


class Within:
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


class Target:
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
class Cut:
    """The items of `taken.region` of a row of `saver` go to `taken.where` of the target's array."""

    saver: int
    row: int
    path: str
    taken: Taken
    target: Target

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


class Portions:
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
        self._targets: dict[int, Target] = {}
        count, _ = runs(plan, saved, wanted)
        self.runs = self._runs(_some(plan, np.flatnonzero(count == 1)), private)
        self._plan = plan
        self._to_cut = np.flatnonzero(count > 1).tolist()

    def cuts(self, piece_bytes: int | None = None) -> list[Cut]:
        """What has to be cut out, in pieces that take up about `piece_bytes` of their rows."""
        nbytes = piece_bytes or PIECE_BYTES
        return [part for line in self._to_cut for part in self._cuts(self._plan, line, nbytes)]

    def finish(self) -> None:
        for target in self._targets.values():
            target.finish()

    def _target(self, line: int) -> Target:
        found = self._targets.get(line)
        if found is None:
            found = self._targets[line] = Target(self._sinks[int(self._wanted.row[line])], self._wanted, line)
        return found

    def _runs(self, plan: Reshard, private: Sequence[tuple[int, int, int, Sink]]) -> Runs:
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
                sinks.append(Within(self._target(line).memory[at : at + length]))
        have = plan.saved[found.line]
        rank, row, length = (np.array([one[at] for one in private], np.int64) for at in range(3))
        return Runs(
            np.concatenate([saved.rank[have].astype(np.int64), rank]),
            np.concatenate([saved.row[have], row]),
            np.concatenate([found.source, np.zeros(len(rank), np.int64)]),
            np.concatenate([found.source + found.length, length]),
            [*sinks, *(sink for _, _, _, sink in private)],
        )

    def _cuts(self, plan: Reshard, line: int, piece_bytes: int) -> list[Cut]:
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
        return [Cut(saver, row, path, band, target) for band in bands(Taken(region, where), items)]


def _some(plan: Reshard, lines: Column) -> Reshard:
    return Reshard(
        plan.wanted[lines], plan.saved[lines], plan.wanted_offsets[lines], plan.saved_offsets[lines], plan.shape[lines]
    )
