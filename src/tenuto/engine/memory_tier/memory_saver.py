"""States that go into memory alone: copied here or behind a fence, digested and sealed beside training."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from tenuto.concurrency.background_priority import lower_priority
from tenuto.concurrency.worker_threads import BackgroundWork, background_threads
from tenuto.crashpoints import crashpoint
from tenuto.engine.memory_tier.tier import MemoryTier
from tenuto.engine.save.fenced_capture import FencedCapture
from tenuto.engine.save.handle import Save, SaveClock
from tenuto.engine.save.manifest_builder import index_of
from tenuto.engine.staging.pack_content import Filling
from tenuto.engine.staging.plan import Digester, SavePlan
from tenuto.errors import SaveTorn, in_words
from tenuto.events import Emitter, SavedToMemory, Warned
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo, now_text
from tenuto.state.contract import Flattened

if TYPE_CHECKING:
    from typing import Any

    from tenuto.engine.save.job import ManifestDetails


DIGESTED_BYTES: Final = 4 << 20
"""What is digested at a time behind a copy that is still under way."""


@dataclass(slots=True)
class _Taken:
    """One state under way."""

    save: Save
    plan: SavePlan
    flattened: Flattened
    about: ManifestDetails
    filling: Filling
    created: str
    began: float


class MemorySaver:
    """Takes the states of one run into its memory tier, from one training thread."""

    def __init__(self, repo: Repo, tier: MemoryTier, emitter: Emitter, *, rank: int = 0) -> None:
        self._repo = repo
        self._tier = tier
        self._emitter = emitter
        self._rank = rank
        self._work: BackgroundWork | None = None
        self._last: tuple[Save, Filling] | None = None
        self._fence_s = 0.0
        """Of those before the last."""
        self._clock = SaveClock()
        """One for all states: what is asked of it is what they cost together."""
        self.fencing: FencedCapture | None = None
        """Set where what optimizers own is copied beside training: the one that saves to the store go by too."""
        self.sealed = 0
        """States that went into memory alone and are whole there."""

    @property
    def busy(self) -> bool:
        """Whether a state taken before, for memory or for the store, has not been sealed yet."""
        return self._tier.busy

    @property
    def torn(self) -> int | None:
        """The step of the state taken last, where its image is torn: known before the update that it met."""
        last = self._last
        return last[0].step if last is not None and isinstance(last[1].failure, SaveTorn) else None

    @property
    def fence_s(self) -> float:
        """How long updates have waited for copies of states that went into memory alone."""
        return self._fence_s + (self._last[0].fence_s if self._last is not None else 0.0)

    @property
    def cpu_s(self) -> float:
        """Processor time that copies, digests and seals of states that went into memory alone took beside training."""
        return self._clock.cpu_s

    def save(self, flattened: Flattened, id: CheckpointId, about: ManifestDetails, *, eager: bool = False) -> bool:
        """Copies the state, or what of it cannot wait, and returns; False where there is no memory tier. Waits for the
        one before to be copied and sealed: DeadlineExceeded if that takes too long. `eager`: all of it is copied here.
        """
        began, fencing = time.perf_counter(), self.fencing
        if fencing is not None:
            fencing.begin_save()
        plan = self._tier.begin(flattened, writing=False)
        if plan is None:
            return False
        save = Save(id, self._tier.save_id(id), reason=about.reason)
        save.clock = self._clock
        taken = _Taken(save, plan, flattened, about, Filling(), now_text(), began)
        try:
            self._capture(taken, eager=eager)
            save.stall_s = time.perf_counter() - began
            name = f"tenuto-memory-{id.step}"
            self._work = background_threads.submit(lambda: self._background(taken), name)
        except BaseException:
            if fencing is not None:
                fencing.give_up()
            self._tier.ended(plan)
            raise
        self._fence_s, self._last = self.fence_s, (save, taken.filling)
        return True

    def join(self, timeout: float | None) -> bool:
        """Waits for what is being copied and sealed; False if it is not after `timeout` seconds."""
        if self.fencing is not None:
            self.fencing.flush()
        if self._work is not None:
            self._work.join(timeout)
        return self._work is None or not self._work.is_alive()

    def _capture(self, taken: _Taken, *, eager: bool) -> None:
        plan = taken.plan
        if not eager and self.fencing is not None and self.fencing.possible(plan):
            self.fencing.capture(taken.flattened, plan, taken.save, taken.filling)
            return
        plan.capturer.capture(taken.flattened, taken.save.save_id)
        taken.filling.advance(plan.layout.nbytes)

    def _background(self, taken: _Taken) -> None:
        with self._clock.cpu_in_background():
            self._finish(taken)

    def _finish(self, taken: _Taken) -> None:
        plan, id, content = taken.plan, taken.save.id, ""
        try:
            lower_priority()
            digests = _digested(plan, taken.filling)
            crashpoint("memory image captured, not sealed")
            index = index_of(
                plan,
                taken.flattened,
                digests,
                taken.save.save_id,
                rank=self._rank,
                chunk_bytes=self._repo.chunk_bytes,
            )
            content = self._tier.seal(plan, id, index, taken.flattened, taken.about, created=taken.created)
            if content:
                self.sealed += 1
                nbytes = sum(pack.length for pack in plan.layout.packs)
                took = time.perf_counter() - taken.began
                self._emitter.emit(SavedToMemory(id, nbytes, taken.save.stall_s, took, content))
        except Exception as error:  # noqa: BLE001 - a thread's exception would reach nobody; training goes on without it
            self._emitter.emit(Warned(f"step {id.step} is not kept in memory: {in_words(error)}", str(id)))
        finally:
            if not content:  # what is sealed may be the training thread's again by now, for the next state
                self._tier.ended(plan)
                self._tier.missed(id)


def _digested(plan: SavePlan, filling: Filling) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The digests of an image that fills up meanwhile. What broke its capture off; DeadlineExceeded if it stands
    still."""
    digester, nbytes = Digester(plan.chunks, plan.arena.buffer.data), plan.layout.nbytes
    for end in (*range(DIGESTED_BYTES, nbytes, DIGESTED_BYTES), nbytes):
        filling.wait(end)
        digester.advance(end)
    return digester.digests()
