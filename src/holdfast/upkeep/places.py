"""The other places of a repository kept in step with its home: what it no longer knows goes, manifests come.

Each node sees to its own directory. Nothing is put there before the home has the save's `begin.json`, and that is
the last that is removed there: what lies in a place without one, under a step that is not the newest, is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.errors import ObjectNotFound
from holdfast.model.names import CheckpointId, parse_attempt, parse_step
from holdfast.repo import layout
from holdfast.repo.manifest import MAX_ABORTED
from holdfast.repo.places import Places
from holdfast.repo.repository import Repo
from holdfast.store.contract import Store
from holdfast.store.names import TEMPORARY
from holdfast.upkeep.census import is_note


def tidy_places(repo: Repo, newest: CheckpointId) -> int:
    """Looks through the run of `newest`, which has just been committed, in every place that this process puts packs
    into; how many saves were freed there. Raises StoreError."""
    places, freed = repo.store, 0
    if isinstance(places, Places):
        for place in places.members:
            for id in _saves(place, newest.run):
                freed += id <= newest and _tidied(places, place, id)
    return freed


def _saves(place: Store, run: str) -> Iterator[CheckpointId]:
    for key in place.children(layout.run_directory(run)).directories:
        attempt = parse_attempt(key)
        if attempt is not None:
            for name in place.children(layout.attempt_directory(run, attempt)).directories:
                step = parse_step(name)
                if step is not None:
                    yield CheckpointId(run, attempt, step)


def _tidied(places: Places, place: Store, id: CheckpointId) -> bool:
    """Whether what lay there was freed. A name in the place is looked for before the home is asked for it: what is put
    is in the home first."""
    here = [entry.name[len(id.directory) + 1 :] for entry in place.walk(id.directory)]
    home = places.home.children(id.directory).objects
    if layout.BEGIN in home or _is_checkpoint(places.home, id):
        if layout.MANIFEST in home:
            places.bring_to(place, id.manifest)
        elif layout.MANIFEST in here:
            place.delete([id.manifest])
        return False
    own = [f"{id.directory}/{file}" for file in here if layout.is_part(file) or file == layout.BEGIN or is_note(file)]
    left = [entry.name for entry in place.leftovers(id.directory) if _is_own(entry.name.partition(TEMPORARY)[0])]
    place.delete([id.manifest])
    place.delete([*own, *left])
    return any(map(layout.is_pack, own))


def _is_checkpoint(home: Store, id: CheckpointId) -> bool:
    """Asked of the home by name: a listing may be older than what it lists."""
    try:
        home.stat(layout.begin_name(id))
        return True
    except ObjectNotFound:
        pass
    try:
        return home.stat(id.manifest).length > MAX_ABORTED
    except ObjectNotFound:
        return False


def _is_own(name: str) -> bool:
    file = name.rpartition("/")[2]
    return layout.is_part(file) or file in (layout.BEGIN, layout.MANIFEST)
