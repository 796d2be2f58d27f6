"""Encodes the chunks of a checkpoint that lies somewhere already, for a place that stores it in another way.

What comes out is the same checkpoint: the rows of its indexes, the digests of what its chunks hold, its content digest.
Its index says where the chunks lie in that place, among them those of the baseline, the newest checkpoint there. Memory
is bounded by a batch of chunks, one of what they are differences to, and two packs.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np

from tenuto.codec.choosing import choose, codecs_for, encoded
from tenuto.codec.chunk_map import chunk_counts, chunk_sizes, chunk_starts
from tenuto.codec.digest import digest
from tenuto.codec.registry import codec
from tenuto.concurrency.worker_threads import background_threads, lower_priority, parallel_for
from tenuto.engine.read.lazy_reader import LazyReader
from tenuto.engine.save.baseline import Baseline, keys_of
from tenuto.engine.save.encoded_pack import PAGE, Filling, Segment
from tenuto.engine.save.joined_chunks import Written, joined
from tenuto.errors import CorruptionError
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, Json, PackEntry
from tenuto.policy.encoding import Encoding
from tenuto.record import record
from tenuto.repo.encoded_places import described
from tenuto.repo.format.index import ShapeRows
from tenuto.repo.format.object_names import encoded_pack_file
from tenuto.repo.format.safetensors import build_header
from tenuto.repo.format.stored_chunks import MAX_CHUNK_BYTES, RAW
from tenuto.seal.cipher import TAG, PackSealer
from tenuto.sharding.slices import Region
from tenuto.state.contract import Buffer

BATCH_BYTES: Final = 8 << 20
"""Decoded bytes that are read, and encoded, at a time."""
PACK_BYTES: Final = 32 << 20
MOST_PACKS: Final = 1000
"""About as many packs has an index at most: of a large state they are longer."""
_TRUSTED: Final = 16
"""For so many checkpoints what was chosen for a leaf is not asked again."""

Column = np.ndarray[Any, np.dtype[np.int64]]
Read = Callable[[int, int, Buffer], None]
"""Fills a buffer with the verified bytes of a row, from a byte of it on."""
ReadBase = Callable[[int, int, Buffer], bool]
"""The same of the baseline; returns False where it cannot be read any more."""
Seal = Callable[[str, int], PackSealer]
"""Returns what seals a pack of this name, whose header has so many bytes."""


class Transcoder:
    """Encodes the checkpoints of one place, one after the other. Raises MissingExtra without its codec's package."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self.checkpoints = 0
        self._chosen: dict[tuple[str, bool], tuple[tuple[str, ...], int]] = {}
        """By leaf, and whether there is a base: the codecs to try, and when they were chosen."""
        if encoding.codec is not None:
            codec(f"planes4-{encoding.codec}")  # an absent package is told now, and not at each checkpoint

    def chosen(self, path: str, dtype: str, raw: memoryview, base: memoryview | None) -> tuple[str, ...]:
        """Returns the names of the codecs to try for a chunk of a leaf, the best first."""
        encoding, key = self.encoding, (path, base is not None)
        names, when = self._chosen.get(key, ((), -_TRUSTED))
        if when + _TRUSTED <= self.checkpoints:
            family = encoding.codec or "zstd"
            best = choose(dtype, [raw], None if base is None else [base], family=family, level=encoding.level).name
            plain = codecs_for(dtype, family).plain[0]
            names = (best, plain) if codec(best).needs_base else (best,)
            self._chosen[key] = names, self.checkpoints
        return names

    def about(self, made: Sequence[tuple[Index, Json]]) -> dict[str, Json]:
        """Returns what a person may want to know of a checkpoint's encoding, for its manifest, and how the place is to
        be filled by who is not told. `made`: its indexes with what became of each."""
        encoding = self.encoding
        how = f"compressed by {encoding.codec}" if encoding.codec is not None else "stored as they are"
        numbers = {name: sum(int(about[name]) for _, about in made) for name in made[0][1]}
        return {"decision": f"chunks are {how} for this tier", "tier": described(encoding), **numbers}


@record
class Rows:
    """Where the chunks of an index lie in its rows: the row of each, its first byte there, and its length."""

    starts: Column
    row: Column
    begin: Column
    size: Column

    @classmethod
    def of(cls, index: Index) -> Rows:
        starts = chunk_starts(index.length, index.chunk_bytes)
        row = np.repeat(np.arange(len(index.length), dtype=np.int64), chunk_counts(index.length, index.chunk_bytes))
        begin = (np.arange(len(row), dtype=np.int64) - starts[row]) * index.chunk_bytes
        return cls(starts, row, begin, chunk_sizes(index.length, index.chunk_bytes))


class _Putting:
    """A pack that is being put, in a thread that holds up no end of the process."""

    def __init__(self, put: Callable[[Segment], object], segment: Segment) -> None:
        self._put, self._segment = put, segment
        self._error: BaseException | None = None
        self._work = background_threads.submit(self._run, "tenuto-put")

    def _run(self) -> None:
        lower_priority()
        try:
            self._put(self._segment)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error

    def wait(self) -> mmap.mmap:
        """Returns the pack's memory once it is put. Raises what putting it has raised."""
        self._work.join()
        if self._error is not None:
            raise self._error
        return self._segment.memory


def rows_of(reader: LazyReader, index: Index) -> Read:
    """Returns what reads the rows of the index of which `reader` has the table."""

    def read(row: int, start: int, out: Buffer) -> None:
        reader.read(row, index.specs[row].path, bytes_from(start, len(out)), 1, out)

    return read


def bytes_from(start: int, count: int) -> Region:
    """Returns the region of so many bytes of a row."""
    return Region(start, (count,), (1,), (False,), (count,))


class TranscodedIndex:
    """One rank's part of a checkpoint, being encoded.

    - `read`: the rows of the checkpoint. `base`: of the baseline, where differences to it may be stored.
    - `put`: puts a pack; called in a thread of its own, in order.
    - `token`: of the names of its packs.
    """

    def __init__(
        self,
        transcoder: Transcoder,
        index: Index,
        read: Read,
        put: Callable[[Segment], object],
        *,
        token: str,
        baseline: Baseline | None = None,
        base: ReadBase | None = None,
        seal: Seal | None = None,
    ) -> None:
        encoding = transcoder.encoding
        self._transcoder, self._index, self._read, self._put = transcoder, index, read, put
        self._token, self._seal = token, seal
        self._baseline = baseline if encoding.dedupe else None
        self._base_rows = base if encoding.delta else None
        self._base_starts: Column | None = None
        """The first chunk of each row of the baseline, once something of it was read."""
        self._compresses = encoding.codec is not None and index.chunk_bytes <= MAX_CHUNK_BYTES
        self._rows = Rows.of(index)
        count = len(self._rows.row)
        self._before = np.full(count, -1, np.int64)
        if self._baseline is not None:
            paths = [spec.path for spec in index.specs]
            self._before = self._baseline.entries_at(
                self._rows.starts, index.chunk_bytes, lambda: keys_of(ShapeRows.of(index.specs), paths, index.length)
            )
        self._pack, self._offset, self._stored, self._codec = (np.zeros(count, np.int64) for _ in range(4))
        self._base, self._same, self._twin = (np.full(count, -1, np.int64) for _ in range(3))
        self._digests = np.zeros((count, 16), np.uint8)
        self._codecs = [RAW]
        self._filling: Filling | None = None
        self._written: list[PackEntry] = []
        self._spare: list[mmap.mmap] = []
        self._room = pack_room(int(self._rows.size.sum()), index.chunk_bytes)

    def run(self) -> tuple[Index, Json]:
        """Puts every pack. Returns the index, and how many bytes became what. Raises what `read` and `put` do."""
        going: _Putting | None = None
        try:
            for segment in self._segments():
                if going is not None:
                    self._spare.append(going.wait())
                going = _Putting(self._put, segment)
        finally:
            if going is not None:
                going.wait()
        columns = (self._pack, self._offset, self._stored, self._codec, self._base, self._same, self._twin)
        written = Written(*columns, self._rows.size, self._digests, self._codecs)
        named = int(self._rows.size[self._same >= 0].sum())
        deltas = int(self._rows.size[self._base >= 0].sum())
        stored, packs = joined(written, self._written, self._baseline)
        nowhere = np.zeros(len(self._index.length), np.int64)
        made = replace(self._index, packs=packs, pack=nowhere, offset=nowhere, stored=stored)
        return made, {
            "delta_bytes": deltas,
            "named_bytes": named,
            "raw_bytes": int(self._rows.size.sum()),
            "written_bytes": sum(pack.length for pack in self._written),
        }

    def _segments(self) -> Iterator[Segment]:
        """Yields the packs as they become full."""
        for batch in self._batches(self._new()):
            raws, bases = self._raws(batch)
            for number, raw, (name, data) in zip(batch, raws, self._encoded(batch, raws, bases), strict=True):
                if self._filling is not None and self._filling.length + len(data) + TAG > self._room:
                    yield self._closed(self._filling)
                self._add(number, name, raw.data if name == RAW else memoryview(data))
        if self._filling is not None:
            yield self._closed(self._filling)

    def _closed(self, filling: Filling) -> Segment:
        segment = filling.closed(lambda: None)
        self._written.append(segment.entry)
        self._filling = None
        return segment

    def _new(self) -> list[int]:
        """Notes what the baseline, or this checkpoint itself, has of each chunk; returns the others."""
        content, baseline = np.ascontiguousarray(self._index.digests), self._baseline
        if not self._transcoder.encoding.dedupe:
            return list(range(len(content)))
        same = np.zeros(len(content), np.bool_)
        if baseline is not None:
            same = (self._before >= 0) & baseline.usable[self._before]
            same[same] = (baseline.content[self._before[same]] == content[same]).all(axis=1)
            self._same[same] = self._before[same]
        names, sizes, seen, todo = content.tobytes(), self._rows.size.tolist(), dict[tuple[bytes, int], int](), []
        for number in np.flatnonzero(~same).tolist():
            key = names[number * 16 : number * 16 + 16], sizes[number]
            elsewhere = None if baseline is None else baseline.find(*key)
            if elsewhere is not None:
                self._same[number] = elsewhere
            elif seen.setdefault(key, number) != number:
                self._twin[number] = seen[key]
            else:
                todo.append(number)
        return todo

    def _batches(self, todo: Sequence[int]) -> Iterator[list[int]]:
        batch, nbytes = list[int](), 0
        for number in todo:
            size = int(self._rows.size[number])
            if batch and nbytes + size > BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(number)
            nbytes += size
        if batch:
            yield batch

    def _raws(self, batch: Sequence[int]) -> tuple[list[Buffer], list[Buffer | None]]:
        """Returns the bytes of these chunks, and those of the baseline that each may be a difference to."""
        places = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._rows.size[list(batch)])]).tolist()
        memory = np.empty(places[-1], np.uint8)
        raws = [memory[low:high] for low, high in pairwise(places)]
        bases: list[Buffer | None] = [None] * len(batch)
        allowed = self._may_differ(batch)
        behind = np.empty(places[-1], np.uint8) if allowed.any() else memory
        rows = self._rows.row
        # Chunks that follow each other in one row, and in the baseline, are read at once.
        runs = groupby(enumerate(batch), key=lambda one: (rows[one[1]], one[1] - one[0], bool(allowed[one[0]])))
        for (row, _, differs), group in runs:
            some = list(group)
            first, last = some[0][0], some[-1][0]
            low, high = places[first], places[last + 1]
            self._read(int(row), int(self._rows.begin[batch[first]]), memory[low:high])
            if differs and self._read_base(batch[first], behind[low:high]):
                for at in range(first, last + 1):
                    bases[at] = behind[places[at] : places[at + 1]]
        return raws, bases

    def _may_differ(self, batch: Sequence[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Returns which chunks may be stored as differences to the baseline's at their place."""
        before, baseline = self._before[list(batch)], self._baseline
        if not self._compresses or baseline is None or self._base_rows is None:
            return np.zeros(len(batch), np.bool_)
        delta = self._transcoder.encoding.delta
        found: np.ndarray[Any, np.dtype[np.bool_]] = before >= 0
        return found & baseline.usable[before] & (baseline.depth[before] < delta)

    def _read_base(self, number: int, out: Buffer) -> bool:
        baseline, before = self._baseline, int(self._before[number])
        assert baseline is not None, "it may differ"
        if self._base_starts is None:
            length = np.array([key[0] for key in baseline.rows()], np.int64)
            self._base_starts = chunk_starts(length, baseline.chunk_bytes)
        starts = self._base_starts
        row = int(np.searchsorted(starts, before, side="right")) - 1
        begin = (before - int(starts[row])) * baseline.chunk_bytes
        if self._base_rows is None or not self._base_rows(row, begin, out):
            self._base_rows = None
            return False
        return True

    def _encoded(
        self, batch: Sequence[int], raws: Sequence[Buffer], bases: Sequence[Buffer | None]
    ) -> list[tuple[str, bytes | memoryview]]:
        """Returns the name of the codec of each chunk and its stored bytes, which decode to what they were made of."""
        found: list[tuple[str, bytes | memoryview]] = [(RAW, raw.data) for raw in raws]
        if not self._compresses:
            return found
        encoding, specs = self._transcoder.encoding, self._index.specs

        def work(at: int) -> None:
            raw, base, spec = raws[at], bases[at], specs[int(self._rows.row[batch[at]])]
            behind = None if base is None else base.data
            names = self._transcoder.chosen(spec.path, spec.dtype, raw.data, behind)
            tried = tuple(codec(name, encoding.level) for name in names if name != RAW)
            name, data = encoded(raw.data, tried, behind)
            if name != RAW:
                one, back = codec(name), np.empty(len(raw), np.uint8)
                one.decode(memoryview(data), back.data, behind if one.needs_base else None)
                if not np.array_equal(back, raw):
                    raise CorruptionError(
                        f"a chunk of {spec.path} does not come back from {name}: is the memory of this machine faulty?",
                        subject=spec.path,
                    )
                if one.needs_base:
                    self._base[batch[at]] = self._before[batch[at]]
            found[at] = name, data

        parallel_for(work, range(len(batch)), encoding.workers)
        return found

    def _add(self, number: int, name: str, data: memoryview) -> None:
        filling = self._filling
        if filling is None:
            place = len(self._written)
            file = encoded_pack_file(self._index.rank, place, self._token)
            header = build_header((), {"tenuto.pack": file, "tenuto.save_id": self._index.save_id}, align=PAGE)
            memory = self._spare.pop() if self._spare else mmap.mmap(-1, -(-self._room // PAGE) * PAGE)
            sealer = None if self._seal is None else self._seal(file, len(header))
            filling = self._filling = Filling(
                place, file, header, memory, self._room, save_id=self._index.save_id, sealer=sealer
            )
        if name not in self._codecs:
            self._codecs.append(name)
        frame = filling.sealed(data)
        self._pack[number], self._offset[number], self._stored[number] = filling.number, filling.length, len(frame)
        self._codec[number] = self._codecs.index(name)
        self._digests[number] = np.frombuffer(digest(frame), np.uint8)
        filling.add(frame)


def pack_room(nbytes: int, chunk_bytes: int) -> int:
    """Returns how long a pack of an index of so many bytes may become."""
    return max(min(PACK_BYTES, nbytes + nbytes // 1024), -(-nbytes // MOST_PACKS), chunk_bytes) + TAG + 2 * PAGE


def pack_names(index: Index, token: str) -> list[str]:
    """Returns the names that the packs of an index may have."""
    nbytes, chunks = int(index.length.sum()), len(index.digests)
    room = pack_room(nbytes, index.chunk_bytes) - min(index.chunk_bytes, nbytes) - TAG - PAGE
    numbers = range((nbytes + TAG * chunks) // max(room, PAGE) + 10)
    return [encoded_pack_file(index.rank, number, token) for number in numbers]


def bases_of(baselines: Sequence[Baseline | None]) -> tuple[CheckpointId, ...]:
    """Returns the checkpoints in whose directories the packs of these baselines lie."""
    return tuple(sorted({home for one in baselines if one is not None for home in one.homes}))
