"""Repair: puts what was saved back in place of what is damaged, from wherever its bytes still lie.

An object that fits its own place's manifest is never replaced: where a place has another manifest of a checkpoint, as
of another line of training, the plan leaves that place out (`repair_plan`). What was put counts as repaired once it was
read back from its place and compared.

An object is never without its bytes: what repairs it is put beside it first, every byte verified, and the damaged one
goes only then. A repair that is cut off there is completed by the next one, which finds those bytes (`Sources.twins`).
A manifest lies in the trash meanwhile, so that nobody takes its checkpoint for a save that never ended. A checkpoint
that is removed while it is repaired stays removed.

What nothing can repair is noted as damaged, with the leaves that are lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np

from tenuto.crashpoints import crashpoint
from tenuto.engine.read.opened import open_checkpoint
from tenuto.errors import AlreadyExists, CheckpointNotFound, CorruptionError, ObjectNotFound, StoreError, TenutoError
from tenuto.events import Emitter, Progress
from tenuto.maintenance.census import census_of
from tenuto.maintenance.marks import store_now
from tenuto.maintenance.repair_plan import EVERYTHING, Mending, RepairPlan
from tenuto.maintenance.repair_sources import Sources
from tenuto.maintenance.verify import VerifyReport, plan_verify
from tenuto.maintenance.verify import execute as execute_verify
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import Box
from tenuto.record import record
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import MAX_MANIFEST
from tenuto.repo.format.object_names import STAGED
from tenuto.repo.notes import notes, verification_of
from tenuto.repo.replicated.places import followers_of, home_of, reporting_to
from tenuto.repo.replicated.replica import exists, is_there
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import is_tombstoned
from tenuto.store.contract import Bytes, Content, Store, is_unreadable, time_of

LEAVES_NAMED: Final = 8
"""Lost leaves that a report names; of more it has the number."""
_PIECE: Final = 8 << 20
_BUSY_NS: Final = 3600 * 10**9
"""How old what a repair has left beside an object has to be for nobody to be at it."""
_LOOKED_AT: Final = 20
"""Older checkpoints that are looked at for one that has the lost leaves."""


@record
class Quarantined:
    """A checkpoint that could not be repaired whole, and is noted as damaged.

    lost: the paths of the first leaves that are lost, of `count`. words: what is lost where the paths are not known.
    instead: the newest older checkpoint that has all of `lost` whole, or all that it has itself where there are words,
    every byte read; None if there is none among those that were looked at.
    """

    id: CheckpointId
    lost: tuple[str, ...]
    count: int
    words: str
    instead: CheckpointId | None


@record
class RepairReport:
    """What a repair has come to.

    repaired: objects that are whole again, in their place. gone: those of checkpoints that were removed meanwhile.
    failed: objects that a store did not take, each with the error. quarantined: checkpoints that are not whole.
    verification: of every byte of each checkpoint that was touched, after the repair; None if nothing was damaged.
    """

    plan: RepairPlan
    repaired: tuple[Mending, ...] = ()
    gone: tuple[Mending, ...] = ()
    failed: tuple[tuple[Mending, TenutoError], ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    verification: VerifyReport | None = None

    @property
    def bytes(self) -> int:
        """Returns the bytes that were put."""
        return sum(one.size for one in self.repaired)

    @property
    def ok(self) -> bool:
        """Returns whether everything that was looked at is whole now."""
        verified = self.verification is None or self.verification.ok
        return verified and not self.failed and not self.quarantined and not self.plan.hopeless


def execute(
    sources: Sources, plan: RepairPlan, *, emitter: Emitter | None = None, threads: int | None = None
) -> RepairReport:
    """Repairs what the plan has sources for, verifies every byte of the checkpoints concerned, and notes the result.
    What goes wrong with one object is reported and keeps nothing from the others."""
    emit, repo = emitter or Emitter(), sources.repo
    repaired: list[Mending] = []
    gone: list[Mending] = []
    failed: list[tuple[Mending, TenutoError]] = []
    total, done = sum(one.size for one in plan.repairs), 0
    with reporting_to(repo.store, lambda message: None):  # the plan has said it
        for one in plan.repairs:
            try:
                (repaired if _mend(repo, one) else gone).append(one)
            except (CorruptionError, StoreError) as error:
                if one.id is not None and not _is_wanted(repo, one.id):
                    gone.append(one)
                else:
                    failed.append((one, error))
            done += one.size
            if emit.listened:
                emit.emit(Progress("repair", repo.url, done, total))
        _tidy(repo, plan)
    touched = [id for id in plan.checked if _concerns(repo, plan, id)]
    if not touched:
        return RepairReport(plan, tuple(repaired), tuple(gone), tuple(failed))
    note = repo.keys is not None or repo.closed_ring is None  # without the key no note would be believed
    verified = execute_verify(repo, plan_verify(repo, touched, listed=True), emitter=emit, threads=threads, note=note)
    quarantined = tuple(_quarantined(repo, plan, verified, id) for id in verified.damaged())
    return RepairReport(plan, tuple(repaired), tuple(gone), tuple(failed), quarantined, verified)


def _concerns(repo: Repo, plan: RepairPlan, id: CheckpointId) -> bool:
    """Returns whether a checkpoint, or one whose data files it uses, was damaged."""
    if not repo.exists(id):
        return False
    try:
        return not {id, *repo.manifest(id).bases}.isdisjoint(plan.touched)
    except (CheckpointNotFound, CorruptionError):
        return id in plan.touched


def _tidy(repo: Repo, plan: RepairPlan) -> None:
    """Removes what repairs that broke off have left beside objects that are whole, once no process can be at it."""
    now_ns = store_now(repo) if plan.left else 0
    for store, entry in plan.left:
        modified_ns = time_of(store, entry)
        if modified_ns is not None and now_ns - modified_ns > _BUSY_NS:
            store.delete([entry.name])


# --------------------------------------------------------------------------------------------------
# One object.


def _mend(repo: Repo, one: Mending) -> bool:
    """Puts an object in its place again. Returns False where its checkpoint was removed meanwhile."""
    store, token = one.store, f"repair-{secrets.token_hex(8)}"
    assert store is not None
    content: Content = Bytes(one.data) if one.data is not None else _Recipe(one)
    if one.kind == "manifest":
        assert one.id is not None and one.data is not None
        return _mend_manifest(repo, one, one.id, one.data, token)
    if _is_right(one):
        return True
    if one.missing:
        _put(store, one, content, token)
        _read_back(one)
    else:
        staged = f"{one.name}{STAGED}{secrets.token_hex(8)}"
        try:
            store.put_if_absent(staged, content, token=token)
        except BaseException:
            store.delete([staged])
            raise
        crashpoint("repaired object staged, damaged one still there")
        if not _is_right(one):
            store.delete([one.name])
            crashpoint("damaged object removed, repaired one not yet in its place")
            _put(store, one, _Stored(store, staged, content.length), token)
            _read_back(one, f": {staged} beside it has what was saved")
        crashpoint("repaired object in its place, staged one still there")
        store.delete([staged])
    if one.id is None or _is_wanted(repo, one.id):
        return True
    store.delete([one.name])
    return False


def _put(store: Store, one: Mending, content: Content, token: str) -> None:
    try:
        store.put_if_absent(one.name, content, token=token)
    except AlreadyExists:
        if not _is_right(one):  # a third party has put something there
            raise


def _is_right(one: Mending) -> bool:
    """Reads the object in its place. Returns whether it is there, as it has to be: another repair may have been faster.
    Raises StoreError where the store does not say."""
    assert one.store is not None
    try:
        if one.recipe is not None:
            return one.recipe.is_whole()
        assert one.data is not None
        return one.store.get(one.name, limit=len(one.data)) == one.data
    except (CorruptionError, ObjectNotFound):
        return False
    except StoreError as error:
        if not is_unreadable(error):
            raise
        return False


def _read_back(one: Mending, more: str = "") -> None:
    """Reads what was put, in its place, before it counts as repaired. Raises CorruptionError where it is not what was
    saved, and StoreError where it cannot be read."""
    try:
        right = _is_right(one)
    except StoreError as error:
        error.message = f"{one.name} in {one.place} was put, and could not be read back: {error.message}"
        raise
    if not right:
        raise CorruptionError(
            f"{one.name} in {one.place} was put, and reads otherwise{more}", subject=one.name, object=one.name
        )


def _is_wanted(repo: Repo, id: CheckpointId) -> bool:
    """Returns whether the checkpoint is there, or lies in the trash, whence it can come back, or for others."""
    if repo.exists(id):
        return True
    trash = repo.store.children(object_names.trash_directory(id)).objects
    return bool(trash) and not is_there(home_of(repo.store), id.manifest)  # what was freed has an aborted mark there


def _mend_manifest(repo: Repo, one: Mending, id: CheckpointId, data: bytes, token: str) -> bool:
    """Replaces a manifest. While its name is free its copy lies in the trash: a claim takes the checkpoint for removed
    then, not for a save that never ended, and `tenuto undelete` brings it back if this process dies there."""
    store = one.store
    assert store is not None
    if store is not repo.store and store.url != repo.store.url:
        home, begin = home_of(repo.store), object_names.begin_name(id)
        keeps = any(store is one for one in followers_of(repo.store))  # also what the home has removed
        if not is_there(store if keeps else home, begin if keeps else id.manifest):
            return False
        store.delete([id.manifest])
        crashpoint("damaged manifest removed from another place, repaired one not yet there")
        _put_manifest(store, id, data, token)
        _read_back(one)
        wanted = is_there(store if keeps else home, begin if keeps else id.manifest)
        if not wanted:  # whoever removes it may have passed here already
            store.delete([id.manifest])
        return wanted
    if one.missing:
        return _put_lost(repo, one, id, data, token)
    if not repo.exists(id):
        return False
    trash, begin = object_names.trash_directory(id), object_names.begin_name(id)
    before, begun = {entry.name for entry in repo.store.walk(trash)}, exists(store, begin)
    copy = f"{trash}/{secrets.token_hex(16)}.json"
    repo.store.put_if_absent(copy, Bytes(data), token=token)
    crashpoint("repaired manifest in the trash, damaged one still there")
    store.delete([id.manifest])
    crashpoint("damaged manifest removed, repaired one not yet in its place")
    _put_manifest(store, id, data, token)
    store.settle(id.manifest)
    _read_back(one)
    # A removal that has come between leaves a tombstone, its own copy in the trash, or nothing of the save.
    removed = is_tombstoned(repo, id) or {entry.name for entry in repo.store.walk(trash)} - before - {copy}
    if removed or (begun and not exists(store, begin)):
        store.delete([id.manifest])
    repo.store.delete([copy])
    return repo.exists(id)


def _put_lost(repo: Repo, one: Mending, id: CheckpointId, data: bytes, token: str) -> bool:
    """Puts the manifest of a checkpoint that has lost it, unless that was removed meanwhile."""
    store = one.store
    assert store is not None
    if not repo.exists(id):
        if not census_of(repo, id).lost:
            return False
        _put_manifest(store, id, data, token)
        store.settle(id.manifest)
        _read_back(one)
        gone = not exists(store, object_names.begin_name(id)) or is_tombstoned(repo, id)
        if gone:  # a removal has come between
            store.delete([id.manifest])
    return repo.exists(id)


def _put_manifest(store: Store, id: CheckpointId, data: bytes, token: str) -> None:
    try:
        store.put_if_absent(id.manifest, Bytes(data), token=token)
    except AlreadyExists:  # another repair was faster
        if store.get(id.manifest, limit=MAX_MANIFEST) != data:
            raise


class _Recipe:
    """A pack that is being assembled, as content of a put."""

    def __init__(self, one: Mending) -> None:
        assert one.recipe is not None
        self.length = one.recipe.length
        self.pieces = one.recipe.pieces


class _Stored:
    """An object of a store, as content of a put; what is put is verified where it lies afterwards."""

    def __init__(self, store: Store, name: str, length: int) -> None:
        self._store, self._name, self.length = store, name, length

    def pieces(self) -> Iterator[memoryview]:
        with self._store.open(self._name) as reader:
            data = np.empty(min(_PIECE, self.length), np.uint8)
            for start in range(0, self.length, _PIECE):
                piece = data[: min(_PIECE, self.length - start)]
                reader.read_into(start, piece.data)
                yield piece.data


# --------------------------------------------------------------------------------------------------
# What stays damaged.


def _quarantined(repo: Repo, plan: RepairPlan, verified: VerifyReport, id: CheckpointId) -> Quarantined:
    harmful = [one for one in plan.mendings if one.id == id and one.harms]
    words = [one.lost_words for one in harmful if one.lost_words]
    known = [path for one in harmful for path in one.lost]
    if not (known or words):
        known = [one.leaf for one in verified.of(id) if one.leaf is not None]
    lost = list(dict.fromkeys(known))
    named = tuple(lost[:LEAVES_NAMED])
    instead = older_with(repo, id, named if named and not words else None)
    told = EVERYTHING if EVERYTHING in words else ", ".join(words)
    return Quarantined(id, named, len(lost), told, instead)


def older_with(repo: Repo, id: CheckpointId, paths: Sequence[str] | None) -> CheckpointId | None:
    """Returns the newest older checkpoint of the run that has these leaves, every byte of them as it was saved; None if
    there is none among the next ones. Reads these leaves and no others; of `paths` None all that a checkpoint has."""
    older = (
        CheckpointId(id.run, attempt, step)
        for attempt in reversed(repo.attempts(id.run))
        for step in repo.committed(id.run, attempt)
        if (attempt, step) < (id.attempt, id.step)
    )
    for other in islice(older, _LOOKED_AT):
        try:
            if verification_of(notes(repo, other)) != "suspect" and _reads(repo, other, paths):
                return other
        except (TenutoError, ObjectNotFound):
            continue
    return None


def _reads(repo: Repo, id: CheckpointId, paths: Sequence[str] | None) -> bool:
    """Reads leaves. Raises what reading raises; returns whether all of them are there."""
    with open_checkpoint(repo, id, rank=None, emitter=Emitter()) as opened:
        if not all(path in opened for path in paths or ()):
            return False
        for path in opened if paths is None else paths:
            leaf = opened[path]
            leaf.read_into(np.empty(leaf.nbytes, np.uint8), Box.whole(leaf.shape))
    return True
