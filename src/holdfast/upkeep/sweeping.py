"""Deletes what a save has left that nothing reaches: only names that it listed itself, and `begin.json` last;
where that is gone behind an aborted mark, names of a save's own form."""

from __future__ import annotations

import secrets

from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptionError
from holdfast.model.checkpoint import Manifest
from holdfast.repo import layout
from holdfast.repo.repository import Repo
from holdfast.repo.unfinished import abort, free
from holdfast.upkeep.census import SaveDirectory, is_note


def close(repo: Repo, save: SaveDirectory, *, by: str) -> bool:
    """Takes the manifest's name for an aborted mark: from now on nobody can commit this save, or bring it back. False
    if it has a manifest after all."""
    return abort(repo, save.id, save.save_id or secrets.token_hex(16), by=by)


def sweep(repo: Repo, save: SaveDirectory, *, keep_begin: bool) -> None:
    """Deletes the objects of a save that has been closed: packs, indexes and notes, then the copies in the trash, then
    begin.json. `keep_begin`: its process may still put more, so that somebody has to come back."""
    if not free(repo, save.id, names=listed(repo, save), keep_begin=True):
        return
    crashpoint("objects swept, copy in trash still there")
    repo.store.delete([entry.name for entry in save.trash])
    if not keep_begin:
        repo.store.delete([layout.begin_name(save.id)])


def listed(repo: Repo, save: SaveDirectory) -> list[str]:
    """File names of packs and indexes that the save's begin.json or manifest lists, also through its indexes; of a
    closed save without begin.json those that are called so."""
    names = {*(save.begin.names if save.begin else ()), *save.unlisted()}
    if save.manifest is not None:
        names.update(entry.name for entry in save.manifest.tables)
        if save.begin is None:
            names.update(_packs(repo, save.manifest))
    return sorted(names)


def listed_names(repo: Repo, save: SaveDirectory) -> set[str]:
    """Full names of everything that the save may have put: what it listed, what lists it, and its notes."""
    files = {*listed(repo, save), layout.BEGIN, layout.MANIFEST}
    prefix = len(save.id.directory) + 1
    notes = {entry.name for entry in save.entries if is_note(entry.name[prefix:])}
    return notes | {f"{save.id.directory}/{file}" for file in files}


def _packs(repo: Repo, manifest: Manifest) -> set[str]:
    """The packs that the manifest's indexes name, as far as those can be read."""
    found: set[str] = set()
    for rank in range(len(manifest.indexes)):
        try:
            found.update(pack.name for pack in repo.packs(manifest, rank))
        except CorruptionError:
            continue
    return found
