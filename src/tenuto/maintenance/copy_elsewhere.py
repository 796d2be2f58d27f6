"""A verified copy of checkpoints in another store, which is read by itself when this repository is lost.

What the copy lacks (`copy_plan`) goes there in the order of a save: claims,
`begin.json`, indexes, data files, the manifest last. Every byte is checked against its digest on the way. Each object
appears whole or not at all, so a copy that was cut off goes on with the first object that is not there.

Retention may remove a checkpoint while it is copied. Its parts are taken back then, under an aborted mark: another
process that copies the same checkpoint either finds the mark, or finds afterwards that parts are gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeVar

from tenuto.codec.digest import digest
from tenuto.concurrency.worker_threads import parallel_for
from tenuto.crashpoints import crashpoint
from tenuto.engine.read.copy_packs import Counted, copy_pack
from tenuto.errors import (
    AlreadyExists,
    CheckpointNotFound,
    CopyDiverged,
    CorruptionError,
    ObjectNotFound,
    RepositoryError,
    StoreError,
    StoreFull,
    TenutoError,
)
from tenuto.events import Emitter, Progress
from tenuto.maintenance.copy_plan import NAMED_BY, CopyPlan, token
from tenuto.maintenance.copy_record import become_copy
from tenuto.maintenance.inspect import inspect
from tenuto.maintenance.replica_tidy import free_in, is_ahead
from tenuto.maintenance.shared_packs import (
    Base,
    bases_of,
    lacking,
    manifest_of,
    needed_in,
    out_of_trash,
    own_packs,
    packs_of,
    put_base,
)
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import MAX_ABORTED, MAX_MANIFEST, Aborted, decode_manifest, encode_aborted
from tenuto.repo.refs import list_refs, numbers
from tenuto.repo.replicated.places import home_of
from tenuto.repo.replicated.replica import exists
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes, Store

_THREADS: Final = 4
"""Data files that are copied at once."""
One = TypeVar("One")


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy has come to.

    copied: checkpoints that are there now, newest first, and were not, or not whole.
    skipped: how many were there already.
    gone: removed here while they were copied.
    pruned: removed there.
    bytes, seconds: of the data files that were copied, and the time that it took.
    failed: errors of those that were not copied.
    unlisted: why the copy is not on this repository's list of copies; None if it is.
    stopped: whether `stop` was set before all was done.
    """

    copied: tuple[CheckpointId, ...] = ()
    skipped: int = 0
    gone: tuple[CheckpointId, ...] = ()
    pruned: tuple[CheckpointId, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    failed: tuple[TenutoError, ...] = ()
    unlisted: str | None = None
    stopped: bool = False

    @property
    def ok(self) -> bool:
        """Returns whether all that was asked for is there."""
        return not self.failed and not self.stopped

    def __add__(self, later: CopyReport) -> CopyReport:
        """Returns the report of both, of which `later` came after."""
        return CopyReport(
            (*later.copied, *self.copied),
            later.skipped,
            (*later.gone, *self.gone),
            (*later.pruned, *self.pruned),
            self.bytes + later.bytes,
            self.seconds + later.seconds,
            later.failed,
            later.unlisted,
            later.stopped,
        )


class _Stopped(Exception):
    """Raised in the middle of a put, which then leaves nothing."""


def execute(
    repo: Repo,
    target: Store,
    plan: CopyPlan,
    *,
    prune: bool = False,
    emitter: Emitter | None = None,
    stop: threading.Event | None = None,
) -> CopyReport:
    """Copies, newest first. What goes wrong with one checkpoint is reported and keeps nothing from the others; a full
    target ends it. `prune`: also removes there what this repository has removed. `stop`: set from elsewhere to end it
    soon."""
    return _Copying(repo, target, plan, emitter or Emitter(), stop or threading.Event()).run(prune)


class _Copying:
    def __init__(self, repo: Repo, target: Store, plan: CopyPlan, emitter: Emitter, stop: threading.Event) -> None:
        self.repo, self.target, self.plan = repo, target, plan
        self._emitter, self._stop = emitter, stop
        self._there = dict(plan.there)
        self._token = token()
        self._claims: set[str] = set()
        self._bases: set[CheckpointId] = set()
        self._moved = self._bytes = 0
        self._lock = threading.Lock()

    def run(self, prune: bool) -> CopyReport:
        began = time.perf_counter()
        unlisted = become_copy(self.repo, self.target)
        self.target.delete(list(self.plan.leftovers))
        copied: list[CheckpointId] = []
        gone: list[CheckpointId] = []
        pruned: list[CheckpointId] = []
        failed: list[TenutoError] = []
        stopped = False
        try:
            for name in self.plan.small:
                if name.endswith(f"/{object_names.ATTEMPT}"):
                    self._guarded(failed, self._bring_from_here, name)
                elif object_names.is_key_ring(name):
                    self._guarded(failed, self._bring_keys, name)
            for task in self.plan.bases:
                self._check_stop()
                self._guarded(failed, self._mend_base, task.id)
            for task in self.plan.tasks:
                self._check_stop()
                try:
                    self._copy(task.id)
                    copied.append(task.id)
                except CheckpointNotFound:
                    gone.append(task.id)
                    self._guarded(failed, self._withdraw, task.id)
                except (RepositoryError, CorruptionError, StoreError) as error:
                    failed.append(error)
                    if isinstance(error, StoreFull):
                        break
            for name in self.plan.small:
                if not name.startswith((object_names.RUNS, object_names.KEYS)):
                    self._guarded(failed, self._bring_name, name)
            for id in self.plan.parts:
                if not self._is_known_here(id):
                    self._guarded(failed, self._withdraw, id)
            for id in self._prunable() if prune else ():
                self._check_stop()
                self._prune(id)
                pruned.append(id)
            if prune and (pruned or self.plan.resting):
                self._guarded(failed, self._free_unneeded, self.plan.resting.union(pruned))
        except _Stopped:
            stopped = True
        seconds = time.perf_counter() - began
        return CopyReport(
            tuple(copied),
            self.plan.whole,
            tuple(gone),
            tuple(pruned),
            self._bytes,
            seconds,
            tuple(failed),
            unlisted,
            stopped,
        )

    def _guarded(self, failed: list[TenutoError], work: Callable[[One], None], one: One) -> None:
        try:
            work(one)
        except (CopyDiverged, CorruptionError, StoreError) as error:
            failed.append(error)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    # -- one checkpoint ------------------------------------------------------------------------------------------------

    def _copy(self, id: CheckpointId) -> None:
        """Raises CheckpointNotFound if it was removed here meanwhile."""
        claim = object_names.attempt_name(id.run, id.attempt)
        if claim not in self._claims:
            self._bring_from_here(claim)
            self._claims.add(claim)
        data = self.repo.manifest_bytes(id)
        found = decode_manifest(data, id, self.repo.id)
        assert isinstance(found, Manifest), "manifest_bytes has looked"
        self._bring_from_here(object_names.begin_name(id))
        try:
            for base in bases_of(self.repo, found, every_pack=True):
                self._bring_base(base)
            for entry in found.tables:
                self._bring(f"{id.directory}/{entry.name}", self.repo.index_bytes(id, entry))
            packs = [(rank, file) for rank in range(len(found.indexes)) for file in self._lacking(found, rank)]
            parallel_for(lambda one: self._copy_pack(found, *one), packs, _THREADS)
            parts = [*(f"{id.directory}/{entry.name}" for entry in found.tables), *packs_of(self.repo, found)]
        except CorruptionError:
            if not self.repo.exists(id):
                raise CheckpointNotFound(f"{id} was removed while it was copied", subject=str(id)) from None
            raise
        crashpoint("copied elsewhere, manifest not yet")
        if not self.repo.exists(id):
            raise CheckpointNotFound(f"{id} was removed while it was copied", subject=str(id))
        began_before = object_names.begin_name(id) in self.plan.there
        self._bring(id.manifest, data)
        self._check_parts(id, parts)
        if began_before:
            out_of_trash(self.target, id)
        for note in self.repo.store.walk(object_names.notes_directory(id)):
            if note.name not in self._there:
                self._bring_from_here(note.name)

    def _mend_base(self, id: CheckpointId) -> None:
        """Brings what is lacking there of a checkpoint that was removed here and on which others rest. Leaves it as it
        is where it is freed here by now."""
        try:
            manifest, data = manifest_of(self.repo, id)
            self._bring_base(Base(manifest, data, tuple(own_packs(self.repo, manifest))))
        except CheckpointNotFound:
            return
        except CorruptionError:
            if self.repo.store.children(object_names.trash_directory(id)).objects:
                raise

    def _bring_base(self, base: Base) -> None:
        """Brings all of a checkpoint but its manifest, which lies in the trash there until it is copied itself."""
        if base.id not in self._bases:
            put_base(self.repo, base, self.target, self._bring, mark=False)
            lacks = [(rank, pack.name) for rank, pack in base.packs if self._there.get(base.name(pack)) != pack.length]
            parallel_for(lambda one: self._copy_pack(base.manifest, *one), lacks, _THREADS)
            self._there.update({base.name(pack): pack.length for _, pack in base.packs})
            self._bases.add(base.id)

    def _lacking(self, manifest: Manifest, rank: int) -> list[str]:
        return [
            pack.name
            for pack in self.repo.packs(manifest, rank)
            if pack.at is None and self._there.get(f"{manifest.id.directory}/{pack.name}") != pack.length
        ]

    def _copy_pack(self, manifest: Manifest, rank: int, file: str) -> None:
        put = copy_pack(
            self.repo,
            manifest,
            rank,
            file,
            target=self.target,
            replaces=f"{manifest.id.directory}/{file}" in self._there,  # it is damaged there
            watched=lambda content: Counted(content, self._advance),
            token=self._token,
        )
        with self._lock:
            self._bytes += put

    def _advance(self, nbytes: int) -> None:
        self._check_stop()
        with self._lock:
            self._moved += nbytes
            done = self._moved
        if self._emitter.listened:
            self._emitter.emit(Progress("replicate", self.plan.to, done, max(done, self.plan.bytes)))

    def _check_parts(self, id: CheckpointId, parts: Sequence[str]) -> None:
        """Takes the manifest back where a part is gone by now: another process has found this checkpoint removed."""
        if lacking(self.target, parts):
            self.target.delete([id.manifest])
            raise CheckpointNotFound(f"{id} was removed while it was copied", subject=str(id))

    # -- small objects -------------------------------------------------------------------------------------------------

    def _bring_from_here(self, name: str) -> None:
        """Copies a sealed object, if it is here. Raises CorruptionError if it is damaged here."""
        try:
            data = self.repo.store.get(name, limit=MAX_MANIFEST)
        except ObjectNotFound:
            return
        canonical_json.open_seal(data, name=name)
        self._bring(name, data)

    def _bring(self, name: str, data: bytes) -> None:
        """Puts an object, in place of a damaged one. Raises CopyDiverged if another one is there and whole."""
        if name not in self._there:
            try:
                self.target.put_if_absent(name, Bytes(data), token=self._token)
                self._there[name] = len(data)
                return
            except AlreadyExists:
                pass
        try:
            there = self.target.get(name, limit=MAX_MANIFEST)
        except (ObjectNotFound, CorruptionError):
            there = b""
        if there == data:
            self._there[name] = len(data)
            return
        if canonical_json.is_sealed(there, name) and not _is_mark(name, there, self.repo.id):
            raise diverged(self.plan.to, name, self.repo.url)
        self.target.delete([name])
        self.target.put_if_absent(name, Bytes(data), token=self._token)
        self._there[name] = len(data)

    def _bring_name(self, name: str) -> None:
        """Copies a ref or a proof. A ref follows what it names: the copy never points at what it does not have."""
        if name.startswith("refs/"):
            try:
                data = self.repo.store.get(name, limit=objects.SMALL)
            except ObjectNotFound:
                return
            to = objects.decode("ref", name, data, self.repo.id).checkpoint("to")
            if to is not None and to.manifest not in self._there:
                return
        self._bring_from_here(name)

    def _bring_keys(self, name: str) -> None:
        """Copies a key ring, then removes the older ones there: slots that were removed here open them."""
        self._bring_from_here(name)
        if name in self._there:
            there, newest = (
                numbers(Repo.open(self.target), object_names.KEYS),
                object_names.parse_numbered(name.rpartition("/")[2]) or 0,
            )
            self.target.delete([object_names.numbered(object_names.KEYS, one) for one in there if one < newest])

    # -- what is no more here ------------------------------------------------------------------------------------------

    def _is_known_here(self, id: CheckpointId) -> bool:
        """Asks by name: the listing may be older than what another process has copied since. Of what was freed here an
        aborted mark is left."""
        return exists(home_of(self.repo.store), object_names.begin_name(id)) or self.repo.exists(id)

    def _withdraw(self, id: CheckpointId) -> None:
        """Takes back the parts of a checkpoint that was removed here before all of it was copied; not of what lies in
        the trash there, for others rest on it."""
        if self.target.children(object_names.trash_directory(id)).objects:
            return
        mark = encode_aborted(Aborted(id, "", "its original was removed while it was copied"), self.repo.id)
        try:
            self.target.put_if_absent(id.manifest, Bytes(mark), token=self._token)
        except AlreadyExists:
            there = self.target.get(id.manifest, limit=MAX_MANIFEST)
            if not _is_mark(id.manifest, there, self.repo.id):
                return  # another process had all of it in time
        free_in(self.target, id, manifest_last=True)

    def _prune(self, id: CheckpointId) -> None:
        """Removes a checkpoint there; what others may rest on waits in the trash."""
        try:
            data = self.target.get(id.manifest, limit=MAX_MANIFEST)
        except ObjectNotFound:
            return  # another process has removed it
        self._bring(f"{object_names.trash_directory(id)}/{digest(data).hex()}.json", data)
        self.target.delete([id.manifest])

    def _free_unneeded(self, waiting: Collection[CheckpointId]) -> None:
        """Frees what lies in the trash there and no checkpoint rests on. What another process has copied meanwhile and
        rests on it is taken back: the next call brings both."""
        copy = Repo.open(self.target)
        there = copy.checkpoints()
        freed = set(waiting).difference(there, needed_in(copy, there))
        for id in sorted(freed):
            free_in(self.target, id)
        for id in set(copy.checkpoints()).difference(there) if freed else ():
            if not freed.isdisjoint(needed_in(copy, [id])):
                self.target.delete([id.manifest])

    def _prunable(self) -> list[CheckpointId]:
        """Returns what this repository has removed and nothing in the copy needs: no name, and never the newest whole
        checkpoint of a run. A checkpoint that this repository ought to know, and does not, stays."""
        copy = Repo.open(self.target)
        named = {ref.id for ref in list_refs(copy, NAMED_BY)}
        home = home_of(self.repo.store)
        pair = ReplicatedStore(home, [home, self.target], 1)
        found = []
        for run, some in groupby(sorted(self.plan.removed, reverse=True), lambda id: id.run):
            kept = next((id for id in _newest(copy, run) if not inspect(copy, id).harmed), None)
            found += [
                id
                for id in some
                if kept is not None
                and id != kept
                and id not in named
                and not self._is_known_here(id)
                and not is_ahead(pair, self.target, id, self.repo.id)
            ]
        return found


def _newest(repo: Repo, run: str) -> Iterator[CheckpointId]:
    for attempt in reversed(repo.attempts(run)):
        yield from (CheckpointId(run, attempt, step) for step in repo.committed(run, attempt))


def _is_mark(name: str, data: bytes, repository: str) -> bool:
    id = object_names.save_of(name)
    if id is None or name != id.manifest or len(data) > MAX_ABORTED:
        return False
    try:
        return isinstance(decode_manifest(data, id, repository), Aborted)
    except CorruptionError:
        return False


def diverged(copy: str, name: str, source: str) -> CopyDiverged:
    """Returns the error for a name under which a copy has something else, undamaged."""
    return CopyDiverged(
        f"{copy} has another {name} than {source}: one of the two was set back or changed",
        subject=name,
        hint="to keep both, copy into an empty place; else move that directory of the copy away",
    )
