"""Repack: a run's checkpoints in another encoding: raw while they are hot, small when they are cold.

A committed object is never rewritten, so each gets a new identity: the same steps in a new attempt of the run, with the
same content digest, metrics and tags, of as many ranks. What is written is read back, decoded and compared before any
of it is visible; the newest becomes visible first, so `latest` means the same step at any moment; then the originals go
into the trash, and with them whatever data files were mostly dead.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tenuto.crashpoints import crashpoint
from tenuto.engine.read.lazy_reader import LazyReader
from tenuto.engine.save.commit_protocol import ManifestCallback, SoloCommit
from tenuto.engine.save.handle import Save
from tenuto.engine.save.held_commit import Held, HeldCommit
from tenuto.engine.save.job import Job, ManifestDetails, stored_in
from tenuto.engine.save.saver import Saver
from tenuto.errors import CheckpointNotFound, RunInUse, SaveFailed, typed
from tenuto.events import Emitter, Progress, Warned
from tenuto.maintenance import remove
from tenuto.maintenance.rename_run import check_dependents, check_refs
from tenuto.maintenance.shared_packs import REPACKED
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, IndexEntry, Json, Manifest, Receipt
from tenuto.policy.encoding import Encoding
from tenuto.record import record
from tenuto.repo.commit import begin, put_object
from tenuto.repo.format.manifest import content_of
from tenuto.repo.format.object_names import BOXES
from tenuto.repo.format.shard_table import encode_boxes
from tenuto.repo.keys import unlock
from tenuto.repo.lineage import latest, walk
from tenuto.repo.notes import known_metrics
from tenuto.repo.ownership.claim import Attempt, claim_newest
from tenuto.repo.ownership.owner_watch import finished_runs
from tenuto.repo.refs import put_ref
from tenuto.repo.repository import Repo
from tenuto.sharding.slices import Region
from tenuto.state.contract import Buffer, Flattened
from tenuto.state.self_reading import SelfReading

BLOCK_BYTES: Final = 4 << 20


@record
class RepackPlan:
    """What `execute` will do.

    checkpoints: of the run's line of training, oldest first. stored: the bytes of their own data files; bytes: of their
    states.
    originals: what goes into the trash: those, and where an earlier call was cut off what it has made of others.
    tags: that move.
    """

    where: str
    run: str
    encoding: Encoding
    checkpoints: tuple[CheckpointId, ...]
    originals: tuple[CheckpointId, ...]
    tags: tuple[tuple[str, CheckpointId], ...]
    stored: int
    bytes: int


@record
class Repacked:
    """Each old identity with the new one, and the bytes of the new data files. The originals lie in the trash."""

    checkpoints: tuple[tuple[CheckpointId, CheckpointId], ...]
    tags: tuple[str, ...]
    stored: int


def plan_repack(repo: Repo, run: str, encoding: Encoding) -> RepackPlan:
    """Plans to rewrite the line of training of `run`, and writes nothing.

    Raises RunInUse while a process trains the run; RemovalRefused where a pin or a hold names one of its checkpoints or
    another run has nothing else to resume from; CorruptionError.
    """
    run = run_key(run)
    if run not in finished_runs(repo, [run]):
        raise RunInUse(f"run {run!r} is not repacked while a process trains it", subject=run, hint="stop it first")
    line = [id for id in walk(repo, run) if id.run == run]
    ids = [id for _, id in sorted({id.step: id for id in reversed(line)}.items())]
    if not ids:
        raise CheckpointNotFound(f"run {run!r} has no checkpoint", subject=run, hint=typed("tenuto", "ls", repo.url))
    manifests = [repo.manifest(id) for id in ids]
    check_dependents(repo, line, besides=(run,))
    tags = tuple((name, id) for name, id in check_refs(repo, run) if id in line)
    stored = sum(manifest.stored_bytes for manifest in manifests)
    nbytes = sum(manifest.bytes for manifest in manifests)
    return RepackPlan(repo.url, run, encoding, tuple(ids), tuple(sorted(line)), tags, stored, nbytes)


def execute(repo: Repo, plan: RepackPlan, *, emitter: Emitter | None = None) -> Repacked:
    """Writes the checkpoints again, verifies them, moves the tags, and puts the originals into the trash.

    Raises RunInUse if the run has changed since the plan was made, SaveFailed where something else comes back than was
    read, and errors of the store. Cut off before anything is visible it leaves the run as it was; later, both.
    """
    emit = emitter or Emitter()
    unlock(repo, writing=True)
    own = _WithHeld(repo, repo.chunk_bytes, set())
    newest = latest(repo, plan.run)

    def changed() -> tuple[CheckpointId | None, CheckpointId | None]:
        raise RunInUse(f"run {plan.run!r} has changed since the plan was made", subject=plan.run, hint="plan again")

    attempt = claim_newest(own, plan.run, newest, newest, again=changed, wait_s=0.0)
    protocol = HeldCommit(own, visible="a repacked checkpoint is visible")
    made: list[Held] = []
    try:
        if {id for id in walk(repo, plan.run) if id.run == plan.run} != set(plan.originals):
            changed()
        writer = _Writer(own, attempt, plan.encoding, protocol.held, emit)
        try:
            for id in plan.checkpoints:
                writer.write(id)
        finally:
            writer.close()
        made = list(protocol.held)
        crashpoint("repacked checkpoints durable, none visible")
        attempt.check()
        protocol.put(newest_first=True)
        attempt.committed(plan.checkpoints[-1].step)
        by_step = {one.manifest.id.step: one.manifest.id for one in made}
        for name, id in plan.tags:
            put_ref(repo, "tag", name, by_step[id.step])
        crashpoint("repacked checkpoints visible, originals still there")
        removal = remove.plan_remove(repo, plan.originals, force=True, finished={plan.run: attempt.number})
        remove.execute(repo, removal)
    finally:
        # What is visible already rests on others that are not.
        needed = [base for one in made if one not in protocol.held for base in one.manifest.bases]
        try:
            protocol.take_back(
                lambda message: emit.emit(Warned(message, plan.run)), by="repacking failed", spared=needed
            )
        finally:
            attempt.release()
    stored = sum(one.manifest.stored_bytes for one in made)
    pairs = tuple((id, by_step[id.step]) for id in plan.checkpoints)
    return Repacked(pairs, tuple(name for name, _ in plan.tags), stored)


class _WithHeld(Repo):
    """A repository in which the saves of this process exist from when all but their manifests is there: the next one
    may rest on them, and they become visible together."""

    def __init__(self, repo: Repo, chunk_bytes: int, held: set[CheckpointId]) -> None:
        super().__init__(repo.store, repo.id, chunk_bytes)
        self.share_keys(repo)
        self.held = held

    def exists(self, id: CheckpointId) -> bool:
        return id in self.held or super().exists(id)


# --------------------------------------------------------------------------------------------------
# One checkpoint: everything but its manifest, rank by rank.


@record
class _Row:
    """One row of a rank's index, from which any part can be read, verified."""

    reader: LazyReader
    number: int
    spec: LeafSpec

    def read_into(self, out: Buffer, start: int) -> None:
        itemsize = self.spec.itemsize
        for done in range(0, len(out), BLOCK_BYTES):
            part = out[done : done + BLOCK_BYTES]
            items = len(part) // itemsize
            region = Region((start + done) // itemsize, (items,), (1,), (False,), (items,))
            self.reader.read(self.number, self.spec.path, region, itemsize, part)


_STORED: Final = SelfReading("stored")
_NOT_ENCODED: Final[Json] = {"bases": (), "rounded": False, "stored": None}


@record
class _Put:
    """What was put of one rank. `encoding`: what became of it; None where it is not encoded."""

    index: Index
    entry: IndexEntry
    receipts: Sequence[Receipt]
    bytes: int
    encoding: Json


class _OneRank(SoloCommit):
    """Commits nothing: what a saver has put of one rank is a part of a checkpoint that is begun and shown as a whole.
    `put`: the part that came last."""

    put: _Put

    def __init__(self, repo: Repo, rank: int) -> None:
        super().__init__(repo)
        self.rank = rank

    def take(self, flattened: Flattened, save: Save) -> Flattened:
        return flattened

    def begin(self, job: Job, attempt: Attempt) -> None:
        """Does nothing: all ranks have begun."""

    def commit(
        self,
        job: Job,
        index: Index,
        entry: IndexEntry,
        receipts: Sequence[Receipt],
        *,
        timed: bool,
        report: ManifestCallback,
    ) -> None:
        self.put = _Put(index, entry, receipts, job.save.bytes, job.about.environment.get("encoding"))


class _Writer:
    """Puts checkpoints again, one after the other, as as many ranks as have saved them. Of a job of several it holds
    the image of one rank at a time, and what differences are made to of as many as there is memory for.

    held: where they are added.
    """

    def __init__(
        self, repo: _WithHeld, attempt: Attempt, encoding: Encoding, held: list[Held], emitter: Emitter
    ) -> None:
        self._repo, self._attempt, self._encoding, self._emitter = repo, attempt, encoding, emitter
        self._held = held
        self._buffers = np.empty((2, BLOCK_BYTES), np.uint8)
        self._savers: dict[tuple[int, int], tuple[Saver, _OneRank]] = {}
        """By rank, and by the length of chunks."""

    def write(self, source: CheckpointId) -> None:
        """Puts all of the new checkpoint but its manifest, and verifies it. Raises SaveFailed, CorruptionError."""
        repo, manifest = self._repo, self._repo.manifest(source)
        ranks = range(len(manifest.indexes))
        indexes = [repo.index(manifest, rank) for rank in ranks]
        boxes = repo.boxes(manifest)
        savers = [self._saver(rank, manifest.chunk_bytes) for rank in ranks]
        id, save_id = CheckpointId(source.run, self._attempt.number, source.step), uuid.uuid4().hex
        names = [name for rank in ranks for name in savers[rank][0].names(indexes[rank].specs)]
        bases = {base for saver, _ in savers for base in saver.bases()}
        names += [BOXES] * (boxes is not None)
        begin(self._attempt, id.step, save_id, names, bases=sorted(bases), newest_first=True)
        tree, receipts = canonical_json.spell(manifest.tree), list[Receipt]()
        self._held.append(Held(replace(manifest, id=id, save_id=save_id), receipts, tree))
        put, table = list[_Put](), None
        for (saver, protocol), index in zip(savers, indexes, strict=True):
            self._save_rank(saver, Save(id, save_id, reason=f"repacked from {source}"), manifest, index)
            put.append(protocol.put)
            receipts += protocol.put.receipts
            if len(ranks) > 1:
                saver.rest()
        if boxes is not None:
            receipt, table = put_object(repo, id, BOXES, encode_boxes(boxes, id, save_id, repo.id), save_id)
            receipts.append(receipt)
        made = [one.index for one in put]
        new = replace(
            manifest,
            id=id,
            save_id=save_id,
            parent=self._attempt.parent,
            indexes=tuple(one.entry for one in put),
            boxes=table,
            content=content_of(tree, made, boxes),
            bytes=sum(one.bytes for one in put),
            metrics=known_metrics(repo, source),
            environment=self._environment(manifest, [one.encoding for one in put if one.encoding is not None]),
            code="",
            **{**_NOT_ENCODED, **stored_in(*made)},
        )
        self._held[-1] = held = Held(new, receipts, tree)
        self._verify(manifest, held.manifest)
        repo.held.add(id)

    def close(self) -> None:
        for saver, _ in self._savers.values():
            saver.close()

    def _saver(self, rank: int, chunk_bytes: int) -> tuple[Saver, _OneRank]:
        found = self._savers.get((rank, chunk_bytes))
        if found is None:
            repo = _WithHeld(self._repo, chunk_bytes, self._repo.held)
            protocol = _OneRank(repo, rank)
            saver = Saver(repo, self._attempt.run, emitter=self._emitter, protocol=protocol, encoding=self._encoding)
            saver.attempt = self._attempt
            saver.begin_afresh()  # the originals are to go
            found = self._savers[rank, chunk_bytes] = saver, protocol
        return found

    def _save_rank(self, saver: Saver, save: Save, manifest: Manifest, index: Index) -> None:
        reader = LazyReader(self._repo, manifest.id, self._repo.table(manifest, index.rank))
        try:
            forms = [[one.path, one.dtype, one.shape, one.offsets, one.whole] for one in index.specs]
            flattened = Flattened(
                tree=manifest.tree,
                private=index.private,
                specs=tuple(index.specs),
                sources=[_Row(reader, number, spec) for number, spec in enumerate(index.specs)],
                devices=(_STORED,),
                device=[0] * len(index.specs),
                fingerprint=repr(forms),
                leaf=None if index.leaf is None else index.leaf.tolist(),
                shared=index.tree_leaves,
            )
            saver.save(flattened, save.step, wait=True, about=ManifestDetails(reason=save.reason), handle=save).wait()
        finally:
            reader.close()

    def _environment(self, manifest: Manifest, encodings: Sequence[Json]) -> dict[str, Json]:
        found = {name: value for name, value in manifest.environment.items() if name != "encoding"}
        found[REPACKED] = {"checkpoint": str(manifest.id), "encoding": str(self._encoding)}
        if encodings:
            names = {name for one in encodings for name in one if name != "decision"}
            numbers = {name: sum(one.get(name, 0) for one in encodings) for name in names}
            found["encoding"] = {"decision": encodings[0]["decision"], **numbers}
        return found

    def _verify(self, original: Manifest, manifest: Manifest) -> None:
        """Reads back every byte of what was stored, decoded, and compares it with the original: by its digests, or
        where the two are sealed by different keys by its bytes.

        Raises SaveFailed where it is not the same state, CorruptionError where it cannot be read.
        """
        repo, done = self._repo, 0
        for rank in range(len(original.indexes)):
            index, made = repo.index(original, rank), repo.index(manifest, rank)
            by_bytes = index.sealed != made.sealed
            alike = (list(made.specs), made.private) == (list(index.specs), index.private)
            if not alike or (not by_bytes and manifest.content != original.content):
                raise _differs(repo, original.id)
            new, old = (LazyReader(repo, one.id, repo.table(one, rank)) for one in (manifest, original))
            try:
                for number, spec in enumerate(index.specs):
                    self._compare(_Row(new, number, spec), _Row(old, number, spec) if by_bytes else None, original.id)
                    done += spec.nbytes
                    if self._emitter.listened:
                        self._emitter.emit(Progress("verify", str(original.id), done, original.bytes))
            finally:
                new.close()
                old.close()

    def _compare(self, new: _Row, old: _Row | None, source: CheckpointId) -> None:
        step = BLOCK_BYTES // new.spec.itemsize * new.spec.itemsize
        for start in range(0, new.spec.nbytes, step):
            ours, theirs = self._buffers[:, : min(step, new.spec.nbytes - start)]
            new.read_into(ours, start)
            if old is not None:
                old.read_into(theirs, start)
                if not np.array_equal(ours, theirs):
                    raise _differs(self._repo, source)


def _differs(repo: Repo, source: CheckpointId) -> SaveFailed:
    return SaveFailed(
        f"what was written of {source} is not the same state: nothing of it is visible",
        subject=str(source),
        hint=typed("tenuto", "verify", repo.url, source),
    )
