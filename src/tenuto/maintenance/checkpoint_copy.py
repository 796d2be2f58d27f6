"""Copies of checkpoints under another name: in another run, another repository, or both.

Within a repository a copy puts no data files: its indexes name those that are there (`bases` in its manifest), as a
save does that dedupes. Into another repository every stored byte goes, verified on the way. Either is a checkpoint like
any other, with the tree, values, random states, metrics and certificate of its source, and as many ranks. A frame is
sealed for one name: a copy of it that shares nothing is opened and sealed again, between places of its repository.

All copies are put before the first manifest is: whatever breaks off before that leaves nothing that can be seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np

from tenuto.codec.chunk_map import ChunkMap
from tenuto.codec.digest import digest
from tenuto.concurrency.worker_threads import parallel_for
from tenuto.crashpoints import crashpoint
from tenuto.engine.read.chunk_reader import ChunkReader, chunk_runs
from tenuto.engine.read.copy_packs import copy_pack
from tenuto.engine.read.lazy_reader import LazyReader
from tenuto.engine.read.packs import open_pack
from tenuto.engine.save.baseline import baseline_in
from tenuto.engine.save.encoded_pack import Segment
from tenuto.engine.save.job import stored_in
from tenuto.engine.save.sealed_again import pack_names, sealed_again
from tenuto.errors import (
    AlreadyExists,
    CheckpointNotFound,
    CorruptionError,
    KeyMissing,
    NotARepository,
    TenutoError,
    UsageError,
    typed,
)
from tenuto.events import Emitter, Progress, Warned
from tenuto.maintenance.remove import is_suspect
from tenuto.maintenance.tier_copies import fill_now
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import Index, IndexEntry, Json, Manifest, PackEntry, Receipt
from tenuto.record import record
from tenuto.repo.bases import forked_from_others, usable_bases
from tenuto.repo.commit import begin, commit, put_index, put_object
from tenuto.repo.format import object_names
from tenuto.repo.format.object_names import encoded_pack_file
from tenuto.repo.format.safetensors import build_header
from tenuto.repo.format.shard_table import encode_boxes
from tenuto.repo.keys import refuse_if_sealed, unlock
from tenuto.repo.lineage import latest
from tenuto.repo.notes import add_note, known_metrics
from tenuto.repo.ownership.claim import Attempt, claim_newest
from tenuto.repo.replicated.members import member_in
from tenuto.repo.replicated.places import home_of
from tenuto.repo.repository import Repo, now_text
from tenuto.repo.unfinished import abort, free
from tenuto.seal.cipher import Identity, PackSealer
from tenuto.sharding.slices import Region
from tenuto.state.contract import Buffer
from tenuto.store.contract import Where
from tenuto.store.registry import open_store
from tenuto.store.wrappers.delegating import Counted

COPIED: Final = "copied"
"""The entry of a copy's environment that says what it was made from: `checkpoint` and `repository`."""
_THREADS: Final = 4
"""Data files that are copied at once."""


@record
class PlannedCopy:
    """One copy to make. `step`: its own. `bytes`: that are written for it; `shared`: those that it shares instead."""

    source: CheckpointId
    step: int
    bytes: int
    shared: int


@record
class RunCopyPlan:
    """What `execute` will do.

    where, to: URLs of the repository that is copied from, and of the one that is copied to; run: of the copies.
    creates: whether there is no repository at `to` yet.
    shares: whether the copies share the data files of what they are made from.
    parent: what the run that is made goes on from: where it is new, and in the same repository, the first source.
    """

    where: str
    to: str
    run: str
    creates: bool
    shares: bool
    parent: CheckpointId | None
    copies: tuple[PlannedCopy, ...]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.copies)

    @property
    def shared(self) -> int:
        return sum(one.shared for one in self.copies)


@record
class CopiedCheckpoint:
    """A copy that was made: `id` in its repository, `source` in the one that it came from, and bytes as planned."""

    id: CheckpointId
    source: CheckpointId
    bytes: int
    shared: int
    content: str


@record
class RunCopy:
    """What was copied to `where`, in the order of steps, and how long that took."""

    where: str
    checkpoints: tuple[CopiedCheckpoint, ...]
    seconds: float


# --------------------------------------------------------------------------------------------------
# The plan.


def plan_copies(
    repo: Repo,
    ids: Sequence[CheckpointId],
    *,
    to: Where | None = None,
    run: str | None = None,
    step: int | None = None,
    stand_alone: bool = False,
) -> RunCopyPlan:
    """Plans copies of `ids`, and writes nothing.

    to: another repository; None: this one. run: the run of the copies; None: that of the sources. step: of a single
    copy; None: that of its source. stand_alone: within a repository, too, the data is copied; it is in any case into a
    run that was not forked from another, since only a fork may rest on data files of another run.

    Raises UsageError where names meet, or the run has come as far already; CheckpointNotFound and CorruptionError for
    sources that are not there, or are known to be damaged.
    """
    target = repo if to is None else _target(repo, to, run)
    same = target is not None and target.url == repo.url
    new = run_key(run) if run is not None else _one_run(ids)
    if same and any(id.run == new for id in ids):
        raise UsageError(
            f"the copies would lie in run {new!r} of {repo.url}, where they come from",
            subject=new,
            hint="--to-run NEWRUN names another run; a repository to copy to is a path such as ./other, or a URL",
        )
    if step is not None and len(ids) > 1:
        raise UsageError(f"--to-step is for one checkpoint, and there are {len(ids)}", subject="--to-step")
    ordered = sorted(dict.fromkeys(ids), key=lambda id: id.step)
    twice = next((one for one, other in pairwise(ordered) if one.step == other.step), None)
    if twice is not None:
        raise UsageError(
            f"two of the checkpoints are of step {twice.step}", subject=str(twice), hint="copy one of them"
        )
    own = None if target is None else newest_own(target, new)
    first = ordered[0].step if step is None else step
    if own is not None and first <= own.step:
        raise UsageError(
            f"run {new!r} at {repo.url if target is None else target.url} is at step {own.step} already, and step "
            f"{first} would come after it",
            subject=new,
            hint="--to-run NEWRUN copies into a run of its own; --to-step N gives one copy a later step",
        )
    shares = not stand_alone and same and target is not None and (own is None or forked_from_others(target, new))
    planned = []
    for id in ordered:
        manifest = repo.manifest(id)
        if is_suspect(repo, id):
            raise CorruptionError(
                f"{id} is known to be damaged, and is not copied",
                subject=str(id),
                hint=typed("tenuto", "verify", repo.url, id),
            )
        own_keys = target is not None and target.id == repo.id
        if not shares and not own_keys and (manifest.code or _is_sealed(repo, manifest)):
            raise UsageError(
                f"{id} is sealed: its bytes can be read in {repo.url} alone",
                subject=str(id),
                hint=f"`--to-run NEWRUN` copies it within the repository, and {typed('tenuto', 'replicate', repo.url)} "
                "TO makes a copy of the repository with its keys",
            )
        nbytes = 0 if shares else _stored(repo, manifest)
        planned.append(PlannedCopy(id, id.step if step is None else step, nbytes, manifest.bytes if shares else 0))
    parent = own if own is not None else ordered[0] if same else None
    url = open_store(to).url if target is None and to is not None else (target or repo).url
    return RunCopyPlan(repo.url, url, new, target is None, shares, parent, tuple(planned))


def newest_own(repo: Repo, run: str) -> CheckpointId | None:
    """Returns the run's newest checkpoint that is not another run's: a fork that has none yet means what it came
    from."""
    found = latest(repo, run) if run in repo.runs() else None
    return found if found is not None and found.run == run else None


def _target(repo: Repo, to: Where, run: str | None) -> Repo | None:
    try:
        target = Repo.open(open_store(to))
    except NotARepository:
        return None
    into_its_primary = run is not None and member_in(home_of(target.store)) is None
    if target.id == repo.id and target.url != repo.url and not into_its_primary:
        raise UsageError(
            f"{target.url} is a copy of {repo.url}, and has its checkpoints under their own names",
            subject=target.url,
            hint=typed("tenuto", "replicate", repo.url, target.url),
        )
    if target.id != repo.id:
        refuse_if_sealed(target, "what is copied there", hint="copy into another repository, and seal that")
    return target


def _one_run(ids: Sequence[CheckpointId]) -> str:
    runs = sorted({id.run for id in ids})
    if len(runs) != 1:
        raise UsageError(
            f"the checkpoints are of {len(runs)} runs: {', '.join(runs)}",
            subject="STEP",
            hint="--to-run RUN names the one that they go into",
        )
    return runs[0]


def _is_sealed(repo: Repo, manifest: Manifest) -> bool:
    if not repo.had(object_names.KEYS):
        return False
    return any(pack.key for rank in range(len(manifest.indexes)) for pack in repo.packs(manifest, rank))


def _stored(repo: Repo, manifest: Manifest) -> int:
    """Returns about how many bytes a copy takes: those of its packs, or where it rests on others at most its state."""
    return manifest.bytes if manifest.bases else manifest.stored_bytes


# --------------------------------------------------------------------------------------------------
# One copy: everything but its manifest.


@dataclass(slots=True)
class _Written:
    """A copy that has everything but its manifest."""

    manifest: Manifest
    source: CheckpointId
    receipts: list[Receipt] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    indexes: tuple[Index, ...] = ()
    copied: int = 0
    suspect: bool = False


class CheckpointCopier:
    """Puts copies under an attempt, and shows all of them at once."""

    def __init__(self, repo: Repo, attempt: Attempt, *, shares: bool, emitter: Emitter, total: int = 0) -> None:
        """`attempt`: of the repository that is copied to. `total`: the bytes to come, for the progress."""
        self._repo = repo
        self._attempt = attempt
        self._target = attempt.repo
        self._shares = shares
        self._emitter = emitter
        self._total = total
        self._moved = 0
        self._lock = threading.Lock()
        self._written: list[_Written] = []

    def write(self, source: CheckpointId, step: int, *, created: str = "", suspect: bool = False) -> None:
        """Puts all of a copy but its manifest. `created`: its time, the present one by default. `suspect`: it is known
        to be damaged, and so is its copy. Raises CheckpointNotFound where the source is removed meanwhile."""
        repo, manifest = self._repo, self._repo.manifest(source)
        id = CheckpointId(self._attempt.run, self._attempt.number, step)
        copied: Json = {"checkpoint": str(source), "repository": repo.id}
        copy = replace(
            manifest,
            id=id,
            parent=self._attempt.parent,
            metrics=known_metrics(repo, source),
            progress={**manifest.progress, "step": step},
            environment={**manifest.environment, COPIED: copied},
            created=created or now_text(),
            code="",
        )
        one = _Written(copy, source, suspect=suspect)
        self._written.append(one)
        indexes = [repo.index(manifest, rank) for rank in range(len(manifest.indexes))]
        made: list[tuple[Index, tuple[_Pack, ...]]] = [
            (named_by(index, source), ()) if self._shares else self._contents(manifest, index) for index in indexes
        ]
        packs = [pack for _, contents in made for pack in contents]
        one.names = [*(pack.file for pack in packs), *(entry.name for entry in manifest.tables)]
        one.names += (name for index, _ in made if self._seals_again(index) for name in pack_names(index))
        bases = tuple(sorted({source, *manifest.bases})) if self._shares else ()
        begin(self._attempt, step, manifest.save_id, one.names, bases=bases)
        if self._shares and usable_bases(self._target, id, bases, through=source) != bases:
            raise _gone(source)
        try:
            parallel_for(lambda pack: one.receipts.append(self._put(id, pack, manifest.save_id)), packs, _THREADS)
            for index, _ in made:
                one.indexes += (self._sealed_again(one, index) if self._seals_again(index) else index,)
        except CorruptionError:
            if not repo.exists(source):
                raise _gone(source) from None
            raise
        entries: list[IndexEntry] = []
        for index in one.indexes:
            receipt, entry = put_index(self._target, id, index)
            one.receipts.append(receipt)
            entries.append(entry)
        boxes = repo.boxes(manifest)
        table: IndexEntry | None = None
        if boxes is not None:
            data = encode_boxes(boxes, id, manifest.save_id, self._target.id)
            receipt, table = put_object(self._target, id, object_names.BOXES, data, manifest.save_id)
            one.receipts.append(receipt)
        one.copied = sum(pack.length for index in one.indexes for pack in index.packs if pack.at is None)
        one.manifest = replace(copy, indexes=tuple(entries), boxes=table, **stored_in(*one.indexes))

    def show(self) -> list[CopiedCheckpoint]:
        """Makes all copies exist, in the order of their steps."""
        crashpoint("copies put, none visible")
        made = []
        while self._written:
            one = self._written[0]
            commit(self._target, one.manifest, one.receipts, own=one.indexes)
            del self._written[0]
            self._attempt.committed(one.manifest.id.step)
            if one.suspect:
                add_note(self._target, one.manifest.id, "suspect", {"copied": str(one.source)})
            shared = one.manifest.bytes if self._shares else 0
            made.append(CopiedCheckpoint(one.manifest.id, one.source, one.copied, shared, one.manifest.content))
            crashpoint("a copy is visible")
        return made

    def take_back(self) -> None:
        """Closes and frees all copies whose manifest was not put; does nothing after `show`."""
        for one in self._written:
            id = one.manifest.id
            try:
                if abort(self._target, id, one.manifest.save_id, by="the copy failed"):
                    free(self._target, id, names=one.names)
            except TenutoError as trouble:
                left = f"what {id} left behind stays until the run is claimed again: {trouble.message}"
                self._emitter.emit(Warned(left, id.run))
        self._written.clear()

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _contents(self, manifest: Manifest, index: Index) -> tuple[Index, tuple[_Pack, ...]]:
        """Returns an index of packs of the copy's own, and these: as they are, or with the chunks that it needs of
        others'. Of what is sealed again that is known only once it is."""
        if self._seals_again(index):
            return index, ()
        if all(pack.at is None for pack in index.packs):
            return index, tuple(_AsItIs(self._repo, manifest, index, number) for number in range(len(index.packs)))
        gathered = _Gathered(self._repo, manifest, index)
        return gathered.index, (gathered,)

    def _seals_again(self, index: Index) -> bool:
        return index.sealed is not None and not self._shares

    def _sealed_again(self, one: _Written, index: Index) -> Index:
        """Puts what an index needs, opened and sealed for its new name; returns the index of that. Raises Tampered, and
        KeyMissing where the keys of the two are not open."""
        id, save_id, source, target = one.manifest.id, one.manifest.save_id, self._repo, self._target
        keys = target.keys
        if keys is None or source.keys is None or source.id != target.id:
            raise KeyMissing(
                f"{one.source} is sealed, and without the keys of its repository nothing of it can go to {target.url}",
                subject=str(one.source),
                hint="set TENUTO_KEY_FILE, TENUTO_KEY or TENUTO_PASSPHRASE",
            )

        def put(segment: Segment) -> None:
            name = f"{id.directory}/{segment.entry.name}"
            one.receipts.append(target.store.put_if_absent(name, segment, token=save_id))
            self._advance(segment.length)

        def seal(file: str, start: int) -> PackSealer:
            return keys.new_pack(Identity(target.id, save_id, f"{id.directory}/{file}"), start=start)

        def read(row: int, start: int, out: Buffer) -> None:
            part = Region(start, (len(out),), (1,), (False,), (len(out),))
            reader.read(row, index.specs[row].path, part, 1, out)

        reader = LazyReader(source, one.source, source.table(source.manifest(one.source), index.rank))
        try:
            return sealed_again(index, read, put, seal)
        finally:
            reader.close()

    def _put(self, id: CheckpointId, pack: _Pack, token: str) -> Receipt:
        return pack.put(self._target, f"{id.directory}/{pack.file}", token, self._advance)

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self._moved += nbytes
            done = self._moved
        if self._emitter.listened:
            self._emitter.emit(Progress("copy", self._target.url, done, max(done, self._total)))


def named_by(index: Index, source: CheckpointId) -> Index:
    """Returns the index of a copy that shares all data files of `source`, whose index this is."""
    chunks = baseline_in(index, source)
    return replace(index, packs=chunks.packs, stored=chunks.stored)


class _AsItIs:
    """A data file of the copy that is one of its source: `file`, its name; `length` in bytes."""

    def __init__(self, repo: Repo, manifest: Manifest, index: Index, number: int) -> None:
        self._source = (repo, manifest, index.rank, index.packs[number].name)
        self.file = index.packs[number].name
        self.length = index.packs[number].length

    def put(self, target: Repo, name: str, token: str, moved: Callable[[int], None]) -> Receipt:
        """Puts it from the first place that has it undamaged."""
        put = copy_pack(
            *self._source, target=target.store, to=name, watched=lambda content: Counted(content, moved), token=token
        )
        if put is None:
            raise AlreadyExists(f"{name} exists already ({target.url})", subject=name)
        return put


class _Gathered:
    """One pack of all stored chunks that an encoded index needs, from whatever packs they lie in."""

    def __init__(self, repo: Repo, manifest: Manifest, index: Index) -> None:
        stored = index.stored
        assert stored is not None, "only an encoded index rests on others"
        self._repo, self._id, self._old = repo, manifest.id, index
        self.file = encoded_pack_file(index.rank, 0)
        self._header = build_header((), {"tenuto.pack": self.file, "tenuto.save_id": manifest.save_id})
        places = np.stack([stored.pack, stored.offset], 1)
        _, first, chunk = np.unique(places, axis=0, return_index=True, return_inverse=True)
        ends = len(self._header) + np.cumsum(stored.stored[first])
        begins = ends - stored.stored[first]
        length = int(ends[-1]) if len(ends) else len(self._header)
        entry = PackEntry(self.file, length, len(self._header), digest(self._header))
        offset = begins[chunk.reshape(-1)].astype(np.int64)
        self.index = replace(
            index, packs=(entry,), stored=replace(stored, pack=np.zeros(len(stored), np.int64), offset=offset)
        )
        self.length = length

    def put(self, target: Repo, name: str, token: str, moved: Callable[[int], None]) -> Receipt:
        return target.store.put_if_absent(name, Counted(self, moved), token=token)

    def pieces(self) -> Iterator[memoryview]:
        """Yields the header, then each chunk once, in the order of the packs that they come from."""
        yield memoryview(self._header)
        chunks, packs = ChunkMap.of(self._old), self._old.packs
        reader = ChunkReader(self._repo, self._id, chunks, packs)
        opened, number = None, -1
        try:
            for run in chunk_runs(chunks):
                if run.pack != number or opened is None:
                    if opened is not None:
                        opened.close()
                    opened, number = open_pack(self._repo, self._id, packs[run.pack], header=False), run.pack
                yield reader.read_run(opened, run, lambda row: self._old.specs[row].path).data
        finally:
            if opened is not None:
                opened.close()


_Pack = _AsItIs | _Gathered


def _gone(source: CheckpointId) -> CheckpointNotFound:
    return CheckpointNotFound(f"{source} was removed while it was copied", subject=str(source))


# --------------------------------------------------------------------------------------------------
# Execution.


def execute(repo: Repo, plan: RunCopyPlan, to: Where | None = None, *, emitter: Emitter | None = None) -> RunCopy:
    """Makes the planned copies, all or none. `to` as in the plan.

    Raises RunInUse if another process trains the run that is copied to, CheckpointNotFound for a source that is removed
    meanwhile, CorruptionError for one that is damaged, and errors of the stores.
    """
    emit, began = emitter or Emitter(), time.perf_counter()
    inside = to is None or plan.to == repo.url
    target = repo if inside or to is None else Repo.create_or_open(open_store(to), chunk_bytes=repo.chunk_bytes)
    unlock(target, writing=True)
    if target.id == repo.id:
        repo.keys = target.keys  # another place of the same repository may have an older key ring
    newest = latest(target, plan.run)
    attempt = claim_newest(
        target, plan.run, newest, plan.parent, again=lambda: (latest(target, plan.run), plan.parent), wait_s=0.0
    )
    copier = CheckpointCopier(repo, attempt, shares=plan.shares, emitter=emit, total=plan.bytes)
    try:
        if (own := newest_own(target, plan.run)) is not None and own.step >= plan.copies[0].step:
            raise UsageError(
                f"run {plan.run!r} has come to step {own.step} since the plan was made",
                subject=plan.run,
                hint="plan again",
            )
        for one in plan.copies:
            copier.write(one.source, one.step)
        made = copier.show()
    finally:
        try:
            copier.take_back()
        finally:
            attempt.release()
    for copy in made:
        fill_now(target, copy.id, lambda message: emit.emit(Warned(message, plan.run)))
    return RunCopy(target.url, tuple(made), time.perf_counter() - began)
