"""Reads parts of leaves from the packs of one checkpoint, every byte verified before it is returned (I5).

A pack whose bytes lie in memory is read in place: each chunk is digested at its first use, and a bitmap records that.
Elsewhere every chunk that is read is digested, since each read is another transfer that can go wrong. The few chunks
read last are cached, so that neighbouring slices do not read the same chunk again and again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tenuto.codec.chunk_map import ChunkMap, ChunkRange, whole_chunks
from tenuto.concurrency.worker_threads import parallel_for
from tenuto.engine.read.chunk_reader import ChunkReader, long_reads, threads_for
from tenuto.engine.read.packs import OpenPack, from_any_copy, open_pack, replace_copy
from tenuto.errors import CheckpointNotFound, CorruptionError, StoreError, UsageError, typed
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import Box
from tenuto.model.records import PackEntry
from tenuto.repo.format.index import Table
from tenuto.repo.repository import Repo
from tenuto.sharding.slices import Region, blocks
from tenuto.state.contract import Buffer

if TYPE_CHECKING:
    from tenuto.engine.read.encoded_chunks import ChunkDecoder

BLOCK_BYTES: Final = 4 << 20
"""The most that is read at once of a slice with gaps, or of a long run by each of several threads."""
CACHED_BYTES: Final = 8 << 20
OPENED_AT_ONCE: Final = 64
"""Packs that are opened with the checkpoint, so that it can be read on after its removal; further ones when needed."""
_ITEMS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def item_dtype(itemsize: int) -> Any:
    """Returns the dtype by which items of this size are copied."""
    return np.dtype(_ITEMS.get(itemsize, f"V{itemsize}"))


@dataclass(slots=True)
class _ChunkCache:
    """The verified chunks that were read last, by their row in the table of digests."""

    chunks: OrderedDict[int, Buffer] = field(default_factory=OrderedDict)
    nbytes: int = 0

    def take(self, row: int) -> Buffer | None:
        found = self.chunks.get(row)
        if found is not None:
            self.chunks.move_to_end(row)
        return found

    def put(self, row: int, data: Buffer) -> None:
        if len(data) > CACHED_BYTES // 2 or row in self.chunks:
            return
        self.chunks[row] = data.copy()
        self.nbytes += len(data)
        while self.nbytes > CACHED_BYTES:
            self.nbytes -= len(self.chunks.popitem(last=False)[1])


class LazyReader:
    """Reads rows of `table`. May be used by several threads. `bytes_read` counts what was read, or digested in
    place."""

    def __init__(
        self,
        repo: Repo,
        id: CheckpointId,
        table: Table,
        packs: Callable[[PackEntry], OpenPack] | None = None,
        *,
        opened: Iterable[int] | None = None,
    ) -> None:
        """Opens the packs. Raises CorruptionError where one is missing or has another length than was saved.

        packs: supplies open packs instead, which stay its own.
        opened: the packs to open now; None: all, as far as that is not too many.
        """
        self._repo = repo
        self._id = id
        self._table = table
        self._packs: dict[int, OpenPack] = {}
        self._open = packs or (lambda entry: from_any_copy(repo, lambda: open_pack(repo, id, entry, header=False)))
        self._theirs = packs is not None
        self._chunks = ChunkMap.of(table)
        self._reader = ChunkReader(repo, id, self._chunks, table.packs, packs=self._open, gone=self._removed)
        self._decoder = self._new_decoder()
        self._paths: dict[int, str] = {}
        """Of rows that were read, where errors come to need them."""
        self._verified = bytearray(-(-len(table.digests) // 8))
        self._damaged: list[OpenPack] = []
        """Damaged copies, from which other threads may still be reading."""
        self._cache = _ChunkCache()
        self._lock, self._replacing = threading.Lock(), threading.Lock()
        self._replaced = 0
        self._closed = False
        self.bytes_read = 0
        try:
            for number in range(min(len(table.packs), OPENED_AT_ONCE)) if opened is None else opened:
                self._pack(number)
        except BaseException:
            self.close()
            raise

    def _new_decoder(self) -> ChunkDecoder | None:
        if self._chunks.stored is None:
            return None
        from tenuto.engine.read.encoded_chunks import ChunkDecoder  # plain checkpoints need no codecs

        return ChunkDecoder(self._repo, self._id, self._chunks, self._table.packs, self._path_of)

    def parts(self, row: int) -> list[tuple[int, Box]]:
        """Returns the parts of a row, with their ranks: one has all of it."""
        cut = slice(int(self._table.bounds[row]), int(self._table.bounds[row + 1]))
        return [(self._table.rank, Box.whole(tuple(self._table.dims[cut].tolist())))]

    def digests(self, row: int) -> tuple[Any, ...]:
        """Returns what is equal for two rows of one repository only if their bytes are. Digests of sealed checkpoints
        are hidden by a key each."""
        first, chunks = self._chunks.first, self._chunks
        found = chunks.digests[int(first[row]) : int(first[row + 1])].tobytes()
        return (chunks.chunk_bytes, chunks.sealed, self._repo.id if chunks.sealed is not None else "", found)

    def views(self, row: int) -> bool:
        """Returns whether the bytes of a row lie in memory, where they are read in place."""
        return self._decoder is None and self._pack(int(self._table.pack[row])).view is not None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            packs, self._packs = [*self._packs.values(), *self._damaged], {}
            self._damaged, self._cache = [], _ChunkCache()
        for pack in () if self._theirs else packs:
            pack.close()

    def _removed(self, _: str) -> CheckpointNotFound:
        return CheckpointNotFound(
            f"{self._id} was removed while it was open, and this store keeps nothing for those who still read",
            subject=str(self._id),
            hint=typed("tenuto", "ls", self._repo.url),
        )

    def _pack(self, number: int) -> OpenPack:
        found = self._packs.get(number)
        if found is not None:
            return found
        with self._lock:
            if self._closed:
                raise UsageError(
                    f"{self._id} is closed", subject=str(self._id), hint="read inside `with tenuto.open(…)`"
                )
            found = self._packs.get(number)
            if found is None:
                entry = self._table.packs[number]
                found = self._packs[number] = self._open(entry)
            return found

    def read(self, row: int, path: str, region: Region, itemsize: int, out: Buffer) -> None:
        """Fills `out` with the items of a region in row-major order. `path`: the name of the leaf in errors.

        Raises CorruptionError, which names the leaf, the pack and the offset; `out` is undefined then.
        """
        if not region.size or not itemsize:
            return
        if region.is_run:
            self._from_any(lambda: self._run(row, path, region.first * itemsize, out))
            return
        items = np.ndarray(region.counts, item_dtype(itemsize), out)
        self._from_any(lambda: self._items(row, path, region, items))

    def read_items(self, row: int, path: str, region: Region, target: np.ndarray[Any, Any]) -> None:
        """Does the same into an array of as many items, of any strides."""
        if target.flags.c_contiguous:
            self.read(row, path, region, target.itemsize, target.reshape(-1).view(np.uint8))
        elif region.size:
            self._from_any(lambda: self._items(row, path, region, target))

    def _from_any(self, read: Callable[[], None]) -> None:
        """Retries `read` from another copy of a pack, if this one is damaged and there is another. Supplied packs are
        left to their owner."""
        while True:
            replaced = self._replaced
            try:
                return read()
            except (CorruptionError, StoreError) as error:
                with self._replacing:
                    # Of threads that meet the same damage at once only the first replaces the copy.
                    if self._theirs or (replaced == self._replaced and not self._replace(error)):
                        raise

    def _replace(self, error: CorruptionError | StoreError) -> bool:
        name = replace_copy(self._repo, error)
        if name is None:
            return False
        with self._lock:
            for number, pack in list(self._packs.items()):
                if pack.name == name:
                    self._damaged.append(self._packs.pop(number))
            self._verified = bytearray(len(self._verified))
        self._replaced += 1
        return True

    def _items(self, row: int, path: str, region: Region, target: np.ndarray[Any, Any]) -> None:
        itemsize = target.itemsize
        order: Any = (*(slice(None, None, -1 if flip else 1) for flip in region.flipped), ...)
        target = target[order]
        paces = tuple(stride * itemsize for stride in region.strides)
        chunk = self._chunks.chunk_bytes
        # What lies in memory is digested and taken chunk by chunk, while the processor still has it.
        most = chunk if self.views(row) else max(BLOCK_BYTES, chunk)
        for block in blocks(region, itemsize, block_bytes=most, gap_bytes=chunk):
            data, base = self._fetch(row, path, block.start, block.stop)
            target[block.where] = np.ndarray(block.counts, target.dtype, data, block.start - base, paces)

    def _run(self, row: int, path: str, start: int, out: Buffer) -> None:
        """Reads a run of bytes; a long one that does not lie in memory by several threads, cut between chunks."""
        views = self.views(row)
        block = 0 if views else max(BLOCK_BYTES, long_reads(self._repo))
        stop, step = start + len(out), whole_chunks(block, self._chunks.chunk_bytes)

        def piece(low: int) -> None:
            begin, end = max(low, start), min(low + step, stop)
            data, base = self._fetch(row, path, begin, end)
            np.positive(data[begin - base : end - base], out=out[begin - start : end - start])

        lows: Sequence[int] = range(start // step * step, stop, step)
        if len(lows) < 4 or views:
            for low in lows:
                piece(low)
        else:
            parallel_for(piece, lows, threads_for(self._repo).read)

    def _fetch(self, row: int, path: str, start: int, stop: int) -> tuple[Buffer, int]:
        """Returns verified bytes of the leaf that hold `start..stop-1`, and which of its bytes the first of them is."""
        if self._decoder is not None:
            return self._decoded(self._decoder, row, path, start, stop)
        verified = self._verified  # before the pack: what is verified of a copy that is replaced meanwhile is dropped
        found = self._chunks.covering(row, start, stop)
        pack = self._pack(found.pack)
        view = pack.view
        if view is None:
            return self._read(pack, path, found), found.low
        for number in range(found.first, found.stop):
            if not verified[number >> 3] >> (number & 7) & 1:
                one = self._chunks.part(found, number, number + 1)
                self._reader.check(pack.name, one, view[one.begin : one.end], path)
                with self._lock:
                    verified[number >> 3] |= 1 << (number & 7)
                    self.bytes_read += one.end - one.begin
        return view[found.begin : found.end], found.low

    def _path_of(self, row: int) -> str:
        return self._paths.get(row, f"leaf {row}")

    def _decoded(self, decoder: ChunkDecoder, row: int, path: str, start: int, stop: int) -> tuple[Buffer, int]:
        """Returns decoded bytes that hold `start..stop-1` of an encoded leaf, and which of its bytes the first is."""
        self._paths[row] = path
        chunk, before = self._chunks.chunk_bytes, self._chunks.first.item(row)
        numbers = range(before + start // chunk, before + -(-stop // chunk))
        with self._lock:
            known = {number: data for number in numbers if (data := self._cache.take(number)) is not None}
        unknown = [number for number in numbers if number not in known]
        if unknown:
            opened = {number: self._pack(number) for number in decoder.packs(np.array(unknown, np.int64))}
            found = decoder.read(unknown, [row] * len(unknown), opened)
            with self._lock:
                self.bytes_read += sum(map(len, found))
                for number, data in zip(unknown, found, strict=True):
                    known[number] = data
                    if number in (numbers[0], numbers[-1]):
                        self._cache.put(number, data)
        parts = [known[number] for number in numbers]
        return parts[0] if len(parts) == 1 else np.concatenate(parts), (numbers[0] - before) * chunk

    def _read(self, pack: OpenPack, path: str, wanted: ChunkRange) -> Buffer:
        """Returns the bytes of these chunks; reads those that are not known from the last reads."""
        numbers = range(wanted.first, wanted.stop)
        with self._lock:
            known = {number: data for number in numbers if (data := self._cache.take(number)) is not None}
        if len(numbers) == len(known) == 1:
            return known[wanted.first]  # callers only copy out of it
        out = np.empty(wanted.high - wanted.low, np.uint8)

        def place(first: int, stop: int) -> tuple[ChunkRange, Buffer]:
            part = self._chunks.part(wanted, first, stop)
            return part, out[part.low - wanted.low : part.high - wanted.low]

        for number, data in known.items():
            place(number, number + 1)[1][:] = data
        for unknown, run in groupby(numbers, key=lambda number: number not in known):
            if not unknown:
                continue
            first, *rest = run
            last = rest[-1] if rest else first
            part, target = place(first, last + 1)
            self._reader.read_range(pack, part, target, path)
            with self._lock:
                self.bytes_read += len(target)
                for number in {first, last}:
                    self._cache.put(number, place(number, number + 1)[1])
        return out
