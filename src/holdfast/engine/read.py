"""Reads leaves out of packs into their destinations, every chunk verified, several ranges at once."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.codec.digest import digest
from holdfast.errors import CorruptionError, ObjectNotFound
from holdfast.events import Emitter, Progress
from holdfast.model.checkpoint import Index, Manifest
from holdfast.plan.reads import TASK_BYTES, Part, ReadTask, coalesce
from holdfast.repo.repository import Repo
from holdfast.state.contract import Buffer, Sink
from holdfast.store.contract import Reader

PAGE = 4096
STRAIGHT_BYTES = 128 << 10
"""A part at least this long is read straight into its destination where the reader does not ask for alignment."""

VIEWED_BYTES = 16 << 20
"""The length of a task where no read is made: handing out tasks is all that it costs."""
READ_THREADS = 8
"""Ranges read at once: a device is fast only with several requests before it, and threads that wait cost nothing."""
COPY_THREADS = 4
"""Ranges copied at once where no read is made: memory is the limit."""


@dataclass(slots=True)
class _Task:
    reader: Reader
    pack: str
    task: ReadTask
    view: Buffer | None
    """The pack's bytes where they are in memory already."""


class _Bounce(threading.local):
    """One page-aligned buffer for each reading thread, grown to what the largest task needs."""

    buffer: Buffer | None = None

    def of(self, nbytes: int) -> Buffer:
        if self.buffer is None or len(self.buffer) < nbytes:
            self.buffer = np.frombuffer(mmap.mmap(-1, -(-nbytes // PAGE) * PAGE), np.uint8)
        return self.buffer


class LeafReader:
    """Reads wanted leaves of one index. `wants` are leaf numbers and where their bytes go."""

    def __init__(
        self, repo: Repo, manifest: Manifest, index: Index, *, emitter: Emitter, phase: str = "restore"
    ) -> None:
        self._repo = repo
        self._manifest = manifest
        self._index = index
        self._emitter = emitter
        self._phase = phase
        self._expected = index.digests.tobytes()
        self._bounce = _Bounce()
        self._done = 0
        self._count = threading.Lock()

    def read(self, wants: Sequence[tuple[int, Sink]]) -> int:
        """Fills every sink; returns the bytes of the leaves. CorruptionError names the leaf, the pack and the
        offset."""
        index = self._index
        staged, ours = self._stage(wants)
        offsets, lengths, packs = index.offset.tolist(), index.length.tolist(), index.pack.tolist()
        total: int = sum(lengths[leaf] for leaf, _ in wants)
        by_pack: dict[int, list[tuple[int, int]]] = {}
        for place, (leaf, _) in enumerate(wants):
            by_pack.setdefault(packs[leaf], []).append((place, leaf))
        readers: list[Reader] = []
        try:
            tasks: list[_Task] = []
            for pack, chosen in sorted(by_pack.items()):
                reader = self._open(pack)
                readers.append(reader)
                name = index.packs[pack].name
                whole = reader.view()
                view = np.frombuffer(whole, np.uint8) if whole is not None else None
                size = TASK_BYTES if view is None else VIEWED_BYTES
                found = coalesce(chosen, offsets, lengths, chunk_bytes=index.chunk_bytes, task_bytes=size)
                tasks.extend(_Task(reader, name, task, view) for task in found)
            self._run(tasks, staged, total)
        finally:
            for reader in readers:
                reader.close()
        for place in ours:
            wants[place][1].fill(staged[place])
        return total

    def _stage(self, wants: Sequence[tuple[int, Sink]]) -> tuple[list[Buffer], list[int]]:
        """Where each leaf's bytes arrive: its destination, or memory of our own for a sink that must be filled; and
        which of the wanted leaves are of the second kind."""
        out: list[Buffer] = []
        ours: list[int] = []
        lengths = self._index.length[[leaf for leaf, _ in wants]].tolist() if wants else []
        for place, ((leaf, sink), nbytes) in enumerate(zip(wants, lengths, strict=True)):
            buffer = sink.buffer
            if buffer is None:
                ours.append(place)
                buffer = np.empty(nbytes, np.uint8)
            if len(buffer) != nbytes:
                path = self._index.specs[leaf].path
                raise CorruptionError(
                    f"{path} has {nbytes} bytes in the checkpoint and {len(buffer)} in the target", subject=path
                )
            out.append(buffer)
        return out, ours

    def _open(self, pack: int) -> Reader:
        """A reader of one pack, its length and header block checked against the index."""
        entry = self._index.packs[pack]
        name = f"{self._manifest.id.directory}/{entry.name}"
        try:
            reader = self._repo.store.open(name)
        except ObjectNotFound as error:
            raise CorruptionError(f"{name} is missing", subject=name, hint=_verify_hint(self._repo)) from error
        try:
            if reader.length != entry.length:
                message = f"{name} is {reader.length} bytes long; {entry.length} were saved"
                raise CorruptionError(message, subject=name, hint=_verify_hint(self._repo))
            block = np.empty(entry.header_length, np.uint8)
            reader.read_into(0, block.data)
            if digest(block.data) != entry.header_digest:
                raise CorruptionError(f"the header of {name} is damaged", subject=name, hint=_verify_hint(self._repo))
        except BaseException:
            reader.close()
            raise
        return reader

    def _run(self, tasks: Sequence[_Task], staged: Sequence[Buffer], total: int) -> None:
        if len(tasks) <= 1:
            for task in tasks:
                self._one(task, staged, total)
            return
        threads = COPY_THREADS if all(task.view is not None for task in tasks) else READ_THREADS
        waiting = iter(tasks)
        failed = threading.Event()

        def work() -> None:
            # Taking from an iterator is one step of the interpreter. A future for each task would cost more than that.
            for task in waiting:
                if failed.is_set():
                    return
                try:
                    self._one(task, staged, total)
                except BaseException:
                    failed.set()
                    raise

        with ThreadPoolExecutor(min(threads, len(tasks)), thread_name_prefix="holdfast-read") as pool:
            workers = [pool.submit(work) for _ in range(min(threads, len(tasks)))]
            try:
                for worker in workers:
                    worker.result()
            except BaseException:
                failed.set()
                raise

    def _one(self, task: _Task, staged: Sequence[Buffer], total: int) -> None:
        parts = task.task.parts
        if task.view is not None:
            self._viewed(task, task.view, staged)
        elif task.reader.alignment == 1 and all(part.stop - part.start >= STRAIGHT_BYTES for _, part in parts):
            for position, part in parts:
                self._straight(task, position, part, staged[part.want])
        else:
            self._bounced(task, staged)
        with self._count:
            self._done += sum(part.stop - part.start for _, part in parts)
            done = self._done
        self._emitter.emit(Progress(self._phase, str(self._manifest.id), done, total))

    def _viewed(self, task: _Task, view: Buffer, staged: Sequence[Buffer]) -> None:
        """From memory into the destination, chunk by chunk; what arrived is what is digested."""
        step = self._index.chunk_bytes
        for position, part in task.task.parts:
            target = staged[part.want]
            for low in range(part.start, part.stop, step):
                high = min(low + step, part.stop)
                at = position + low - part.start
                chunk = target[low:high]
                # A ufunc copies by wide registers and without the interpreter's lock: faster than a slice assignment.
                np.positive(view[at : at + high - low], out=chunk)
                self._check(task, position, part, low, chunk.data)

    def _straight(self, task: _Task, position: int, part: Part, target: Buffer) -> None:
        """Chunk by chunk into the destination: each is digested while the processor still has it."""
        step = self._index.chunk_bytes
        view = target.data
        for start in range(part.start, part.stop, step):
            stop = min(start + step, part.stop)
            chunk = view[start:stop]
            task.reader.read_into(position + start - part.start, chunk)
            self._check(task, position, part, start, chunk)

    def _bounced(self, task: _Task, staged: Sequence[Buffer]) -> None:
        """One aligned read for the whole range, then each chunk checked and copied out."""
        start, stop = task.task.start, task.task.stop
        if task.reader.alignment > 1:
            start = start // PAGE * PAGE
            stop = -(-stop // PAGE) * PAGE
        bounce = self._bounce.of(stop - start)
        view = bounce.data
        task.reader.read_into(start, view[: stop - start])
        step = self._index.chunk_bytes
        for position, part in task.task.parts:
            target = staged[part.want]
            for low in range(part.start, part.stop, step):
                high = min(low + step, part.stop)
                at = position - start + low - part.start
                chunk = view[at : at + high - low]
                self._check(task, position, part, low, chunk)
                np.positive(bounce[at : at + high - low], out=target[low:high])

    def _check(self, task: _Task, position: int, part: Part, start: int, chunk: memoryview) -> None:
        row = (int(self._index.chunk_start[part.leaf]) + start // self._index.chunk_bytes) * 16
        if digest(chunk) != self._expected[row : row + 16]:
            path = self._index.specs[part.leaf].path
            name = f"{self._manifest.id.directory}/{task.pack}"
            raise damaged(self._repo, path, name, len(chunk), position + start - part.start)


def damaged(repo: Repo, path: str, pack: str, nbytes: int, offset: int) -> CorruptionError:
    """What a chunk of leaf `path` that is not what was saved is told by (I5): `nbytes` of `pack` from `offset` on."""
    return CorruptionError(
        f"{path} is damaged: {pack}, {nbytes} bytes from offset {offset}, are not what was saved",
        subject=path,
        hint=_verify_hint(repo),
    )


def _verify_hint(repo: Repo) -> str:
    return f"holdfast verify {repo.url}"


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

    def fill(self, data: Buffer) -> None:
        self.data[:] = data
