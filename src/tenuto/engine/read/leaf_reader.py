"""Reads leaves into their destinations: the memory of tensors and arrays, or memory of ours that fills others."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from tenuto.codec.chunk_map import ChunkMap, Column, Span
from tenuto.concurrency.worker_threads import LoopThreads
from tenuto.engine.read.chunk_reader import ChunkReader
from tenuto.engine.read.packs import OpenPack
from tenuto.errors import CorruptionError
from tenuto.events import Emitter, Progress
from tenuto.model.records import Index, Manifest, PackEntry
from tenuto.repo.repository import Repo
from tenuto.sharding.coalesce import SMALL_BYTES
from tenuto.state.contract import Buffer, Sink

# --------------------------------------------------------------------------------------------------
# Where the wanted leaves arrive.

_move: Final = ctypes.PyDLL(None).memmove
"""Kept under the interpreter's lock: giving it away and taking it back takes longer than a kibibyte does."""
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move.restype = None


class LeafTargets:
    """The destinations of wanted leaves, one for each of `wants`."""

    def __init__(
        self,
        index: Index,
        wants: Sequence[tuple[int, Sink]],
        leaf: Column,
        span: Span | None = None,
    ) -> None:
        """Raises CorruptionError where a destination has another length than its leaf.

        wants: leaf numbers, and the sink of each; leaf: the same numbers.
        span: destination i takes bytes `span[0][i] .. span[1][i] - 1` of its leaf; None: all.
        """
        self._index = index
        self._wants = wants
        self._lengths: list[int] = (index.length[leaf] if span is None else span[1] - span[0]).tolist()
        self._lead = None if span is None else span[0]
        """The first wanted byte of each leaf."""
        self._leads: list[int] | None = None if self._lead is None else self._lead.tolist()
        self._buffers: dict[int, Buffer] = {}
        """By place among the wanted; of small leaves only where nothing else tells the address."""
        self._ours: list[int] = []
        self._parts: dict[int, Callable[[int, Buffer], None]] = {}
        """What fills large leaves that have no memory to offer, part by part: they need none of ours."""
        self._address: Column = np.fromiter(self._addresses(), np.int64, len(wants))
        """Of the small leaves; 0 for the others."""

    def _addresses(self) -> Sequence[int]:
        found = []
        for place, ((_, sink), nbytes) in enumerate(zip(self._wants, self._lengths, strict=True)):
            span = sink.span() if nbytes < SMALL_BYTES else None
            if span is None and nbytes >= SMALL_BYTES and sink.buffer is None and (fill := sink.fill_part) is not None:
                self._parts[place] = fill
                span = (0, nbytes)
            if span is None:
                buffer = self._buffer(place, sink, nbytes)
                span = (buffer.ctypes.data if 0 < nbytes < SMALL_BYTES else 0, len(buffer))
            if span[1] != nbytes:
                path = self._index.specs[self._wants[place][0]].path
                raise CorruptionError(
                    f"{path} has {nbytes} bytes in the checkpoint and {span[1]} in the target", subject=path
                )
            found.append(span[0])
        return found

    def _buffer(self, place: int, sink: Sink, nbytes: int) -> Buffer:
        buffer = sink.buffer
        if buffer is None:
            self._ours.append(place)
            buffer = np.empty(nbytes, np.uint8)
        self._buffers[place] = buffer
        return buffer

    def part(self, place: int, start: int, stop: int) -> Buffer | None:
        """Returns the memory that bytes `start..stop-1` of the leaf go to; None where not all of them are wanted, or
        the leaf has no memory to offer."""
        if place in self._parts:
            return None
        if self._leads is not None:
            start, stop = start - self._leads[place], stop - self._leads[place]
            if start < 0 or stop > self._lengths[place]:
                return None
        return self._whole(place)[start:stop]

    def put(self, place: int, start: int, data: Buffer) -> None:
        """Copies what is wanted of `data`, the bytes of the leaf from `start` on."""
        if self._leads is not None:
            start -= self._leads[place]
        stop = min(start + len(data), self._lengths[place])
        begin = max(start, 0)
        piece = data[begin - start : stop - start]
        if (fill := self._parts.get(place)) is not None:
            fill(begin, piece)
        else:
            np.positive(piece, out=self._whole(place)[begin:stop])

    def _whole(self, place: int) -> Buffer:
        found = self._buffers.get(place)
        if found is None:
            found = self._buffers[place] = _memory(int(self._address[place]), self._lengths[place])
        return found

    def scatter(self, source: Buffer, at: Column, want: Column, start: Column, size: Column) -> None:
        """Copies pieces of small leaves: `size[i]` bytes from `at[i]` of `source` on to byte `start[i]` of leaf
        `want[i]`."""
        assert not len(at) or int((at + size).max()) <= len(source), "pieces lie within what was read"
        assert self._address[want].all(), "only small leaves are filled so"
        if self._lead is not None:
            start = start - self._lead[want]
            begin = np.maximum(start, 0)
            stop = np.minimum(start + size, np.array([self._lengths[one] for one in want.tolist()], np.int64))
            at, start, size = at + begin - start, begin, stop - begin
        to, of = self._address[want] + start, at + source.ctypes.data
        deque(map(_move, to.tolist(), of.tolist(), size.tolist()), maxlen=0)

    def finish(self) -> None:
        """Fills the sinks that had no memory to offer."""
        for place in self._ours:
            self._wants[place][1].fill(self._buffers[place])


def _memory(address: int, nbytes: int) -> Buffer:
    flat: Buffer = np.ndarray((nbytes,), np.uint8, (ctypes.c_uint8 * nbytes).from_address(address))  # type: ignore[arg-type]
    return flat


class LeafReader:
    """Reads wanted leaves of one index."""

    def __init__(
        self,
        repo: Repo,
        manifest: Manifest,
        index: Index,
        *,
        emitter: Emitter,
        phase: str = "restore",
        packs: Callable[[PackEntry], OpenPack] | None = None,
        threads: LoopThreads | None = None,
    ) -> None:
        """
        packs: opens a pack, which stays its owner's; None: packs are opened here, and closed.
        threads: None: those of a process that reads alone.
        """
        self._index = index
        self._id = str(manifest.id)
        self._emitter = emitter
        self._phase = phase
        chunks = ChunkMap.of(index)
        self._chunks = ChunkReader(repo, manifest.id, chunks, index.packs, packs=packs, threads=threads)

    def read(self, wants: Sequence[tuple[int, Sink]], span: Span | None = None) -> int:
        """Fills every sink; returns the bytes that they took. Raises CorruptionError, which names the leaf, the pack
        and the offset.

        wants: leaf numbers, and the sink of each.
        span: the bytes of its leaf that each sink takes, from and to; None: all.
        """
        leaf = np.fromiter((number for number, _ in wants), np.int64, len(wants))
        targets = LeafTargets(self._index, wants, leaf, span)
        total = int((self._index.length[leaf] if span is None else span[1] - span[0]).sum())

        def progress(done: int) -> None:
            if self._emitter.listened:
                self._emitter.emit(Progress(self._phase, self._id, done, total))

        self._chunks.read(leaf, targets, lambda row: self._index.specs[row].path, span=span, progress=progress)
        targets.finish()
        return total


def read_leaves(
    repo: Repo,
    manifest: Manifest,
    index: Index,
    wants: Sequence[tuple[int, Sink]],
    *,
    emitter: Emitter | None = None,
    phase: str = "restore",
) -> int:
    """Fills each sink with its leaf's bytes, every chunk verified; returns their number."""
    return LeafReader(repo, manifest, index, emitter=emitter or Emitter(), phase=phase).read(wants)


class MemorySink:
    """A sink over memory that is there already, such as a part of another sink's."""

    def __init__(self, data: Buffer) -> None:
        self.data = data

    @property
    def buffer(self) -> Buffer | None:
        return self.data

    def span(self) -> None:
        return None

    def fill(self, data: Buffer) -> None:
        self.data[:] = data

    @property
    def fill_part(self) -> None:
        return None


class SinkPart:
    """The bytes from `first` on of a sink that is filled in parts."""

    buffer = None

    def __init__(self, fill: Callable[[int, Buffer], None], first: int) -> None:
        self._fill = fill
        self._first = first

    def span(self) -> None:
        return None

    def fill(self, data: Buffer) -> None:
        self._fill(self._first, data)

    def fill_part(self, start: int, data: Buffer) -> None:
        self._fill(self._first + start, data)


class Staged(MemorySink):
    """A sink with memory of its own."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(np.empty(nbytes, np.uint8))
