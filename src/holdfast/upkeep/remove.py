"""Remove (`rm`): a checkpoint's manifest goes into the trash. Its packs stay until gc, and until then it can come back.

The order (I2): a tombstone, so that whoever comes to need the checkpoint sees it; a look at who needs it, so that
whoever came before is seen; the copy in the trash; the manifest; the tombstone taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.crashpoints import crashpoint
from holdfast.errors import (
    AlreadyExists,
    CheckpointNotFound,
    CorruptionError,
    HoldfastError,
    ObjectNotFound,
    RemovalRefused,
    typed,
)
from holdfast.events import Emitter, Removed
from holdfast.model.names import CheckpointId
from holdfast.repo import layout
from holdfast.repo.manifest import MAX_MANIFEST
from holdfast.repo.repository import Repo
from holdfast.repo.tombstones import Tombstone, put_tombstone, stands, take_back
from holdfast.store.contract import Bytes
from holdfast.upkeep.needs import Need, needs
from holdfast.upkeep.owners import Finished, finished_runs


@dataclass(frozen=True, slots=True)
class Removal:
    """One checkpoint to be removed, and what stands in the way. `bytes`: what gc will free later; 0 if nobody knows."""

    id: CheckpointId
    bytes: int
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True)
class RemovePlan:
    """`finished`: runs whose owner was found dead, with the attempt's number."""

    where: str
    removals: tuple[Removal, ...]
    force: bool = False
    finished: tuple[tuple[str, int], ...] = ()

    @property
    def bytes(self) -> int:
        return sum(removal.bytes for removal in self.removals)

    @property
    def refused(self) -> tuple[Removal, ...]:
        return tuple(removal for removal in self.removals if _blocking(removal.needs, force=self.force))

    def __str__(self) -> str:
        lines = [f"remove {len(self.removals)} of {self.where}, {self.bytes / 2**20:,.1f} MiB after gc"]
        for removal in self.removals:
            blocking = _blocking(removal.needs, force=self.force)
            why = f"refused: {'; '.join(need.reason for need in blocking)}" if blocking else "removed"
            lines.append(f"  {removal.id}  {why}")
        return "\n".join(lines)


def plan_remove(
    repo: Repo, ids: Sequence[CheckpointId], *, force: bool = False, finished: Finished | None = None
) -> RemovePlan:
    """What removing `ids` would do. `force` removes also what a run that nobody trains on would go on from.

    `finished`: runs known to have no live owner; by default found out, which takes 15 s if one lived on another host
    and did not say goodbye. Raises CheckpointNotFound. A refusal is in the plan; executing it raises.
    """
    for id in ids:
        if not repo.exists(id):
            raise CheckpointNotFound(
                f"no checkpoint {id} at {repo.url}",
                subject=str(id),
                hint=f"{typed('holdfast', 'ls', repo.url)} shows those there are",
            )
    known = finished_runs(repo, repo.runs()) if finished is None else dict(finished)
    removals = tuple(Removal(id, _bytes(repo, id), tuple(needs(repo, id, known))) for id in dict.fromkeys(ids))
    # The oldest goes first: cut short, the removal of a whole run leaves its newest checkpoints.
    ordered = tuple(sorted(removals, key=lambda removal: removal.id))
    return RemovePlan(repo.url, ordered, force, tuple(sorted(known.items())))


def execute(repo: Repo, plan: RemovePlan, *, emitter: Emitter | None = None) -> tuple[CheckpointId, ...]:
    """Removes; returns what was removed. Raises RemovalRefused, before anything is removed if the plan says so already,
    else at the first checkpoint that somebody has come to need since (those before it are removed)."""
    if plan.refused:
        raise refusal(plan.refused[0].id, _blocking(plan.refused[0].needs, force=plan.force))
    removed = []
    for removal in plan.removals:
        remove(repo, removal.id, finished=dict(plan.finished), force=plan.force)
        removed.append(removal.id)
        (emitter or Emitter()).emit(Removed(removal.id, "removed by hand; `undelete` can bring it back until gc"))
    return tuple(removed)


def remove(repo: Repo, id: CheckpointId, *, finished: Finished, force: bool) -> None:
    """One checkpoint, by the order above."""
    stone = put_tombstone(repo, id, reason="rm")
    crashpoint("tombstone put, manifest still there")
    try:
        blocking = _blocking(needs(repo, id, finished), force=force)
        if blocking:
            raise refusal(id, blocking)
        _put_into_trash(repo, stone)
        crashpoint("copy in trash, manifest still there")
        if not stands(repo, stone):
            raise RemovalRefused(
                f"{id} was not removed: its tombstone has been taken back by a claim of the run",
                subject=str(id),
                hint=typed("holdfast", "rm", repo.url, id),
            )
        repo.store.delete([id.manifest])
        repo.store.settle(id.manifest)
    except HoldfastError:
        take_back(repo, stone)
        raise
    crashpoint("manifest removed, packs still there")
    take_back(repo, stone)


def refusal(id: CheckpointId, blocking: Sequence[Need]) -> RemovalRefused:
    reasons = "; ".join(need.reason for need in blocking)
    return RemovalRefused(f"{id} is not removed: {reasons}", subject=str(id), hint=blocking[0].hint)


def _put_into_trash(repo: Repo, stone: Tombstone) -> None:
    """The manifest's bytes, damaged or not, under a name that no earlier removal has used."""
    try:
        data = repo.store.get(stone.id.manifest, limit=MAX_MANIFEST)
    except ObjectNotFound:
        raise CheckpointNotFound(f"{stone.id} was removed meanwhile", subject=str(stone.id)) from None
    token = stone.name.rpartition("/")[2].removesuffix(".json")
    name = f"{layout.trash_directory(stone.id)}/{token}.json"
    try:
        repo.store.put_if_absent(name, Bytes(data), token=token)
    except AlreadyExists:
        repo.store.settle(name)  # our own: the reply to an earlier try was lost


def _blocking(found: Sequence[Need], *, force: bool) -> list[Need]:
    return [need for need in found if not (force and need.forcible)]


def _bytes(repo: Repo, id: CheckpointId) -> int:
    try:
        return repo.manifest(id).bytes
    except CorruptionError:
        return 0
