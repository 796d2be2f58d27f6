"""One job of many ranks, whose steps one thread takes in turn: what a rank would wait for is there when it comes to it.

All that ranks say to each other is encoded, put on a board, read and decoded; packs, indexes, the table of parts and
the manifest are put into a store as they would be. Left out is what takes no part in the ranks' agreement: the
handshake, signs of life, and the threads of a save.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final, TypeVar

from campaigns.many_ranks.costs import Costs, CountedKVStore, CountedStore
from campaigns.many_ranks.states import Mesh
from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.group.rounds import WaitPoints
from tenuto.engine.save.handle import Save
from tenuto.engine.save.job import Job, ManifestDetails
from tenuto.engine.staging.arena import Arena
from tenuto.engine.staging.pack_content import PackContent
from tenuto.engine.staging.plan import StagingBuffer
from tenuto.events import Emitter
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, IndexEntry, Manifest
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.cleanup import StaleRounds
from tenuto.ranks.contract import Settings
from tenuto.ranks.session import Session
from tenuto.repo.commit import put_index
from tenuto.repo.format.object_names import index_file
from tenuto.repo.ownership.claim import Attempt, claim
from tenuto.repo.repository import Repo
from tenuto.state.contract import Flattened
from tenuto.state.encode.flattener import Flattener

RUN: Final = "main"
_IMAGE_BYTES: Final = 64 << 20
Result = TypeVar("Result")


class OneImage:
    """The memory of one image, which all ranks use in turn."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _IMAGE_BYTES)

    def acquire(self, nbytes: int, *, step: int = 0) -> Arena:
        assert nbytes <= _IMAGE_BYTES, "a rank of this simulation writes little"
        return Arena(self._memory, nbytes=nbytes)

    def release(self) -> None:
        """It goes with this object."""


class Rank:
    """One rank of the job, between two steps."""

    def __init__(self, job: ManyRanks, rank: int) -> None:
        session = Session("f" * 32, rank, job.mesh.ranks, job.kv_store, Settings())
        self.rank = rank
        self.agreement = Agreement(session, StaleRounds(session))
        self.together = GroupCommit(job.repo, self.agreement)
        self.buffer = StagingBuffer(job.image, job.repo.chunk_bytes, Emitter(), rank=rank)
        self.flattened: Flattened | None = None
        self.job: Job | None = None
        self.put: tuple[Index, IndexEntry] | None = None


class ManyRanks:
    """A job over `mesh`, in a repository of its own; `account` says what its saves have cost."""

    def __init__(self, mesh: Mesh, name: str) -> None:
        self.mesh = mesh
        self.kv_store = CountedKVStore()
        self.store = CountedStore(name)
        self.store.place.objects.clear()
        self.repo = Repo.create_or_open(self.store)
        self.image = OneImage()
        self.costs = Costs(self.kv_store)
        self.attempt: Attempt = claim(self.repo, RUN, None)
        self.ranks = [Rank(self, rank) for rank in range(mesh.ranks)]
        self.manifests: list[Manifest] = []

    def close(self) -> None:
        self.attempt.release()
        self.store.place.objects.clear()

    def save(self, step: int, prefix: str) -> CheckpointId:
        """One save of all ranks. Its phases are told under names that begin with `prefix`."""
        saves = [Save(CheckpointId(RUN, self.attempt.number, step), "") for _ in self.ranks]
        for one in self.ranks:
            one.flattened = Flattener(self.mesh.state(one.rank, step)).flatten()
        taken = self._in_step(
            [f"{prefix}: say what is held", f"{prefix}: plan", f"{prefix}: hear the plan"],
            [one.together.take_steps(_known(one.flattened), save) for one, save in zip(self.ranks, saves, strict=True)],
        )
        for one, written, save in zip(self.ranks, taken, saves, strict=True):
            with self.costs.step_of(f"{prefix}: lay out", one.rank):
                one.job = self._job(one, written, save, step)
            one.flattened = None
        self._in_step(
            [f"{prefix}: say ready", f"{prefix}: begin", f"{prefix}: hear that it is begun"],
            [one.together.begin_steps(_of(one), self.attempt) for one in self.ranks],
        )
        for one in self.ranks:
            with self.costs.step_of(f"{prefix}: capture, put pack and index", one.rank):
                self._write(one)
        self._in_step(
            [f"{prefix}: say what is put", f"{prefix}: commit", f"{prefix}: hear of the commit"],
            [self._committing(one) for one in self.ranks],
        )
        return saves[0].id

    def _committing(self, one: Rank) -> WaitPoints[None]:
        assert one.put is not None
        index, entry = one.put
        return one.together.commit_steps(_of(one), index, entry, timed=False, told=self._note_commit)

    def _note_commit(self, manifest: Manifest) -> None:
        if manifest.indexes:
            self.manifests.append(manifest)

    def _in_step(self, names: Sequence[str], steps: Sequence[WaitPoints[Result]]) -> list[Result]:
        """All ranks say what they have to say; the coordinator decides; all others hear it, and so on where there is
        another round. What comes of each rank's steps."""
        found: dict[int, Result] = {}

        def step_of(name: str, rank: int) -> None:
            with self.costs.step_of(name, rank):
                try:
                    next(steps[rank])
                except StopIteration as end:
                    found[rank] = end.value

        for rank in range(len(steps)):
            step_of(names[0], rank)
        while len(found) < len(steps):
            step_of(names[1], 0)
            for rank in range(1, len(steps)):
                step_of(names[2], rank)
        return [found[rank] for rank in range(len(steps))]

    def _job(self, one: Rank, written: Flattened, save: Save, step: int) -> Job:
        plan = one.buffer.prepare(written)
        job = Job(save, plan, written, ManifestDetails(progress={"step": step}))
        job.names = [*(pack.name for pack in plan.layout.packs), index_file(one.rank)]
        return job

    def _write(self, one: Rank) -> None:
        """Captures, digests and puts what the rank writes: all in one turn, for the next rank uses the same memory."""
        job = _of(one)
        save, plan, repo = job.save, job.plan, self.repo
        plan.capturer.capture(job.flattened, save.save_id, progress=None, admit=job.filling.admit)
        job.filling.advance(plan.layout.nbytes)
        job.digester.advance(plan.layout.nbytes)
        for pack in plan.layout.packs:
            content = PackContent(pack, plan.arena.buffer.data, job.filling, _nothing)
            repo.store.put_if_absent(f"{save.id.directory}/{pack.name}", content, token=save.save_id)
        index = job.index()
        _, entry = put_index(repo, save.id, index, plan.rows)
        one.put = index, entry


def _known(flattened: Flattened | None) -> Flattened:
    assert flattened is not None
    return flattened


def _of(one: Rank) -> Job:
    assert one.job is not None, "taken before"
    return one.job


def _nothing(end: int) -> None:
    """Nobody looks at how far it is."""
