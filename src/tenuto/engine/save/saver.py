"""Saving: capture, digest and write overlap; then one commit, last.

Up to `in_flight` saves at a time: the next state is captured while those before it are being written, one after the
other. `save_writer` says how one is written, and in which order.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tenuto.concurrency.deadlines import begun_within
from tenuto.concurrency.interruption import Latch
from tenuto.concurrency.worker_threads import (
    BackgroundWork,
    background_threads,
    foreground_threads,
    lower_priority,
)
from tenuto.crashpoints import crashpoint
from tenuto.engine.save.commit_protocol import CommitProtocol, SoloCommit
from tenuto.engine.save.encoder import StateEncoder
from tenuto.engine.save.fenced_capture import FencedCapture
from tenuto.engine.save.handle import Save
from tenuto.engine.save.job import Job, ManifestDetails, capture
from tenuto.engine.save.save_writer import SaveWriter
from tenuto.engine.staging.pack_content import WriterGone
from tenuto.engine.staging.plan import ImagePlan, SavePlan
from tenuto.engine.staging.pool import StagingPool
from tenuto.errors import SaveFailed, Superseded, TenutoError
from tenuto.events import Captured, Committed, Emitter, SaveFailedEvent, SaveStarted
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Manifest
from tenuto.policy.encoding import PLAIN, Encoding
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.replicated.places import check_sharing
from tenuto.repo.repository import Repo
from tenuto.state.contract import Flattened

if TYPE_CHECKING:
    from tenuto.engine.memory_tier.tier import MemoryTier
    from tenuto.engine.save.health import HealthWatch

CHECK_S = 60.0
"""How long the training thread waits for the one listing that shows whether it still owns the run."""


def _nothing() -> None:
    """Does nothing."""


class Saver:
    """Saves the states of one run, from one training thread. `in_flight`: how many at most at a time, each with an
    image of its own; they are written and committed in the order in which they were taken.

    `encoding`: how the chunks of what it saves are stored. `health`: looks at the values of each save.

    `attempt` is set once the run is claimed, before the first save. `on_end` is called in the writing thread with the
    handle of each save that has ended, well or not. `make_room` is called at most once in a save that finds its place
    full; if it returns True the save resumes from where it was. `lasting`: many saves are to come, so memory is taken
    and touched once. `timed`: manifests say where the time of their saves went. `memory`: the tier whose images are
    written from; `beside`: one whose images take memory of the same budget beside those of saves.
    """

    def __init__(
        self,
        repo: Repo,
        run: str,
        *,
        emitter: Emitter | None = None,
        in_flight: int = 1,
        memory_budget: int | None = None,
        lasting: bool = True,
        timed: bool = False,
        on_end: Callable[[Save], None] | None = None,
        make_room: Callable[[], bool] | None = None,
        memory: MemoryTier | None = None,
        protocol: CommitProtocol | None = None,
        beside: MemoryTier | None = None,
        encoding: Encoding = PLAIN,
        health: HealthWatch | None = None,
    ) -> None:
        self.repo = repo
        self._health = health
        self.attempt: Attempt | None = None
        self._emitter = emitter or Emitter()
        self._on_end = on_end
        self.memory = memory
        self._protocol: CommitProtocol = protocol or SoloCommit(repo)
        self._encoder = None
        if not encoding.plain or repo.keys is not None:
            check_sharing(repo.store)
            self._encoder = StateEncoder(repo, encoding, rank=self._protocol.rank)
        self._writer = SaveWriter(
            repo,
            self._emitter,
            protocol=self._protocol,
            timed=timed,
            make_room=make_room,
            memory=memory,
            encoder=self._encoder,
            health=health,
        )

        self._beside = tier = beside or memory
        encoder = self._encoder
        self._pool = StagingPool(
            repo.id,
            run,
            rank=self._protocol.rank,
            count=in_flight,
            chunk_bytes=repo.chunk_bytes,
            emitter=self._emitter,
            budget=memory_budget,
            lasting=lasting,
            others=lambda: (0 if tier is None else tier.nbytes) + (0 if encoder is None else encoder.nbytes),
        )
        self._lock = threading.Lock()
        self._saves: list[Save] = []
        self._with_image: dict[str, Latch] = {}
        """Of each save that still has an image, by its id, when that is given back: a hung one that was given up among
        them."""
        self._work: BackgroundWork | None = None
        self._superseded: Superseded | None = None
        self.fencing: FencedCapture | None = None
        """Set where what optimizers own is copied in the background."""

    @property
    def manifest(self) -> Manifest | None:
        """Of the save that came last to its commit, its tree left out."""
        return self._writer.manifest

    @property
    def busy(self) -> bool:
        """Whether a writing thread is at work: on a save, or on what follows one."""
        return self._work is not None and self._work.is_alive()

    @property
    def in_flight(self) -> list[Save]:
        """The saves that have not ended, oldest first."""
        with self._lock:
            return [save for save in self._saves if not save.done]

    @property
    def free(self) -> bool:
        """Whether another save may be taken now."""
        with self._lock:
            return self._has_room()

    def begin_afresh(self) -> None:
        """Has the first save name no data of earlier checkpoints; the next ones may name that save's."""
        if self._encoder is not None:
            self._encoder.begin_afresh()

    def names(self, specs: Sequence[LeafSpec]) -> list[str]:
        """Returns the file names of all that a save of these leaves may put, but its manifest."""
        rank, chunk_bytes = self._protocol.rank, self.repo.chunk_bytes
        return self._writer.names(ImagePlan.of(specs, rank=rank, chunk_bytes=chunk_bytes))

    def bases(self) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints whose data files the next save may name."""
        return () if self._encoder is None else self._encoder.bases(self._claimed().parent)

    def rest(self) -> None:
        """Gives back what only a save under way needs, until the next one: images, buffers and threads."""
        self._pool.release()
        if self._encoder is not None:
            self._encoder.rest()

    def prewarm(self, flattened: Flattened) -> float:
        """Plans and takes the memory that saves of this state need; returns the seconds it took."""
        began = time.perf_counter()
        if self.memory is not None:
            self.memory.prepare(flattened)
        if self.memory is None or self.memory.off:
            self._pool.prepare(flattened)
        return time.perf_counter() - began

    def expect(self, nbytes: int) -> None:
        """Takes memory for images of about `nbytes` and touches it, where which leaves this process is to write is not
        known before the first save."""
        if self.memory is None or self.memory.off:
            self._pool.expect(nbytes)

    def await_free(self, timeout: float | None) -> bool:
        """Waits until another save may be taken; False if none may after `timeout` seconds."""
        self.flush()
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._has_room():
                    return True
                given_back = next(iter(self._with_image.values()))  # of the oldest: they are written in order
            if not given_back.wait(None if until is None else max(until - time.monotonic(), 0.0)):
                return False

    def save(
        self,
        flattened: Flattened,
        step: int,
        *,
        wait: bool,
        about: ManifestDetails,
        handle: Save | None = None,
        eager: bool = False,
    ) -> Save:
        """Copies the state and returns; what follows runs in the background, or is awaited here if `wait`. To be called
        while the saver is `free`.

        eager: everything is copied before this returns, also where saves are fenced.

        Raises Superseded at once if another process has claimed the run, DeadlineExceeded if an earlier save is stuck.
        A failure later is in the handle.
        """
        began = time.perf_counter()
        attempt = self._claimed()
        try:
            owned = self._begin_check(attempt, CHECK_S if handle is None else handle.patience_s or CHECK_S)
            if self.fencing is not None:
                self.fencing.begin_save()
        except BaseException as error:
            self._protocol.missed(step, error)
            raise
        save = handle or self.plan_save(step, reason=about.reason)
        flattened = self._protocol.take(flattened, save)
        try:
            plan = self._plan(flattened)
            save.clock.add("prepare_s", time.perf_counter() - began)
            # Through a window the state goes out while it is captured, whoever waits for what.
            overlapped = wait or plan.arena.window is not None
            job = Job(save, plan, flattened, about, digest_while_writing=not overlapped)
            if self._health is not None:
                self._health.watch(job)
            try:
                self._enter(save)
                self._emitter.emit(SaveStarted(save.id, save.save_id, save.bytes, len(flattened.specs), about.reason))
                save.state = "capturing"
                if overlapped or (not eager and self.fencing is not None):
                    owned()  # before anything copies, or writes, behind this thread
                if not overlapped:
                    self._capture(job, overlapped=False, eager=eager)
                owned()
                self._start(job)
            except BaseException as error:
                if job.work is None:  # no thread ever will
                    self._give_back(job)
                    self._remove(save)
                elif overlapped:  # the thread is at work, and nobody fills the image
                    job.filling.fail(SaveFailed(f"the save of {save.id} was cut off: {error!r}", subject=str(save.id)))
                raise
        except BaseException as error:
            self._protocol.failed(save, error)
            raise
        if overlapped:
            self._overlap(job, wait=wait, eager=eager)
        save.stall_s = time.perf_counter() - began
        self._emitter.emit(Captured(save.id, save.stall_s, job.plan.arena.kind))
        return save

    def _begin_check(self, attempt: Attempt, patience_s: float) -> Callable[[], None]:
        """Begins to look whether this process still owns the run. What it returns waits for the answer, and raises
        Superseded where it does not."""
        if self.repo.store.capabilities.remote:
            return _nothing  # the thread that writes finds it out
        what = f"the check who owns run {attempt.run}"
        return begun_within(patience_s, what, attempt.check, subject=attempt.run)

    def plan_save(self, step: int, *, reason: str = "") -> Save:
        """Returns the handle of a save that is going to be taken."""
        attempt = self._claimed()
        return Save(CheckpointId(attempt.run, attempt.number, step), uuid.uuid4().hex, reason=reason)

    def release_fence(self) -> None:
        """Returns when training's memory may change, by whatever means."""
        if self.fencing is not None:
            self.fencing.release()

    def flush(self) -> None:
        """Ends the pauses of the copy in flight: its end is awaited."""
        if self.fencing is not None:
            self.fencing.flush()

    def join(self, timeout: float | None) -> bool:
        """Waits for all that is in flight and what follows it; False if that has not ended after `timeout` seconds."""
        self.flush()
        if self._work is not None:
            self._work.join(timeout)
        return not self.busy

    def close(self) -> None:
        """Gives the memory back, unless a hung writer still reads it."""
        if self.fencing is not None:
            self.fencing.close()
        if not self.busy:
            self._pool.release()
            if self._encoder is not None:
                self._encoder.close()

    def _has_room(self) -> bool:
        memory = self.memory
        return len(self._with_image) < (memory.in_flight if memory is not None and memory.on else self._pool.most)

    def _plan(self, flattened: Flattened) -> SavePlan:
        """Plans a capture into the next slot of the memory tier, else into memory that serves saves alone."""
        memory = self.memory
        plan = memory.begin(flattened, writing=True) if memory is not None else None
        if plan is not None:
            return plan
        tier = self._beside
        if tier is not None and tier.off:
            tight = self._pool.tight(sum(spec.nbytes for spec in flattened.specs))
            if tight and tier.shrink():
                self._pool.retry_room()
        return self._pool.take(flattened)

    def _claimed(self) -> Attempt:
        assert self.attempt is not None, "a save needs a claimed attempt"
        return self.attempt

    def _overlap(self, job: Job, *, wait: bool, eager: bool) -> None:
        """Captures while the writer follows; with `wait`, returns once the save has ended."""
        ended = True
        try:
            self._capture(job, overlapped=True, eager=wait or eager)
        except WriterGone:
            pass  # what made it fail is in the handle
        finally:
            if wait:
                with job.save.clock.joining():
                    ended = job.save.join()
        if not ended:
            raise job.save.stuck()

    def _capture(self, job: Job, *, overlapped: bool, eager: bool) -> None:
        began, clock = time.perf_counter(), job.save.clock
        last = max(pack.start + pack.length for pack in job.plan.layout.packs)
        reached = 0

        def progress(filled: int) -> None:
            nonlocal reached
            job.digester.advance(filled)
            if reached < last:  # behind it is padding: the writer may report the save without waiting for it
                clock.put("capture_s", time.perf_counter() - began)
            reached = filled
            job.filling.advance(filled)

        try:
            complete = capture(job, None if eager else self.fencing, progress=progress if overlapped else None)
        except WriterGone:
            raise
        except TenutoError as error:
            job.filling.fail(error)
            raise
        except BaseException as error:
            job.filling.fail(SaveFailed(f"the capture of {job.save.id} broke off: {error!r}", subject=str(job.save.id)))
            raise
        if not overlapped or not complete:
            clock.put("capture_s", time.perf_counter() - began)
        if complete:
            crashpoint("image captured")
            job.save.state = "writing"
            job.filling.advance(job.plan.layout.nbytes)

    # -- the writing threads: one for each save, and one writes at a time, in the order in which they were taken ------
    #
    # A thread for each, and not one for all, because the thread of a save that training waits for must not run at
    # background priority, and because a state can be sealed in memory while the one before it is still being written.

    def _enter(self, save: Save) -> None:
        """Adds a save that is about to be captured, and is written after those in flight."""
        before = self.in_flight
        with self._lock:
            save.wait_behind(before[-1] if before else None)
            self._saves.append(save)
            self._with_image[save.save_id] = Latch()

    def _start(self, job: Job) -> None:
        """Starts the writing thread; at background priority where training does not wait for it."""
        before = self._work if self.busy else None
        threads = background_threads if job.digest_while_writing else foreground_threads
        job.work = BackgroundWork(lambda: self._run(job, before), f"tenuto-save-{job.save.step}")
        try:
            threads.run(job.work)
        except BaseException:
            if job.work.withdraw():
                job.work = None
            else:
                self._work = job.work  # a signal's handler has raised, and the thread is at work already
            raise
        self._work = job.work

    def _run(self, job: Job, before: BackgroundWork | None) -> None:
        """Runs one save to its end, after the work `before` it, and never raises: how it ended is in its handle, and in
        an event."""
        save = job.save
        failure: TenutoError | None = None
        try:
            try:
                save.clock.begin_cpu()
                if job.digest_while_writing:  # training continues meanwhile
                    lower_priority()
                if before is not None:
                    self._seal_early(job)
            finally:
                if before is not None:  # whatever happens: nothing is reported of a save before the one before it ends
                    with save.clock.during("queue_s"):
                        before.join()
            failure = self._write(job)
        except BaseException as error:
            failure = SaveFailed(
                f"the save of {save.id} was cut off while {save.phase}: {error!r}", subject=str(save.id)
            )
            failure.__cause__ = error
            raise
        finally:
            job.filling.abandon()
            self._give_back(job)
            save.end(failure)  # whatever happens: training may wait for it without a deadline (I8)
            self._remove(save)
            if self._on_end is not None:
                self._on_end(save)

    def _seal_early(self, job: Job) -> None:
        """Seals in memory a save that has to wait until it is written, which frees a slot for the next state."""
        try:
            self._writer.seal(job)
        except TenutoError:
            pass  # the capture broke off: raised again, and reported, when it is to be written

    def _write(self, job: Job) -> TenutoError | None:
        """Writes and commits a save; returns what made it fail, or None."""
        save, attempt = job.save, self._claimed()
        began = time.perf_counter()
        save.begin()
        before = self._superseded
        if before is not None:  # the run was claimed by another process: nothing of it is put
            lost = Superseded(f"{save.id} is not saved: {before.message}", subject=before.subject, hint=before.hint)
            self._protocol.failed(save, lost)
            self._emitter.emit(SaveFailedEvent(save.id, lost.message, save.phase, lost.hint or ""))
            return lost
        attempt.unsettled.add(save.id)
        failure = self._writer.write(job, attempt)
        if isinstance(failure, Superseded):
            self._superseded = failure
        if failure is None:
            attempt.unsettled.discard(save.id)
            save.seconds = time.perf_counter() - began
            save.clock.read_cpu()
            self._emitter.emit(Committed(save.id, save.bytes, save.seconds, save.timing))
        return failure

    def _give_back(self, job: Job) -> None:
        """Frees the image, which nobody reads or fills any more; before the save ends, so that there is room for the
        next one by then."""
        if self.memory is not None:
            self.memory.ended(job.plan)
        self._pool.give_back(job.plan)
        job.encoded = None  # which has the job in turn: a cycle would keep the image mapped until it is collected
        if self._health is not None:
            self._health.ended(job.save.save_id)
        with self._lock:
            given_back = self._with_image.pop(job.save.save_id, None)
        if given_back is not None:
            given_back.set()

    def _remove(self, save: Save) -> None:
        """Removes a save that has ended, or never will."""
        with self._lock:
            self._saves = [kept for kept in self._saves if kept is not save]
