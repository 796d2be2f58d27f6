"""Reads leaves out of packs into their destinations, every chunk verified, several ranges at once."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from tenuto.codec.digest import DIGEST_BYTES, digest, digest_rows
from tenuto.concurrency.parallel_for import COPY_THREADS, READ_THREADS, parallel_for
from tenuto.engine.read.packs import OpenPack, damaged, missing, open_pack
from tenuto.errors import CorruptionError, ObjectNotFound
from tenuto.events import Emitter, Progress
from tenuto.model.records import Index, Manifest, PackEntry
from tenuto.repo.repository import Repo
from tenuto.sharding.coalesce import GAP_BYTES, SMALL_BYTES, TASK_BYTES, Column, ReadPlan, ReadTask, coalesce
from tenuto.state.contract import Buffer, Sink

# --------------------------------------------------------------------------------------------------
# Where the wanted leaves arrive: their destinations' own memory, or memory of ours for sinks that must be filled.

_move: Final = ctypes.PyDLL(None).memmove
"""Kept under the interpreter's lock: giving it away and taking it back takes longer than a kibibyte does."""
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move.restype = None


class LeafTargets:
    """One destination for each of `wants`, which takes the bytes `span[0][i]` to `span[1][i]` - 1 of its leaf; None:
    all of it. Places in a leaf are counted from its first chunk that is read. CorruptionError where a destination has
    not the length."""

    def __init__(
        self,
        index: Index,
        wants: Sequence[tuple[int, Sink]],
        leaf: Column,
        span: tuple[Column, Column] | None = None,
    ) -> None:
        self._index = index
        self._wants = wants
        self._lengths: list[int] = (index.length[leaf] if span is None else span[1] - span[0]).tolist()
        self._lead = None if span is None else span[0] % index.chunk_bytes
        """Bytes before what is wanted that are read because they are of its first chunk."""
        self._leads: list[int] | None = None if self._lead is None else self._lead.tolist()
        self._buffers: dict[int, Buffer] = {}
        """By place among the wanted; of small leaves only where nothing else tells the address."""
        self._ours: list[int] = []
        self._address: Column = np.fromiter(self._addresses(), np.int64, len(wants))
        """Of the small leaves; 0 for the others."""

    def _addresses(self) -> Sequence[int]:
        found = []
        for place, ((_, sink), nbytes) in enumerate(zip(self._wants, self._lengths, strict=True)):
            span = sink.span() if nbytes < SMALL_BYTES else None
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
        """Where bytes `start..stop-1` of the leaf go; None where not all of them are wanted."""
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
        np.positive(data[begin - start : stop - start], out=self._whole(place)[begin:stop])

    def _whole(self, place: int) -> Buffer:
        found = self._buffers.get(place)
        if found is None:
            found = self._buffers[place] = _memory(int(self._address[place]), self._lengths[place])
        return found

    def scatter(self, source: Buffer, at: Column, want: Column, start: Column, size: Column) -> None:
        """Copies pieces of small leaves: `size[i]` bytes from `at[i]` of `source` to `start[i]` of destination
        `want[i]`."""
        assert not len(at) or int((at + size).max()) <= len(source), "pieces lie within what was read"
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


PAGE: Final = 4096
STRAIGHT_BYTES: Final = 128 << 10
"""A piece at least this long is read straight into its destination where the reader does not ask for alignment."""

PART_GAP_BYTES: Final = 32 << 10
"""Unwanted bytes that are read between parts of leaves: what lies there is what others read."""

VIEWED_BYTES: Final = 16 << 20
"""The length of a task where no read is made: handing out tasks is all that it costs."""

Span = tuple[Column, Column]


class _Chunks(NamedTuple):
    """The plan's columns as lists: where chunks are handled one by one, a number out of an array costs several times
    one out of a list."""

    want: list[int]
    start: list[int]
    size: list[int]
    position: list[int]
    row: list[int]

    @classmethod
    def of(cls, plan: ReadPlan) -> _Chunks:
        return cls(*(column.tolist() for column in (plan.want, plan.start, plan.size, plan.position, plan.row)))


@dataclass(slots=True)
class _Task:
    pack: OpenPack
    plan: ReadPlan
    chunks: _Chunks
    task: ReadTask


class _Bounce(threading.local):
    """One page-aligned buffer for each reading thread, grown to what the largest task needs."""

    buffer: Buffer | None = None

    def of(self, nbytes: int) -> Buffer:
        if self.buffer is None or len(self.buffer) < nbytes:
            self.buffer = np.frombuffer(mmap.mmap(-1, -(-nbytes // PAGE) * PAGE), np.uint8)
        return self.buffer[:nbytes]


class LeafReader:
    """Reads wanted leaves of one index. `wants` are leaf numbers and where their bytes go."""

    def __init__(
        self,
        repo: Repo,
        manifest: Manifest,
        index: Index,
        *,
        emitter: Emitter,
        phase: str = "restore",
        packs: Callable[[PackEntry], OpenPack] | None = None,
    ) -> None:
        """`packs`: where open packs are had from, whose they stay; None: they are opened here, and closed."""
        self._repo = repo
        self._manifest = manifest
        self._index = index
        self._emitter = emitter
        self._phase = phase
        self._expected = index.digests.tobytes()
        self._leaf: Column = np.empty(0, np.int64)
        self._span: Span | None = None
        self._open = packs or (lambda entry: open_pack(repo, manifest.id, entry, header=True))
        self._kept = packs is not None
        self._bounce = _Bounce()
        self._done = 0
        self._count = threading.Lock()

    def read(self, wants: Sequence[tuple[int, Sink]], span: Span | None = None) -> int:
        """Fills every sink; returns the bytes that they took. `span`: the bytes of its leaf that each takes, from and
        to, of leaves that have any; None: all. CorruptionError names the leaf, the pack and the offset."""
        leaf = self._leaf = np.fromiter((number for number, _ in wants), np.int64, len(wants))
        self._span = span
        targets = LeafTargets(self._index, wants, leaf, span)
        total = int((self._index.length[leaf] if span is None else span[1] - span[0]).sum())
        packs: list[OpenPack] = []
        reads = False
        try:
            tasks: list[_Task] = []
            for number, chosen in _by_pack(self._index.pack[leaf]):
                pack = self._open(self._index.packs[number])
                if not self._kept:
                    packs.append(pack)
                reads |= pack.view is None
                plan = self._plan(chosen, TASK_BYTES if pack.view is None else VIEWED_BYTES)
                chunks = _Chunks.of(plan)
                tasks.extend(_Task(pack, plan, chunks, task) for task in plan.tasks)
            threads = READ_THREADS if reads else COPY_THREADS
            parallel_for(lambda task: self._one(task, targets, total), tasks, threads)
        finally:
            for pack in packs:
                pack.close()
        targets.finish()
        return total

    def _plan(self, chosen: Column, task_bytes: int) -> ReadPlan:
        index, leaf = self._index, self._leaf[chosen]
        offset, length, first = index.offset[leaf], index.length[leaf], index.chunk_start[leaf]
        gap = GAP_BYTES
        if self._span is not None:
            chunk = index.chunk_bytes
            low = self._span[0][chosen] // chunk
            stop = np.minimum(-(-self._span[1][chosen] // chunk) * chunk, length)
            offset, length, first = offset + low * chunk, stop - low * chunk, first + low
            gap = PART_GAP_BYTES
        return coalesce(
            chosen, offset, length, first, chunk_bytes=index.chunk_bytes, task_bytes=task_bytes, gap_bytes=gap
        )

    def _one(self, one: _Task, targets: LeafTargets, total: int) -> None:
        task, plan, pack = one.task, one.plan, one.pack
        straight = pack.reader.alignment == 1 and task.shortest >= STRAIGHT_BYTES
        held = None if pack.view is not None or straight else self._fetched(pack, task.start, task.stop)
        for run in range(task.first, task.last):
            first, stop = plan.runs[run], plan.runs[run + 1]
            if stop - first == 1:
                self._chunk(one, first, held, targets)
            else:
                self._run(one, slice(first, stop), held, targets)
        with self._count:
            self._done += task.nbytes
            done = self._done
        if self._emitter.listened:
            self._emitter.emit(Progress(self._phase, str(self._manifest.id), done, total))

    def _fetched(self, pack: OpenPack, start: int, stop: int) -> Buffer:
        """The pack's bytes `start..stop-1`, read at once; an aligned read where the reader asks for that."""
        low, high = start, stop
        if pack.view is None and pack.reader.alignment > 1:
            low, high = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
        buffer = self._bounce.of(high - low)
        self._read_into(pack, low, buffer)
        return buffer[start - low : stop - low]

    def _read_into(self, pack: OpenPack, position: int, target: Buffer) -> None:
        """As the pack does; one that is gone, from a store whose open objects do not outlive their removal, is missing
        as it would be to who opens it now."""
        try:
            pack.read_into(position, target)
        except ObjectNotFound as error:
            raise missing(self._repo, pack.name) from error

    def _chunk(self, one: _Task, number: int, held: Buffer | None, targets: LeafTargets) -> None:
        """One chunk, as in `_run`."""
        chunks = one.chunks
        start, size, position = chunks.start[number], chunks.size[number], chunks.position[number]
        target = targets.part(chunks.want[number], start, start + size) if held is None else None
        if target is not None:
            self._read_into(one.pack, position, target)
            self._check(one, number, number + 1, target)
            return
        base = one.task.start
        data = (
            self._fetched(one.pack, position, position + size)
            if held is None
            else held[position - base : position - base + size]
        )
        self._check(one, number, number + 1, data)
        targets.put(chunks.want[number], start, data)

    def _run(self, one: _Task, rows: slice, held: Buffer | None, targets: LeafTargets) -> None:
        """Some chunks that lie one after the other. `held`: the task's bytes, where they have been read already.

        Chunks of one leaf arrive where they belong, and what arrived is what is digested. Small leaves are digested
        together in memory of our own, and then copied out of it.
        """
        pack, plan, base = one.pack, one.plan, one.task.start
        low, last = int(plan.position[rows.start]), rows.stop - 1
        high = int(plan.position[last] + plan.size[last])
        want = int(plan.want[last])
        alone = want == plan.want[rows.start]
        start = int(plan.start[rows.start])
        target = targets.part(want, start, start + high - low) if alone and held is None else None
        if target is not None:
            self._read_into(pack, low, target)
            self._check(one, rows.start, rows.stop, target)
            return
        data = self._fetched(pack, low, high) if held is None else held[low - base : high - base]
        self._check(one, rows.start, rows.stop, data)
        if alone:
            targets.put(want, start, data)
        else:
            targets.scatter(data, plan.position[rows] - low, plan.want[rows], plan.start[rows], plan.size[rows])

    def _check(self, one: _Task, first: int, stop: int, data: Buffer) -> None:
        """`data` are the bytes of chunks `first..stop-1`, one after the other."""
        if stop - first == 1:
            row = one.chunks.row[first] * DIGEST_BYTES
            if digest(data) != self._expected[row : row + DIGEST_BYTES]:
                raise self._damaged(one, first)
            return
        plan, rows = one.plan, slice(first, stop)
        position, size = plan.position[rows], plan.size[rows]
        _, found = digest_rows(data, position - position[0], size, self._index.chunk_bytes)
        differs = (found != self._index.digests[plan.row[rows]]).any(axis=1)
        if differs.any():
            raise self._damaged(one, first + int(differs.argmax()))

    def _damaged(self, one: _Task, number: int) -> CorruptionError:
        chunks = one.chunks
        path = self._index.specs[int(self._leaf[chunks.want[number]])].path
        return damaged(self._repo, path, one.pack.name, chunks.size[number], chunks.position[number])


def _by_pack(pack: Column) -> Iterator[tuple[int, Column]]:
    """Each pack that occurs, and the places where it does."""
    order = np.argsort(pack, kind="stable")
    bounds = [0, *(np.flatnonzero(np.diff(pack[order])) + 1).tolist(), len(order)]
    for start, stop in pairwise(bounds):
        if stop > start:
            yield int(pack[order[start]]), order[start:stop]


def read_leaves(
    repo: Repo,
    manifest: Manifest,
    index: Index,
    wants: Sequence[tuple[int, Sink]],
    *,
    emitter: Emitter | None = None,
    phase: str = "restore",
) -> int:
    """Fills each sink with its leaf's bytes, every chunk verified; returns how many bytes that were."""
    return LeafReader(repo, manifest, index, emitter=emitter or Emitter(), phase=phase).read(wants)


class Staged:
    """A sink that keeps the bytes in memory of its own, in `data`."""

    def __init__(self, nbytes: int) -> None:
        self.data: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(nbytes, np.uint8)

    @property
    def buffer(self) -> Buffer | None:
        return self.data

    def span(self) -> None:
        return None

    def fill(self, data: Buffer) -> None:
        self.data[:] = data
