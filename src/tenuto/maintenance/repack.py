"""Repack: a run's checkpoints in another encoding: raw while they are hot, small when they are cold.

A committed object is never rewritten, so each gets a new identity: the same steps in a new attempt of the run, with the
same content digest, metrics and tags. What is written is read back, decoded and compared before any of it is visible;
the newest becomes visible first, so `latest` means the same step at any moment; then the originals go into the trash,
and with them whatever data files were mostly dead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tenuto.crashpoints import crashpoint
from tenuto.engine.read.lazy_reader import LazyReader
from tenuto.engine.save.held_commit import Held, HeldCommit
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.errors import CheckpointNotFound, RunInUse, SaveFailed, UsageError, typed
from tenuto.events import Emitter, Progress, Warned
from tenuto.maintenance import remove
from tenuto.maintenance.rename_run import check_dependents, check_refs
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Json
from tenuto.policy.encoding import Encoding
from tenuto.repo.keys import unlock
from tenuto.repo.lineage import latest, walk
from tenuto.repo.notes import known_metrics
from tenuto.repo.ownership.claim import claim_newest
from tenuto.repo.ownership.owner_watch import finished_runs
from tenuto.repo.refs import put_ref
from tenuto.repo.repository import Repo
from tenuto.sharding.slices import Region
from tenuto.state.contract import Buffer, Flattened
from tenuto.state.self_reading import SelfReading

REPACKED: Final = "repacked"
"""The entry of a checkpoint's environment that names the one that it was stored as before."""
BLOCK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Repacked:
    """Each old identity with the new one, and the bytes of the new data files. The originals lie in the trash."""

    checkpoints: tuple[tuple[CheckpointId, CheckpointId], ...]
    tags: tuple[str, ...]
    stored: int


def plan_repack(repo: Repo, run: str, encoding: Encoding) -> RepackPlan:
    """Plans to rewrite the line of training of `run`, and writes nothing.

    Raises RunInUse while a process trains the run; RemovalRefused where a pin or a hold names one of its checkpoints or
    another run has nothing else to resume from; UsageError for checkpoints of several ranks; CorruptionError.
    """
    run = run_key(run)
    if run not in finished_runs(repo, [run]):
        raise RunInUse(f"run {run!r} is not repacked while a process trains it", subject=run, hint="stop it first")
    line = [id for id in walk(repo, run) if id.run == run]
    ids = [id for _, id in sorted({id.step: id for id in reversed(line)}.items())]
    if not ids:
        raise CheckpointNotFound(f"run {run!r} has no checkpoint", subject=run, hint=typed("tenuto", "ls", repo.url))
    manifests = [repo.manifest(id) for id in ids]
    for manifest in manifests:
        if len(manifest.indexes) > 1 or manifest.chunk_bytes != repo.chunk_bytes:
            raise UsageError(
                f"{manifest.id} was saved by {len(manifest.indexes)} ranks in chunks of {manifest.chunk_bytes} bytes: "
                "only what one process has saved is repacked",
                subject=str(manifest.id),
                hint="a training that resumes with encoding= stores its next checkpoints so",
            )
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
    own = _WithHeld(repo)
    newest = latest(repo, plan.run)

    def changed() -> tuple[CheckpointId | None, CheckpointId | None]:
        raise RunInUse(f"run {plan.run!r} has changed since the plan was made", subject=plan.run, hint="plan again")

    attempt = claim_newest(own, plan.run, newest, newest, again=changed, wait_s=0.0)
    protocol = HeldCommit(own, visible="a repacked checkpoint is visible")
    made: list[Held] = []
    try:
        if {id for id in walk(repo, plan.run) if id.run == plan.run} != set(plan.originals):
            changed()
        with _saver(own, plan, protocol, emit) as saver:
            saver.attempt = attempt
            for id in plan.checkpoints:
                _store(repo, saver, id, plan.encoding)
                own.held.add(protocol.held[-1].manifest.id)
                protocol.held[-1] = _verify(own, id, protocol.held[-1], emit)
        made = list(protocol.held)
        crashpoint("repacked checkpoints durable, none visible")
        attempt.check()
        protocol.put(newest_first=True)
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

    def __init__(self, repo: Repo) -> None:
        super().__init__(repo.store, repo.id, repo.chunk_bytes)
        self.keys = repo.keys
        self.held: set[CheckpointId] = set()

    def exists(self, id: CheckpointId) -> bool:
        return id in self.held or super().exists(id)


@contextmanager
def _saver(repo: Repo, plan: RepackPlan, protocol: HeldCommit, emitter: Emitter) -> Iterator[Saver]:
    saver = Saver(repo, plan.run, emitter=emitter, protocol=protocol, encoding=plan.encoding)
    saver.begin_afresh()  # the originals are to go
    try:
        yield saver
    finally:
        saver.close()


# --------------------------------------------------------------------------------------------------
# One checkpoint.


@dataclass(frozen=True, slots=True)
class _Row:
    """One leaf of a checkpoint, from which any part can be read, verified."""

    reader: LazyReader
    number: int
    spec: LeafSpec

    def read_into(self, out: Buffer, start: int) -> None:
        itemsize = self.spec.itemsize
        for begin in range(0, len(out), BLOCK_BYTES):
            part = out[begin : begin + BLOCK_BYTES]
            items = len(part) // itemsize
            region = Region((start + begin) // itemsize, (items,), (1,), (False,), (items,))
            self.reader.read(self.number, self.spec.path, region, itemsize, part)


_STORED: Final = SelfReading("stored")


def _store(repo: Repo, saver: Saver, id: CheckpointId, encoding: Encoding) -> None:
    """Puts all of the new checkpoint but its manifest. Raises SaveFailed."""
    manifest = repo.manifest(id)
    index = repo.index(manifest)
    reader = LazyReader(repo, id, repo.table(manifest))
    try:
        forms: list[Json] = [[spec.path, spec.dtype, list(spec.shape)] for spec in index.specs]
        flattened = Flattened(
            tree=manifest.tree,
            private=index.private,
            specs=tuple(index.specs),
            sources=[_Row(reader, number, spec) for number, spec in enumerate(index.specs)],
            devices=(_STORED,),
            device=[0] * len(index.specs),
            fingerprint=canonical_json.dumps(forms).decode(),
        )
        assert saver.attempt is not None, "claimed"
        about = ManifestDetails(
            parent=saver.attempt.parent,
            metrics=known_metrics(repo, id),
            progress=manifest.progress,
            environment={**manifest.environment, REPACKED: {"checkpoint": str(id), "encoding": str(encoding)}},
            certificate=manifest.certificate,
            health=manifest.health,
            reason=f"repacked from {id}",
        )
        saver.save(flattened, id.step, wait=True, about=about).wait()
    finally:
        reader.close()


def _verify(repo: Repo, source: CheckpointId, held: Held, emitter: Emitter) -> Held:
    """Reads back every byte of what was stored, decoded, and compares it with the original: by its digests, or where
    the two are sealed by different keys by its bytes. Returns it with the original's time.

    Raises SaveFailed where it is not the same state, CorruptionError where it cannot be read.
    """
    original, manifest = repo.manifest(source), held.manifest
    index = repo.index(original)
    by_bytes = index.sealed != held.index.sealed
    if not by_bytes and manifest.content != original.content:
        raise _differs(repo, source)
    new, old = (LazyReader(repo, one.id, repo.table(one)) for one in (manifest, original))
    ours, theirs, done = np.empty(BLOCK_BYTES, np.uint8), np.empty(BLOCK_BYTES, np.uint8), 0
    try:
        for number, spec in enumerate(index.specs):
            step = max(BLOCK_BYTES // spec.itemsize, 1) * spec.itemsize
            for start in range(0, spec.nbytes, step):
                length = min(step, spec.nbytes - start)
                _Row(new, number, spec).read_into(ours[:length], start)
                if by_bytes:
                    _Row(old, number, spec).read_into(theirs[:length], start)
                    if not np.array_equal(ours[:length], theirs[:length]):
                        raise _differs(repo, source)
                done += length
            if emitter.listened:
                emitter.emit(Progress("verify", str(source), done, original.bytes))
    finally:
        new.close()
        old.close()
    return replace(held, manifest=replace(manifest, created=original.created))


def _differs(repo: Repo, source: CheckpointId) -> SaveFailed:
    return SaveFailed(
        f"what was written of {source} is not the same state: nothing of it is visible",
        subject=str(source),
        hint=typed("tenuto", "verify", repo.url, source),
    )
