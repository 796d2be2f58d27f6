"""The catalog: facts of a repository's checkpoints, cached in the process between two rounds of retention.

A manifest, an attempt's record, a note and a ref never change once they were put. So each is read at most once, and the
manifest of a checkpoint that this process committed not at all. A new catalog reads everything anew.

Other processes can add and remove objects at any time. So each round takes a `Snapshot`: a view of the repository whose
listings are made after it was taken. Objects that are new in it are read. Damaged objects and copies are never cached.
A manifest that was intact when it was read may be damaged since: before one checkpoint is removed because another one
is intact, `Snapshot.is_fresh` says whether that one has to be read again.

A round must not cost more the more checkpoints there are. Of a large run, a snapshot lists the attempts with their
steps, the refs and the trash, but of the checkpoints' own directories only those that it does not know, those that are
to be removed, those that others rely on, the newest, and those that were listed longest ago. What it says of the
others, their notes above all, may be as old as the number of checkpoints divided by RELISTED rounds.
"""

from __future__ import annotations

import bisect
import operator
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from tenuto.errors import CheckpointNotFound, CorruptionError, ObjectNotFound, StoreDenied, StoreError
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId, parse_attempt, parse_step
from tenuto.model.records import Manifest, Note, Receipt
from tenuto.record import record
from tenuto.repo.best import is_healthy
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import MAX_MANIFEST, Aborted, decode_manifest, decode_outline
from tenuto.repo.format.small_records import decode_begin
from tenuto.repo.notes import notes
from tenuto.repo.refs import is_name as is_run
from tenuto.repo.replicated.places import home_of
from tenuto.repo.repository import Repo
from tenuto.store.contract import Capabilities, Content, Entry, Listing, Reader, Stat, Store, is_unreadable

SCAN_OBJECTS: Final = 1_000
"""A run of at most so many objects is listed in one go, with all notes; a larger one by directories."""
PAGES: Final = 16
"""A remote store lists so many times as many objects in as many requests as directories would take."""
RELISTED: Final = 16
"""How many of the newest checkpoints, and of those listed longest ago, a large run's snapshot lists again."""
_TRASH: Final = "trash"
_BEGUN: Final = 64
"""Saves begun by this process whose files are known until they commit."""


@record
class CatalogEntry:
    """The facts of one committed checkpoint.

    length, digest: of the manifest object. bytes: of its own packs. ranks: how many indexes it names. files: what its
    save said that it would write, where this process saved it; empty where another did. bases: the checkpoints on whose
    packs it rests. healthy: as its manifest says. parent: what its attempt began from.
    """

    length: int
    digest: bytes
    bytes: int
    ranks: int
    created: str
    metrics: Mapping[str, float]
    files: tuple[str, ...] = ()
    bases: tuple[CheckpointId, ...] = ()
    healthy: bool = True
    parent: CheckpointId | None = None


@dataclass(slots=True)
class CheckpointDirectory:
    """What a listing of a checkpoint's directory found: whether there is a manifest, or an aborted mark, whether there
    are notes, and whether there is a `begin.json`. `notes`: as they were read, None until then."""

    has_manifest: bool
    has_notes: bool
    begun: bool
    notes: Sequence[Note] | None = None


class Catalog:
    """The facts that outlive a snapshot. Commits add facts from any thread; one thread at a time takes snapshots."""

    def __init__(self) -> None:
        self._entries: dict[CheckpointId, CatalogEntry] = {}
        self._aborted: dict[CheckpointId, int] = {}
        """Length of each aborted mark that was read."""
        self._objects: dict[str, bytes] = {}
        """Records, notes and refs, by name."""
        self._lock = threading.Lock()
        self._begun: dict[CheckpointId, tuple[str, ...]] = {}
        self._files: tuple[str, ...] = ()
        """Those of the save that was begun last: most saves write the same."""
        self._listed: dict[CheckpointId, CheckpointDirectory] = {}
        """Directories of checkpoints of large runs, in the order in which they were listed."""
        self._noted: set[CheckpointId] = set()
        """Checkpoints that got a note from this process since the last snapshot was taken."""
        self._unseen: set[CheckpointId] = set()
        """Committed by this process since the last snapshot that listed them: as good as read."""
        self._begun_on: dict[CheckpointId, tuple[CheckpointId, ...]] = {}
        """The bases that `begin.json` names, of saves of this process and of those that were read."""
        self._saving: CheckpointId | None = None
        """The save that this process began last; earlier ones have ended."""
        self.waiting: dict[CheckpointId, CheckpointId | None] = {}
        """What retention has dropped and left in the trash because others need its packs. With the one that does, where
        only a look into other runs finds that."""
        self.plan_again = False
        """Whether others have changed what the last plan was made from, so that more may go than it knew of."""
        self._last: Snapshot | None = None
        self._only_run = False
        """Whether the last snapshot found no other run."""

    # -- filled by this process's own saves --------------------------------------------------------------------------

    def begun(self, id: CheckpointId, names: Sequence[str], bases: Sequence[CheckpointId] = ()) -> None:
        """Remembers what a save of this process will write, and on what it may rest."""
        files = tuple(names)
        with self._lock:
            self._files = self._files if self._files == files else files
            while len(self._begun) >= _BEGUN:
                del self._begun[next(iter(self._begun))]
            self._begun[id] = self._files
            self._begun_on[id] = tuple(bases)
            self._saving = id

    def committed(self, manifest: Manifest, data: bytes) -> None:
        """Adds a checkpoint that this process has just committed; `data` is its manifest as it was put."""
        with self._lock:
            files = self._begun.pop(manifest.id, ())
            entry = _entry_of(manifest, len(data), data[-canonical_json.TAIL :])
            self._entries[manifest.id] = replace(entry, files=files)
            self._unseen.add(manifest.id)

    def add(self, manifest: Manifest, length: int, digest: bytes) -> None:
        """Adds a checkpoint whose manifest somebody else has read, so that it is not read again. length, digest: of the
        object, as in `CatalogEntry`."""
        with self._lock:
            self._entries.setdefault(manifest.id, _entry_of(manifest, length, digest))

    def noted(self, id: CheckpointId) -> None:
        """Has the directory listed again of a checkpoint to which this process has added a note."""
        with self._lock:
            self._noted.add(id)
            self._listed.pop(id, None)

    def known_needs(self, run: str) -> dict[CheckpointId, CheckpointId]:
        """Returns the checkpoints on whose packs others of `run` rest, as far as is known, each with one of those.
        Costs no call."""
        with self._lock:
            saving = {} if self._saving is None else {self._saving: self._begun_on.get(self._saving, ())}
            known = {id: entry.bases for id, entry in self._entries.items() if entry.bases and id.run == run}
        return {base: id for id, bases in {**saving, **known}.items() for base in bases}

    def unneeded(self, run: str) -> list[CheckpointId]:
        """Returns what of `run` waits in the trash and nothing known needs any more."""
        needs = self.known_needs(run) if self.waiting else {}
        return sorted(id for id, elsewhere in self.waiting.items() if elsewhere is None and id not in needs)

    @property
    def known(self) -> int:
        """How many checkpoints are known."""
        return len(self._entries)

    # -- snapshots --------------------------------------------------------------------------------------------------

    def snapshot(self, repo: Repo, run: str, *, anew: Iterable[CheckpointId] = ()) -> Snapshot:
        """Takes a snapshot of the repository for the retention of `run`. `close` ends it. `anew`: checkpoints whose
        directories are listed in any case, because they are about to be removed."""
        return Snapshot(repo, self, run, anew)

    def last_snapshot(self, run: str) -> Snapshot | None:
        """Returns the last snapshot of `run`, with what this process committed since; None without one.

        Nothing may be removed by it alone: others may have come to need what it does not know of.
        """
        last = self._last
        if last is None or last.run != run:
            return None
        for id in sorted(self._unseen):
            if id.run == run:
                last.add(id)
        return last

    def _objects_of(self, run: str) -> int:
        """Estimates how many objects the known checkpoints of `run` have."""
        return sum(2 * entry.ranks + 4 for id, entry in list(self._entries.items()) if id.run == run)


def _entry_of(manifest: Manifest, length: int, digest: bytes) -> CatalogEntry:
    return CatalogEntry(
        length=length,
        digest=digest,
        bytes=manifest.stored_bytes,
        ranks=len(manifest.indexes),
        created=manifest.created,
        metrics=dict(manifest.metrics),
        bases=manifest.bases,
        healthy=is_healthy(manifest),
        parent=manifest.parent,
    )


class Snapshot(Repo):
    """A repository as it is listed once, for reading: each directory is listed at most once, when first asked for."""

    def __init__(self, repo: Repo, catalog: Catalog, run: str, anew: Iterable[CheckpointId] = ()) -> None:
        self._listed = _ListedStore(repo.store, repo.id, catalog._objects)
        super().__init__(self._listed, repo.id, repo.chunk_bytes)
        self.share_keys(repo)
        self.run = run
        self._catalog = catalog
        self._steps: dict[tuple[str, int], list[int]] = {}
        self._directories: dict[CheckpointId, CheckpointDirectory] = {}
        """Those that this snapshot has listed."""
        self._added: set[CheckpointId] = set()
        with catalog._lock:
            catalog._noted.clear()
        self._before = set(catalog._entries) | set(catalog._aborted)
        self._objects_before = set(catalog._objects)
        self._unseen_before = set(catalog._unseen)
        self._damaged: dict[CheckpointId, bool] = {}
        """Checkpoints whose manifest is damaged or a copy; whether they count as checkpoints all the same."""
        self._fresh: set[CheckpointId] = set()
        self._used: set[CheckpointId] = set()
        self._scanned: set[str] = set()
        """Directories of other runs that were listed in one go."""
        remote = repo.store.capabilities.remote
        most = SCAN_OBJECTS * (PAGES if remote else 1)
        # The first snapshot looks into each directory: on a remote store more requests than pages, however many.
        if (catalog._last is not None or remote) and catalog._objects_of(run) <= most:
            catalog._listed.clear()
            self._scan(catalog)
        else:
            self._forget_directories(catalog._listed, anew)

    def _scan(self, catalog: Catalog) -> None:
        """Lists refs, and the run, in one go each. Other runs may be large, and are listed by directories."""
        try:
            self._listed.scan("refs")
            self._listed.scan(object_names.RUNS if catalog._only_run else object_names.run_directory(self.run))
        except StoreDenied:
            return  # somebody else's directory that may not be looked into: directories are listed one by one

    def _forget_directories(
        self, listed: dict[CheckpointId, CheckpointDirectory], anew: Iterable[CheckpointId]
    ) -> None:
        """Takes out of `listed` what has to be listed again: also what `rm` has moved to the trash meanwhile."""
        if not listed:
            return
        newest = islice(self._ids(), RELISTED)
        for id in (*anew, *newest, *islice(listed, RELISTED), *self._ids_in_trash()):
            listed.pop(id, None)

    def _ids(self) -> Iterator[CheckpointId]:
        """Yields the saves of the run that have a directory, newest first."""
        for attempt in reversed(self.attempts(self.run)):
            yield from (CheckpointId(self.run, attempt, step) for step in self.steps(self.run, attempt))

    def _ids_in_trash(self) -> Iterator[CheckpointId]:
        for run in filter(is_run, self.store.children(_TRASH).directories):
            for key in self.store.children(f"{_TRASH}/{run}").directories:
                attempt = parse_attempt(key)
                steps = map(parse_step, self.store.children(f"{_TRASH}/{run}/{key}").directories if attempt else ())
                yield from (CheckpointId(run, attempt, step) for step in steps if attempt and step is not None)

    def steps(self, run: str, attempt: int) -> list[int]:
        key = (run, attempt)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = super().steps(run, attempt)
        return found

    def newest_steps(self, run: str, attempt: int) -> Iterator[int]:
        return iter(self.steps(run, attempt))

    def directory(self, id: CheckpointId) -> CheckpointDirectory:
        """Returns what a listing of the checkpoint's directory has found, in this snapshot or an earlier one."""
        found = self._directories.get(id) or self._catalog._listed.get(id)
        if found is None:
            level = self.store.children(id.directory)
            found = self._directories[id] = CheckpointDirectory(
                object_names.MANIFEST in level.objects,
                object_names.NOTES in level.directories,
                object_names.BEGIN in level.objects,
            )
        return found

    def exists(self, id: CheckpointId) -> bool:
        """Does what `Repo.exists` does; reads an unknown manifest in full, for its facts."""
        if not self.directory(id).has_manifest:
            return False
        try:
            return self.entry(id) is not None or self._damaged[id]
        except CheckpointNotFound:
            return False
        except StoreError as error:
            if not is_unreadable(error):
                raise
            return True

    def entry(self, id: CheckpointId) -> CatalogEntry | None:
        """Returns the checkpoint's facts; None if its manifest is damaged or a copy. Raises CheckpointNotFound if there
        is no manifest, or an aborted mark; StoreError if it cannot be read."""
        if id in self._damaged:
            return None
        self._used.add(id)
        length = self._listed.lengths.get(id.manifest) if self._listed.lengths else None
        known = self._catalog._entries.get(id)
        if known is not None and length in (None, known.length):
            return known
        aborted = self._catalog._aborted.get(id)
        if aborted is not None and length in (None, aborted):
            raise self._not_found(id, "its save was never finished")
        return self._load(id)

    def _load(self, id: CheckpointId) -> CatalogEntry | None:
        before = self._catalog._entries.pop(id, None)
        self._catalog._aborted.pop(id, None)
        self._fresh.add(id)
        try:
            data = self.store.get(id.manifest, limit=MAX_MANIFEST)
            outline = decode_outline(data, id, self.id)  # its digest covers the tree, which need not be parsed
            found = decode_manifest(data, id, self.id) if outline is None else outline[0]
            if not isinstance(found, Aborted):
                self.authenticate(found, data)
        except ObjectNotFound:
            raise self._not_found(id, "there is none") from None
        except CorruptionError:
            self._damaged[id] = super().exists(id)
            return None
        if isinstance(found, Aborted):
            self._catalog._aborted[id] = len(data)
            raise self._not_found(id, "its save was never finished")
        entry = _entry_of(found, len(data), data[-canonical_json.TAIL :])
        if before is not None and before.digest == entry.digest:
            entry = before
        self._catalog._entries[id] = entry
        return entry

    def bases(self, id: CheckpointId) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints on whose packs `id` rests: a checkpoint, one in the trash, or a save under way, whose
        `begin.json` says it. None for a save that was aborted, and a copied directory."""
        found = self.directory(id)
        if found.has_manifest:
            try:
                entry = self.entry(id)
            except CheckpointNotFound:
                return ()
            if entry is not None:
                return entry.bases
            if not self._damaged[id]:
                return ()
        return self._begun_on(id) if found.begun else ()

    def _begun_on(self, id: CheckpointId) -> tuple[CheckpointId, ...]:
        known = self._catalog._begun_on
        if id not in known:
            try:
                data = self.store.get(object_names.begin_name(id), limit=objects.SMALL)
                known[id] = decode_begin(data, id, self.id).bases
            except (ObjectNotFound, CorruptionError):
                return ()  # without it no manifest can follow, nor one that is damaged be read
        return known[id]

    def needs(self, others: Iterable[str]) -> dict[CheckpointId, CheckpointId]:
        """Returns the checkpoints on whose packs others rest, each with one of those: of this run, and of the runs
        `others`, which are listed in one go."""
        found = self._catalog.known_needs(self.run)
        for run in (self.run, *others):
            if run != self.run and object_names.run_directory(run) not in self._scanned:
                self._scanned.add(object_names.run_directory(run))
                self._steps = {key: steps for key, steps in self._steps.items() if key[0] != run}
                self._directories = {id: one for id, one in self._directories.items() if id.run != run}
                with suppress(StoreDenied):  # then its directories are listed one by one
                    self._listed.scan(object_names.run_directory(run), measure=False)
            for attempt in self.attempts(run):
                for step in self.steps(run, attempt):
                    id = CheckpointId(run, attempt, step)
                    found.update(dict.fromkeys(self.bases(id), id))
        return found

    def notes(self, id: CheckpointId) -> Sequence[Note]:
        """Returns the checkpoint's notes as they were when its directory was listed."""
        found = self.directory(id)
        if found.notes is None:
            found.notes = notes(self, id) if found.has_notes else ()
        return found.notes

    def is_fresh(self, id: CheckpointId) -> bool:
        """Returns whether this snapshot has listed the directory and read the manifest, or this process has committed
        it since the last one."""
        return id in self._directories and (id in self._fresh or id in self._catalog._unseen)

    def read_again(self, id: CheckpointId) -> None:
        """Reads the checkpoint's manifest, and its notes when they are next asked for, whatever is cached."""
        self._catalog._listed.pop(id, None)
        if self.directory(id).has_notes:
            directory = object_names.notes_directory(id)
            self._listed.forget(f"{directory}/{file}" for file in self.store.children(directory).objects)
            self._directories[id].notes = None
        try:
            self._load(id)
        except CheckpointNotFound:
            self.drop(id)

    @property
    def listed_objects(self) -> int:
        """How many objects this snapshot has listed in one go, 0 if it lists by directories."""
        return len(self._listed.lengths)

    def files(self, id: CheckpointId) -> tuple[str, ...]:
        """Returns the files that the checkpoint's save announced; empty unless this process saved it."""
        known = self._catalog._entries.get(id)
        return () if known is None or id in self._damaged else known.files

    def add(self, id: CheckpointId) -> None:
        """Adds a checkpoint that was committed since the snapshot was taken."""
        if id in self._added:
            return
        self._added.add(id)
        self._directories[id] = CheckpointDirectory(has_manifest=True, has_notes=False, begun=True)
        steps = self.steps(id.run, id.attempt)
        if id.step not in steps:
            bisect.insort(steps, id.step, key=operator.neg)

    def drop(self, id: CheckpointId) -> None:
        """Takes out a checkpoint that is gone."""
        self._directories[id] = CheckpointDirectory(has_manifest=False, has_notes=False, begun=False)
        self._catalog._listed.pop(id, None)
        self._catalog._entries.pop(id, None)
        self._catalog._unseen.discard(id)

    def close(self) -> None:
        """Ends the snapshot. The catalog drops what does not exist any more and stores the snapshot."""
        catalog = self._catalog
        for id in self._before - self._used:
            if id.run != self.run and not self._scanned:
                continue  # nobody has asked for those of other runs
            catalog._entries.pop(id, None)
            catalog._aborted.pop(id, None)
        with catalog._lock:
            for id in catalog._begun_on.keys() & catalog._entries.keys():
                del catalog._begun_on[id]  # its manifest says it
        for name in self._objects_before - self._listed.used:
            catalog._objects.pop(name, None)
        for id in catalog._listed.keys() - self._used:
            catalog._listed.pop(id, None)
        if not self._listed.lengths:  # in a run that is listed in one go, each directory is listed every time
            with catalog._lock:
                for id, found in self._directories.items():
                    if found.has_manifest and id not in self._damaged and id not in catalog._noted:
                        catalog._listed[id] = found
        catalog._unseen.difference_update(self._unseen_before)
        catalog._only_run = self.runs() == [self.run]
        catalog._last = self
        self._fresh.clear()


class _ListedStore:
    """A store for reading, in which a directory is listed once. `known`: bytes of records, notes and refs that were
    read before, which are not read again while they are listed."""

    def __init__(self, store: Store, repository: str, known: dict[str, bytes]) -> None:
        self._store = store
        self._repository = repository
        self._home = home_of(store)
        self._objects = known
        self._levels: dict[str, Listing] = {}
        self._below: dict[str, frozenset[str]] = {}
        """The directories in a level: of thousands not each is compared for each."""
        self.lengths: dict[str, int] = {}
        """Of objects that a scan has found."""
        self.used: set[str] = set()

    def scan(self, prefix: str, *, measure: bool = True) -> None:
        """Lists everything below `prefix` in one go. `measure`: also remembers the lengths of objects."""
        directories: dict[str, set[str]] = {prefix: set()}
        files: dict[str, list[str]] = {}
        for entry in self._home.walk(prefix):
            directory, _, file = entry.name.rpartition("/")
            files.setdefault(directory, []).append(file)
            if measure:
                self.lengths[entry.name] = entry.length
            while directory != prefix:
                above, _, segment = directory.rpartition("/")
                directories.setdefault(directory, set())
                known = directories.setdefault(above, set())
                if segment in known:
                    break
                known.add(segment)
                directory = above
        for directory, below in directories.items():
            self._levels[directory] = Listing(tuple(sorted(below)), tuple(sorted(files.get(directory, ()))))

    def children(self, prefix: str, *, after: str = "") -> Listing:
        found = self._levels.get(prefix)
        if found is None:
            above, _, segment = prefix.rpartition("/")
            parent = self._levels.get(above)
            if parent is not None:
                below = self._below.get(above)
                if below is None:
                    below = self._below[above] = frozenset(parent.directories)
                if segment not in below:
                    return Listing((), ())
            found = self._levels[prefix] = self._home.children(prefix)
        return found.behind(after) if after else found

    def get(self, name: str, *, limit: int) -> bytes:
        directory, _, file = name.rpartition("/")
        level = self._levels.get(directory)
        if level is not None and file not in level.objects:
            raise ObjectNotFound(f"there is no object {name} ({self.url})", subject=name)
        self.used.add(name)
        known = self._objects.get(name)
        if known is not None and self.lengths.get(name, len(known)) == len(known):
            return known
        data = self._store.get(name, limit=limit)
        if _is_lasting(name) and _is_intact(name, data, self._repository):
            self._objects[name] = data
        return data

    def forget(self, names: Iterable[str]) -> None:
        """Has these read again when they are next asked for."""
        for name in names:
            self._objects.pop(name, None)

    # -- as the store has it -----------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    def probe(self) -> Capabilities:
        return self._store.probe()

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        raise AssertionError("a snapshot is read-only")

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        raise AssertionError("a snapshot is read-only")

    def open(self, name: str) -> Reader:
        return self._store.open(name)

    def stat(self, name: str) -> Stat:
        return self._store.stat(name)

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        return self._store.walk(prefix, leftovers=leftovers)

    def settle(self, name: str) -> None:
        self._store.settle(name)

    def free_bytes(self) -> int | None:
        return self._store.free_bytes()

    def close(self) -> None:
        """Does nothing: the store belongs to the repository."""


def _is_lasting(name: str) -> bool:
    """Returns whether an object of this name is small and never changes while it exists."""
    parts = name.split("/")
    if parts[0] == "refs":
        return True
    return parts[0] == object_names.RUNS and (
        (len(parts) == 4 and parts[3] == object_names.ATTEMPT) or (len(parts) == 6 and parts[4] == object_names.NOTES)
    )


def _is_intact(name: str, data: bytes, repository: str) -> bool:
    """Returns whether the object is intact and belongs to this name in this repository."""
    try:
        return objects.origin_in(canonical_json.open_seal(data, name=name), name, repository) is None
    except CorruptionError:
        return False
