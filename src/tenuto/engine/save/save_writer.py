"""Writing one save: packs, index and manifest, in the order that I1 requires; and closing one that fails.

begin.json -> packs -> index -> manifest, each durable before the next is begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tenuto.crashpoints import crashpoint
from tenuto.engine.save.commit_protocol import CommitProtocol
from tenuto.engine.save.encoded_pack import Segment, pack_names
from tenuto.engine.save.encoder import EncodedPacks, StateEncoder
from tenuto.engine.save.job import Job
from tenuto.engine.staging.pack_content import PackContent
from tenuto.engine.staging.plan import ImagePlan
from tenuto.errors import OwnershipError, SaveFailed, StoreFull, StoreUnreliable, TenutoError, in_words, typed
from tenuto.events import Emitter, PackWritten, Progress, SaveFailedEvent, Warned
from tenuto.model.records import Manifest, Receipt
from tenuto.repo.bases import usable_bases
from tenuto.repo.commit import put_index
from tenuto.repo.format.object_names import begin_name, index_file
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.replicated.places import free_space, is_kept
from tenuto.repo.repository import Repo
from tenuto.repo.unfinished import abort, free
from tenuto.units import size

if TYPE_CHECKING:
    from tenuto.engine.memory_tier.tier import MemoryTier
    from tenuto.engine.save.health import HealthWatch

SMALL_OBJECTS_BYTES = 4 << 20
"""Room that is asked for beside the packs: index, manifest, begin.json, notes."""
COMMITTING = "committing"


class SaveWriter:
    """Writes the saves of one run, one after the other. `make_room` and `timed`: as `Saver`."""

    def __init__(
        self,
        repo: Repo,
        emitter: Emitter,
        *,
        protocol: CommitProtocol,
        timed: bool,
        make_room: Callable[[], bool] | None,
        memory: MemoryTier | None,
        encoder: StateEncoder | None = None,
        health: HealthWatch | None = None,
    ) -> None:
        self._repo = repo
        self._health = health
        self._encoder = encoder
        self._emitter = emitter
        self._protocol = protocol
        self._timed = timed
        self._make_room = make_room
        self._memory = memory
        self.manifest: Manifest | None = None
        """Of the save that came last to its commit, its tree left out."""

    def write(self, job: Job, attempt: Attempt) -> TenutoError | None:
        """Writes and commits a save; returns what made it fail, or None."""
        try:
            try:
                self._write(job, attempt)
            except StoreFull:
                if job.filling.gone or self._make_room is None or not self._make_room():
                    raise
                self._write(job, attempt)
        except BaseException as error:  # noqa: BLE001 - a thread's exception would reach nobody; the handle carries it
            if self._encoder is not None:
                self._encoder.failed()
            return self._failed(job, attempt, error)
        return None

    def _failed(self, job: Job, attempt: Attempt, error: BaseException) -> TenutoError | None:
        """Closes and reports a save that broke off; returns why it failed, or None if it has committed after all."""
        save = job.save
        cause = self._protocol.failed(save, error)
        if not self._closed(job, attempt, error):
            return None
        if isinstance(cause, OwnershipError | SaveFailed):
            failure: TenutoError = cause
        else:
            failure = SaveFailed(
                f"the save of {save.id} failed while {save.phase}: {in_words(cause)}",
                subject=str(save.id),
                hint=getattr(cause, "hint", None) or typed("tenuto", "ls", self._repo.url),
            )
            failure.__cause__ = cause
        self._emitter.emit(SaveFailedEvent(save.id, failure.message, save.phase, failure.hint or ""))
        return failure

    def _closed(self, job: Job, attempt: Attempt, error: BaseException) -> bool:
        """Takes the manifest's name, so that this save can no longer commit, and frees its objects. False if the
        manifest is there: its put was answered by an error, and had arrived all the same."""
        save = job.save
        try:
            if not job.begun:
                return True
            if not self._protocol.coordinates:
                # What was put here after the coordinator had freed the save; nothing, if it may still commit.
                free(self._repo, save.id, names=job.names, keep_begin=True)
                return True
            if not self._abort(job, error):
                if isinstance(error, StoreUnreliable):
                    return True  # visible, and perhaps not durable: never reported as committed
                self._repo.store.settle(save.id.manifest)
                return False
            crashpoint("unfinished save marked aborted, objects still there")
            # Another rank that still writes frees what is its own; what a killed one has left goes before the next save
            # is begun, or at the next claim.
            if self._protocol.has_peers:
                attempt.unclosed.add(save.id)
            free(self._repo, save.id, names=job.names, keep_begin=self._protocol.has_peers)
        except TenutoError as trouble:
            attempt.unclosed.add(save.id)
            self._emitter.emit(
                Warned(f"what {save.id} left behind stays until the next save: {trouble.message}", str(save.id))
            )
        return True

    def _abort(self, job: Job, error: BaseException) -> bool:
        """Closes the save as `abort` does. On a full disk the mark may not fit; then what was written is deleted
        without one: a save that never began to commit, or found no room for its manifest, cannot commit late, since its
        only writer is here."""
        save, store = job.save, self._repo.store
        try:
            return abort(self._repo, save.id, save.save_id)
        except StoreFull:
            in_doubt = save.phase == COMMITTING and not isinstance(error, StoreFull)
            if in_doubt or self._repo.mark(save.id) is not None:
                raise
            store.delete([f"{save.id.directory}/{name}" for name in job.names])
            store.delete([begin_name(save.id)])
            return True

    def _write(self, job: Job, attempt: Attempt) -> None:
        save, layout, repo, clock = job.save, job.plan.layout, self._repo, job.save.clock
        if job.digest_while_writing and self._memory is not None:
            # First, where training continues meanwhile: neither a crash from here on nor a store that is full, or does
            # not answer, loses a step.
            save.phase = "sealing it in memory"
            self.seal(job)
        save.phase = "asking for space"
        with clock.during("begin_s"):
            self._check_space(job)
            save.phase = "beginning"
            if not job.begun:
                self._begin(job, attempt)
                job.begun = True
        if job.encoded is not None:
            self._write_encoded(job, job.encoded)
        else:
            for pack in range(len(job.receipts), len(layout.packs)):
                job.receipts.append(self._write_pack(job, pack))
        crashpoint("pack durable, index not yet")
        save.phase = "writing the index"
        job.digester.advance(layout.nbytes)
        clock.put("digest_s", job.digester.seconds)
        with clock.during("index_s"):
            index = job.written_index()
            if self._health is not None:
                index, found = self._health.concluded(job, index, attempt.parent)
                job.about = replace(job.about, health=found)
            if job.encoded is not None:
                about = {"encoding": job.encoded.about(index)}
                job.about = replace(job.about, environment={**job.about.environment, **about})
            receipt, entry = put_index(repo, save.id, index, job.plan.rows)
        receipts = [*job.receipts, receipt]
        crashpoint("packs and indexes durable, manifest not yet")
        self.seal(job)
        save.phase = COMMITTING
        with clock.during("commit_s"):
            self._protocol.commit(job, index, entry, receipts, timed=self._timed, report=self._set_manifest)
        if self._encoder is not None and job.encoded is not None:
            self._encoder.committed(job.encoded, index)
        if self._health is not None:
            self._health.committed(job)
        crashpoint("manifest durable, not yet reported")

    def names(self, plan: ImagePlan) -> list[str]:
        """Returns the file names of all that a save of this structure may put, but its manifest."""
        return [*pack_names(plan, encoded=self._encoder is not None), index_file(self._protocol.rank)]

    def _set_manifest(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def _begin(self, job: Job, attempt: Attempt) -> None:
        encoder = self._encoder
        job.names = self.names(job.plan)
        if encoder is None:
            self._protocol.begin(job, attempt)
            return
        job.bases = encoder.bases(attempt.parent)
        self._protocol.begin(job, attempt)
        usable = usable_bases(self._repo, job.save.id, job.bases, through=encoder.newest)
        job.encoded = encoder.begin(job, usable, partial(is_kept, self._repo.store))

    def _write_encoded(self, job: Job, packs: EncodedPacks) -> None:
        save = job.save

        def put(segment: Segment) -> Receipt:
            save.phase, began = f"writing {segment.entry.name}", time.perf_counter()
            receipt = self._repo.store.put_if_absent(
                f"{save.id.directory}/{segment.entry.name}", segment, token=save.save_id
            )
            took = time.perf_counter() - began
            save.clock.add("write_s", took)
            self._emitter.emit(PackWritten(save.id, segment.entry.name, segment.length, took))
            return receipt

        def progress(end: int) -> None:
            if self._emitter.listened:
                self._emitter.emit(Progress("save", str(save.id), min(end, save.bytes), save.bytes))

        packs.write(put, job.receipts, progress)

    def _write_pack(self, job: Job, pack: int) -> Receipt:
        save, plan = job.save, job.plan.layout.packs[pack]
        save.phase = f"writing {plan.name}"
        began, aside = time.perf_counter(), job.aside_s()

        def before_piece(end: int) -> None:
            save.moves()
            if job.digest_while_writing:
                job.digester.advance(end)
            if self._emitter.listened:
                self._emitter.emit(Progress("save", str(save.id), min(end, save.bytes), save.bytes))

        content = PackContent(plan, job.plan.arena.buffer.data, job.filling, before_piece)
        receipt = self._repo.store.put_if_absent(f"{save.id.directory}/{plan.name}", content, token=save.save_id)
        took = time.perf_counter() - began
        save.clock.add("write_s", max(0.0, took - (job.aside_s() - aside)))
        self._emitter.emit(PackWritten(save.id, plan.name, plan.length, took))
        return receipt

    def seal(self, job: Job) -> None:
        """Seals the image in memory, once, so that the next process can resume from it. What goes wrong with the seal
        fails no save; what broke the capture off is raised."""
        if self._memory is None or job.sealed or job.plan.arena.window is not None:
            return
        job.digest_image()
        job.sealed = True
        with job.save.clock.during("seal_s"):
            self._memory.seal(job)

    def _check_space(self, job: Job) -> None:
        where, free_bytes = free_space(self._repo.store)
        bytes = job.save.bytes if self._encoder is None else self._encoder.expected(job.save.bytes)
        needed = bytes + SMALL_OBJECTS_BYTES
        if free_bytes is not None and free_bytes < needed:
            url = self._repo.url
            raise StoreFull(
                f"{where} has {size(free_bytes)} free; this checkpoint needs {size(needed)}",
                subject=where,
                hint=f"`{typed('tenuto', 'gc', url, '--now')}` frees what is in the trash at once; or keep fewer "
                f"checkpoints: `{typed('tenuto', 'ls', url)}` shows what is kept",
            )
