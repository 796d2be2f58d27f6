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
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from tenuto.codec.digest import digest
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
from tenuto.maintenance.place_copy import PlaceCopy
from tenuto.maintenance.replica_tidy import free_in, is_ahead
from tenuto.maintenance.shared_packs import Base, is_aborted_mark, manifest_of, needed_in, own_packs
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest, Receipt
from tenuto.record import record
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import MAX_MANIFEST, Aborted, encode_aborted
from tenuto.repo.refs import list_refs, numbers
from tenuto.repo.replicated.places import home_of
from tenuto.repo.replicated.replica import exists
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes, Store
from tenuto.store.wrappers.delegating import Counted

One = TypeVar("One")


@record
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


class _Copying(PlaceCopy):
    threads = 4
    every_pack = True
    marks = False
    alone = False

    def __init__(self, repo: Repo, target: Store, plan: CopyPlan, emitter: Emitter, stop: threading.Event) -> None:
        super().__init__(repo, target, token=token())
        self.plan = plan
        self._emitter, self._stop = emitter, stop
        self._there = dict(plan.there)
        self._claims: set[str] = set()
        self._moved = self._bytes = 0
        self._lock = threading.Lock()

    def run(self, prune: bool) -> CopyReport:
        began = time.perf_counter()
        unlisted = become_copy(self.repo, self.place)
        self.place.delete(list(self.plan.leftovers))
        copied: list[CheckpointId] = []
        gone: list[CheckpointId] = []
        pruned: list[CheckpointId] = []
        failed: list[TenutoError] = []
        stopped = False
        try:
            for name in self.plan.small:
                if name.endswith(f"/{object_names.ATTEMPT}"):
                    self._guarded(failed, self.send, name)
                elif object_names.is_key_ring(name):
                    self._guarded(failed, self._bring_keys, name)
            for task in self.plan.bases:
                self._check_stop()
                self._guarded(failed, self._mend_base, task.id)
            for task in self.plan.tasks:
                self._check_stop()
                try:
                    self.bring(task.id)
                    copied.append(task.id)
                except CheckpointNotFound:
                    gone.append(task.id)
                    self._guarded(failed, self._withdraw, task.id)
                except (RepositoryError, CorruptionError, StoreError) as error:
                    failed.append(error)
                    if isinstance(error, StoreFull):
                        break
            for lacking in self._names().items():
                self._guarded(failed, self._bring_names, lacking)
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

    def there(self, id: CheckpointId) -> list[str]:
        """Every object of what is there in part is compared with what is here; but it may lie in the trash."""
        return [object_names.BEGIN] if object_names.begin_name(id) in self.plan.there else []

    def _mend_base(self, id: CheckpointId) -> None:
        """Brings what is lacking there of a checkpoint that was removed here and on which others rest. Leaves it as it
        is where it is freed here by now."""
        try:
            manifest, data = manifest_of(self.repo, id)
            self.bring_base(Base(manifest, data, tuple(own_packs(self.repo, manifest))))
        except CheckpointNotFound:
            return
        except CorruptionError:
            if self.repo.store.children(object_names.trash_directory(id)).objects:
                raise

    def begin(self, id: CheckpointId) -> None:
        claim = object_names.attempt_name(id.run, id.attempt)
        if claim not in self._claims:
            self.send(claim)
            self._claims.add(claim)
        self.send(object_names.begin_name(id))

    def lacks(self, packs: Mapping[str, int]) -> list[str]:
        return [name for name, length in packs.items() if self._there.get(name) != length]

    def put_pack(self, manifest: Manifest, rank: int, file: str, **how: Any) -> Receipt | None:
        name = f"{manifest.id.directory}/{file}"
        damaged = name in self._there
        watched = partial(Counted, moved=self._advance)
        put = super().put_pack(manifest, rank, file, replaces=damaged, watched=watched, **how)
        if put is not None:
            with self._lock:
                self._there[name] = put.length
                self._bytes += put.length
        return put

    def _advance(self, nbytes: int) -> None:
        self._check_stop()
        with self._lock:
            self._moved += nbytes
            done = self._moved
        if self._emitter.listened:
            self._emitter.emit(Progress("replicate", self.plan.to, done, max(done, self.plan.bytes)))

    # -- small objects -------------------------------------------------------------------------------------------------

    def send(self, name: str) -> None:
        """Copies a sealed object, if it is here. Raises CorruptionError if it is damaged here."""
        try:
            data = self.repo.store.get(name, limit=MAX_MANIFEST)
        except ObjectNotFound:
            return
        canonical_json.open_seal(data, name=name)
        self.put(name, data)

    def put(self, name: str, data: bytes) -> bool:
        """Puts an object, in place of a damaged one. Raises CopyDiverged if another one is there and whole."""
        if name not in self._there and super().put(name, data):
            self._there[name] = len(data)
            return True
        try:
            there = self.place.get(name, limit=MAX_MANIFEST)
        except (ObjectNotFound, CorruptionError):
            there = b""
        if there != data:
            if canonical_json.is_sealed(there, name) and not is_aborted_mark(name, there, self.repo.id):
                raise diverged(self.plan.to, name, self.repo.url)
            self.place.delete([name])
            super().put(name, data)
        self._there[name] = len(data)
        return there != data

    def _names(self) -> dict[str, list[int]]:
        """Returns the versions of refs, and the proofs, that the copy lacks: the numbers by directory, newest first."""
        found: dict[str, list[int]] = {}
        for name in self.plan.small:
            if not name.startswith((object_names.RUNS, object_names.KEYS)):
                directory, _, file = name.rpartition("/")
                found.setdefault(directory, []).append(object_names.parse_numbered(file) or 0)
        return {directory: sorted(numbers, reverse=True) for directory, numbers in found.items()}

    def _bring_names(self, lacking: tuple[str, list[int]]) -> None:
        """Copies the versions of a ref up to the newest that names what is there, that one first; or proofs. So the
        copy never points at what it does not have, and what earlier versions named, which may be gone, leaves no
        gap."""
        directory, numbers = lacking
        known = self.place.children(directory).objects if directory.startswith("refs/") else ()
        newest = max((object_names.parse_numbered(file) or 0 for file in known), default=0)
        for number in numbers:
            name = object_names.numbered(directory, number)
            if number < newest or not directory.startswith("refs/") or self._names_what_is_there(name):
                self.send(name)
                newest = max(newest, number)

    def _names_what_is_there(self, ref: str) -> bool:
        try:
            data = self.repo.store.get(ref, limit=objects.SMALL)
        except ObjectNotFound:
            return False
        to = objects.decode("ref", ref, data, self.repo.id).checkpoint("to")
        return to is None or to.manifest in self._there

    def _bring_keys(self, name: str) -> None:
        """Copies a key ring, then removes the older ones there: slots that were removed here open them."""
        self.send(name)
        if name in self._there:
            newest = object_names.parse_numbered(name.rpartition("/")[2]) or 0
            older = (one for one in numbers(Repo.open(self.place), object_names.KEYS) if one < newest)
            self.place.delete([object_names.numbered(object_names.KEYS, one) for one in older])

    # -- what is no more here ------------------------------------------------------------------------------------------

    def _is_known_here(self, id: CheckpointId) -> bool:
        """Asks by name: the listing may be older than what another process has copied since. Of what was freed here an
        aborted mark is left."""
        return exists(home_of(self.repo.store), object_names.begin_name(id)) or self.repo.exists(id)

    def _withdraw(self, id: CheckpointId) -> None:
        """Takes back the parts of a checkpoint that was removed here before all of it was copied; not of what lies in
        the trash there, for others rest on it."""
        if self.place.children(object_names.trash_directory(id)).objects:
            return
        mark = encode_aborted(Aborted(id, "", "its original was removed while it was copied"), self.repo.id)
        try:
            self.place.put_if_absent(id.manifest, Bytes(mark), token=self.token)
        except AlreadyExists:
            there = self.place.get(id.manifest, limit=MAX_MANIFEST)
            if not is_aborted_mark(id.manifest, there, self.repo.id):
                return  # another process had all of it in time
        free_in(self.place, id, manifest_last=True)

    def _prune(self, id: CheckpointId) -> None:
        """Removes a checkpoint there; what others may rest on waits in the trash."""
        try:
            data = self.place.get(id.manifest, limit=MAX_MANIFEST)
        except ObjectNotFound:
            return  # another process has removed it
        self.put(f"{object_names.trash_directory(id)}/{digest(data).hex()}.json", data)
        self.place.delete([id.manifest])

    def _free_unneeded(self, waiting: Collection[CheckpointId]) -> None:
        """Frees what lies in the trash there and no checkpoint rests on. What another process has copied meanwhile and
        rests on it is taken back: the next call brings both."""
        copy = Repo.open(self.place)
        there = copy.checkpoints()
        freed = set(waiting).difference(there, needed_in(copy, there))
        for id in sorted(freed):
            free_in(self.place, id)
        for id in set(copy.checkpoints()).difference(there) if freed else ():
            if not freed.isdisjoint(needed_in(copy, [id])):
                self.place.delete([id.manifest])

    def _prunable(self) -> list[CheckpointId]:
        """Returns what this repository has removed and nothing in the copy needs: no name, and never the newest whole
        checkpoint of a run. A checkpoint that this repository ought to know, and does not, stays."""
        copy = Repo.open(self.place)
        named = {ref.id for ref in list_refs(copy, NAMED_BY)}
        home = home_of(self.repo.store)
        pair = ReplicatedStore(home, [home, self.place], 1)
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
                and not is_ahead(pair, self.place, id, self.repo.id)
            ]
        return found


def _newest(repo: Repo, run: str) -> Iterator[CheckpointId]:
    for attempt in reversed(repo.attempts(run)):
        yield from (CheckpointId(run, attempt, step) for step in repo.committed(run, attempt))


def diverged(copy: str, name: str, source: str) -> CopyDiverged:
    """Returns the error for a name under which a copy has something else, undamaged."""
    return CopyDiverged(
        f"{copy} has another {name} than {source}: one of the two was set back or changed",
        subject=name,
        hint="to keep both, copy into an empty place; else move that directory of the copy away",
    )
