"""What one structure of state needs at each save: made once, and again when the structure changes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tenuto.codec.chunk_map import ChunkMap, chunk_starts
from tenuto.codec.digest import DIGEST_BYTES, digest
from tenuto.concurrency.gc_pause import gc_paused
from tenuto.engine.staging.arena import Arena
from tenuto.engine.staging.budget import STEPS_IN_WINDOW
from tenuto.engine.staging.buffer_layout import BufferLayout, plan_layout
from tenuto.engine.staging.capture import Capturer
from tenuto.events import Emitter, Warned
from tenuto.model.canonical_json import Spelled
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


class Digester:
    """Digests an image's chunks as the image fills up from its beginning, which has taken `seconds`. One use per
    save."""

    def __init__(self, table: ChunkTable, image: memoryview) -> None:
        self._table = table
        self._image = image
        self._done = 0
        self._parts: list[bytes] = []
        self.seconds = 0.0

    def advance(self, filled: int) -> None:
        """Digests every chunk that lies wholly below position `filled` and has not been digested yet."""
        table, image = self._table, self._image
        stop = int(np.searchsorted(table.end, filled, side="right"))
        if stop <= self._done:
            return
        began = time.perf_counter()
        begins = table.begin[self._done : stop].tolist()
        ends = table.end[self._done : stop].tolist()
        self._parts.extend([digest(image[begin:end]) for begin, end in zip(begins, ends, strict=True)])
        self._done = stop
        self.seconds += time.perf_counter() - began

    def digests(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All digests in index order, uint8 [chunks, 16]."""
        assert self._done == self._table.total, "the image was not digested to its end"
        found = np.frombuffer(b"".join(self._parts), np.uint8).reshape(-1, 16)
        out = np.empty_like(found)
        out[self._table.row] = found
        return out


@dataclass(frozen=True, slots=True)
class SavePlan:
    fingerprint: str
    layout: BufferLayout
    chunks: ChunkTable
    rows: ShapeRows
    table: Spelled
    """Of the leaves, for the index and for the content digest."""
    capturer: Capturer
    arena: Arena


class ArenaSource(Protocol):
    """Where a planner takes the memory of an image from."""

    def acquire(self, nbytes: int, *, step: int = 0) -> Arena:
        """At least `nbytes`, or a window that holds four steps of `step` bytes; the one given before is no longer
        valid."""
        ...

    def release(self) -> None: ...


class Planner:
    """Keeps the plan of the structure that was saved last, and the memory that it takes."""

    def __init__(self, arenas: ArenaSource, chunk_bytes: int, emitter: Emitter, *, rank: int) -> None:
        self._arenas = arenas
        self._chunk_bytes = chunk_bytes
        self._emitter = emitter
        self._rank = rank
        self._plan: SavePlan | None = None

    def fits(self, flattened: Flattened) -> bool:
        """Whether there is a plan for this state already."""
        return self._plan is not None and self._plan.fingerprint == flattened.fingerprint

    @gc_paused
    def plan(self, flattened: Flattened) -> SavePlan:
        """The plan for this state. SaveFailed where there is no memory for it (I9), and as `acquire`."""
        if self._plan is not None and self.fits(flattened):
            return self._plan
        self._plan = None
        layout = plan_layout(flattened.specs, rank=self._rank)
        arena = self._arenas.acquire(layout.nbytes, step=self._chunk_bytes)
        capturer = Capturer(flattened, layout, arena)
        if arena.window is not None:
            step = max(capturer.largest_step(flattened), self._chunk_bytes)
            if STEPS_IN_WINDOW * step > arena.window:
                arena = self._arenas.acquire(layout.nbytes, step=step)
                capturer = Capturer(flattened, layout, arena)
        if arena.note:
            self._emitter.emit(Warned(f"the image lies in {arena.kind}: {arena.note}"))
        self._plan = SavePlan(
            flattened.fingerprint,
            layout,
            ChunkTable(layout, self._chunk_bytes),
            ShapeRows.of(flattened.specs),
            leaf_table(flattened.specs),
            capturer,
            arena,
        )
        return self._plan

    def release(self) -> None:
        """Gives the memory back."""
        self._plan = None
        self._arenas.release()
