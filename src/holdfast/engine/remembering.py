"""States that go into memory alone: copied here, digested and sealed beside training."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.crashpoints import crashpoint
from holdfast.engine.chunks import Digester
from holdfast.engine.describing import index_of
from holdfast.engine.memory import MemoryTier
from holdfast.engine.planned import SavePlan
from holdfast.engine.politeness import stand_back
from holdfast.events import Emitter, Remembered, Warned
from holdfast.model.names import CheckpointId
from holdfast.repo.repository import Repo, now_text
from holdfast.state.contract import Flattened

if TYPE_CHECKING:
    from holdfast.engine.job import About


@dataclass(slots=True)
class _Taken:
    """One state under way."""

    plan: SavePlan
    flattened: Flattened
    id: CheckpointId
    save_id: str
    about: About
    created: str
    began: float
    stall_s: float = 0.0


class MemorySaver:
    """Takes the states of one run into its memory tier, from one training thread."""

    def __init__(self, repo: Repo, tier: MemoryTier, emitter: Emitter, *, rank: int = 0) -> None:
        self._repo = repo
        self._tier = tier
        self._emitter = emitter
        self._rank = rank
        self._thread: threading.Thread | None = None
        self.sealed = 0
        """States that went into memory alone and are whole there."""

    @property
    def busy(self) -> bool:
        """Whether a state taken before, for memory or for the store, has not been sealed yet."""
        return self._tier.busy

    def save(self, flattened: Flattened, id: CheckpointId, about: About) -> bool:
        """Copies the state and returns; False where there is no memory tier. Waits for the one before to be sealed:
        DeadlineExceeded if that takes too long."""
        began = time.perf_counter()
        plan = self._tier.begin(flattened, writing=False)
        if plan is None:
            return False
        taken = _Taken(plan, flattened, id, uuid.uuid4().hex, about, now_text(), began)
        try:
            plan.capturer.capture(flattened, taken.save_id)
            crashpoint("memory image captured, not sealed")
            taken.stall_s = time.perf_counter() - began
            name = f"holdfast-memory-{id.step}"
            thread = threading.Thread(target=self._background, args=(taken,), name=name, daemon=True)
            thread.start()
            self._thread = thread  # one that could not be started cannot be joined
        except BaseException:
            self._tier.ended(plan)
            raise
        return True

    def join(self, timeout: float | None) -> bool:
        """Waits for what is being sealed; False if it is not after `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _background(self, taken: _Taken) -> None:
        plan, id, content = taken.plan, taken.id, ""
        try:
            stand_back()
            digester = Digester(plan.chunks, plan.arena.buffer.data)
            digester.advance(plan.layout.nbytes)
            index = index_of(
                plan,
                taken.flattened,
                digester.digests(),
                taken.save_id,
                rank=self._rank,
                chunk_bytes=self._repo.chunk_bytes,
            )
            content = self._tier.seal(plan, id, index, taken.flattened, taken.about, created=taken.created)
            if content:
                self.sealed += 1
                nbytes = sum(pack.length for pack in plan.layout.packs)
                took = time.perf_counter() - taken.began
                self._emitter.emit(Remembered(id, nbytes, taken.stall_s, took, content))
        except Exception as error:  # noqa: BLE001 - a thread's exception would reach nobody; training goes on without it
            self._emitter.emit(Warned(f"step {id.step} is not kept in memory: {error!r}", str(id)))
        finally:
            if not content:  # what is sealed may be the training thread's again by now, for the next state
                self._tier.ended(plan)
