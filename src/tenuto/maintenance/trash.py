"""The trash: where a removal puts a checkpoint's manifest, so that `undelete` can put it back. The packs stay in place.

The caller has put a tombstone, and has asked who needs the checkpoint; it takes the tombstone back afterwards.
"""

from __future__ import annotations

from tenuto.crashpoints import crashpoint
from tenuto.errors import AlreadyExists, CheckpointNotFound, ObjectNotFound, StoreFull
from tenuto.maintenance.census import census_of
from tenuto.maintenance.marks import By, put_mark
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import MAX_MANIFEST
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import Tombstone, still_exists
from tenuto.store.contract import Bytes


def move_into_trash(repo: Repo, stone: Tombstone, *, by: By) -> bool:
    """Moves the checkpoint of `stone` into the trash, and marks it: its grace begins now. Returns False, and has
    removed nothing, if the tombstone has been taken back. Raises CheckpointNotFound if the manifest is gone."""
    id = stone.id
    _put_copy(repo, stone)
    crashpoint("copy in trash, manifest still there")
    if not still_exists(repo, stone):
        return False
    repo.store.delete([id.manifest])
    repo.store.settle(id.manifest)
    crashpoint("manifest removed, packs still there")
    try:
        put_mark(repo, census_of(repo, id), by=by)
    except StoreFull:
        pass  # without a mark it lies there longer: the next look into the trash, or visit of gc, puts one
    return True


def _put_copy(repo: Repo, stone: Tombstone) -> None:
    """Puts the manifest's bytes, damaged or not, under a name that no earlier removal has used."""
    try:
        data = repo.store.get(stone.id.manifest, limit=MAX_MANIFEST)
    except ObjectNotFound:
        raise CheckpointNotFound(f"{stone.id} was removed meanwhile", subject=str(stone.id)) from None
    token = stone.name.rpartition("/")[2].removesuffix(".json")
    name = f"{object_names.trash_directory(stone.id)}/{token}.json"
    try:
        repo.store.put_if_absent(name, Bytes(data), token=token)
    except AlreadyExists:
        repo.store.settle(name)  # our own: the reply to an earlier try was lost
