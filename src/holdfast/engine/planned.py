"""What one structure of state needs at each save: made once, and again when the structure changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from holdfast.engine.arenas import STEPS_IN_WINDOW
from holdfast.engine.chunks import ChunkTable
from holdfast.events import Emitter, Warned
from holdfast.image.arena import Arena
from holdfast.image.capture import Capturer
from holdfast.image.layout import Layout, plan_layout
from holdfast.model.canonical import Spelled
from holdfast.repo.content import leaf_table
from holdfast.repo.rows import Rows
from holdfast.state.collector import collector_paused
from holdfast.state.contract import Flattened


@dataclass(frozen=True, slots=True)
class SavePlan:
    fingerprint: str
    layout: Layout
    chunks: ChunkTable
    rows: Rows
    table: Spelled
    """Of the leaves, for the index and for the content digest."""
    capturer: Capturer
    arena: Arena


class Arenas(Protocol):
    """Where a planner takes the memory of an image from."""

    def acquire(self, nbytes: int, *, step: int = 0) -> Arena:
        """At least `nbytes`, or a window that holds four steps of `step` bytes; the one given before is no longer
        valid."""
        ...

    def release(self) -> None: ...


class Planner:
    """Keeps the plan of the structure that was saved last, and the memory that it takes."""

    def __init__(self, arenas: Arenas, chunk_bytes: int, emitter: Emitter, *, rank: int) -> None:
        self._arenas = arenas
        self._chunk_bytes = chunk_bytes
        self._emitter = emitter
        self._rank = rank
        self._plan: SavePlan | None = None

    def fits(self, flattened: Flattened) -> bool:
        """Whether there is a plan for this state already."""
        return self._plan is not None and self._plan.fingerprint == flattened.fingerprint

    @collector_paused
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
            Rows.of(flattened.specs),
            leaf_table(flattened.specs),
            capturer,
            arena,
        )
        return self._plan

    def release(self) -> None:
        """Gives the memory back."""
        self._plan = None
        self._arenas.release()
