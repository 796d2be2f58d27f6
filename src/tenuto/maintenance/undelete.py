"""Undelete: brings a removed checkpoint back, as long as gc has not come near it.

Its packs and index are checked byte for byte; its manifest is put back; then everything is checked again. Gc and
undelete meet at the manifest's name: gc takes it for an aborted mark before it deletes anything, so that only one of
the two can go on.
"""

from __future__ import annotations

import secrets

from tenuto.crashpoints import crashpoint
from tenuto.errors import (
    AlreadyExists,
    CheckpointNotFound,
    CorruptionError,
    ObjectNotFound,
    RemovalRefused,
    RepositoryError,
    typed,
)
from tenuto.maintenance.census import SaveDirectory, census_of
from tenuto.maintenance.inspect import inspect, scan
from tenuto.maintenance.marks import GRACE_S, age_s, probe, store_now, valid_marks
from tenuto.maintenance.remove import remove
from tenuto.model.ids import CheckpointId
from tenuto.record import record
from tenuto.repo.format import objects
from tenuto.repo.format.manifest import MAX_MANIFEST, Aborted, decode_manifest
from tenuto.repo.ownership.owner_watch import finished_runs
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import dead_tombstones, is_tombstoned, take_back
from tenuto.units import seconds, size


@record
class UndeletePlan:
    """`trash`: where the manifest lies now. `left_s`: seconds for which it can still be brought back; None: nothing has
    marked it yet, and its grace has not begun."""

    where: str
    id: CheckpointId
    trash: str
    bytes: int
    left_s: float | None
    grace_s: float

    def __str__(self) -> str:
        left = "its grace has not begun" if self.left_s is None else f"possible for {seconds(self.left_s)}"
        return f"undelete {self.id} of {self.where}, {size(self.bytes)} to be checked ({left})"


def plan_undelete(repo: Repo, id: CheckpointId, *, grace_s: float = GRACE_S) -> UndeletePlan:
    """Raises CheckpointNotFound where there is nothing to bring back; RepositoryError where the grace is over: gc waits
    for another hour only, and bringing a checkpoint back takes time. `grace_s`: as gc is run here."""
    save = census_of(repo, id)
    if save.state == "committed":
        raise RepositoryError(f"{id} is not removed", subject=str(id), hint=typed("tenuto", "verify", repo.url))
    if save.state != "removed" or save.manifest is None:
        raise _nothing(repo, save)
    left = _left_s(repo, save, grace_s)
    if left is not None and left <= 0:
        raise RepositoryError(
            f"{id} cannot be brought back any more: it was removed more than {seconds(grace_s)} ago, and gc may delete "
            "its data files at any time",
            subject=str(id),
            hint=f"where gc is run with a longer grace: {typed('tenuto', 'undelete', repo.url, id)} --grace HOURS",
        )
    return UndeletePlan(repo.url, id, _trash_of(repo, save), save.manifest.bytes, left, grace_s)


@record
class Undeleted:
    """`unseen`: how many of its packs were not looked at, for they may lie on a node that is not found from here."""

    id: CheckpointId
    unseen: int


def execute(repo: Repo, plan: UndeletePlan) -> Undeleted:
    """Brings it back. Raises CorruptionError, with everything that is wrong, if it would come back damaged; then it
    stays removed."""
    plan = plan_undelete(repo, plan.id, grace_s=plan.grace_s)
    before = census_of(repo, plan.id)
    data = repo.store.get(plan.trash, limit=MAX_MANIFEST)
    try:
        unseen = _check(repo, plan.id, data, every_byte=True)
    except CorruptionError:
        now = census_of(repo, plan.id)
        if now.state != "removed":
            raise _nothing(repo, now) from None  # gc has freed it meanwhile: that is no damage
        _refuse_going(repo, plan.id)
        raise
    _take_back_dead(repo, plan.id)
    try:
        objects.put(repo.store, plan.id.manifest, data, token=secrets.token_hex(16))
    except AlreadyExists:
        raise _nothing(repo, census_of(repo, plan.id)) from None
    repo.store.settle(plan.id.manifest)
    crashpoint("manifest put back from trash, not yet checked")
    try:
        _refuse_going(repo, plan.id)
        _check(repo, plan.id, data, every_byte=False)
    except (RepositoryError, CorruptionError):
        _withdraw(repo, plan.id)
        raise
    # Only what was there before: a removal that has begun since has put a copy of its own.
    repo.store.delete([entry.name for entry in (*before.trash, *before.marks)])
    return Undeleted(plan.id, unseen)


def _refuse_going(repo: Repo, id: CheckpointId) -> None:
    """Raises RepositoryError while another process removes or frees it."""
    if is_tombstoned(repo, id):
        raise RepositoryError(
            f"{id} is being removed by another process", subject=str(id), hint="try again when it has ended"
        )


def _check(repo: Repo, id: CheckpointId, data: bytes, *, every_byte: bool) -> int:
    """Checks presence, length and header of every object, and with `every_byte` the leaves. Returns how many packs were
    not found."""
    manifest = decode_manifest(data, id, repo.id)
    if isinstance(manifest, Aborted):
        raise CorruptionError(f"what lies in the trash for {id} is not a manifest", subject=str(id))
    found = inspect(repo, id, manifest)
    if every_byte:
        scan(found, on_bytes=lambda nbytes: None, threads=2)
    if found.harmed:
        wrong = "\n".join(f"  {finding}" for finding in found.findings)
        raise CorruptionError(f"{id} would not come back whole:\n{wrong}", subject=str(id))
    return len(found.unseen)


def _withdraw(repo: Repo, id: CheckpointId) -> None:
    """Removes it again, unless somebody has come to need it meanwhile, or has removed it."""
    try:
        remove(repo, id, finished=finished_runs(repo, repo.runs()), force=True)
    except (RemovalRefused, CheckpointNotFound):
        pass


def _take_back_dead(repo: Repo, id: CheckpointId) -> None:
    """Withdraws the tombstone of a removal that died at its end, so that it does not count as one in progress."""
    with probe(repo) as name:
        for stone in dead_tombstones(repo, id.run, now_name=name, dead_below=0):
            if stone.id == id:
                take_back(repo, stone)


def _left_s(repo: Repo, save: SaveDirectory, grace_s: float) -> float | None:
    marks = valid_marks(repo, save)
    if not marks:
        return None
    now_ns = store_now(repo)
    return grace_s - max(age_s(repo, mark.entry, now_ns) for mark in marks)


def _trash_of(repo: Repo, save: SaveDirectory) -> str:
    """Returns the readable copy in the trash."""
    for entry in save.trash:
        try:
            decode_manifest(repo.store.get(entry.name, limit=MAX_MANIFEST), save.id, repo.id)
            return entry.name
        except (CorruptionError, ObjectNotFound):
            continue
    raise _nothing(repo, save)


def _nothing(repo: Repo, save: SaveDirectory) -> CheckpointNotFound:
    why = {
        "closed": "its space has been freed",
        "removed": "its manifest in the trash is damaged",
        "damaged": save.message,
    }.get(save.state, "nothing of it is in the trash")
    return CheckpointNotFound(
        f"{save.id} cannot be brought back: {why}", subject=str(save.id), hint=typed("tenuto", "ls", repo.url)
    )
