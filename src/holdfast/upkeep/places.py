"""The other places of a repository kept in step with its home: what it no longer knows goes, manifests come.

Each node sees to its own directory. Nothing is put there before the home has the save's `begin.json`, and that is
the last that is removed there: what lies in a place without one, under a step that is not the newest, is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.errors import CorruptionError, ObjectNotFound
from holdfast.model.names import CheckpointId, parse_attempt, parse_step
from holdfast.repo import layout, objects
from holdfast.repo.manifest import MAX_ABORTED, Aborted, decode_manifest
from holdfast.repo.members import node_of
from holdfast.repo.places import Places
from holdfast.repo.repository import Repo
from holdfast.store.contract import Store
from holdfast.store.names import TEMPORARY
from holdfast.upkeep.census import is_note, is_run


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a place holds of a save that the home no longer knows. `bytes`: of its packs."""

    place: str
    id: CheckpointId
    bytes: int


def tidy_places(repo: Repo, newest: CheckpointId) -> int:
    """Looks through the run of `newest`, which has just been committed, in every place that this process puts packs
    into; how many saves were freed there. Raises StoreError."""
    places, freed = repo.store, 0
    if isinstance(places, Places):
        for place in places.members:
            for id in _saves(place, newest.run):
                if id > newest:
                    continue  # perhaps under way
                if _is_known(places.home, id):
                    _follow(places, place, id)
                elif _claimed_there(places.home, place, id):
                    freed += _free(place, id)
    return freed


def forgotten(repo: Repo) -> Iterator[Forgotten]:
    """What the places that are found here hold of saves that the home no longer knows."""
    places = repo.store
    if not isinstance(places, Places) or places.of:
        return
    for place in places.others:
        for key in place.children(layout.RUNS).directories:
            for id in _saves(place, key) if is_run(key) else ():
                if not _is_known(places.home, id) and _claimed_there(places.home, place, id):
                    names = [entry for entry in place.walk(id.directory) if layout.is_pack(entry.name)]
                    yield Forgotten(place.url, id, sum(entry.length for entry in names))


def free_forgotten(repo: Repo, found: Forgotten) -> bool:
    """Frees it, unless the home has come to know it. Whether it did."""
    places = repo.store
    assert isinstance(places, Places), "found there"
    place = next(store for store in places.others if store.url == found.place)
    if _is_known(places.home, found.id) or not _claimed_there(places.home, place, found.id):
        return False
    _free(place, found.id)
    return True


def targets(repo: Repo) -> list[Store]:
    """The places that are to hold every pack: the home, and those that are no node's own."""
    places = repo.store
    if not isinstance(places, Places):
        return [repo.store]
    return [places.home, *(store for store in places.others if not node_of(store))]


def _saves(place: Store, run: str) -> Iterator[CheckpointId]:
    for key in place.children(layout.run_directory(run)).directories:
        attempt = parse_attempt(key)
        if attempt is not None:
            for name in place.children(layout.attempt_directory(run, attempt)).directories:
                step = parse_step(name)
                if step is not None:
                    yield CheckpointId(run, attempt, step)


def _follow(places: Places, place: Store, id: CheckpointId) -> None:
    """What the home has of it: its manifest too, or no longer. A name in the place is looked for before the home is
    asked for it: what is put is in the home first."""
    here = layout.MANIFEST in place.children(id.directory).objects
    try:
        places.home.stat(id.manifest)
    except ObjectNotFound:
        place.delete([id.manifest] if here else [])
    else:
        places.bring_to(place, id.manifest)


def _free(place: Store, id: CheckpointId) -> bool:
    """Whether there was a pack of it."""
    prefix = len(id.directory) + 1
    own = [entry.name for entry in place.walk(id.directory) if _is_own(entry.name[prefix:])]
    left = [entry.name for entry in place.leftovers(id.directory) if _is_ours(_final(entry.name)[prefix:])]
    place.delete([id.manifest])
    place.delete([*own, *left])
    place.delete([layout.begin_name(id)])
    return any(map(layout.is_pack, own))


def _is_known(home: Store, id: CheckpointId) -> bool:
    """Whether the home has its `begin.json`, or its manifest. Asked by name: a listing may be older than what it
    lists."""
    try:
        home.stat(layout.begin_name(id))
        return True
    except ObjectNotFound:
        pass
    try:
        if home.stat(id.manifest).length > MAX_ABORTED:
            return True
        return not isinstance(decode_manifest(home.get(id.manifest, limit=MAX_ABORTED), id), Aborted)
    except ObjectNotFound:
        return False
    except CorruptionError:
        return True  # only what was read and understood is no checkpoint


def _claimed_there(home: Store, place: Store, id: CheckpointId) -> bool:
    """Whether the home has the very claim under which it was saved. One that was set back to an older state, from a
    backup, knows nothing of what came after: nothing of that is freed."""
    name = layout.attempt_name(id.run, id.attempt)
    try:
        return home.get(name, limit=objects.SMALL) == place.get(name, limit=objects.SMALL)
    except ObjectNotFound:
        return False


def _is_ours(file: str) -> bool:
    return _is_own(file) or file in (layout.BEGIN, layout.MANIFEST)


def _is_own(file: str) -> bool:
    return layout.is_part(file) or is_note(file)


def _final(name: str) -> str:
    return name.partition(TEMPORARY)[0]
