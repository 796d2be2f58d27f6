"""Brings another place what a checkpoint rests on: packs in the directories of others, its *bases*.

A place that has a checkpoint has every pack that it needs, before its manifest. A base that is no checkpoint there, for
the place keeps others or it is removed already, lies there as retention would have left it: its manifest in the trash,
with a mark of `needed`, and of its packs those that are needed. So whoever frees, claims or repairs in that place knows
it, and it goes with the last checkpoint that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Final

from tenuto.codec.digest import digest
from tenuto.crashpoints import crashpoint
from tenuto.errors import CheckpointNotFound, CorruptionError, FormatTooNew, ObjectNotFound, typed
from tenuto.maintenance.census import census_of
from tenuto.maintenance.marks import put_mark
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest, PackEntry
from tenuto.record import record
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import MAX_ABORTED, MAX_MANIFEST, Aborted, decode_manifest
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store

REPACKED: Final = "repacked"
"""The entry of a checkpoint's environment that names the one that it was stored as before another encoding."""
Put = Callable[[str, bytes], object]
"""Puts a small object into the place, unless it is there."""


@record
class Base:
    """A checkpoint on which another one rests, removed or not.

    - `data`: its manifest, byte for byte.
    - `packs`: those of its own that the other one needs, each with its rank.
    """

    manifest: Manifest
    data: bytes
    packs: tuple[tuple[int, PackEntry], ...]

    @property
    def id(self) -> CheckpointId:
        return self.manifest.id

    def name(self, pack: PackEntry) -> str:
        return f"{self.id.directory}/{pack.name}"


def manifest_of(repo: Repo, id: CheckpointId) -> tuple[Manifest, bytes]:
    """Returns the manifest of a checkpoint, with its bytes; from the trash, where it was removed and others need its
    packs. Raises CheckpointNotFound where there is neither, CorruptionError for one that cannot be read."""
    try:
        data = repo.manifest_bytes(id)
        return _manifest(repo, id, data), data
    except CheckpointNotFound:
        directory = object_names.trash_directory(id)
        for file in repo.store.children(directory).objects:
            with suppress(ObjectNotFound, CorruptionError):
                data = repo.store.get(f"{directory}/{file}", limit=MAX_MANIFEST)
                return _manifest(repo, id, data), data
        raise


def _manifest(repo: Repo, id: CheckpointId, data: bytes) -> Manifest:
    found = decode_manifest(data, id, repo.id)
    if not isinstance(found, Manifest):
        raise CorruptionError(f"what lies in the trash for {id} is not a manifest", subject=str(id))
    return found


def has_another(repo: Repo, place: Store, manifest: Manifest) -> bool:
    """Returns whether a place has another manifest of its own of a checkpoint, in its place or in the trash, as of
    another line of training: what it has there fits that one, and nothing else says what is right there. Raises
    StoreError."""
    try:
        own, _ = manifest_of(Repo(place, repo.id, repo.chunk_bytes), manifest.id)
    except (CheckpointNotFound, CorruptionError):
        return False
    except FormatTooNew:
        return True
    return is_another(own, manifest)


def is_another(own: Manifest, manifest: Manifest) -> bool:
    """Returns whether two manifests under one name are of different saves, or of different objects."""
    return (own.save_id, own.tables) != (manifest.save_id, manifest.tables)


def bases_of(repo: Repo, manifest: Manifest, *, every_pack: bool = False) -> list[Base]:
    """Returns what a checkpoint rests on. `every_pack`: with all the packs that these have themselves.

    Raises CorruptionError where one of them cannot be read, or is gone.
    """
    needed: dict[CheckpointId, set[str]] = {}
    for rank in range(len(manifest.indexes)) if manifest.bases else ():
        for pack in repo.packs(manifest, rank):
            if pack.at is not None:
                needed.setdefault(pack.at, set()).add(pack.name)
    found = []
    for id, files in sorted(needed.items()):
        try:
            base, data = manifest_of(repo, id)
        except CheckpointNotFound as error:
            raise CorruptionError(
                f"{manifest.id} rests on data files of {id}, and no manifest says what those hold",
                subject=str(manifest.id),
                hint=f"a repack was cut off: {typed('tenuto', 'repack', repo.url, '--run', manifest.id.run)} ends it"
                if REPACKED in manifest.environment
                else None,
            ) from error
        own = own_packs(repo, base)
        packs = tuple((rank, pack) for rank, pack in own if every_pack or pack.name in files)
        if files - {pack.name for _, pack in packs}:
            raise CorruptionError(f"{id} does not have the data files that {manifest.id} names", subject=str(id))
        found.append(Base(base, data, packs))
    return found


def own_packs(repo: Repo, manifest: Manifest) -> Iterator[tuple[int, PackEntry]]:
    """Yields the packs in a checkpoint's own directory, each with its rank."""
    for rank in range(len(manifest.indexes)):
        yield from ((rank, pack) for pack in repo.packs(manifest, rank) if pack.at is None)


def packs_of(repo: Repo, manifest: Manifest) -> dict[str, int]:
    """Returns the names of all data files that a checkpoint needs, with their lengths."""
    ranks = range(len(manifest.indexes))
    return {pack.object_name(manifest.id): pack.length for rank in ranks for pack in repo.packs(manifest, rank)}


def lacking(
    place: Store, names: Collection[str], listed: Mapping[str, Collection[str]] = MappingProxyType({})
) -> list[str]:
    """Returns which of the names of data files a place does not have. One listing for each directory that is not among
    those `listed` already, with their files."""
    there = dict(listed)
    for directory in {name.rpartition("/")[0] for name in names} - there.keys():
        there[directory] = set(place.children(directory).objects)
    return [name for name in names if name.rpartition("/")[2] not in there[name.rpartition("/")[0]]]


def put_base(repo: Repo, base: Base, target: Store, put: Put, *, mark: bool = True) -> bool:
    """Puts everything of a base but its packs; returns whether that made it one that lies in the trash there.

    `mark`: says there too that it goes as soon as nobody needs it. Raises StoreError, and CorruptionError.
    """
    id = base.id
    there = set(target.children(id.directory).objects)
    for name in (object_names.attempt_name(id.run, id.attempt), object_names.begin_name(id)):
        if name.rpartition("/")[2] not in there:
            with suppress(ObjectNotFound):
                put(name, repo.store.get(name, limit=MAX_MANIFEST))
    for entry in base.manifest.tables:
        if entry.name not in there:
            put(f"{id.directory}/{entry.name}", repo.index_bytes(id, entry))
    directory = object_names.trash_directory(id)
    if object_names.MANIFEST in there and not remove_aborted_mark(repo, target, id):
        return False
    if target.children(directory).objects:
        return False
    put(f"{directory}/{digest(base.data).hex()}.json", base.data)
    if mark:
        copy = Repo(target, repo.id, repo.chunk_bytes)
        put_mark(copy, census_of(copy, id), by="needed")
    crashpoint("place has a base of a checkpoint in its trash, not its data files")
    return True


def remove_aborted_mark(repo: Repo, target: Store, id: CheckpointId) -> bool:
    """Removes the aborted mark that freeing a checkpoint in this place has left under its manifest's name: what comes
    back would be freed again. Returns whether it was one. Nobody else puts it: it has been a checkpoint elsewhere."""
    try:
        found = is_aborted_mark(id.manifest, target.get(id.manifest, limit=MAX_MANIFEST), repo.id)
    except (ObjectNotFound, CorruptionError):
        return False
    if found:
        target.delete([id.manifest])
    return found


def is_aborted_mark(name: str, data: bytes, repository: str) -> bool:
    """Returns whether an object is the mark of an aborted save, under the name of its manifest."""
    id = object_names.save_of(name)
    if id is None or name != id.manifest or len(data) > MAX_ABORTED:
        return False
    try:
        return isinstance(decode_manifest(data, id, repository), Aborted)
    except CorruptionError:
        return False


def out_of_trash(target: Store, id: CheckpointId) -> None:
    """Removes the copy in the trash of what has become a checkpoint in this place."""
    directory = object_names.trash_directory(id)
    names = [f"{directory}/{file}" for file in target.children(directory).objects]
    if names:
        target.delete(names)


def needed_in(copy: Repo, ids: Collection[CheckpointId]) -> Mapping[CheckpointId, CheckpointId]:
    """Returns what the checkpoints `ids` of a place rest on there, each with one of them. Raises CorruptionError where
    a manifest cannot be read: it may rest on anything."""
    needed: dict[CheckpointId, CheckpointId] = {}
    for id in ids:
        with suppress(CheckpointNotFound):  # removed meanwhile
            needed.update(dict.fromkeys(copy.manifest(id).bases, id))
    return needed
