"""States that go into memory alone: when they are taken, and how: copied at once or behind a fence, then sealed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from tenuto.concurrency.worker_threads import BackgroundWork, background_threads, lower_priority
from tenuto.crashpoints import crashpoint
from tenuto.engine.memory_tier.image_store import Image
from tenuto.engine.memory_tier.tier import MemoryTier
from tenuto.engine.save.fenced_capture import FencedCapture
from tenuto.engine.save.handle import Save, SaveClock
from tenuto.engine.save.job import Job, ManifestDetails, capture
from tenuto.engine.save.rank_group import RankGroup
from tenuto.engine.staging.pack_content import Filling
from tenuto.errors import DeadlineExceeded, SaveTorn, in_words
from tenuto.events import Emitter, SavedToMemory, SaveSkipped, Warned
from tenuto.model.ids import CheckpointId
from tenuto.policy.save import Decision, Moment, SaveHistory, SavePolicy
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.repository import Repo
from tenuto.state.contract import Flattened

MOMENTS = 4
"""States whose time is kept: two of them can be the newest that is sealed."""
JOIN_S = 30.0
"""How long the end of training waits for a state that is being sealed."""
BUSY = "the state taken into memory before is not sealed yet"


class MemorySaver:
    """Takes states of one run into its memory tier, from one training thread."""

    def __init__(self, tier: MemoryTier, emitter: Emitter) -> None:
        self.fencing: FencedCapture | None = None
        """Set where what optimizers own is copied in the background, the same as for saves to the store."""
        self.sealed = 0
        """States that went into memory alone and are complete there."""
        self._tier = tier
        self._emitter = emitter
        self._work: BackgroundWork | None = None
        self._last: tuple[Save, Filling] | None = None
        """Not the job: its plan would keep memory that the tier has given back."""
        self._fence_s = 0.0
        """Of those before the last."""
        self._clock = SaveClock()
        """One for all states, since only their total is asked for."""

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
        """Processor time in the background of copies, digests and seals of states that went into memory alone."""
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
        job = Job(save, plan, flattened, about)
        try:
            if capture(job, None if eager else fencing):
                job.filling.advance(plan.layout.nbytes)
            save.stall_s = time.perf_counter() - began
            self._work = background_threads.submit(lambda: self._seal(job, began), f"tenuto-memory-{id.step}")
        except BaseException:
            if fencing is not None:
                fencing.give_up()
            self._tier.ended(plan)
            raise
        self._fence_s, self._last = self.fence_s, (save, job.filling)
        return True

    def join(self, timeout: float | None) -> bool:
        """Waits for what is being copied and sealed; False if it is not after `timeout` seconds."""
        if self.fencing is not None:
            self.fencing.flush()
        if self._work is not None:
            self._work.join(timeout)
        return self._work is None or not self._work.is_alive()

    def _seal(self, job: Job, began: float) -> None:
        save, content = job.save, ""
        with self._clock.cpu_in_background():
            try:
                lower_priority()
                job.digest_image()
                crashpoint("memory image captured, not sealed")
                content = self._tier.seal(job)
                if content:
                    self.sealed += 1
                    took = time.perf_counter() - began
                    self._emitter.emit(SavedToMemory(save.id, save.bytes, save.stall_s, took, content))
            except Exception as error:  # noqa: BLE001 - a thread's exception would reach nobody; training goes on without it
                self._emitter.emit(Warned(f"step {save.step} is not kept in memory: {in_words(error)}", str(save.id)))
            finally:
                if not content:  # a sealed slot may be the training thread's again by now, for the next state
                    self._tier.ended(job.plan)
                    self._tier.missed(save.id)


class MemoryCadence:
    """The memory tier of one run, with a cadence of its own.

    Several ranks keep states at the same steps, all or none of a state. So a state that is due is never left out for
    being busy, nor a torn one replaced before the next is due: it would be on one rank and not on another. And their
    saves to the store have memory of their own, since each is a part of a state.
    """

    def __init__(
        self,
        repo: Repo,
        run: str,
        policy: SavePolicy,
        *,
        on_busy: Literal["wait", "skip"],
        budget: int | None,
        in_flight: int = 1,
        emitter: Emitter,
        warn: Callable[[str], None],
        group: RankGroup,
    ) -> None:
        self._saves_are_states = group.writes_all
        """Whether a save to the store is a state in memory as well, and this process skips and replaces by itself."""
        in_flight = in_flight if self._saves_are_states else 1
        self.tier = MemoryTier(repo, run, group=group, budget=budget, in_flight=in_flight, emitter=emitter, warn=warn)
        self.policy = policy
        self.skipped = 0
        """Steps that were due and not taken, for the one before was not sealed."""
        self.delayed = 0
        """Steps that waited for the one before to be sealed."""
        self._stalled_s = 0.0
        self._moments: dict[int, float] = {}
        self._run = run
        self._may_skip = on_busy == "skip" and self._saves_are_states
        self._emitter = emitter
        self._saver = MemorySaver(self.tier, emitter)
        self._attempt: Attempt | None = None
        self._first_step = 0
        self._before: tuple[int, int | None, float | None] | None = None
        """Of the last save to the store: its step, and what was the last state before it."""
        self._last_step: int | None = None
        self._last_s: float | None = None
        self._started_s = 0.0

    @property
    def written_from(self) -> MemoryTier | None:
        """The tier whose images saves to the store are written from; None where they have memory of their own."""
        return self.tier if self._saves_are_states else None

    def capture_fenced(self, fencing: FencedCapture) -> None:
        """Copies what optimizers own in the background from now on, as saves to the store do."""
        self._saver.fencing = fencing

    def begin(self, attempt: Attempt, flattened: Flattened, step: int, since_s: float) -> None:
        """Begins once the run is claimed, on all ranks: training resumes from `step`. `since_s`: since when its line
        has not been saved. Raises RankFailed, RanksMissing and RankStoreLost."""
        self.tier.saved_s = since_s
        self.tier.claimed(attempt, flattened)
        self._attempt = attempt
        self._first_step, self._started_s = step, time.monotonic()
        self.tier.agree()

    @property
    def kept(self) -> int:
        """States that were sealed, saves to the store not counted."""
        return self._saver.sealed

    @property
    def fence_s(self) -> float:
        """As `MemorySaver`."""
        return self._saver.fence_s

    @property
    def cpu_s(self) -> float:
        """As `MemorySaver`."""
        return self._saver.cpu_s

    @property
    def held_s(self) -> float:
        """How long training has waited for states that went into memory alone, their fences included."""
        return self._stalled_s + self.fence_s

    @property
    def torn(self) -> int | None:
        """The step of the state that was torn, until another one is taken in its place."""
        torn = self._saver.torn
        return torn if torn == self._last_step else None

    @property
    def newest_s(self) -> float | None:
        """When the newest state that is complete in memory was taken, by the monotonic clock."""
        footer = self.tier.sealed if self.tier.on else None
        return None if footer is None else self._moments.get(footer.id.step, footer.sealed_us / 1e6)

    def saved(self, step: int) -> bool:
        """Notes that a save to the store is taken, which is sealed here as well if it is a whole state; returns whether
        it takes the place of a torn one."""
        if not self._saves_are_states:
            self.tier.saved_s = time.monotonic()
            return False
        torn = self.torn is not None
        self._before = step, self._last_step, self._last_s
        self._last_step, self._last_s = step, time.monotonic()
        self._moment(step, self._last_s)
        self.tier.saved_s = self._last_s
        return torn

    def not_saved(self, step: int) -> None:
        """Notes that the save of this step has failed while training waited for it. Unless it was sealed by then, the
        next state is due as if it had never been taken."""
        footer, before = self.tier.sealed, self._before
        if before is not None and before[0] == step == self._last_step and (footer is None or footer.id.step != step):
            _, self._last_step, self._last_s = before

    def decide(self, moment: Moment) -> Decision:
        if not self.tier.on or self._attempt is None:
            return Decision(False, "there is no memory tier")
        history = SaveHistory(
            started_s=self._started_s,
            first_step=self._first_step,
            last_saved_step=self._last_step,
            last_saved_s=self._last_s,
        )
        decision, torn = self.policy.decide(moment, history), self.torn
        if self._saves_are_states and not decision.save and torn is not None and moment.step > torn:
            return Decision(True, f"in place of the torn state of step {torn}")
        return decision

    def skips(self, step: int) -> bool:
        """Returns whether the state of this step, which is due, is left out because the one before is not sealed yet;
        that is counted and reported. To be called before the state is flattened."""
        if not self._may_skip or not self.tier.busy or self.torn is not None:
            return False  # the slot of a torn one is about to be free
        self._skip(step, BUSY)
        return True

    def take(
        self, flattened: Flattened, step: int, about: ManifestDetails, *, due_s: float, eager: bool = False
    ) -> None:
        """Takes the state of a completed step. It fails no training: what goes wrong is reported. `due_s`: since when
        training has waited for it. `eager`: nothing is left to be copied in the background."""
        assert self._attempt is not None
        torn = self.torn is not None
        self._last_s = time.monotonic()
        self._moment(step, self._last_s)
        self.delayed += self.tier.busy
        id = CheckpointId(self._attempt.run, self._attempt.number, step)
        try:
            if self._saver.save(flattened, id, about, eager=eager or torn):
                self._last_step = step
        except DeadlineExceeded as error:
            self.tier.missed(id)
            self._skip(step, error.message)
        except Exception as error:  # noqa: BLE001 - no thread to be had, no memory: training goes on without it
            self.tier.missed(id)
            why = getattr(error, "message", None) or repr(error)
            self._emitter.emit(Warned(f"step {step} is not kept in memory: {why}", self._run))
        finally:
            self._stalled_s += time.monotonic() - due_s

    def newest_image(self) -> Image | None:
        """Returns the newest state that is complete in memory, once what is under way is sealed; to be closed by the
        caller. None where there is none."""
        self._saver.join(JOIN_S)
        return self.tier.newest_image() if self.tier.on else None

    def close(self, durable: CheckpointId | None) -> None:
        """Gives the slots back; an image of a step that is not durable stays for the next process."""
        self._saver.join(JOIN_S)
        self.tier.close(durable)

    def _moment(self, step: int, now_s: float) -> None:
        self._moments[step] = now_s
        while len(self._moments) > MOMENTS:
            del self._moments[next(iter(self._moments))]

    def _skip(self, step: int, reason: str) -> None:
        self.skipped += 1
        self._emitter.emit(SaveSkipped(self._run, step, f"{reason} ({self.skipped} skipped so far)"))
