"""Replicate: every place that is to hold checkpoints gets what it lacks of them, from where it lies.

To the home comes what lies only on a node; to each other place that is no node's own whatever it lacks: packs, and
what it takes to read them there by themselves, its manifest last. Every byte is verified on the way. What goes wrong
with one checkpoint, or in one place, keeps nothing from the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenuto.errors import CheckpointNotFound, CorruptionError, RepositoryError, StoreError, TenutoError
from tenuto.events import Emitter, Progress
from tenuto.maintenance.place_copy import PlaceCopy
from tenuto.maintenance.replica_tidy import targets
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.record import record
from tenuto.repo.format import object_names
from tenuto.repo.replicated.places import copies_of, home_of, unreachable
from tenuto.repo.replicated.replica import UnreachableReplica, is_there
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store


@record
class Copying:
    """The objects of a checkpoint that one place lacks, by name: `packs`, with `bytes` in all, and small objects. `id`
    is None for those of no checkpoint."""

    id: CheckpointId | None
    target: str
    packs: tuple[str, ...]
    small: tuple[str, ...]
    bytes: int


@record
class ReplicatePlan:
    """`unfound`: packs that no place in reach has. `away`: places out of reach. `failed`: errors that kept a checkpoint
    out of the plan."""

    where: str
    copies: tuple[Copying, ...]
    unfound: tuple[str, ...]
    away: tuple[UnreachableReplica, ...]
    failed: tuple[TenutoError, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.copies)


@record
class ReplicateReport:
    """`bytes`: of the packs that were copied. `failed`: errors of those that were not."""

    bytes: int
    failed: tuple[TenutoError, ...]


def plan_replicate(repo: Repo, ids: Sequence[CheckpointId]) -> ReplicatePlan:
    """Plans what to copy where, newest first. Skips checkpoints that were removed meanwhile."""
    copies: list[Copying] = []
    unfound: list[str] = []
    failed: list[TenutoError] = []
    found = []
    for target in targets(repo):
        try:
            target.children("")
            found.append(target)
        except StoreError as error:
            failed.append(error)  # nobody can say what it lacks
    planned: dict[str, set[str]] = {target.url: set() for target in found}
    for id in sorted(ids, reverse=True):
        try:
            for one in _lacking(repo, repo.manifest(id), found, unfound, planned):
                copies.append(one)
        except CheckpointNotFound:
            continue
        except (RepositoryError, CorruptionError, StoreError) as error:
            failed.append(error)
    for target in found:
        if target is home_of(repo.store):
            continue
        listed = (entry.name for top in ("refs", object_names.KEYS) for entry in repo.store.walk(top))
        refs = tuple(name for name in listed if not is_there(target, name))
        if refs:
            copies.append(Copying(None, target.url, (), refs, 0))
    return ReplicatePlan(repo.url, tuple(copies), tuple(unfound), tuple(unreachable(repo.store)), tuple(failed))


def _lacking(
    repo: Repo, manifest: Manifest, found: Sequence[Store], unfound: list[str], planned: dict[str, set[str]]
) -> list[Copying]:
    """`planned`: the packs that other checkpoints of the plan bring a place already."""
    packs: dict[str, list[tuple[str, int]]] = {target.url: [] for target in found}
    for rank in range(len(manifest.indexes)):
        for pack in repo.packs(manifest, rank):
            name = pack.object_name(manifest.id)
            have = {store.url for store in copies_of(repo.store, name)}
            if not have and name not in unfound:
                unfound.append(name)
            for url in packs.keys() - have if have else ():
                if name not in planned[url]:
                    planned[url].add(name)
                    packs[url].append((name, pack.length))
    copies, home = [], home_of(repo.store)
    for target in found:
        wanted = packs[target.url]
        small = [] if target is home else [name for name in _small(repo, manifest) if not is_there(target, name)]
        if wanted or small:
            names, nbytes = tuple(name for name, _ in wanted), sum(nbytes for _, nbytes in wanted)
            copies.append(Copying(manifest.id, target.url, names, tuple(small), nbytes))
    return copies


def _small(repo: Repo, manifest: Manifest) -> list[str]:
    """Returns the objects that a place needs to show a checkpoint by itself, in the order in which they are put."""
    directory = manifest.id.directory
    notes = [entry.name for entry in repo.store.walk(object_names.notes_directory(manifest.id))]
    return [*(f"{directory}/{entry.name}" for entry in manifest.tables), manifest.id.manifest, *notes]


def execute(repo: Repo, plan: ReplicatePlan, *, emitter: Emitter | None = None) -> ReplicateReport:
    """Copies what it can."""
    emit, done = emitter or Emitter(), 0
    failed: list[TenutoError] = []
    known = {target.url: target for target in targets(repo)}

    def advance(name: str, nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if emit.listened:
            emit.emit(Progress("replicate", plan.where, done, plan.bytes))

    for copying in plan.copies:
        target = known[copying.target]
        try:
            if copying.id is None:
                for name in copying.small:
                    PlaceCopy(repo, target).send(name)
            elif target is home_of(repo.store):
                PlaceCopy(repo, target, advance).bring_packs(repo.manifest(copying.id), copying.packs)
            else:
                PlaceCopy(repo, target, advance).bring(copying.id, copying.packs)
        except CheckpointNotFound:
            continue
        except (CorruptionError, StoreError) as error:
            failed.append(error)
    return ReplicateReport(done, tuple(failed))
