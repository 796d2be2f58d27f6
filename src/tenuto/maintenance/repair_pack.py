"""Assembles a damaged or missing pack: chunk by chunk from whatever source has the bytes that were saved.

The index of the checkpoint says what each chunk has to be, so any source will do, in any mixture, also other objects
with equal chunks. What is assembled is verified once more as it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np

from tenuto.codec.chunk_map import Array, ChunkMap, Column
from tenuto.codec.digest import digest
from tenuto.engine.read.chunk_reader import ChunkRun, chunk_runs, differing
from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.errors import CorruptionError, StoreError, TenutoError
from tenuto.maintenance.repair_sources import ChunkTable, Sources, chunk_keys
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index
from tenuto.record import record
from tenuto.repo.format.object_names import is_home_pack
from tenuto.repo.format.safetensors import build_header
from tenuto.store.contract import Reader, Store

NOWHERE = -1
_REBUILT = "recomputed from the index"


@record
class Origin:
    """Where some bytes of a pack come from. `name`: what the plan calls it; `object`: the object's name in `store`."""

    name: str
    store: Store
    object: str


@dataclass(slots=True, eq=False)
class PackRecipe:
    """How to assemble one pack of a checkpoint.

    header: its header block; None where nobody has it. header_from: what gives it.
    origins: what gives chunks. For each run of chunks: `origin`, int64 [chunks], places in `origins` (NOWHERE: lost),
    and `at`, the first byte of each in the object of its origin.
    """

    id: CheckpointId
    index: Index
    number: int
    target: Store
    header: bytes | None = None
    header_from: str = ""
    origins: list[Origin] = field(default_factory=list)
    runs: list[ChunkRun] = field(default_factory=list)
    origin: list[Column] = field(default_factory=list)
    at: list[Column] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.index.packs[self.number].object_name(self.id)

    @property
    def length(self) -> int:
        return self.index.packs[self.number].length

    @property
    def complete(self) -> bool:
        return self.header is not None and not any((origin == NOWHERE).any() for origin in self.origin)

    def shares(self) -> dict[str, int]:
        """Returns the bytes that each origin gives, by its name."""
        found: dict[str, int] = {}
        if self.header is not None:
            found[self.header_from] = len(self.header)
        for run, origins in zip(self.runs, self.origin, strict=True):
            for number in np.unique(origins[origins != NOWHERE]).tolist():
                name = self.origins[number].name
                found[name] = found.get(name, 0) + int(run.chunks.stored[origins == number].sum())
        return found

    def lost(self) -> tuple[list[str], int]:
        """Returns the paths of the leaves whose chunks nobody has, and the bytes of these chunks."""
        rows: set[int] = set()
        nbytes = 0
        for run, origins in zip(self.runs, self.origin, strict=True):
            gone = origins == NOWHERE
            rows.update(run.chunks.row[gone].tolist())
            nbytes += int(run.chunks.stored[gone].sum())
        return list(dict.fromkeys(self.index.specs[row].path for row in sorted(rows))), nbytes

    # -- finding ---------------------------------------------------------------------------------------------------

    @classmethod
    def find(cls, sources: Sources, id: CheckpointId, index: Index, number: int, target: Store) -> PackRecipe:
        """Looks for the bytes of a pack that is damaged or missing in `target`: what is whole of it there first, then
        copies of the same pack, then equal chunks anywhere."""
        found = cls(id, index, number, target)
        found.runs = list(chunk_runs(ChunkMap.of(index), pack=number))
        found.origin = [np.full(len(run.chunks), NOWHERE, np.int64) for run in found.runs]
        found.at = [np.array(run.chunks.offset, np.int64) for run in found.runs]
        for origin in (
            Origin("itself", target, found.name),
            *(Origin(*one) for one in sources.twins(target, found.name)),
        ):
            if found.complete:
                break
            with suppress(TenutoError), origin.store.open(origin.object) as reader:
                found._take_same(origin, reader)
        if found.header is None:
            found._rebuild_header()
        if any((origins == NOWHERE).any() for origins in found.origin):
            for table in sources.tables(id, index.save_id):
                if found.complete:
                    break
                found._take_equal(table)
        return found

    def _take_same(self, origin: Origin, reader: Reader) -> None:
        """Takes what is whole of a copy of the same pack, or of a part of it."""
        entry, place = self.index.packs[self.number], len(self.origins)
        if self.header is None and reader.length >= entry.header_length:
            block = np.empty(entry.header_length, np.uint8)
            with suppress(CorruptionError, StoreError):
                reader.read_into(0, block.data)
                if digest(block) == entry.header_digest:
                    self.header, self.header_from = block.tobytes(), origin.name
        digests = ChunkMap.of(self.index).stored_digests
        used = False
        for run, origins in zip(self.runs, self.origin, strict=True):
            if (origins != NOWHERE).all():
                continue
            good = _whole_chunks(reader, run, digests) & (origins == NOWHERE)
            origins[good] = place
            used |= bool(good.any())
        if used:
            self.origins.append(origin)

    def _take_equal(self, table: ChunkTable) -> None:
        """Takes chunks with the same digest and length out of whatever objects another index has them in."""
        digests = ChunkMap.of(self.index).stored_digests
        opened: dict[int, tuple[int, Reader] | None] = {}
        with ExitStack() as stack:
            for run, origins, at in zip(self.runs, self.origin, self.at, strict=True):
                missing = np.flatnonzero(origins == NOWHERE)
                if not len(missing):
                    continue
                wanted = run.chunks.take(missing)
                found = table.find(chunk_keys(digests, wanted), wanted.stored)
                for number in np.flatnonzero(found >= 0).tolist():
                    place = int(found[number])
                    pack, offset = int(table.chunks.pack[place]), int(table.chunks.offset[place])
                    if pack not in opened:
                        opened[pack] = self._open(stack, table, pack)
                    source = opened[pack]
                    if source is None:
                        continue
                    data = bytearray(int(wanted.stored[number]))
                    with suppress(CorruptionError, StoreError):
                        source[1].read_into(offset, memoryview(data))
                        if digest(memoryview(data)) == digests[int(wanted.digest[number])].tobytes():
                            origins[missing[number]], at[missing[number]] = source[0], offset

    def _open(self, stack: ExitStack, table: ChunkTable, pack: int) -> tuple[int, Reader] | None:
        name = table.index.packs[pack].object_name(table.id)
        try:
            reader = stack.enter_context(table.store.open(name))
        except (CorruptionError, StoreError):
            return None
        self.origins.append(Origin(f"{table.name} ({name.rpartition('/')[2]})", table.store, name))
        return len(self.origins) - 1, reader

    def _rebuild_header(self) -> None:
        """A header says what the index says too: the same bytes come out where this version writes them alike."""
        entry, index = self.index.packs[self.number], self.index
        if index.stored is not None and not entry.name.endswith(".safetensors"):
            block = build_header(
                (), {"tenuto.pack": entry.name, "tenuto.save_id": index.save_id}, align=entry.header_length
            )
        elif index.stored is not None or entry.adopted:
            return
        else:
            home = [number for number, pack in enumerate(index.packs) if is_home_pack(pack.object_name(self.id))]
            rows = np.flatnonzero(np.isin(index.pack, home)).tolist()
            try:
                layout = plan_layout(index.specs, rank=index.rank, in_home=rows)
            except TenutoError:
                return
            numbers = {pack.name: number for number, pack in enumerate(layout.packs)}
            if entry.name not in numbers:
                return
            block = layout.header(numbers[entry.name], index.save_id)
        if digest(block) == entry.header_digest:
            self.header, self.header_from = block, _REBUILT

    # -- assembling --------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[memoryview]:
        """Yields the pack's bytes, each chunk verified. Raises CorruptionError where a source has changed since it was
        found."""
        assert self.header is not None and self.complete, "only what was found whole is assembled"
        digests = ChunkMap.of(self.index).stored_digests
        yield memoryview(self.header)
        with ExitStack() as stack:
            readers: dict[int, Reader] = {}
            for run, origins, at in zip(self.runs, self.origin, self.at, strict=True):
                data = np.empty(run.stop - run.start, np.uint8)
                begin = run.chunks.offset - run.start
                ends = at + run.chunks.stored
                cuts = np.flatnonzero((np.diff(origins) != 0) | (at[1:] != ends[:-1])) + 1
                for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(origins)], strict=True):
                    number = int(origins[low])
                    if number not in readers:
                        origin = self.origins[number]
                        readers[number] = stack.enter_context(origin.store.open(origin.object))
                    stop = int(begin[high - 1] + run.chunks.stored[high - 1])
                    readers[number].read_into(int(at[low]), data[int(begin[low]) : stop].data)
                if len(differing(run.chunks, digests, data)):
                    raise CorruptionError(
                        f"what repairs {self.name} has changed since it was looked at",
                        subject=self.name,
                        object=self.name,
                    )
                yield data.data

    def is_whole(self) -> bool:
        """Reads the object in its place. Returns whether it is what was saved. Raises what reading its header does."""
        entry = self.index.packs[self.number]
        digests = ChunkMap.of(self.index).stored_digests
        with self.target.open(self.name) as reader:
            block = np.empty(entry.header_length, np.uint8)
            if reader.length != entry.length:
                return False
            reader.read_into(0, block.data)
            return digest(block) == entry.header_digest and all(
                _whole_chunks(reader, run, digests).all() for run in self.runs
            )


def _whole_chunks(reader: Reader, run: ChunkRun, digests: Array) -> Array:
    """Returns which chunks of a run are what was saved. What cannot be read is not."""
    chunks = run.chunks
    inside = int(np.searchsorted(chunks.end, reader.length, side="right"))
    good = np.zeros(len(chunks), np.bool_)
    if not inside:
        return good
    data = np.empty(int(chunks.end[inside - 1]) - run.start, np.uint8)
    try:
        reader.read_into(run.start, data.data)
    except (CorruptionError, StoreError):
        for number in range(inside) if inside > 1 else ():
            part = chunks.take(slice(number, number + 1))
            only = ChunkRun(run.pack, int(part.offset[0]), int(part.end[0]), part)
            good[number] = _whole_chunks(reader, only, digests)[0]
        return good
    good[:inside] = True
    good[differing(chunks.take(slice(0, inside)), digests, data)] = False
    return good
