"""Saves that began and will never commit: closed, and their objects freed.

Only names that the save's own `begin.json` lists are touched, and their temporaries; `begin.json` goes last, so that a
process that dies here leaves the next one everything it needs. The aborted mark stays.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable

from tenuto.crashpoints import crashpoint
from tenuto.errors import AlreadyExists, CorruptionError, ObjectNotFound, StoreError, typed
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import MAX_ABORTED, Aborted, encode_aborted
from tenuto.repo.format.small_records import decode_begin
from tenuto.repo.lost import Witnesses
from tenuto.repo.repository import Repo
from tenuto.store.contract import final_name, is_leftover, is_unreadable

Report = Callable[[str], None]


def abort(repo: Repo, id: CheckpointId, save_id: str, *, by: str = "the save failed") -> bool:
    """Takes the manifest's name for an aborted mark, so that this save can never commit. Returns False if it has
    committed.

    Returns True also if there is a mark already. Raises CorruptionError if the object there cannot be read.
    """
    mark = Aborted(id, save_id, by[:200])
    try:
        objects.put(repo.store, id.manifest, encode_aborted(mark, repo.id), token=save_id)
    except AlreadyExists:
        return _is_aborted(repo, id)
    return True


def _is_aborted(repo: Repo, id: CheckpointId) -> bool:
    """Returns whether the save is aborted. Raises CorruptionError if that cannot be read: then nothing may be freed,
    but nothing else has to wait."""
    try:
        return isinstance(repo.mark(id), Aborted)
    except StoreError as error:
        if not is_unreadable(error):
            raise
        raise CorruptionError(error.message, subject=error.subject) from error


def free(repo: Repo, id: CheckpointId, *, names: Iterable[str] = (), keep_begin: bool = False) -> bool:
    """Deletes the objects of an aborted save. Returns False, changing nothing, without an aborted mark.

    `names`: file names that the caller wrote, in case `begin.json` is gone. `keep_begin`: the save's process may still
    be alive and put more, so that this has to be repeated.
    """
    if not _is_aborted(repo, id):
        return False
    # Somebody else may have put it a moment ago. Were it lost with the power, a commit could come after the freeing.
    repo.store.settle(id.manifest)
    begun = object_names.begin_name(id)
    files = {file for file in names if object_names.is_file(file)}
    try:
        files.update(decode_begin(repo.store.get(begun, limit=objects.SMALL), id, repo.id).names)
    except ObjectNotFound:
        pass  # freed before, or never begun: what the caller knows is all there is
    wanted = sorted(f"{id.directory}/{file}" for file in files)
    # Only a checkpoint that once existed has notes: its removal was cut short.
    notes, leftovers = notes_and_leftovers(repo, id, wanted)
    repo.store.delete([*wanted, *leftovers, *notes])
    if not keep_begin:
        repo.store.delete([begun])
    return True


def notes_and_leftovers(repo: Repo, id: CheckpointId, own: Iterable[str]) -> tuple[list[str], list[str]]:
    """Lists a save's directory. Returns the names of its notes, and those of the temporaries of its objects, which are
    `own`, the notes, `begin.json` and the manifest."""
    return notes_and_leftovers_among([entry.name for entry in repo.store.walk(id.directory, leftovers=True)], id, own)


def notes_and_leftovers_among(
    found: Iterable[str], id: CheckpointId, own: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Returns what `notes_and_leftovers` does, where the directory has been listed: `found` are the names."""
    found = list(found)
    notes = [name for name in found if object_names.is_note(name[len(id.directory) + 1 :])]
    final = {*own, *notes, id.manifest, object_names.begin_name(id)}
    return notes, [name for name in found if is_leftover(name) and final_name(name) in final]


def close_unfinished(repo: Repo, run: str, attempt: int, *, by: str, owner_dead: bool, report: Report) -> None:
    """Closes and frees the unfinished saves of an earlier attempt. Reports damaged ones and leaves them as they are.

    Looks from the highest step down to the first checkpoint: an attempt begins its saves in the order of their steps,
    and none before the earlier ones have committed or are closed (`repo.commit.begin`).
    """
    for step in repo.newest_steps(run, attempt):
        if close_save(repo, CheckpointId(run, attempt, step), by=by, owner_dead=owner_dead, report=report):
            return


def close_save(repo: Repo, id: CheckpointId, *, by: str, owner_dead: bool, report: Report) -> bool:
    """Closes and frees a save, unless it is a checkpoint, in the trash, or freed already, or has lost its manifest.
    Returns whether it is a checkpoint that its own process has committed.

    A checkpoint whose removal broke off after its manifest was gone looks the same, and is freed the same way.
    """
    here = {entry.name: entry.length for entry in repo.store.walk(id.directory)}
    if object_names.begin_name(id) not in here:
        return False
    try:
        if id.manifest not in here:
            # A checkpoint in the trash has lost its manifest too, and can still come back.
            if repo.store.children(object_names.trash_directory(id)).objects:
                return False
            save_id = _save_id(repo, id)
            if save_id is None:
                return False
            lost = Witnesses(repo, [id.run]).lost(id)
            if lost:
                back = typed("tenuto", "repair", repo.url, "--from", "BACKUP")
                report(f"{id} has lost its manifest ({lost}) and is left as it is; `{back}` brings it back from a copy")
                return False
            if not abort(repo, id, save_id, by=by):
                return True
            crashpoint("unfinished save marked aborted, objects still there")
        elif here[id.manifest] > MAX_ABORTED:
            return repo.exists(id)  # a copied directory says nothing of the saves below it
        return not free(repo, id, keep_begin=not owner_dead)
    except ObjectNotFound:
        return False  # removed meanwhile by somebody who knew what it was
    except CorruptionError as error:
        report(f"an unfinished save was left as it is: {error.message}")
        return False


def _save_id(repo: Repo, id: CheckpointId) -> str | None:
    """Returns the id of the save that was begun here; None if the directory is a copy, or of another repository."""
    name, data = object_names.begin_name(id), b""
    try:
        data = repo.store.get(name, limit=objects.SMALL)
        return decode_begin(data, id, repo.id).save_id
    except (ObjectNotFound, CorruptionError):
        if objects.is_copy(name, data, repo.id):
            return None
        return secrets.token_hex(16)  # nobody's: the mark counts, not whose save it closed
