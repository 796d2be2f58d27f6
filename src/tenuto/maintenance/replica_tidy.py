"""Brings the other places of a repository in step with its home: frees what the home no longer knows, copies manifests.

Each node does so for its own directory. Nothing is put there before the home has the save's `begin.json`, and that is
removed last: objects in a place without one, under a step that is not the newest, belong to no save.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tenuto.errors import CorruptionError, ObjectNotFound, StoreError
from tenuto.maintenance.census import is_run
from tenuto.model.ids import CheckpointId, parse_attempt, parse_step
from tenuto.record import record
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import MAX_ABORTED, MAX_MANIFEST, Aborted, decode_manifest
from tenuto.repo.format.small_records import decode_attempt
from tenuto.repo.replicated.members import node_of
from tenuto.repo.replicated.places import all_places, followers_of, places_of
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store, final_name, is_leftover

SET_BACK: Final = "it is left alone. Was the primary restored from a backup?"


@record
class ForgottenSave:
    """What a place holds of a save that the home no longer knows. `bytes`: of its packs."""

    place: str
    id: CheckpointId
    bytes: int


def tidy_replicas(repo: Repo, newest: CheckpointId) -> int:
    """Brings every place for packs of this process in step with the home, for the run of `newest`, which has just been
    committed. Returns how many saves it freed. Reports a problem with one save or place and continues with the
    others."""
    places, freed = places_of(repo.store), 0
    if places is not None:
        for place in places.members:
            try:
                ids = [id for id in _saves(place, newest.run) if id <= newest]  # others are perhaps under way
            except StoreError as error:
                places.warn_once(place, "tidying", f"{place.url} cannot be tidied: {error.message}")
                continue
            for id in ids:
                try:
                    freed += _tidy_save(places, place, id, repo.id)
                except (StoreError, CorruptionError) as error:
                    places.warn_once(place, f"tidying {id.attempt}", f"{id} in {place.url}: {error.message}")
    return freed


def _tidy_save(places: ReplicatedStore, place: Store, id: CheckpointId, repository: str) -> bool:
    """Tidies one save in a place. Returns whether it was freed there."""
    # An older save that was aborted has no writer left, though its begin.json stays until the next claim.
    if _is_known(places.home, id, repository) and not _is_aborted(places.home, id, repository):
        _follow(places, place, id)
        return False
    if is_ahead(places, place, id, repository):
        message = f"{place.url} has {id}, and {places.url} does not know it: {SET_BACK}"
        places.warn_once(place, id.run, message)
        return False
    return free_in(place, id)


def unknown(repo: Repo) -> tuple[tuple[ForgottenSave, ...], list[tuple[CheckpointId, str]]]:
    """Returns what the places in reach have of saves that the home does not know: those that it has removed, and those
    that it ought to know, each with a message."""
    places, gone, ahead = places_of(repo.store), [], []
    if places is None or places.of:
        return (), []
    for place in places.others:
        for key in filter(is_run, place.children(object_names.RUNS).directories):
            for id in _saves(place, key):
                if _is_known(places.home, id, repo.id):
                    continue
                if is_ahead(places, place, id, repo.id):
                    ahead.append((id, f"{place.url} has it, and the primary does not know it: {SET_BACK}"))
                else:
                    packs = [entry.length for entry in place.walk(id.directory) if object_names.is_pack(entry.name)]
                    gone.append(ForgottenSave(place.url, id, sum(packs)))
    return tuple(gone), ahead


def free_forgotten(repo: Repo, found: ForgottenSave) -> bool:
    """Frees it, unless the home has come to know it. Returns whether it did."""
    places = places_of(repo.store)
    assert places is not None, "found there"
    place = next(store for store in places.others if store.url == found.place)
    if _is_known(places.home, found.id, repo.id) or is_ahead(places, place, found.id, repo.id):
        return False
    free_in(place, found.id)
    return True


def targets(repo: Repo) -> list[Store]:
    """Returns the places that `tenuto replicate` brings every pack: the home, and those that are no node's own."""
    home, *others = all_places(repo.store)
    return [home, *(store for store in others if not node_of(store)), *followers_of(repo.store)]


def _saves(place: Store, run: str) -> Iterator[CheckpointId]:
    for key in place.children(object_names.run_directory(run)).directories:
        attempt = parse_attempt(key)
        if attempt is not None:
            for name in place.children(object_names.attempt_directory(run, attempt)).directories:
                step = parse_step(name)
                if step is not None:
                    yield CheckpointId(run, attempt, step)


def _follow(places: ReplicatedStore, place: Store, id: CheckpointId) -> None:
    """Copies the home's manifest of a save to a place, or removes it there. Lists the place before it asks the home,
    where everything is put first."""
    here = object_names.MANIFEST in place.children(id.directory).objects
    try:
        places.home.stat(id.manifest)
    except ObjectNotFound:
        trash = object_names.trash_directory(id)
        for file in places.home.children(trash).objects if not places.declared.per_node else ():
            places.replica(place).copy_from_home(f"{trash}/{file}")  # first: others may rest on its packs
        place.delete([id.manifest] if here else [])
    else:
        places.replica(place).copy_from_home(id.manifest)


def free_in(place: Store, id: CheckpointId, *, manifest_last: bool = False) -> bool:
    """Frees a save in a place. Returns whether it had a pack there. `manifest_last`: an aborted mark lies under that
    name, and keeps others from completing the save until nothing of it is left."""
    prefix = len(id.directory) + 1
    found = [entry.name for entry in place.walk(id.directory, leftovers=True)]
    own = [name for name in found if _is_own(name[prefix:])]
    final = {name: final_name(name)[prefix:] for name in found if is_leftover(name)}
    left = [
        name for name, file in final.items() if _is_own(file) or file in (object_names.BEGIN, object_names.MANIFEST)
    ]
    place.delete([] if manifest_last else [id.manifest])
    # What it leaves while there is something of it is found again by its packs.
    place.delete([entry.name for entry in place.walk(object_names.trash_directory(id))] if own else [])
    place.delete([*own, *left])
    place.delete([object_names.begin_name(id)])
    place.delete([id.manifest] if manifest_last else [])
    return any(map(object_names.is_pack, own))


def _is_known(home: Store, id: CheckpointId, repository: str) -> bool:
    """Returns whether the home has its `begin.json` or its manifest. Asks by name: a listing may be older than what it
    lists."""
    try:
        home.stat(object_names.begin_name(id))
        return True
    except ObjectNotFound:
        pass
    try:
        home.stat(id.manifest)
    except ObjectNotFound:
        return False
    return not _is_aborted(home, id, repository)


def _is_aborted(home: Store, id: CheckpointId, repository: str) -> bool:
    """Returns whether an intact aborted mark exists. A manifest may be as short as a mark, so that it has to be
    decoded."""
    try:
        if home.stat(id.manifest).length > MAX_ABORTED:
            return False
        data = home.get(id.manifest, limit=MAX_ABORTED)
        return isinstance(decode_manifest(data, id, repository), Aborted)
    except (ObjectNotFound, CorruptionError):
        return False


def is_ahead(places: ReplicatedStore, place: Store, id: CheckpointId, repository: str) -> bool:
    """Returns whether a save that the home does not know must stay: it was saved under a claim that the home does not
    have, or is a checkpoint beyond the last step that the home knows of that claim."""
    if not places.replica(place).is_of_home(id.manifest):
        return True
    if _is_aborted(places.home, id, repository):
        return False
    try:
        found = decode_manifest(place.get(id.manifest, limit=MAX_MANIFEST), id, repository)
    except ObjectNotFound:
        return False
    except CorruptionError:
        return True
    return not isinstance(found, Aborted) and id.step > _last_known(places, id, repository)


def _last_known(places: ReplicatedStore, id: CheckpointId, repository: str) -> int:
    """Returns the last step that the attempt of `id` is known to have reached: according to the next attempt, or its
    last save."""
    home = places.home
    numbers = map(parse_attempt, home.children(object_names.run_directory(id.run)).directories)
    later = min((number for number in numbers if number is not None and number > id.attempt), default=None)
    known = [-1]
    if later is not None:
        try:
            name = object_names.attempt_name(id.run, later)
            record = decode_attempt(home.get(name, limit=objects.SMALL), id.run, later, repository)
        except (CorruptionError, ObjectNotFound):
            return -1
        if record.parent is not None and (record.parent.run, record.parent.attempt) == (id.run, id.attempt):
            known.append(record.parent.step)
        if record.before is not None and record.before[0] == id.attempt:
            known.append(record.before[1])
        return max(known)
    steps = map(parse_step, home.children(object_names.attempt_directory(id.run, id.attempt)).directories)
    return max((step for step in steps if step is not None), default=-1)


def _is_own(file: str) -> bool:
    return object_names.is_part(file) or object_names.is_note(file)
