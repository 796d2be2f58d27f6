"""Reads leaves out of packs into their destinations, every chunk verified, several ranges at once."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from holdfast.codec.digest import DIGEST_BYTES, digest, digest_rows
from holdfast.engine.packs import OpenPack, damaged, missing, open_pack
from holdfast.engine.targets import Targets
from holdfast.engine.threads import COPY_THREADS, READ_THREADS, hand_out
from holdfast.errors import CorruptionError, ObjectNotFound
from holdfast.events import Emitter, Progress
from holdfast.model.checkpoint import Index, Manifest, PackEntry
from holdfast.plan.reads import GAP_BYTES, TASK_BYTES, Column, ReadPlan, ReadTask, coalesce
from holdfast.repo.repository import Repo
from holdfast.state.contract import Buffer, Sink

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
        targets = Targets(self._index, wants, leaf, span)
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
            hand_out(lambda task: self._one(task, targets, total), tasks, threads)
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

    def _one(self, one: _Task, targets: Targets, total: int) -> None:
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

    def _chunk(self, one: _Task, number: int, held: Buffer | None, targets: Targets) -> None:
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

    def _run(self, one: _Task, rows: slice, held: Buffer | None, targets: Targets) -> None:
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
