"""What one structure of state needs at each save, and the memory it is captured into: planned once per structure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from tenuto.codec.chunk_map import ChunkMap, chunk_starts
from tenuto.codec.digest import DIGEST_BYTES, digest
from tenuto.concurrency.worker_threads import gc_paused
from tenuto.engine.staging.arena import Arena
from tenuto.engine.staging.buffer_layout import BufferLayout, plan_layout
from tenuto.engine.staging.capture import STEPS_IN_WINDOW, Capturer
from tenuto.events import Emitter
from tenuto.model.canonical_json import Spelled
from tenuto.model.leaf import LeafSpec
from tenuto.record import record
from tenuto.repo.format.index import ShapeRows
from tenuto.repo.format.manifest import leaf_table
from tenuto.state.contract import Flattened

# --------------------------------------------------------------------------------------------------
# Where each chunk of each leaf lies in an image: computed once per layout, used at every save.

Column = np.ndarray[Any, np.dtype[np.int64]]


class ChunkTable:
    """Chunks in image order: `begin` and `end` are positions in the image, `row` the chunk's place in the index.

    `start` (n + 1) gives each leaf's first row, leaves in the order of the index. A leaf of no bytes has no chunk.
    """

    def __init__(self, layout: BufferLayout, chunk_bytes: int) -> None:
        self.start: Column = chunk_starts(layout.length, chunk_bytes)
        digests = np.empty((0, DIGEST_BYTES), np.uint8)  # they are not known yet
        image = ChunkMap(layout.pack, layout.start, layout.length, self.start, digests, chunk_bytes)
        chunks = image.chunks(layout.order)
        self.begin: Column = chunks.offset
        self.end: Column = chunks.end
        self.row: Column = chunks.digest
        self.total = len(chunks)


class Observer(Protocol):
    """Looks at chunks of an image right after they were digested, while the processor still has them."""

    batch_bytes: int
    """About how many bytes are digested before they are looked at."""

    def examine(self, first: int, stop: int) -> None:
        """Looks at chunks `first..stop-1` of the image."""
        ...


class Digester:
    """Digests the chunks of one save's image as it fills up from its beginning, which has taken `seconds`. `observer`
    is set before the first chunk."""

    def __init__(self, table: ChunkTable, image: memoryview) -> None:
        self._table = table
        self._image = image
        self._done = 0
        self._parts: list[bytes] = []
        self.seconds = 0.0
        self.observer: Observer | None = None

    def advance(self, filled: int) -> None:
        """Digests every chunk that lies wholly below position `filled` and has not been digested yet."""
        table, observer = self._table, self.observer
        stop = int(np.searchsorted(table.end, filled, side="right"))
        if stop <= self._done:
            return
        began = time.perf_counter()
        if observer is None:
            self._digest(stop)
        while self._done < stop:
            first, batch = self._done, table.begin[self._done] + (0 if observer is None else observer.batch_bytes)
            self._digest(min(stop, max(first + 1, int(np.searchsorted(table.end, batch, side="right")))))
            if observer is not None:
                observer.examine(first, self._done)
        self.seconds += time.perf_counter() - began

    def _digest(self, stop: int) -> None:
        table, image = self._table, self._image
        begins = table.begin[self._done : stop].tolist()
        ends = table.end[self._done : stop].tolist()
        self._parts.extend([digest(image[begin:end]) for begin, end in zip(begins, ends, strict=True)])
        self._done = stop

    def parts(self, first: int, stop: int) -> list[bytes]:
        """Returns the digests of chunks `first..stop-1` of the image, which lie below what was digested."""
        assert stop <= self._done, "digested before"
        return self._parts[first:stop]

    def digests(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns all digests in index order, uint8 [chunks, 16]."""
        assert self._done == self._table.total, "the image was not digested to its end"
        found = np.frombuffer(b"".join(self._parts), np.uint8).reshape(-1, 16)
        out = np.empty_like(found)
        out[self._table.row] = found
        return out


@record
class ImagePlan:
    """Where the leaves of one structure, and their chunks, lie in an image."""

    rank: int
    chunk_bytes: int
    layout: BufferLayout
    chunks: ChunkTable

    @classmethod
    def of(cls, specs: Sequence[LeafSpec], *, rank: int, chunk_bytes: int) -> ImagePlan:
        layout = plan_layout(specs, rank=rank)
        return cls(rank, chunk_bytes, layout, ChunkTable(layout, chunk_bytes))


@record
class SavePlan(ImagePlan):
    """What every save of one structure uses. `table`: the leaves, for the index and for the content digest."""

    fingerprint: str
    rows: ShapeRows
    table: Spelled
    capturer: Capturer
    arena: Arena


class ArenaSource(Protocol):
    """Supplies the memory of one image."""

    def acquire(self, nbytes: int, *, step: int = 0) -> Arena:
        """Returns at least `nbytes`, or a window that holds four steps of `step` bytes; the arena returned before is no
        longer valid."""
        ...

    def release(self) -> None: ...


Source = TypeVar("Source", bound=ArenaSource)


class StagingBuffer(Generic[Source]):
    """The memory of one image, and the plan of the structure that was captured into it last."""

    def __init__(self, memory: Source, chunk_bytes: int, emitter: Emitter, *, rank: int) -> None:
        self.memory = memory
        self.plan: SavePlan | None = None
        self.writing = False
        """Whether a save to the store fills or reads the image."""
        self._chunk_bytes = chunk_bytes
        self._emitter = emitter
        self._rank = rank

    def fits(self, flattened: Flattened) -> bool:
        """Returns whether there is a plan for this state already."""
        return self.plan is not None and self.plan.fingerprint == flattened.fingerprint

    @gc_paused
    def prepare(self, flattened: Flattened) -> SavePlan:
        """Returns the plan for this state. Raises SaveFailed where there is no memory for it (I9), and what `acquire`
        does."""
        if self.plan is not None and self.fits(flattened):
            return self.plan
        self.plan = None  # its views would keep the memory that is given back before more is asked for
        layout = plan_layout(flattened.specs, rank=self._rank, in_home=flattened.in_home)
        arena = self.memory.acquire(layout.nbytes, step=self._chunk_bytes)
        capturer = Capturer(flattened, layout, arena)
        if arena.window is not None:
            step = max(capturer.largest_step(flattened), self._chunk_bytes)
            if STEPS_IN_WINDOW * step > arena.window:
                arena = self.memory.acquire(layout.nbytes, step=step)
                capturer = Capturer(flattened, layout, arena)
        if arena.note and not arena.contended:  # of an owner, the claim says what there is to say
            self._emitter.report(
                f"saves are staged in memory of this process, since shared memory is not available ({arena.note})"
            )
        self.plan = SavePlan(
            self._rank,
            self._chunk_bytes,
            layout,
            ChunkTable(layout, self._chunk_bytes),
            flattened.fingerprint,
            ShapeRows.of(flattened.specs),
            leaf_table(flattened.specs),
            capturer,
            arena,
        )
        return self.plan

    def release(self) -> None:
        """Gives the memory back."""
        self.plan = None
        self.memory.release()
