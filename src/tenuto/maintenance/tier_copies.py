"""What lies in each tier of a repository: fills one from the others, finds out what one knows and the primary does not,
writes a damaged copy anew, and says what may go where one is full.

A tier that is filled in the background (a follower) is a complete repository for readers. Whatever is put there comes
in the order of a save: claim and begin, tables, data files, and the manifest last.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import takewhile
from typing import Final

from tenuto.crashpoints import crashpoint
from tenuto.engine.read.copy_packs import copy_pack
from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    ObjectNotFound,
    RepositoryError,
    RunInUse,
    RunNotFound,
    StoreError,
    in_words,
)
from tenuto.maintenance.place_copy import PlaceCopy, put_small
from tenuto.maintenance.replica_tidy import free_in
from tenuto.maintenance.shared_packs import (
    bases_of,
    has_another,
    lacking,
    manifest_of,
    packs_of,
    put_base,
)
from tenuto.model.ids import CheckpointId
from tenuto.model.records import AttemptRecord
from tenuto.policy.keep import CheckpointFacts, KeepPolicy, Opinion
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import MAX_MANIFEST
from tenuto.repo.lineage import latest, resolve, walk
from tenuto.repo.ownership.lease import read_last
from tenuto.repo.replicated.members import join_follower, member_in
from tenuto.repo.replicated.places import home_of, places_of, tiers_of
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store
from tenuto.units import size

BROUGHT: Final = 3
"""How many checkpoints a primary takes over from another tier: one to resume from, and others in case of damage."""

Bases = Callable[[CheckpointId], Iterable[CheckpointId]]
"""Returns on what a checkpoint rests."""
Held = Mapping[CheckpointId, Mapping[str, int]]
"""What a place has of each save of a run: the files below the save's directory, with their lengths."""


def in_place(repo: Repo, place: Store) -> Repo:
    """Returns the repository as one of its places has it, by itself."""
    return Repo(place, repo.id, repo.chunk_bytes)


def held(place: Store, run: str) -> dict[CheckpointId, dict[str, int]]:
    """Returns what a place has of the saves of `run`. One listing."""
    found: dict[CheckpointId, dict[str, int]] = {}
    for entry in place.walk(object_names.run_directory(run)):
        id = object_names.save_of(entry.name)
        if id is not None:
            found.setdefault(id, {})[entry.name[len(id.directory) + 1 :]] = entry.length
    return found


def has_packs(id: CheckpointId, files: Iterable[str], *, own: bool = False) -> bool:
    """Returns whether any of the files is a data file. `own`: one that no other place has in any case."""
    names = (f"{id.directory}/{file}" for file in files)
    return any(object_names.is_pack(name) and not (own and object_names.is_home_pack(name)) for name in names)


# -- filling -----------------------------------------------------------------------------------------------------------


def fill_now(repo: Repo, id: CheckpointId, report: Callable[[str], None]) -> None:
    """Brings every tier a checkpoint that has just been saved by itself; reports what a tier lacks then."""
    tiers = tiers_of(repo.store)
    if tiers is None:
        return
    try:
        if tiers.fills_home:
            PlaceCopy(repo, home_of(repo.store)).bring_packs(repo.manifest(id))
        for tier in tiers.tiers:
            if tier.store in tiers.declared_followers:
                join_follower(repo.store, tier.store, repo.id)
                PlaceCopy(repo, tier.store).bring(id)
                copy_refs(repo, tier.store)
    except (StoreError, CorruptionError, RepositoryError) as error:
        report(f"step {id.step} is saved, and not every tier has it: {in_words(error)}")


def copy_late_notes(repo: Repo, copier: PlaceCopy, run: str) -> None:
    """Brings a follower the notes that it lacks on any checkpoint that it has. Two listings."""
    ours, theirs = held(home_of(repo.store), run), held(copier.place, run)
    for id, files in theirs.items():
        if object_names.MANIFEST in files:
            for file in sorted(file for file in ours.get(id, ()) if object_names.is_note(file) and file not in files):
                copier.send(f"{id.directory}/{file}")


def copy_refs(repo: Repo, place: Store) -> None:
    """Makes the tags, pins and keys of a follower those of the primary. One that the primary has never had stays: no
    version of a ref is ever removed there, so the primary has lost it."""
    home = home_of(repo.store)
    ours, theirs = (_refs_and_keys(one) for one in (home, place))
    for name in sorted(ours - theirs):
        put_small(place, name, home.get(name, limit=objects.SMALL))
    known = {name.rpartition("/")[0] for name in ours}
    later = sorted(name for name in theirs - ours if name.rpartition("/")[0] in known)
    if later:
        place.delete(later)


def _refs_and_keys(store: Store) -> set[str]:
    return {entry.name for top in ("refs", object_names.KEYS) for entry in store.walk(top)}


# -- what another tier knows -------------------------------------------------------------------------------------------


def announce(repo: Repo, follower: Store, run: str, number: int) -> None:
    """Copies the claim of an attempt to a follower, so that a job with another primary finds it, and first those before
    it that the follower has missed: by one of these alone may the two jobs differ. Raises RunInUse if that has claimed
    the run there, RepositoryError and StoreError."""
    join_follower(repo.store, follower, repo.id)
    known = in_place(repo, follower).attempts(run)
    for missed in repo.attempts(run) if known else ():
        if known[-1] < missed < number:
            with suppress(ObjectNotFound):  # a directory that nobody has claimed
                earlier = object_names.attempt_name(run, missed)
                put_small(follower, earlier, repo.store.get(earlier, limit=objects.SMALL))
    name = object_names.attempt_name(run, number)
    data = repo.store.get(name, limit=objects.SMALL)
    put_small(follower, name, data)
    if follower.get(name, limit=objects.SMALL) != data:
        raise _another_line(repo, follower, run, number)
    check_line(repo, follower, run, number)


def show_release(repo: Repo, follower: Store, run: str, number: int) -> None:
    """Copies the last beat of an attempt's lease to a follower, where it says that the run is released."""
    number_of_beat, beat = read_last(repo, run, number)
    if beat is not None and beat.released:
        name = object_names.numbered(object_names.lease_directory(run, number), number_of_beat)
        put_small(follower, name, repo.store.get(name, limit=objects.SMALL))


def check_line(repo: Repo, follower: Store, run: str, number: int) -> None:
    """Raises RunInUse if a job with another primary has claimed the run after attempt `number`."""
    higher = [one for one in in_place(repo, follower).attempts(run) if one > number]
    if higher:
        raise _another_line(repo, follower, run, higher[-1])


class Takeover:
    """Puts into the primary what another tier knows, until it is given up: from then on nothing is put, for the run may
    be claimed by then, and a claim that came later would supersede it."""

    def __init__(self, home: Store) -> None:
        self.home = home
        self._given_up = False
        self._lock = threading.Lock()

    def put(self, name: str, data: bytes) -> None:
        with self._lock:
            if self._given_up:
                raise StoreError(f"{name} came too late for {self.home.url}", subject=name)
            put_small(self.home, name, data)

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True


def catch_up(
    repo: Repo, follower: Store, run: str, takeover: Takeover, report: Callable[[str], None]
) -> list[CheckpointId]:
    """Brings the primary what a follower knows of the run and it does not, newer than what it has: claims, and the
    small objects of the newest checkpoints, whose data files are read there from now on. Returns these, newest first.
    A damaged one is reported, and others are taken.

    Raises RunInUse where the two have different claims under one number, and StoreError.
    """
    member = member_in(follower)
    if member is None or member.repository != repo.id:
        return []  # a place that is not filled yet; what is wrong with it is said by whoever fills it
    there, home = in_place(repo, follower), home_of(repo.store)
    theirs, ours = there.attempts(run), repo.attempts(run)
    both = set(theirs).intersection(ours)
    if both:
        claims = [_claim(one, run, max(both)) for one in (there, repo)]
        if None not in claims and claims[0] != claims[1]:
            raise _another_line(repo, follower, run, max(both))
    if not theirs or (ours and theirs[-1] < ours[-1]):
        return []
    newest = latest(repo, run)
    newer = takewhile(lambda id: id.run == run and (newest is None or _age(id) > _age(newest)), walk(there, run))
    ids = _intact(there, home, newer, report)
    if ids or not ours:
        _bring_refs(takeover, follower)  # first: what else is brought says that this has been done
    wanted = {theirs[-1], *(id.attempt for id in ids)}
    parents = [_claim(there, run, number) for number in sorted(wanted)]
    wanted |= {one.parent.attempt for one in parents if one is not None and one.parent is not None}
    for number in sorted(wanted.difference(ours).intersection(theirs)):
        name = object_names.attempt_name(run, number)
        takeover.put(name, follower.get(name, limit=objects.SMALL))
    if theirs[-1] not in ours:
        for entry in follower.walk(object_names.lease_directory(run, theirs[-1])):
            takeover.put(entry.name, follower.get(entry.name, limit=objects.SMALL))
    crashpoint("primary has the claims of another tier, not its checkpoints")
    for id in reversed(ids):
        _take_over(there, takeover, id)
    return ids


def _claim(repo: Repo, run: str, number: int) -> AttemptRecord | None:
    """Returns what an attempt's record says, None where it is damaged or gone."""
    try:
        return repo.find_attempt(run, number)
    except CorruptionError:
        return None


def _intact(there: Repo, home: Store, ids: Iterable[CheckpointId], report: Callable[[str], None]) -> list[CheckpointId]:
    """Returns the first `BROUGHT` of `ids` whose manifest and tables can be read, but for what lies in the trash."""
    found: list[CheckpointId] = []
    for id in ids:
        if home.children(object_names.trash_directory(id)).objects:
            continue
        try:
            manifest = there.manifest(id)
            for entry in manifest.tables:
                there.index_bytes(id, entry)
            bases_of(there, manifest)
        except (CorruptionError, CheckpointNotFound) as error:
            report(f"step {id.step} in {there.url} is not taken over: {error.message}")
            continue
        found.append(id)
        if len(found) == BROUGHT:
            break
    return found


def _bring_refs(takeover: Takeover, follower: Store) -> None:
    """Brings the primary the tags, pins and keys that it has no version of; of each the newest first: it counts."""
    ours = {name.rpartition("/")[0] for name in _refs_and_keys(takeover.home)}
    theirs = [name for name in _refs_and_keys(follower) if name.rpartition("/")[0] not in ours]
    for name in sorted(theirs, key=lambda name: (len(name), name), reverse=True):
        takeover.put(name, follower.get(name, limit=objects.SMALL))


def bring(repo: Repo, follower: Store, run: str, wanted: int | str, takeover: Takeover) -> CheckpointId | None:
    """Brings the primary the checkpoint that a follower means by `wanted`, but for its data files; None if it has none
    such."""
    member = member_in(follower)
    if member is None or member.repository != repo.id:
        return None
    there = in_place(repo, follower)
    try:
        id = resolve(there, run, wanted)
    except (CheckpointNotFound, RunNotFound):
        return None
    name = object_names.attempt_name(id.run, id.attempt)
    takeover.put(name, follower.get(name, limit=objects.SMALL))
    _take_over(there, takeover, id)
    return id


def _take_over(there: Repo, takeover: Takeover, id: CheckpointId) -> None:
    """Brings the primary a checkpoint but for its data files, its manifest last."""
    manifest = there.manifest(id)
    for base in bases_of(there, manifest):
        put_base(there, base, takeover.home, takeover.put, mark=False)
    begin = object_names.begin_name(id)
    takeover.put(begin, there.store.get(begin, limit=MAX_MANIFEST))
    for entry in manifest.tables:
        takeover.put(f"{id.directory}/{entry.name}", there.index_bytes(id, entry))
    for note in there.store.walk(object_names.notes_directory(id)):
        takeover.put(note.name, there.store.get(note.name, limit=objects.SMALL))
    crashpoint("primary has the tables of another tier's checkpoint, not its manifest")
    takeover.put(id.manifest, there.manifest_bytes(id))


def _age(id: CheckpointId) -> tuple[int, int]:
    return id.attempt, id.step


def _another_line(repo: Repo, follower: Store, run: str, number: int) -> RunInUse:
    return RunInUse(
        f"{follower.url} has another attempt {number} of run {run!r} than {repo.url}: another line of training lies "
        "there",
        subject=run,
        hint="let one of the two jobs train, or give each a run of its own",
    )


# -- damage ------------------------------------------------------------------------------------------------------------


def heal(repo: Repo, name: str, place: Store) -> bool:
    """Writes a damaged copy anew from a whole one: that is verified first, in full, and what was put is read back.
    Returns whether that could be done. Raises CheckpointNotFound where the checkpoint is gone, CorruptionError where no
    copy is whole or what was put reads otherwise, and StoreError."""
    id = object_names.save_of(name)
    assert id is not None, "it lies in a save"
    if not _is_ours(repo, place, id):
        return False
    (manifest, _), file = manifest_of(repo, id), name.rpartition("/")[2]
    if has_another(repo, place, manifest):
        return False  # it fits that one
    table = next((entry for entry in manifest.tables if entry.name == file), None)
    if table is not None:
        data = repo.index_bytes(id, table)
        place.delete([name])
        put_small(place, name, data)
        if place.get(name, limit=len(data)) != data:
            raise CorruptionError(f"{name} was put, and reads otherwise", subject=name)
        return True
    rank = int(file.removeprefix("rank-").partition(".")[0])
    try:
        copy_pack(repo, manifest, rank, file, target=place, replaces=True)
    except ObjectNotFound:
        return False
    if not (repo.exists(id) or home_of(repo.store).children(object_names.trash_directory(id)).objects):
        place.delete([name])
    return True


def _is_ours(repo: Repo, place: Store, id: CheckpointId) -> bool:
    """Returns whether what a place has under this name is of this line of training: a tier may have come back with
    another one's, under the same numbers."""
    places = places_of(repo.store)
    assert places is not None, "one place of several"
    return places.replica(place).is_of_home(id.manifest)


# -- what goes ---------------------------------------------------------------------------------------------------------


class WithinCapacity(KeepPolicy):
    """Keeps what `inner` keeps but for `going`: another tier has those whole, and this one is full."""

    def __init__(self, inner: KeepPolicy, going: Container[CheckpointId], capacity: int) -> None:
        self.inner = inner
        self.going = going
        self.capacity = capacity

    def metrics(self) -> frozenset[str]:
        return self.inner.metrics()

    def parts(self) -> tuple[KeepPolicy, ...]:
        return self.inner.parts()

    def warnings(self, history: Sequence[CheckpointFacts]) -> list[str]:
        return self.inner.warnings(history)

    def judge(self, history: list[CheckpointFacts]) -> list[Opinion]:  # type: ignore[override]
        why = f"beyond the capacity of {size(self.capacity)}, and whole in a slower tier"
        opinions = self.inner.judge(history)
        return [
            Opinion(False, why) if facts.id in self.going else opinion
            for facts, opinion in zip(history, opinions, strict=True)
        ]


def bases_in(repo: Repo) -> Bases:
    """Returns what tells on what a checkpoint rests; nothing of one that cannot be read. Reads each manifest once."""

    @cache
    def bases(id: CheckpointId) -> tuple[CheckpointId, ...]:
        try:
            return repo.manifest(id).bases
        except (CheckpointNotFound, CorruptionError):
            return ()

    return bases


def beyond(
    place: Held, capacity: int, elsewhere: Callable[[CheckpointId], bool], bases: Bases = lambda id: ()
) -> tuple[list[CheckpointId], int]:
    """Returns the checkpoints that have to go from a place for its capacity, oldest first, of those that lie whole
    `elsewhere`; and by how many bytes it is over its capacity then. What one that stays rests on (`bases`) frees
    nothing."""
    over = sum(sum(files.values()) for files in place.values()) - capacity
    going: list[CheckpointId] = []
    needs = Counter(one for id in place if object_names.MANIFEST in place[id] for one in {id, *bases(id)})
    for id in sorted((id for id in place if object_names.MANIFEST in place[id]), key=_age):
        if over <= 0:
            break
        if elsewhere(id):
            going.append(id)
            for one in {id, *bases(id)}:
                needs[one] -= 1
                over -= sum(place[one].values()) if one in place and not needs[one] else 0
    return going, max(over, 0)


def lies_in(repo: Repo, place: Store, id: CheckpointId) -> bool:
    """Returns whether a checkpoint lies in the place with all the data files that it needs; False also if unknown.
    Asked before another copy goes: a place may have lost what it once had."""
    try:
        there = in_place(repo, place)
        return not lacking(place, packs_of(there, there.manifest(id)))
    except (StoreError, CheckpointNotFound, CorruptionError):
        return False


def free_copies(repo: Repo, place: Store, ids: Iterable[CheckpointId], slower: Iterable[Store]) -> list[CheckpointId]:
    """Frees a node's copies of checkpoints that stay: each whose data files another place has, all of them. Returns
    what went."""
    gone = []
    for id in ids:
        files = [file for file in place.children(id.directory).objects if has_packs(id, [file])]
        if _is_ours(repo, place, id) and any(
            set(files) <= set(one.children(id.directory).objects) and _is_ours(repo, one, id) for one in slower
        ):
            free_in(place, id)
            gone.append(id)
    return gone
