"""Reads chunks out of packs: fetches ranges, verifies every chunk against its digest, and delivers into destinations.

Whatever reads stored bytes reads them here, so that no reader can forget to verify.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from tenuto.codec.chunk_map import Array, ChunkMap, ChunkRange, Chunks, Column, Span
from tenuto.codec.digest import DIGEST_BYTES, digest
from tenuto.concurrency.worker_threads import LoopThreads, parallel_for
from tenuto.engine.read.packs import OpenPack, damaged, from_any_copy, missing, open_pack
from tenuto.errors import CorruptionError, ObjectNotFound, TenutoError
from tenuto.model.ids import CheckpointId
from tenuto.model.records import PackEntry
from tenuto.record import record
from tenuto.repo.format.stored_chunks import RAW
from tenuto.repo.repository import Repo
from tenuto.sharding.coalesce import GAP_BYTES, TASK_BYTES, Flags, ReadPlan, ReadTask, coalesce, wanted_bytes
from tenuto.state.contract import Buffer

if TYPE_CHECKING:
    from tenuto.engine.read.encoded_chunks import ChunkDecoder, Opened

# --------------------------------------------------------------------------------------------------
# Runs: chunks that follow each other in a pack and are read together to be verified.

PIECE_BYTES: Final = 8 << 20


@record(eq=False)
class ChunkRun:
    """Bytes `start..stop-1` of pack `pack`: the chunks follow each other without a hole."""

    pack: int
    start: int
    stop: int
    chunks: Chunks


def chunk_runs(
    chunks: ChunkMap, piece_bytes: int = PIECE_BYTES, *, pack: int | None = None, span: Span | None = None
) -> Iterator[ChunkRun]:
    """Yields all chunks of all packs, cut into pieces of about `piece_bytes`, in order. Reading the index has checked
    that its rows cover every byte after each pack's header exactly once.

    pack: only those of this pack.
    span: only those that hold some of bytes `span[0][i] .. span[1][i] - 1` of it, ranges in order that do not overlap.
    """
    if chunks.stored is not None:
        found = chunks.all_stored()
        found = found if pack is None else found.take(np.flatnonzero(found.pack == pack))
    else:
        found = chunks.chunks(None if pack is None else np.flatnonzero(chunks.pack == pack))
    if span is not None:
        # The first range that ends behind the chunk's first byte is the first that may meet it.
        coming = np.searchsorted(span[1], found.offset, side="right")
        begins = np.append(span[0], np.iinfo(np.int64).max)
        found = found.take(np.flatnonzero(begins[coming] < found.end))
    if not len(found):
        return
    found = found.take(np.lexsort((found.offset, found.pack)))
    group = found.offset // piece_bytes
    apart = (np.diff(group) != 0) | (np.diff(found.pack) != 0) | (found.offset[1:] != found.end[:-1])
    cuts = (np.flatnonzero(apart) + 1).tolist()
    for low, high in zip([0, *cuts], [*cuts, len(found)], strict=True):
        yield _run(found.take(slice(low, high)))


def split_run(run: ChunkRun) -> tuple[ChunkRun, ChunkRun]:
    """Splits a run of at least two chunks in the middle."""
    middle = len(run.chunks) // 2
    return _run(run.chunks.take(slice(0, middle))), _run(run.chunks.take(slice(middle, None)))


def _run(chunks: Chunks) -> ChunkRun:
    return ChunkRun(int(chunks.pack[0]), int(chunks.offset[0]), int(chunks.offset[-1] + chunks.stored[-1]), chunks)


# --------------------------------------------------------------------------------------------------
# Reading.

PAGE: Final = 4096
STRAIGHT_BYTES: Final = 128 << 10
"""A piece at least this long is read straight into its destination where the reader does not ask for alignment."""

PART_GAP_BYTES: Final = 32 << 10
"""Unwanted bytes that are read between parts of rows: other ranks read what lies there."""

VIEWED_BYTES: Final = 16 << 20
"""The length of a task where no read is made: handing out tasks is its only cost."""


class AlignedBuffers(threading.local):
    """One page-aligned buffer for each reading thread, grown to what the largest range needs."""

    buffer: Buffer | None = None

    def of(self, nbytes: int) -> Buffer:
        """Returns `nbytes` of the thread's buffer, until the thread asks again."""
        if self.buffer is None or len(self.buffer) < nbytes:
            self.buffer = np.frombuffer(mmap.mmap(-1, -(-nbytes // PAGE) * PAGE), np.uint8)
        return self.buffer[:nbytes]

    def fetch(self, pack: OpenPack, start: int, stop: int) -> Buffer:
        """Returns bytes `start..stop-1` of the pack in the thread's buffer; reads whole pages where the pack's reader
        asks for that."""
        low, high = start, stop
        if pack.view is None and pack.reader.alignment > 1:
            low, high = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
        buffer = self.of(high - low)
        pack.read_into(low, buffer)
        return buffer[start - low : stop - low]


def differing(chunks: Chunks, digests: Array, data: Buffer) -> Column:
    """Returns which of these chunks are not what was saved.

    chunks: they lie in one pack, in the order of their places.
    digests: the table that their numbers are places in.
    data: the bytes of the pack from the first chunk's first byte on.
    """
    view = data.data
    begin = (chunks.offset - chunks.offset[0]).tolist()
    found = [digest(view[at : at + size]) for at, size in zip(begin, chunks.stored.tolist(), strict=True)]
    table = np.frombuffer(b"".join(found), np.uint8).reshape(-1, DIGEST_BYTES)
    return np.flatnonzero((table != digests[chunks.digest]).any(axis=1))


class Destinations(Protocol):
    """The memory that wanted rows go to. `want` is the place of a row among the wanted ones; bytes are counted from the
    first byte of the row."""

    def part(self, want: int, start: int, stop: int) -> Buffer | None:
        """Returns the memory that bytes `start..stop-1` go to; None where not all of them are wanted, or there is none:
        then they are `put`."""
        ...

    def put(self, want: int, start: int, data: Buffer) -> None:
        """Copies what is wanted of `data`, the bytes of the row from `start` on."""
        ...

    def scatter(self, source: Buffer, at: Column, want: Column, start: Column, size: Column) -> None:
        """Copies pieces of small rows: `size[i]` bytes from `at[i]` of `source` on to byte `start[i]` of row
        `want[i]`."""
        ...


class _Lists(NamedTuple):
    """Columns of a plan as lists: where chunks are handled one by one, a number out of an array costs several times one
    out of a list."""

    row: list[int]
    want: list[int]
    start: list[int]
    offset: list[int]
    stored: list[int]
    digest: list[int]

    @classmethod
    def of(cls, chunks: Chunks) -> _Lists:
        return cls(*(getattr(chunks, name).tolist() for name in cls._fields))


@record
class _Request:
    """The arguments of one `read`."""

    rows: Column
    out: Destinations
    path: Callable[[int], str]
    span: Span | None
    progress: Callable[[int], None]


@dataclass(slots=True)
class _Task:
    request: _Request
    pack: OpenPack
    plan: ReadPlan
    chunks: _Lists
    task: ReadTask


def long_reads(repo: Repo) -> int:
    """Returns the length of reads where each is a request that mostly waits; 0 where reads are short and many."""
    length = repo.store.capabilities.part_bytes
    return length if length > TASK_BYTES else 0


def threads_for(repo: Repo) -> LoopThreads:
    """Returns how many threads a process reads this repository with that reads alone."""
    return LoopThreads.of(1, waiting=repo.store.capabilities.parallel if long_reads(repo) else 0)


def scan_threads(repo: Repo) -> int:
    """Returns how many ranges are read at once where every byte of a repository is verified, and nothing else runs."""
    return threads_for(repo).read if long_reads(repo) else max(2, min(8, (os.cpu_count() or 1) + 1))


class ChunkReader:
    """Reads rows of one index. May be used by several threads."""

    def __init__(
        self,
        repo: Repo,
        id: CheckpointId,
        chunks: ChunkMap,
        entries: Sequence[PackEntry],
        *,
        packs: Callable[[PackEntry], OpenPack] | None = None,
        gone: Callable[[str], TenutoError] | None = None,
        threads: LoopThreads | None = None,
    ) -> None:
        """
        entries: the packs of the index.
        packs: opens a pack, which stays its owner's; None: packs are opened by `read`, and closed.
        threads: None: those of a process that reads alone.
        gone: the error for a pack, by name, that vanishes while it is read; None: that of a missing pack.
        """
        self._repo = repo
        self._id = id
        self._chunks = chunks
        self._entries = entries
        self._packs = packs
        self._gone = gone or (lambda name: missing(repo, name))
        self._threads = threads or threads_for(repo)
        self._long = long_reads(repo)
        """The length of a task that is one read, not cut into what fits a processor's cache; else 0."""
        self._buffers = AlignedBuffers()
        self._done = 0
        self._count = threading.Lock()

    def read(
        self,
        rows: Column,
        out: Destinations,
        path: Callable[[int], str],
        *,
        span: Span | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Delivers rows into `out`; from another copy of a pack where one is damaged, unless the packs are another's.

        rows: their numbers; the places in this column are the `want` of `out`.
        path: the path of a row, for errors.
        span: the bytes wanted of each row, from and to; None: all.
        progress: called after each range, from any thread, with the bytes that have been read so far.

        Raises CorruptionError, which names the row's path, the pack and the offset.
        """
        request = _Request(rows, out, path, span, progress)
        if self._packs is not None:
            self._deliver(request, self._packs)
        else:
            from_any_copy(self._repo, lambda: self._deliver_from_opened(request))

    def _deliver_from_opened(self, request: _Request) -> None:
        opened: list[OpenPack] = []

        def packs(entry: PackEntry) -> OpenPack:
            opened.append(open_pack(self._repo, self._id, entry, header=True))
            return opened[-1]

        try:
            self._deliver(request, packs)
        finally:
            for pack in opened:
                pack.close()

    def _deliver(self, request: _Request, packs: Callable[[PackEntry], OpenPack]) -> None:
        self._done = 0
        chunks = self._chunks.chunks(request.rows, request.span)
        wanted = wanted_bytes(chunks)
        coded, numbers = self._coded(chunks), self._chunks.pack[request.rows]
        opened: dict[int, OpenPack] = {}
        decoder: ChunkDecoder | None = None
        if coded is not None:
            decoded = chunks.take(self._in_turn(chunks, np.flatnonzero(coded)))
            chunks = chunks.take(np.flatnonzero(~coded))
            from tenuto.engine.read.encoded_chunks import TASK_BYTES as DECODED_BYTES  # plain ones need no codecs
            from tenuto.engine.read.encoded_chunks import ChunkDecoder

            decoder = ChunkDecoder(self._repo, self._id, self._chunks, self._entries, request.path)
            numbers = chunks.pack
            opened = {number: packs(self._entries[number]) for number in decoder.packs(decoded.digest)}
        tasks: list[_Task | Chunks] = []
        gap, reads = GAP_BYTES if request.span is None else PART_GAP_BYTES, False
        for number, chosen in _by_pack(numbers, chunks):
            pack = opened.get(number) or packs(self._entries[number])
            reads |= pack.view is None
            plan = coalesce(
                chosen,
                wanted=wanted,
                task_bytes=(self._long or TASK_BYTES) if pack.view is None else VIEWED_BYTES,
                gap_bytes=gap,
            )
            lists = _Lists.of(plan.chunks)
            tasks.extend(_Task(request, pack, plan, lists, task) for task in plan.tasks)
        if coded is not None and len(decoded):
            reads = True
            group = np.cumsum(decoded.size) // max(DECODED_BYTES, self._long)
            bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(decoded)]
            # First: decoding takes longer than reading.
            tasks[:0] = [decoded.take(slice(begin, end)) for begin, end in pairwise(bounds)]

        def work(task: _Task | Chunks) -> None:
            if isinstance(task, _Task):
                self._task(task)
            else:
                assert decoder is not None
                self._decode(request, decoder, task, opened)

        parallel_for(work, tasks, self._threads.read if reads else self._threads.copy)

    def _coded(self, chunks: Chunks) -> Flags | None:
        """Returns which of these chunks have to be decoded or unsealed; None for an index that is not encoded."""
        stored = self._chunks.stored
        if stored is None:
            return None
        plain = stored.codecs.index(RAW) if RAW in stored.codecs else -1
        sealed = np.array([bool(entry.key) for entry in self._entries], np.bool_)
        found: Flags = (stored.codec[chunks.digest] != plain) | sealed[chunks.pack]
        return found

    def _in_turn(self, chunks: Chunks, coded: Column) -> Column:
        """Returns these places in the order in which chunks are decoded: one that is rounded from others follows these,
        so that one task decodes them once."""
        stored = self._chunks.stored
        if stored is None or stored.rounded is None:
            return coded
        number = chunks.digest[coded]
        after = np.where(stored.rounded[number] > 0, 2 * stored.base[number] + 3, 2 * number)
        return coded[np.argsort(after, kind="stable")]

    def _decode(self, request: _Request, decoder: ChunkDecoder, chunks: Chunks, opened: Opened) -> None:
        want, start, size = chunks.want.tolist(), chunks.start.tolist(), chunks.size.tolist()
        targets = [request.out.part(one, at, at + nbytes) for one, at, nbytes in zip(want, start, size, strict=True)]
        try:
            found = decoder.read(chunks.digest.tolist(), chunks.row.tolist(), opened, targets)
        except ObjectNotFound as error:
            raise self._gone(error.subject or "") from error
        for one, at, data, target in zip(want, start, found, targets, strict=True):
            if data is not target:
                request.out.put(one, at, data)
        self._count_done(request, sum(size))

    def read_range(self, pack: OpenPack, found: ChunkRange, target: Buffer, path: str) -> None:
        """Fills `target` with the bytes of consecutive chunks of one row, each verified. Raises as `read`.

        pack: where they lie, open.
        path: that of the row, for errors.
        """
        self._read_into(pack, found.begin, target)
        for number in range(found.first, found.stop):
            one = self._chunks.part(found, number, number + 1)
            self.check(pack.name, one, target[one.low - found.low : one.high - found.low], path)

    def check(self, pack: str, chunk: ChunkRange, data: Buffer, path: str) -> None:
        """Raises CorruptionError where the bytes of one chunk, in the pack of this name, are not what was saved."""
        if digest(data) != self._chunks.digest_of(chunk.first):
            raise damaged(self._repo, path, pack, len(data), chunk.begin)

    def read_run(self, pack: OpenPack, run: ChunkRun, path: Callable[[int], str]) -> Buffer:
        """Returns the bytes of a run, each chunk verified, until this thread reads again. Raises CorruptionError as
        `read`, and StoreError as the pack's reader."""
        data = self._buffers.fetch(pack, run.start, run.stop)
        self.check_run(pack.name, run, data, path)
        return data

    def check_run(self, pack: str, run: ChunkRun, data: Buffer, path: Callable[[int], str]) -> None:
        """Raises CorruptionError where the bytes of a run, in the pack of this name, are not what was saved."""
        bad = differing(run.chunks, self._chunks.stored_digests, data)
        if len(bad):
            raise self._damaged(pack, run.chunks, int(bad[0]), path)

    def _damaged(self, pack: str, chunks: Chunks, number: int, path: Callable[[int], str]) -> CorruptionError:
        row = int(chunks.row[number])
        return damaged(self._repo, path(row), pack, int(chunks.stored[number]), int(chunks.offset[number]))

    # -- one task ------------------------------------------------------------------------------------------------------

    def _task(self, one: _Task) -> None:
        task, plan, pack = one.task, one.plan, one.pack
        if self._long and pack.view is None and self._one_row(one):
            self._count_done(one.request, task.nbytes)
            return
        straight = pack.reader.alignment == 1 and task.shortest >= STRAIGHT_BYTES and not self._long
        fetched = None if pack.view is not None or straight else self._fetch(pack, task.start, task.stop)
        for run in range(task.first, task.last):
            self._run(one, plan.runs[run], plan.runs[run + 1], fetched)
        self._count_done(one.request, task.nbytes)

    def _count_done(self, request: _Request, nbytes: int) -> None:
        with self._count:
            self._done += nbytes
            done = self._done
        request.progress(done)

    def _one_row(self, one: _Task) -> bool:
        """Reads a whole task straight to where it belongs, if that is consecutive bytes of one row; else returns
        False."""
        task, chunks = one.task, one.chunks
        first, stop = one.plan.runs[task.first], one.plan.runs[task.last]
        if task.nbytes != task.stop - task.start or chunks.want[first] != chunks.want[stop - 1]:
            return False
        start = chunks.start[first]
        if chunks.start[stop - 1] + chunks.stored[stop - 1] != start + task.nbytes:
            return False  # of an encoded checkpoint: there may lie others of the row between them
        target = one.request.out.part(chunks.want[first], start, start + task.nbytes)
        if target is None:
            return False
        self._read_into(one.pack, task.start, target)
        self._check(one, first, stop, target)
        return True

    def _run(self, one: _Task, first: int, stop: int, fetched: Buffer | None) -> None:
        """Reads chunks `first..stop-1` of the plan, which lie one after the other. `fetched`: the task's bytes,
        where they have been read already.

        Chunks of one row arrive where they belong, and what arrived is digested. Small rows are digested together in
        memory of our own, and then copied out of it.
        """
        pack, chunks, out, last = one.pack, one.chunks, one.request.out, stop - 1
        low, high = chunks.offset[first], chunks.offset[last] + chunks.stored[last]
        want, start = chunks.want[first], chunks.start[first]
        # Of an encoded checkpoint, chunks of another row may lie between two of one.
        one_row = want == chunks.want[last] and chunks.want[first:stop].count(want) == stop - first
        target = out.part(want, start, start + high - low) if one_row and fetched is None else None
        if target is not None:
            self._read_into(pack, low, target)
            self._check(one, first, stop, target)
            return
        base = one.task.start
        data = self._fetch(pack, low, high) if fetched is None else fetched[low - base : high - base]
        self._check(one, first, stop, data)
        if one_row:
            out.put(want, start, data)
        else:
            some = one.plan.chunks.take(slice(first, stop))
            out.scatter(data, some.offset - low, some.want, some.start, some.size)

    def _fetch(self, pack: OpenPack, start: int, stop: int) -> Buffer:
        try:
            return self._buffers.fetch(pack, start, stop)
        except ObjectNotFound as error:
            raise self._gone(pack.name) from error

    def _read_into(self, pack: OpenPack, position: int, target: Buffer) -> None:
        """Raises, for a pack that vanishes from a store whose open objects do not outlive their removal, what opening
        it now would raise."""
        try:
            pack.read_into(position, target)
        except ObjectNotFound as error:
            raise self._gone(pack.name) from error

    def _check(self, one: _Task, first: int, stop: int, data: Buffer) -> None:
        """Raises CorruptionError unless `data` is what was saved as chunks `first..stop-1` of the plan."""
        bad = first
        if stop - first == 1:
            if digest(data) == self._chunks.digest_of(one.chunks.digest[first]):
                return
        else:
            found = differing(one.plan.chunks.take(slice(first, stop)), self._chunks.digests, data)
            if not len(found):
                return
            bad += int(found[0])
        raise self._damaged(one.pack.name, one.plan.chunks, bad, one.request.path)


def _by_pack(pack: Array, chunks: Chunks) -> Iterator[tuple[int, Chunks]]:
    """Yields each pack of `pack`, and its chunks in their order: none, where rows of no bytes alone lie in it."""
    numbers = np.unique(pack).tolist()
    if len(numbers) == 1:
        yield numbers[0], chunks
        return
    order = np.argsort(chunks.pack, kind="stable")
    bounds = np.searchsorted(chunks.pack[order], [*numbers, np.iinfo(np.int64).max]).tolist()
    for number, (start, stop) in zip(numbers, pairwise(bounds), strict=True):
        yield number, chunks.take(order[start:stop])
