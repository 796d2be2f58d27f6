"""Replicate: every place that is to hold a checkpoint's packs gets those that it lacks, from where they lie.

To the home comes what lies only on a node; to each other place that is no node's own whatever it lacks. Every byte is
verified on the way, and what a place needs to be read by itself comes along: its manifest last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.copying import copy_packs
from holdfast.events import Emitter, Progress
from holdfast.model.checkpoint import Manifest
from holdfast.model.names import CheckpointId
from holdfast.repo import layout
from holdfast.repo.copies import copies_of
from holdfast.repo.places import Places
from holdfast.repo.repository import Repo
from holdfast.store.contract import Store
from holdfast.upkeep.places import targets


@dataclass(frozen=True, slots=True)
class Copying:
    """Packs, by name, of one checkpoint that one place lacks."""

    id: CheckpointId
    target: str
    names: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class ReplicatePlan:
    """`unfound`: packs that lie in no place that is found from here."""

    where: str
    copies: tuple[Copying, ...]
    unfound: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.copies)


def plan_replicate(repo: Repo, ids: Sequence[CheckpointId]) -> ReplicatePlan:
    """What is lacking where. Raises CheckpointNotFound, and CorruptionError for what says where packs lie."""
    copies: list[Copying] = []
    unfound: list[str] = []
    for id in ids:
        manifest = repo.manifest(id)
        lacking: dict[str, list[tuple[str, int]]] = {target.url: [] for target in targets(repo)}
        for rank in range(len(manifest.indexes)):
            for pack in repo.packs(manifest, rank):
                name = f"{id.directory}/{pack.name}"
                have = {store.url for store in copies_of(repo.store, name)}
                if not have:
                    unfound.append(name)
                    continue
                for url in lacking.keys() - have:
                    lacking[url].append((name, pack.length))
        copies += [
            Copying(id, url, tuple(name for name, _ in packs), sum(nbytes for _, nbytes in packs))
            for url, packs in lacking.items()
            if packs
        ]
    return ReplicatePlan(repo.url, tuple(copies), tuple(unfound))


def execute(repo: Repo, plan: ReplicatePlan, *, emitter: Emitter | None = None) -> int:
    """Copies; returns the bytes that were. Raises CorruptionError where a source is damaged, StoreError."""
    emit, done = emitter or Emitter(), 0
    places = {target.url: target for target in targets(repo)}

    def told(name: str, nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if emit.listened:
            emit.emit(Progress("replicate", plan.where, done, plan.bytes))

    for copying in plan.copies:
        manifest, target = repo.manifest(copying.id), places[copying.target]
        _bring(repo, target, [f"{copying.id.directory}/{entry.name}" for entry in manifest.tables])
        copy_packs(repo, manifest, frozenset(copying.names), target, told)
        _bring(repo, target, [copying.id.manifest, *_around(repo, manifest)])
    return done


def _around(repo: Repo, manifest: Manifest) -> list[str]:
    """What is known of a checkpoint beside its manifest, and every name that the repository gives."""
    notes = repo.store.walk(layout.notes_directory(manifest.id))
    return [entry.name for entry in (*notes, *repo.store.walk("refs"))]


def _bring(repo: Repo, target: Store, names: Sequence[str]) -> None:
    places = repo.store
    if isinstance(places, Places) and target is not places.home:
        for name in names:
            places.copy_to(target, name)
