"""Encodes a save's image into packs: names what earlier checkpoints hold, compresses the rest, and writes it behind the
capture.

`StateEncoder` lives as long as a run's saver and knows what its last checkpoint holds, the *baseline*. `EncodedPacks`
is one save of it. Chunks are taken in the order of the image, as the capture fills it; what is new goes into packs of
bounded length, of which one is put while the next is being encoded. A long run of new chunks that are stored as they
are is a pack of its own, put from where it lies in the image.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tenuto.codec.choosing import choose, codecs_for, encoded
from tenuto.codec.contract import Codec
from tenuto.codec.digest import digest
from tenuto.codec.registry import codec
from tenuto.concurrency.memory_headroom import memory_headroom
from tenuto.concurrency.worker_threads import lower_priority
from tenuto.engine.save.baseline import Baseline, baseline_in, baseline_of, keys_of, sizes_of
from tenuto.engine.save.encoded_pack import (
    PAGE,
    STRAIGHT_BYTES,
    Body,
    Filling,
    Rates,
    Segment,
    longest_pack,
    straight_bytes,
    stretches,
)
from tenuto.engine.save.joined_chunks import Written, joined
from tenuto.engine.save.rounded_copies import CopySearch
from tenuto.engine.staging.plan import SavePlan
from tenuto.engine.staging.pool import SPARE_BYTES
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, Json, PackEntry, Receipt
from tenuto.policy.encoding import Encoding
from tenuto.repo.format.object_names import encoded_pack_file
from tenuto.repo.format.safetensors import build_header
from tenuto.repo.format.stored_chunks import MAX_CHUNK_BYTES, RAW
from tenuto.repo.repository import Repo
from tenuto.seal.cipher import TAG, Identity, PackSealer

if TYPE_CHECKING:
    from tenuto.engine.save.job import Job

BATCH_BYTES: Final = 8 << 20
"""Bytes of the image that are encoded at a time."""
FIRST_PACK_BYTES: Final = 8 << 20
"""Packs double from here on: the writer begins early."""
LONGEST_RUN_BYTES: Final = 1 << 30
"""Each such pack may be four times as long as the one before: the writer begins early, and few packs are flushed."""
_TRUSTED: Final = 16
"""For so many saves what was chosen for a leaf is not asked again."""
_SAMPLES: Final = 8
"""So many chunks `auto` encodes in the first save to learn what that would give; then one in each save."""

Column = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class StateEncoder:
    """Encodes the saves of one run and one rank, one after the other."""

    def __init__(self, repo: Repo, encoding: Encoding, *, rank: int = 0) -> None:
        self.encoding = encoding
        self.rates = Rates()
        self.saves = 0
        self.memory: Bytes | None = None
        """The image of a save, where differences to it may be stored."""
        self.memory_of: CheckpointId | None = None
        """Whose image that is; None while it is being overwritten, and after a save that did not commit."""
        self.chosen: dict[tuple[str, int, bool], tuple[tuple[str, ...], int]] = {}
        """By structure, leaf, and whether there is a base: the codecs to try, and when they were chosen."""
        if encoding.codec is not None:
            codec(f"planes4-{encoding.codec}")  # an absent package is told now, and not at each save
        self.copies = CopySearch()
        self.pool = self._new_pool()
        self._repo = repo
        self._rank = rank
        self.keys = repo.keys
        self.repository = repo.id
        self._baseline: Baseline | None = None
        self._looked = False
        self._last: int | None = None
        """The bytes that the last save has put."""
        self._buffers: list[mmap.mmap] = []

    @property
    def nbytes(self) -> int:
        """Returns the bytes of memory that it keeps between saves."""
        return (0 if self.memory is None else self.memory.nbytes) + sum(map(len, self._buffers))

    @property
    def newest(self) -> CheckpointId | None:
        """Returns the committed checkpoint whose chunks the next save may name."""
        return None if self._baseline is None else self._baseline.id

    def bases(self, parent: CheckpointId | None) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints whose packs the next save may name. `parent`: what the attempt continues from, the
        baseline of its first save."""
        if not self._looked and self.encoding.dedupe and parent is not None:
            self._baseline = baseline_of(self._repo, parent, self._rank)
            if self._baseline is not None and self._baseline.sealed != self._sealed():
                self._baseline = None  # what is sealed rests on what is sealed by the same key, and nothing else
        self._looked = True
        return () if self._baseline is None else self._baseline.homes

    def begin_afresh(self) -> None:
        """Has the first save name nothing of what its attempt continues from."""
        self._looked = True

    def _sealed(self) -> int | None:
        return None if self.keys is None else self.keys.number

    def hidden(self, digests: Bytes) -> Bytes:
        """Returns digests of contents as an index has them."""
        return digests if self.keys is None else self.keys.hide(digests, self.keys.number, self.repository)

    def begin(
        self, job: Job, usable: Sequence[CheckpointId], is_kept: Callable[[str], bool] = lambda name: True
    ) -> EncodedPacks:
        """Returns the packs of a save. `usable`: the checkpoints on which it may rest. `is_kept`: whether every place
        that this save needs has the pack of this name."""
        baseline = self._baseline
        if baseline is not None:
            gone = [pack.at not in usable or not is_kept(pack.object_name(baseline.id)) for pack in baseline.packs]
            baseline = baseline.without(gone) if any(gone) else baseline
        return EncodedPacks(self, job, baseline)

    def expected(self, nbytes: int) -> int:
        """Returns about how many bytes a save of an image of `nbytes` will put: twice as many as the last one did."""
        return nbytes if self._last is None else min(nbytes, 2 * self._last)

    def committed(self, packs: EncodedPacks, index: Index) -> None:
        """Makes a save the baseline of the next one."""
        self.saves += 1
        self.memory_of = packs.id if packs.keeps_image else None
        self._last = sum(pack.length for pack in index.packs if pack.at is None)
        if self.encoding.dedupe:
            self._baseline = baseline_in(index, packs.id, fingerprint=packs.fingerprint)

    def failed(self) -> None:
        """Gives back the memory of an image that a save which broke off has overwritten."""
        if self.memory_of is None:
            self.memory = None

    def rest(self) -> None:
        """Gives back buffers and threads until the next save, not what differences are made to."""
        self.pool.shutdown(wait=False)
        self.pool, self._buffers = self._new_pool(), []

    def close(self) -> None:
        self.pool.shutdown(wait=False)
        self.memory, self._buffers = None, []

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.encoding.workers, "tenuto-encode", lower_priority)

    @property
    def compresses(self) -> bool:
        """Returns whether what is new is to be compressed now."""
        return self.encoding.codec is not None and (not self.encoding.auto or self.rates.worth)

    def decision(self) -> str:
        """Returns in words what was decided for a save, and why."""
        name = self.encoding.codec
        if name is None:
            return "chunks are stored as they are"
        return self.rates.decision(name) if self.encoding.auto else f"compressed by {name}, as asked for"

    def buffer(self, nbytes: int) -> mmap.mmap:
        """Returns memory for a pack, which was touched before where there is some."""
        nbytes = -(-nbytes // PAGE) * PAGE
        for place, one in enumerate(self._buffers):
            if len(one) >= nbytes:
                return self._buffers.pop(place)
        if self._buffers:
            self._buffers.pop()
        return mmap.mmap(-1, nbytes)

    def give_back(self, memory: mmap.mmap) -> None:
        if len(memory) > 2 * PAGE:
            self._buffers = sorted([*self._buffers, memory], key=len)


class EncodedPacks:
    """The packs of one save. `write` may be called again after a put has failed: it continues with that pack."""

    def __init__(self, encoder: StateEncoder, job: Job, baseline: Baseline | None) -> None:
        plan: SavePlan = job.plan
        self.id = job.save.id
        self.fingerprint = plan.fingerprint
        self._encoder = encoder
        self._job = job
        self._plan = plan
        self._baseline = baseline
        self._compresses = encoder.compresses and plan.chunk_bytes <= MAX_CHUNK_BYTES
        self.decision = encoder.decision()
        self._pack_bytes = longest_pack(plan)
        self._sizes = sizes_of(plan)
        count = len(self._sizes)
        self._leaf = np.repeat(np.arange(len(plan.chunks.start) - 1), np.diff(plan.chunks.start))
        self._before = np.full(count, -1, np.int64)
        """For each chunk, in the order of the index, the chunk of the baseline at its place, or -1."""
        if baseline is not None:
            self._before = baseline.entries_for(
                plan,
                lambda: keys_of(plan.rows, [spec.path for spec in job.flattened.specs], plan.layout.length),
            )
        self._memory, self._compares = self._image_of_baseline()
        self._copies = encoder.copies.begin(plan, job.flattened.specs, encoder.saves) if self._compresses else None
        # Of each chunk, in the order of the index, one of three: a new one's place; the chunk of the baseline, or of
        # this save, that it is.
        self._pack, self._offset, self._stored, self._codec = (np.zeros(count, np.int64) for _ in range(4))
        self._base, self._same, self._twin, self._master = (np.full(count, -1, np.int64) for _ in range(4))
        self._digests = np.zeros((count, 16), np.uint8)
        self._codecs: list[str] = [RAW]
        self._seen: dict[tuple[bytes, int], int] = {}
        self._entries: dict[int, PackEntry] = {}
        self._waiting: deque[Segment] = deque()
        self._coming = self._segments()
        self._packs_begun = 0
        self._filling: Filling | None = None
        self._run = (0, 0)
        """Chunks of the image, first and stop, that follow each other, are new, and are to be stored as they are."""
        # Sealed chunks are not as they are in the image, and an image in a window is soon overwritten.
        self._straight = 0 if encoder.keys is not None or plan.arena.window is not None else straight_bytes(plan)
        self._longest_run = self._straight or STRAIGHT_BYTES
        self._samples = _SAMPLES if not encoder.rates.encode else 1
        self._encoding = np.zeros(3)
        """Bytes encoded, bytes that became of them, and seconds."""
        self._progress: Callable[[int], None] = lambda end: None
        self._ended = False
        self._broken: BaseException | None = None
        """What the encoding broke off with: it does not continue."""

    def _image_of_baseline(self) -> tuple[Bytes | None, bool]:
        """Returns the memory for the image that differences are made to, and whether it holds that of the baseline."""
        encoder, nbytes = self._encoder, self._plan.layout.nbytes
        if not encoder.encoding.delta or not self._compresses or self._plan.arena.window is not None:
            return None, False
        baseline, image_of = self._baseline, encoder.memory_of
        encoder.memory_of = None
        if encoder.memory is None or encoder.memory.nbytes != nbytes:
            encoder.memory = image_of = None
            room = memory_headroom()
            if room is not None and room < nbytes + SPARE_BYTES:
                return None, False
            encoder.memory = np.empty(nbytes, np.uint8)
        same = baseline is not None and baseline.id == image_of and baseline.fingerprint == self.fingerprint
        return encoder.memory, same

    @property
    def keeps_image(self) -> bool:
        """Whether the encoder's memory has the image of this save, once it is written."""
        return self._memory is not None

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(
        self,
        put: Callable[[Segment], Receipt],
        receipts: list[Receipt],
        progress: Callable[[int], None] = lambda end: None,
    ) -> None:
        """Encodes everything and puts every pack, whose receipt it adds to `receipts`. Raises what `put` does, and what
        broke the capture off. `progress(end)`: how far the image has been taken."""
        if self._broken is not None:
            raise self._broken
        self._progress = progress

        def timed(segment: Segment) -> Receipt:
            began = time.perf_counter()
            receipt = put(segment)
            self._encoder.rates.add_put(segment.length, time.perf_counter() - began)
            return receipt

        with ThreadPoolExecutor(1, "tenuto-put", lower_priority if self._job.digest_while_writing else None) as writer:
            while self._waiting or not self._ended:
                going = writer.submit(timed, self._waiting[0]) if self._waiting else None
                try:
                    if not self._ended and len(self._waiting) < 2:
                        coming = next(self._coming, None)
                        self._ended = coming is None
                        self._waiting.extend([] if coming is None else [coming])
                except BaseException as error:
                    self._broken = error
                    raise
                finally:
                    if going is not None:
                        receipts.append(going.result())
                        done = self._waiting.popleft()
                        self._entries[done.number] = done.entry
                        self._encoder.give_back(done.memory)

    def _segments(self) -> Iterator[Segment]:
        """Yields the packs as they become full."""
        job, table = self._job, self._plan.chunks
        window = self._plan.arena.window
        most = BATCH_BYTES if window is None else min(BATCH_BYTES, window // 4)
        first = 0
        while first < table.total:
            stop = max(int(np.searchsorted(table.end, int(table.begin[first]) + most, side="right")), first + 1)
            end = int(table.end[stop - 1])
            job.filling.wait(end)
            if job.digest_while_writing:
                job.digester.advance(end)
            job.save.moves()
            if self._compresses:
                for some in self._ready(first, stop, end):
                    todo = self._new(some)
                    yield from self._add(todo, self._bodies(todo))
                    self._keep_image(some)
            else:
                todo = self._new(np.arange(first, stop))
                self._sample(todo, end)
                for stretch in stretches(todo, table.begin, table.end):
                    yield from self._add_run(*stretch)
                if window is not None:
                    yield from self._end_run()
            job.filling.written(end)
            self._progress(end)
            first = stop
        job.filling.wait(self._plan.layout.nbytes)  # a fenced capture holds its end back until everything is whole
        yield from self._end_run()
        if self._filling is not None:
            yield self._filling.closed(job.save.moves)
        raw, stored, took = self._encoding.tolist()
        if took:
            self._encoder.rates.add_encoded(raw, stored, took, whole=self._compresses)

    def _ready(self, first: int, stop: int, end: int) -> Iterator[Column]:
        """Yields chunks of the image in the order in which they are encoded, some at a time: those of `first..stop-1`
        that wait for nothing, then those that have waited for what lies before `end`."""
        chunks = np.arange(first, stop)
        if self._copies is None:
            yield chunks
            return
        yield chunks[~self._copies.waits[first:stop]]
        due = self._copies.due(end)
        batch = np.cumsum(self._sizes[self._plan.chunks.row[due]]) // BATCH_BYTES
        yield from np.split(due, np.flatnonzero(np.diff(batch)) + 1)

    def _keep_image(self, chunks: Column) -> None:
        """Keeps these chunks of the image, where the next save may make differences to it."""
        if self._memory is not None:
            table, image = self._plan.chunks, self._plan.arena.buffer
            for first, stop in stretches(chunks, table.begin, table.end):
                begin, end = int(table.begin[first]), int(table.end[stop - 1])
                np.copyto(self._memory[begin:end], image[begin:end])

    def _add(self, chunks: Column, bodies: Iterable[Body]) -> Iterator[Segment]:
        """Copies chunks into packs; yields those that are full."""
        rows = self._plan.chunks.row[chunks]
        for row, body in zip(rows.tolist(), bodies, strict=True):
            filling, moves = self._filling, self._job.save.moves
            if filling is not None and filling.length + len(body.data) + TAG > filling.room:
                yield filling.closed(moves)
                filling = None
            if filling is None:
                number, name = self._next_pack()
                header = self._header(name, PAGE)
                sealer = self._sealer(name, len(header))
                room = min(max(FIRST_PACK_BYTES << min(number, 8), 2 * self._plan.chunk_bytes), self._pack_bytes)
                filling = self._filling = Filling(
                    number,
                    name,
                    header,
                    self._encoder.buffer(room),
                    room,
                    save_id=self._job.save.save_id,
                    sealer=sealer,
                )
            if body.codec not in self._codecs:
                self._codecs.append(body.codec)
            data = filling.sealed(body.data)
            self._pack[row], self._offset[row], self._stored[row] = filling.number, filling.length, len(data)
            self._codec[row], self._base[row] = self._codecs.index(body.codec), body.base
            self._master[row] = body.master
            known = body.digest if data is body.data else b""
            self._digests[row] = np.frombuffer(known or digest(data), np.uint8)
            filling.add(data)

    def _add_run(self, first: int, stop: int) -> Iterator[Segment]:
        """Adds chunks `first..stop-1` of the image, which follow each other there, to be stored as they are."""
        table, (begun, ended) = self._plan.chunks, self._run
        if begun < ended and (ended != first or table.begin[first] != table.end[ended - 1]):
            yield from self._end_run()
            begun = first
        self._run = (begun if begun < ended else first, stop)
        if int(table.end[stop - 1] - table.begin[self._run[0]]) >= self._longest_run:
            yield from self._end_run()

    def _end_run(self) -> Iterator[Segment]:
        """Yields the run as a pack of its own, or copies it, if it is short."""
        (first, stop), self._run = self._run, (0, 0)
        if first == stop:
            return
        table, image, digests = self._plan.chunks, self._plan.arena.buffer, self._job.digester.parts(first, stop)
        begin, end = int(table.begin[first]), int(table.end[stop - 1])
        if not self._straight or end - begin < self._straight:
            chunks = np.arange(first, stop)
            bodies = (
                Body(RAW, image[low:high].data, -1, content)
                for low, high, content in zip(
                    table.begin[first:stop].tolist(), table.end[first:stop].tolist(), digests, strict=True
                )
            )
            yield from self._add(chunks, bodies)
            return
        number, name = self._next_pack()
        # The image lies in the file as in its memory, to the page: so it can be written past the page cache.
        inside = -(-begin // PAGE) * PAGE
        header = self._header(name, PAGE + begin % PAGE)
        memory = mmap.mmap(-1, 2 * PAGE)
        memory[: len(header)] = header
        memory[len(header) : len(header) + inside - begin] = image[begin:inside].tobytes()
        rows = table.row[first:stop]
        self._pack[rows], self._offset[rows] = number, table.begin[first:stop] - begin + len(header)
        self._stored[rows] = self._sizes[rows]
        self._digests[rows] = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)
        self._longest_run = max(min(4 * self._longest_run, LONGEST_RUN_BYTES), self._straight)
        entry = PackEntry(name, len(header) + end - begin, len(header), digest(header))
        yield Segment(number, entry, memory, image[inside:end].data, self._job.save.moves)

    def _next_pack(self) -> tuple[int, str]:
        number, self._packs_begun = self._packs_begun, self._packs_begun + 1
        return number, encoded_pack_file(self._plan.rank, number)

    def _header(self, name: str, length: int) -> bytes:
        return build_header((), {"tenuto.pack": name, "tenuto.save_id": self._job.save.save_id}, align=length)

    def _sealer(self, name: str, start: int) -> PackSealer | None:
        keys, save = self._encoder.keys, self._job.save
        if keys is None:
            return None
        identity = Identity(self._encoder.repository, save.save_id, f"{save.id.directory}/{name}")
        return keys.new_pack(identity, start=start)

    # -- what is new ---------------------------------------------------------------------------------------------------

    def _new(self, chunks: Column) -> Column:
        """Notes what the baseline, or this save, has of these chunks of the image; returns the others."""
        if not self._encoder.encoding.dedupe or not len(chunks):
            return chunks
        rows, parts = self._plan.chunks.row[chunks], self._job.digester.parts
        table = self._plan.chunks
        digests = [part for run in stretches(chunks, table.begin, table.end) for part in parts(*run)]
        found = self._encoder.hidden(np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16))
        same, baseline, copies = np.zeros(len(rows), np.bool_), self._baseline, self._copies
        if baseline is not None:
            before = self._before[rows]
            equal = (before >= 0) & (baseline.content[before] == found).all(axis=1)
            same = equal & baseline.usable[before]
            if copies is not None:
                again = equal & baseline.again[before]
                again &= copies.masters_among(self._same, rows, baseline.stored.base[before])
                self._master[rows[again]] = copies.master[rows[again]]
                same |= again
            self._same[rows[same]] = before[same]
        todo = []
        for at in np.flatnonzero(~same).tolist():
            row = int(rows[at])
            key = found[at].tobytes(), int(self._sizes[row])
            elsewhere = None if baseline is None else baseline.find(*key)
            if elsewhere is not None:
                self._same[row] = elsewhere
            elif key in self._seen:
                self._twin[row] = self._seen[key]
            else:
                if copies is None or copies.master[row] < 0:  # what rests on a chunk of its own is no other's twin
                    self._seen[key] = row
                todo.append(int(chunks[at]))
        return np.array(todo, np.int64)

    # -- encoding ------------------------------------------------------------------------------------------------------

    def _raw(self, chunk: int) -> memoryview:
        table = self._plan.chunks
        return self._plan.arena.buffer[int(table.begin[chunk]) : int(table.end[chunk])].data

    def _bodies(self, chunks: Column) -> list[Body]:
        """Returns these chunks of the image encoded; valid until the image changes."""
        if not len(chunks):
            return []
        began = time.perf_counter()
        # What is chosen for a leaf depends on its first chunk, and not on which thread comes first.
        rows = self._plan.chunks.row[chunks]
        _, firsts = np.unique(self._leaf[rows], return_index=True)
        list(self._encoder.pool.map(self._choose, chunks[firsts].tolist()))
        found = list(self._encoder.pool.map(lambda chunk: self._encoded(chunk, self._raw(chunk)), chunks.tolist()))
        nbytes = int(self._sizes[rows].sum())
        self._encoding += nbytes, sum(len(body.data) for body in found), time.perf_counter() - began
        return found

    def _sample(self, chunks: Column, end: int) -> None:
        """Encodes a chunk now and then, where it may turn out to be worth encoding them all."""
        encoding, encoder = self._encoder.encoding, self._encoder
        if not encoding.auto or not len(chunks) or self._plan.chunk_bytes > MAX_CHUNK_BYTES:
            return
        # Other parts of the state in each save; all over it in the first.
        wanted = _SAMPLES if not encoder.rates.encode else 1
        due = (wanted - self._samples + (encoder.saves * 0.618) % 1) / wanted
        if not self._samples or end < due * self._plan.layout.nbytes:
            return
        self._samples -= 1
        chunk = int(chunks[len(chunks) // 2])
        raw = self._raw(chunk)
        self._encoded(chunk, raw)  # chooses a codec, which whole saves do once for many chunks
        began = time.perf_counter()
        stored = len(self._encoded(chunk, raw).data)
        self._encoding += len(raw), stored, (time.perf_counter() - began) / encoding.workers

    def _encoded(self, chunk: int, raw: memoryview) -> Body:
        row, encoding = int(self._plan.chunks.row[chunk]), self._encoder.encoding
        if self._copies is not None and self._copies.master[row] >= 0:
            copied = self._copies.encoded(row, raw, encoding.codec or "zstd", encoding.level)
            if copied is not None:
                return Body(*copied, -1, master=int(self._copies.master[row]))
        base = self._base_of(row, chunk)
        name, data = encoded(raw, self._tried(int(self._leaf[row]), raw, base), base)
        if name == RAW:
            return Body(name, data, -1, self._job.digester.parts(chunk, chunk + 1)[0])
        return Body(name, data, int(self._before[row]) if codec(name).needs_base else -1)

    def _choose(self, chunk: int) -> None:
        """Chooses the codecs of the chunk's leaf, if they are not chosen."""
        row = int(self._plan.chunks.row[chunk])
        if self._copies is None or self._copies.master[row] < 0:
            self._tried(int(self._leaf[row]), self._raw(chunk), self._base_of(row, chunk))

    def _base_of(self, row: int, chunk: int) -> memoryview | None:
        """Returns what a chunk was in the baseline, if it may be stored as the difference to that."""
        baseline, before, table = self._baseline, int(self._before[row]), self._plan.chunks
        if not self._compares or baseline is None or self._memory is None or before < 0:
            return None
        if not baseline.usable[before] or baseline.depth[before] >= self._encoder.encoding.delta:
            return None
        return self._memory[int(table.begin[chunk]) : int(table.end[chunk])].data

    def _tried(self, leaf: int, raw: memoryview, base: memoryview | None) -> tuple[Codec, ...]:
        """Returns the codecs to try, the best first: what stored a chunk of this leaf in the fewest bytes."""
        encoder, rows = self._encoder, self._plan.rows
        encoding, key = encoder.encoding, (self.fingerprint, leaf, base is not None)
        names, when = encoder.chosen.get(key, ((), -_TRUSTED))
        if when + _TRUSTED <= encoder.saves:
            dtype, family = rows.dtypes[int(rows.code[leaf])], encoding.codec or "zstd"
            best = choose(dtype, [raw], None if base is None else [base], family=family, level=encoding.level).name
            plain = codecs_for(dtype, family).plain[0]
            names = (best, plain) if codec(best).needs_base else (best,)
            encoder.chosen[key] = names, encoder.saves
        return tuple(codec(name, encoding.level) for name in names if name != RAW)

    # -- the result ----------------------------------------------------------------------------------------------------

    def index(self, plain: Index) -> Index:
        """Returns the index of what was written. `plain`: that of the image as it is."""
        columns = (self._pack, self._offset, self._stored, self._codec, self._base, self._same, self._twin, self._sizes)
        rounded = np.zeros(len(self._sizes), np.uint8) if self._copies is None else self._copies.rounded
        own = Written(*columns, self._digests, self._codecs, self._master, rounded)
        written = [self._entries[number] for number in range(self._packs_begun)]
        stored, packs = joined(own, written, self._baseline)
        nowhere = np.zeros(len(plain.length), np.int64)
        keys = self._encoder.keys
        return replace(
            plain,
            packs=packs,
            pack=nowhere,
            offset=nowhere,
            stored=stored,
            digests=self._encoder.hidden(plain.digests),
            sealed=None if keys is None else keys.number,
        )

    def about(self, index: Index) -> Json:
        """Returns what a person may want to know of it, for the manifest."""
        stored = index.stored
        assert stored is not None
        own = sum(pack.length for pack in index.packs if pack.at is None)
        named = int(self._sizes[self._same >= 0].sum())
        deltas = int(self._sizes[self._base >= 0].sum())
        return {
            "decision": self.decision,
            "delta_bytes": deltas,
            "named_bytes": named,
            "raw_bytes": int(self._sizes.sum()),
            **({} if stored.rounded is None else {"rounded_bytes": int(self._sizes[self._master >= 0].sum())}),
            "written_bytes": own,
        }
