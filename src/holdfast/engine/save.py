"""Saving: capture, digest and write overlap; then one commit, last.

The order, which I1 rests on: begin.json -> packs -> index -> manifest, each durable before the next is begun.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from holdfast.crashpoints import crashpoint
from holdfast.engine.arenas import ArenaHolder
from holdfast.engine.chunks import Digester
from holdfast.engine.content import Filling, PackContent, WriterGone
from holdfast.engine.describing import index_of, manifest_of
from holdfast.engine.fenced import Fencing
from holdfast.engine.handle import Save
from holdfast.engine.job import About, Job
from holdfast.engine.memory import MemoryTier
from holdfast.engine.planned import Planner, SavePlan
from holdfast.engine.politeness import stand_back
from holdfast.errors import HoldfastError, OwnershipError, SaveFailed, StoreFull, StoreUnreliable
from holdfast.events import Captured, Committed, Emitter, PackWritten, Progress, SaveFailedEvent, SaveStarted, Warned
from holdfast.model import canonical
from holdfast.model.checkpoint import Index, Manifest, Receipt
from holdfast.model.names import CheckpointId
from holdfast.repo.attempts import Attempt
from holdfast.repo.commit import abort, begin, commit
from holdfast.repo.deadline import within
from holdfast.repo.layout import begin_name, index_file
from holdfast.repo.packs import put_index
from holdfast.repo.repository import Repo, now_text
from holdfast.repo.unfinished import free
from holdfast.state.contract import Flattened

SMALL_OBJECTS_BYTES = 4 << 20
"""Room that is asked for beside the packs: index, manifest, begin.json, notes."""
COMMITTING = "committing"
CHECK_S = 60.0
"""How long the training thread waits for the one listing that tells whether it still owns the run."""


class Saver:
    """Saves the states of one run, one at a time, from one training thread.

    `attempt` is set once the run is claimed, before the first save. `on_end` is called in the writing thread with the
    handle of each save that has ended, well or not. `make_room` is called at most once in a save that finds its place
    full; if it returns True the save goes on from where it was. `lasting`: many saves are to come, so memory is taken
    and touched once. `timed`: manifests say where the time of their saves went.
    """

    def __init__(
        self,
        repo: Repo,
        run: str,
        *,
        emitter: Emitter | None = None,
        memory_budget: int | None = None,
        lasting: bool = True,
        timed: bool = False,
        rank: int = 0,
        on_end: Callable[[Save], None] | None = None,
        make_room: Callable[[], bool] | None = None,
        memory: MemoryTier | None = None,
    ) -> None:
        self.repo = repo
        self.attempt: Attempt | None = None
        self._emitter = emitter or Emitter()
        self._rank = rank
        self._timed = timed
        self._on_end = on_end
        self._make_room = make_room
        self.memory = memory
        arenas = ArenaHolder(repo.id, run, rank, budget=memory_budget, lasting=lasting)
        self._planner = Planner(arenas, repo.chunk_bytes, self._emitter, rank=rank)
        self._thread: threading.Thread | None = None
        self.current: Save | None = None
        self.fencing: Fencing | None = None
        """Set where what optimizers own is copied beside training."""
        self.manifest: Manifest | None = None
        """Of the save that came last to its commit, its tree left out."""

    @property
    def busy(self) -> bool:
        """Whether the writing thread is at work: on a save, or on what follows one."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def writing(self) -> bool:
        """Whether a save is still being written (also one that has been given up while its writer hangs)."""
        return self.busy and self.current is not None and not self.current.done

    def prewarm(self, flattened: Flattened) -> float:
        """Plans and takes the memory that a save of this state needs; returns the seconds it took."""
        began = time.perf_counter()
        if self.memory is not None:
            self.memory.prepare(flattened)
        if self.memory is None or self.memory.off:
            self._planner.plan(flattened)
        return time.perf_counter() - began

    def save(
        self,
        flattened: Flattened,
        step: int,
        *,
        wait: bool,
        about: About,
        handle: Save | None = None,
        eager: bool = False,
    ) -> Save:
        """Copies the state and returns; what follows runs beside training, or here if `wait`.

        eager: everything is copied before this returns, also where saves are fenced.

        Raises Superseded at once if another process has claimed the run, DeadlineExceeded if an earlier save is stuck.
        A failure later is in the handle.
        """
        began = time.perf_counter()
        attempt = self._claimed()
        within(CHECK_S, f"the check who owns run {attempt.run}", attempt.check, subject=attempt.run)
        if self.fencing is not None:
            self.fencing.begin_save()
        plan = self._plan(flattened)
        save = handle or self.plan_save(step, reason=about.reason)
        save.clock.add("prepare_s", time.perf_counter() - began)
        save.bytes = sum(pack.length for pack in plan.layout.packs)
        filling = Filling(plan.arena.window)
        digester = Digester(plan.chunks, plan.arena.buffer.data)
        # Through a window the state goes out while it is captured, whoever waits for what.
        overlapped = wait or plan.arena.window is not None
        job = Job(save, plan, flattened, about, filling, digester, not overlapped, now_text())
        self.current = save
        self._emitter.emit(SaveStarted(save.id, save.save_id, save.bytes, len(flattened.specs), about.reason))
        save.state = "capturing"
        if overlapped:
            self._start(job)
            ended = True
            try:
                self._capture(job, overlapped=True, eager=wait or eager)
            except WriterGone:
                pass  # what made it fail is in the handle
            finally:
                if wait:
                    with save.clock.joining():
                        ended = save.join()
            if not ended:
                raise save.stuck()
        else:
            self._capture(job, overlapped=False, eager=eager)
            self._start(job)
        save.stall_s = time.perf_counter() - began
        self._emitter.emit(Captured(save.id, save.stall_s, plan.arena.kind))
        return save

    def plan_save(self, step: int, *, reason: str = "") -> Save:
        """The handle of a save that is going to be taken."""
        attempt = self._claimed()
        return Save(CheckpointId(attempt.run, attempt.number, step), uuid.uuid4().hex, reason=reason)

    def lift(self) -> None:
        """Returns when training's memory may change, by whatever means."""
        if self.fencing is not None:
            self.fencing.lift()

    def join(self, timeout: float | None) -> bool:
        """Waits for the writer; False if it is still at work after `timeout` seconds."""
        if self.fencing is not None:
            self.fencing.hurry()
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.busy

    def close(self) -> None:
        """Gives the memory back, unless a hung writer still reads it."""
        if self.fencing is not None:
            self.fencing.close()
        if not self.busy:
            self._planner.release()

    def _plan(self, flattened: Flattened) -> SavePlan:
        """Over the memory tier's slot whose turn it is, else over memory that serves saves alone."""
        kept = self.memory.begin(flattened, writing=True) if self.memory is not None else None
        return kept or self._planner.plan(flattened)

    def _claimed(self) -> Attempt:
        assert self.attempt is not None, "a save needs a claimed attempt"
        return self.attempt

    def _capture(self, job: Job, *, overlapped: bool, eager: bool = True) -> None:
        began, clock = time.perf_counter(), job.save.clock

        def progress(filled: int) -> None:
            job.digester.advance(filled)
            clock.put("capture_s", time.perf_counter() - began)  # before the writer may come to tell of it
            job.filling.advance(filled)

        fencing = self.fencing if not eager and self.fencing is not None and self.fencing.possible(job.plan) else None
        try:
            if fencing is not None:
                with clock.during("capture_s"):
                    fencing.capture(job.flattened, job.plan, job.save, job.filling)
                return
            job.plan.capturer.capture(
                job.flattened, job.save.save_id, progress=progress if overlapped else None, admit=job.filling.admit
            )
        except WriterGone:
            raise
        except HoldfastError as error:
            job.filling.fail(error)
            raise
        except BaseException as error:
            job.filling.fail(SaveFailed(f"the capture of {job.save.id} broke off: {error!r}", subject=str(job.save.id)))
            raise
        crashpoint("image captured")
        if not overlapped:
            clock.put("capture_s", time.perf_counter() - began)
        job.save.state = "writing"
        job.filling.advance(job.plan.layout.nbytes)

    def _start(self, job: Job) -> None:
        name = f"holdfast-save-{job.save.step}"
        self._thread = threading.Thread(target=self._background, args=(job,), name=name, daemon=True)
        self._thread.start()

    def _background(self, job: Job) -> None:
        """Runs one save to its end and never raises: how it ended is in the handle, and in an event."""
        save = job.save
        began = time.perf_counter()
        save.clock.begin_cpu()
        failure: HoldfastError | None = None
        try:
            if job.digest_while_writing:  # training goes on meanwhile
                stand_back()
            attempt = self._claimed()
            attempt.unsettled.add(save.id)
            failure = self._run(job)
            if failure is None:
                attempt.unsettled.discard(save.id)
            if failure is None:
                save.seconds = time.perf_counter() - began
                save.clock.read_cpu()
                self._emitter.emit(Committed(save.id, save.bytes, save.seconds, save.timing))
        except BaseException as error:
            failure = SaveFailed(
                f"the save of {save.id} was cut off while {save.phase}: {error!r}", subject=str(save.id)
            )
            failure.__cause__ = error
            raise
        finally:
            job.filling.abandon()
            if self.memory is not None:
                self.memory.ended(job.plan)
            save.end(failure)  # whatever happens: somebody may wait for it without a deadline (I8)
            if self._on_end is not None:
                self._on_end(save)

    def _run(self, job: Job) -> HoldfastError | None:
        """Writes and commits; what made it fail, or None."""
        try:
            try:
                self._write(job)
            except StoreFull:
                if job.filling.gone or self._make_room is None or not self._make_room():
                    raise
                self._write(job)
        except BaseException as error:  # noqa: BLE001 - a thread's exception would reach nobody; the handle carries it
            return self._failed(job, error)
        return None

    def _failed(self, job: Job, error: BaseException) -> HoldfastError | None:
        """What became of a save that broke off: closed and told of, or None if it turns out to have committed."""
        save = job.save
        if not self._closed(job, error):
            return None
        if isinstance(error, OwnershipError | SaveFailed):
            failure: HoldfastError = error
        else:
            failure = SaveFailed(
                f"the save of {save.id} failed while {save.phase}: {getattr(error, 'message', None) or repr(error)}",
                subject=str(save.id),
                hint=getattr(error, "hint", None) or f"holdfast ls {self.repo.url}",
            )
            failure.__cause__ = error
        self._emitter.emit(SaveFailedEvent(save.id, failure.message, save.phase))
        return failure

    def _closed(self, job: Job, error: BaseException) -> bool:
        """Takes the manifest's name, so that this save can no longer commit, and frees its objects. False if the
        manifest is there: its put was answered by an error, and had arrived all the same."""
        save = job.save
        try:
            if not job.begun:
                return True
            if not self._abort(job, error):
                if isinstance(error, StoreUnreliable):
                    return True  # visible, and perhaps not durable: never reported as committed
                self.repo.store.settle(save.id.manifest)
                return False
            crashpoint("unfinished save marked aborted, objects still there")
            free(self.repo, save.id, names=job.names)
        except HoldfastError as trouble:
            self._emitter.emit(
                Warned(f"what {save.id} left behind stays until the next claim: {trouble.message}", str(save.id))
            )
        return True

    def _abort(self, job: Job, error: BaseException) -> bool:
        """As `abort`. On a full disk the mark may not fit; then what was written goes without one, for a save that
        never began to commit, or found no room for its manifest, cannot commit late: its only writer is here."""
        save, store = job.save, self.repo.store
        try:
            return abort(self.repo, save.id, save.save_id)
        except StoreFull:
            in_doubt = save.phase == COMMITTING and not isinstance(error, StoreFull)
            if in_doubt or self.repo.mark(save.id) is not None:
                raise
            store.delete([f"{save.id.directory}/{name}" for name in job.names])
            store.delete([begin_name(save.id)])
            return True

    def _write(self, job: Job) -> None:
        save, layout, repo, clock = job.save, job.plan.layout, self.repo, job.save.clock
        save.phase = "asking for space"
        with clock.during("begin_s"):
            self._check_space(job)
            save.phase = "beginning"
            if not job.begun:
                job.names = [*(pack.name for pack in layout.packs), index_file(self._rank)]
                begin(self._claimed(), save.step, save.save_id, job.names)
                job.begun = True
        if job.digest_while_writing:
            self._seal(job)  # at once, where training goes on meanwhile: a crash from here on loses no step
        for pack in range(len(job.receipts), len(layout.packs)):
            job.receipts.append(self._write_pack(job, pack))
        crashpoint("pack durable, index not yet")
        save.phase = "writing the index"
        job.digester.advance(layout.nbytes)
        clock.put("digest_s", job.digester.seconds)
        with clock.during("index_s"):
            index = self._index(job)
            receipt, entry = put_index(repo, save.id, index, job.plan.rows)
        receipts = [*job.receipts, receipt]
        crashpoint("packs and indexes durable, manifest not yet")
        self._seal(job)
        save.phase = COMMITTING
        with clock.during("commit_s"):
            tree, about = canonical.spell(job.flattened.tree), job.timed() if self._timed else job.about
            manifest = manifest_of(save.id, tree, job.plan, index, entry, about=about, created=job.created)
            self.manifest = replace(manifest, tree=None)
            commit(repo, manifest, receipts, tree=tree)
        crashpoint("manifest durable, not yet reported")

    def _write_pack(self, job: Job, pack: int) -> Receipt:
        save, plan = job.save, job.plan.layout.packs[pack]
        save.phase = f"writing {plan.name}"
        began, aside = time.perf_counter(), job.aside_s()

        def before_piece(end: int) -> None:
            save.moves()
            if job.digest_while_writing:
                job.digester.advance(end)
            self._emitter.emit(Progress("save", str(save.id), min(end, save.bytes), save.bytes))

        content = PackContent(plan, job.plan.arena.buffer.data, job.filling, before_piece)
        receipt = self.repo.store.put_if_absent(f"{save.id.directory}/{plan.name}", content, token=save.save_id)
        took = time.perf_counter() - began
        save.clock.add("write_s", max(0.0, took - (job.aside_s() - aside)))
        self._emitter.emit(PackWritten(save.id, plan.name, plan.length, took))
        return receipt

    def _index(self, job: Job) -> Index:
        digests = job.digester.digests()
        return index_of(
            job.plan, job.flattened, digests, job.save.save_id, rank=self._rank, chunk_bytes=self.repo.chunk_bytes
        )

    def _seal(self, job: Job) -> None:
        """Makes the image one that a process to come can go on from. Once; it fails no save."""
        if self.memory is None or job.sealed or job.plan.arena.window is not None:
            return
        job.sealed = True
        job.filling.wait(job.plan.layout.nbytes)
        job.digester.advance(job.plan.layout.nbytes)
        with job.save.clock.during("seal_s"):
            self.memory.seal(job.plan, job.save.id, self._index(job), job.flattened, job.about, created=job.created)

    def _check_space(self, job: Job) -> None:
        free_bytes = self.repo.store.free_bytes()
        needed = job.save.bytes + SMALL_OBJECTS_BYTES
        if free_bytes is not None and free_bytes < needed:
            free_mib, needed_mib = free_bytes / 2**20, needed / 2**20
            raise StoreFull(
                f"{self.repo.url} has {free_mib:,.0f} MiB free; this checkpoint needs {needed_mib:,.0f} MiB",
                subject=self.repo.url,
                hint=f"free space there, or keep fewer checkpoints; `holdfast ls {self.repo.url}` shows what is kept",
            )
