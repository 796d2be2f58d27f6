"""The census classifies everything in a repository's store: checkpoints, unfinished saves, copies, foreign objects.

It walks over the names once, then reads each save's `begin.json` and the object under its manifest's name. An
unreadable object counts as needed: only one that was read and understood can be garbage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.engine.read.chunk_reader import threads_for
from tenuto.errors import CorruptionError, KeyMissing, ObjectNotFound, StoreDenied, UsageError
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId, attempt_key, parse_attempt, parse_step, run_key, step_key
from tenuto.model.records import Manifest
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import MAX_MANIFEST, Aborted, decode_manifest, decode_outline
from tenuto.repo.format.objects import Origin
from tenuto.repo.format.small_records import Begin, decode_begin
from tenuto.repo.lost import Witnesses
from tenuto.repo.repository import Repo
from tenuto.store.contract import Entry

MARKS: Final = "tombstones/gc"
OWN: Final = frozenset({"refs", object_names.KEYS, object_names.RUNS, "tombstones", "trash"})
"""The directories at the top in which Tenuto puts anything."""
_PROBE: Final = re.compile(r"probe-[0-9a-f]{32}\.json", re.ASCII)
_TOKEN: Final = re.compile(r"[0-9a-f]{32}\.json", re.ASCII)

State = Literal["committed", "damaged", "unfinished", "closed", "removed", "copied", "foreign"]
"""committed: has a manifest. damaged: something unreadable lies under the manifest's name, or instead of begin.json, or
the manifest is missing of what is known to have been a checkpoint (`lost`).
unfinished: begun, not committed. closed: carries an aborted mark. removed: `rm` has put its manifest into the trash.
copied: was written for another place, or in another repository. foreign: holds nothing that says what it is."""


@dataclass(slots=True)
class SaveDirectory:
    """One step's directory, with what lies elsewhere for it. `manifest`: where `state` is committed without its tree,
    which nobody here asks for; where it is removed the one in the trash, whole, or None if that cannot be read."""

    id: CheckpointId
    state: State = "foreign"
    begin: Begin | None = None
    manifest: Manifest | None = None
    manifest_length: int = 0
    manifest_digest: bytes = b""
    """Of the object, of a committed save."""
    sealed: str = ""
    """Of a committed save in a repository with keys: `sealed`, `plain`, or `refused` where no key vouches for it."""
    save_id: str = ""
    message: str = ""
    lost: str = ""
    """What knows that it was a checkpoint, where its manifest is missing. It is damaged then."""
    origin: Origin | None = None
    """Where it was written, if `state` is copied."""
    entries: list[Entry] = field(default_factory=list)
    trash: list[Entry] = field(default_factory=list)
    tombstones: list[Entry] = field(default_factory=list)
    marks: list[Entry] = field(default_factory=list)
    """What a removal, or gc's first visit, has put."""

    def has(self, file: str) -> bool:
        name = f"{self.id.directory}/{file}"
        return any(entry.name == name for entry in self.entries)

    @property
    def bases(self) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints on whose packs it rests; none if it can neither be restored nor committed."""
        if self.state in ("committed", "removed") and self.manifest is not None:
            return self.manifest.bases
        open_or_damaged = self.state in ("unfinished", "removed", "damaged")
        return self.begin.bases if open_or_damaged and self.begin is not None else ()

    @property
    def freed(self) -> bool:
        """Returns whether a removed checkpoint's objects are gone, or being removed: only the copy of its manifest in
        the trash is left."""
        return bool(self.tombstones) or not (
            self.begin or self.has(object_names.BEGIN) or any(True for _ in self.own())
        )

    def own(self) -> Iterator[Entry]:
        """Yields the existing files that `begin.json` or the manifest lists, and the notes, but not those two
        themselves. If an aborted mark exists without `begin.json`, as after a power loss that undid a freeing, yields
        files with names of a save's parts."""
        listed = {*(self.begin.names if self.begin else ()), *self.unlisted()}
        listed.update(entry.name for entry in (self.manifest.tables if self.manifest else ()))
        for entry in self.entries:
            file = entry.name[len(self.id.directory) + 1 :]
            if file in listed or object_names.is_note(file):
                yield entry

    def unlisted(self) -> list[str]:
        """Returns file names of a closed save that nothing lists any more."""
        if self.state != "closed" or self.begin is not None:
            return []
        files = [entry.name[len(self.id.directory) + 1 :] for entry in self.entries]
        return [file for file in files if object_names.is_part(file)]

    def cut(self) -> str:
        """Returns which data files and tables of a committed save are missing or have another length than its manifest
        says; empty if none. It says so of the listing: the save may have been committed, or removed, since."""
        if self.manifest is None or self.state != "committed":
            return ""
        lengths = {entry.name[len(self.id.directory) + 1 :]: entry.length for entry in self.entries}
        wrong = [table.name for table in self.manifest.tables if lengths.get(table.name) != table.length]
        if wrong:
            return f"{', '.join(wrong[:3])}: missing, or cut"
        packs = {
            name: length for name, length in lengths.items() if object_names.is_pack(f"{self.id.directory}/{name}")
        }
        nbytes = sum(packs.values())
        if nbytes == self.manifest.stored_bytes:
            return ""
        begun = self.begin.names if self.begin else ()
        gone = [name for name in begun if name not in lengths]
        what = f"{', '.join(gone[:3])}: missing" if gone else f"{', '.join([*packs][:3])}: cut" if packs else "missing"
        return f"{what} ({nbytes} of the {self.manifest.stored_bytes} bytes that were saved are there)"

    @property
    def is_whole_but_for_its_manifest(self) -> bool:
        """Returns whether a save that never ended had put all else: its tables come last."""
        tables = [name for name in (self.begin.names if self.begin else ()) if name.endswith(".index")]
        return self.state == "unfinished" and bool(tables) and all(map(self.has, tables))

    def strangers(self) -> Iterator[Entry]:
        own = {entry.name for entry in self.own()}
        keep = {f"{self.id.directory}/{file}" for file in (object_names.BEGIN, object_names.MANIFEST)}
        for entry in self.entries:
            if entry.name not in own and entry.name not in keep:
                yield entry


@dataclass(slots=True)
class AttemptDirectory:
    run: str
    number: int
    claimed: bool = False
    leases: list[Entry] = field(default_factory=list)


@dataclass(slots=True)
class Census:
    saves: dict[CheckpointId, SaveDirectory] = field(default_factory=dict)
    attempts: dict[tuple[str, int], AttemptDirectory] = field(default_factory=dict)
    refs: list[Entry] = field(default_factory=list)
    proofs: list[Entry] = field(default_factory=list)
    places: list[Entry] = field(default_factory=list)
    """Where else the repository lies, where copies of it do, or whose place this is."""
    keys: list[Entry] = field(default_factory=list)
    probes: list[Entry] = field(default_factory=list)
    """Left by a gc that died while it asked for the time."""
    foreign: list[Entry] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    """Directories of somebody else's that may not be looked into."""

    def save(self, id: CheckpointId) -> SaveDirectory:
        return self.saves.setdefault(id, SaveDirectory(id))

    def attempt(self, run: str, number: int) -> AttemptDirectory:
        return self.attempts.setdefault((run, number), AttemptDirectory(run, number))


def take_census(repo: Repo) -> Census:
    """Reads names and small objects only; no pack and no index is opened."""
    census = list_names(repo)
    classify_all(repo, list(census.saves.values()))
    return census


def list_names(repo: Repo) -> Census:
    """Lists the store in one go, and reads nothing: the saves are not classified."""
    census = Census()
    for entry in everything(repo, repo.store.walk, census.unlisted):
        if not place(census, entry):
            census.foreign.append(entry)
    return census


def classify_all(repo: Repo, saves: Sequence[SaveDirectory]) -> None:
    """Classifies saves, several at once where reading is mostly waiting. Of one that never ended, also looks whether it
    is a checkpoint that has lost its manifest."""
    parallel_for(partial(classify, repo), saves, threads_for(repo).read if repo.store.capabilities.remote else 1)
    witnesses = Witnesses(repo)
    resting: dict[CheckpointId, CheckpointId] | None = None
    for save in saves:
        if save.state == "unfinished":
            if resting is None:
                # Within its attempt a save may rest on one that is to be committed with it, as those of `repack` do.
                pairs = ((base, one.id) for one in saves for base in one.bases)
                resting = {base: id for base, id in pairs if (base.run, base.attempt) != (id.run, id.attempt)}
            rests = f"{resting[save.id]} rests on its data files" if save.id in resting else ""
            _judge(save, witnesses, rests)


def _judge(save: SaveDirectory, witnesses: Witnesses, rests: str = "") -> None:
    save.lost = witnesses.lost(save.id, rests)
    if save.lost:
        save.state, save.message = "damaged", f"its manifest is missing: {save.lost}"


def everything(repo: Repo, below: Callable[[str], Iterable[Entry]], unlisted: list[str]) -> list[Entry]:
    """Returns all that `below` (the store's `walk`, or `leftovers_of` it) finds. A foreign directory that may not be
    listed, such as a disk's lost+found, is added to `unlisted`; foreign objects beside it are ignored then."""
    try:
        return list(below(""))
    except StoreDenied:
        found: list[Entry] = []
    for directory in repo.store.children("").directories:
        try:
            found += below(directory)
        except StoreDenied:
            if directory in OWN:
                raise
            unlisted.append(directory)
    return found


def census_of(repo: Repo, id: CheckpointId) -> SaveDirectory:
    """Takes the census of one checkpoint alone."""
    census = Census()
    save = census.save(id)
    places = (id.directory, object_names.trash_directory(id), object_names.tombstone_directory(id), mark_directory(id))
    for prefix in places:
        for entry in repo.store.walk(prefix):
            place(census, entry)
    classify(repo, save)
    if save.state == "unfinished":
        _judge(save, Witnesses(repo))
    return save


@dataclass(slots=True)
class RunNames:
    """What the names of a run's directories say. steps: of each attempt, what has a directory or lies in the trash.
    trash: those of which a manifest lies, or lay, in the trash."""

    claimed: list[int] = field(default_factory=list)
    steps: dict[int, set[int]] = field(default_factory=dict)
    trash: set[tuple[int, int]] = field(default_factory=set)

    def newest_first(self, run: str) -> Iterator[CheckpointId]:
        """Yields what may be a save; a name may turn out to be foreign."""
        for number, steps in sorted(self.steps.items(), reverse=True):
            yield from (CheckpointId(run, number, step) for step in sorted(steps, reverse=True))


def names_of_runs(repo: Repo) -> dict[str, RunNames]:
    """Lists the attempts of each run and the trash, and reads nothing."""
    children = repo.store.children
    runs: dict[str, RunNames] = {}
    for top in (object_names.RUNS, "trash"):
        for run in filter(is_run, children(top).directories):
            found = runs.setdefault(run, RunNames())
            for key in children(f"{top}/{run}").directories:
                number = parse_attempt(key)
                if number is None:
                    continue
                level = children(f"{top}/{run}/{key}")
                steps = {step for step in map(parse_step, level.directories) if step is not None}
                found.steps.setdefault(number, set()).update(steps)
                if top == "trash":
                    found.trash |= {(number, step) for step in steps}
                if object_names.ATTEMPT in level.objects or "lease" in level.directories:
                    found.claimed.append(number)
    return runs


def ids_in_trash(repo: Repo, run: str) -> Iterator[CheckpointId]:
    """Yields what has a directory in the trash of the run; an undelete may have emptied it."""
    for key in repo.store.children(f"trash/{run}").directories:
        number = parse_attempt(key)
        if number is not None:
            steps = map(parse_step, repo.store.children(f"trash/{run}/{key}").directories)
            yield from (CheckpointId(run, number, step) for step in steps if step is not None)


def mark_directory(id: CheckpointId) -> str:
    """Returns the directory of the marks that a removal, or gc's first visit, puts."""
    return f"{MARKS}/{id.run}/{attempt_key(id.attempt)}/{step_key(id.step)}"


def place(census: Census, entry: Entry) -> bool:
    """Files one object under what its name says it is; False if no object of Tenuto is called so."""
    parts = entry.name.split("/")
    if entry.name in (object_names.REPOSITORY, object_names.REPOSITORY_COPY):
        return True
    if entry.name == object_names.MEMBER or (
        parts[0] in (object_names.PLACES, object_names.COPIES) and len(parts) == 2 and object_names.is_place(parts[1])
    ):
        census.places.append(entry)
        return True
    if parts[0] == "refs" and len(parts) == 4 and object_names.parse_numbered(parts[3]) is not None:
        census.refs.append(entry)
        return True
    if object_names.is_key_ring(entry.name):
        census.keys.append(entry)
        return True
    if object_names.is_proof(entry.name):
        census.proofs.append(entry)
        return True
    if parts[:2] == ["tombstones", "gc"] and len(parts) == 3 and _PROBE.fullmatch(parts[2]):
        census.probes.append(entry)
        return True
    if parts[0] not in (object_names.RUNS, "trash", "tombstones") or len(parts) < 4:
        return False
    if parts[0] == "tombstones" and len(parts) == 6 and parts[1] == "gc":
        parts = ["marks", *parts[2:]]
    number = parse_attempt(parts[2])
    if number is None or not is_run(parts[1]):
        return False
    if parts[0] == object_names.RUNS and _place_in_attempt(census, parts, number, entry):
        return True
    step = parse_step(parts[3])
    if step is None or len(parts) < 5:
        return False
    id = CheckpointId(parts[1], number, step)
    if parts[0] == object_names.RUNS:
        census.save(id).entries.append(entry)
    elif len(parts) != 5 or not _TOKEN.fullmatch(parts[4]):
        return False
    elif parts[0] == "trash":
        census.save(id).trash.append(entry)
    elif parts[0] == "marks":
        census.save(id).marks.append(entry)
    else:
        census.save(id).tombstones.append(entry)
    return True


def _place_in_attempt(census: Census, parts: list[str], number: int, entry: Entry) -> bool:
    if parts[3:] == ["attempt.json"]:
        census.attempt(parts[1], number).claimed = True
        return True
    if parts[3] == "lease" and len(parts) == 5 and object_names.parse_numbered(parts[4]) is not None:
        census.attempt(parts[1], number).leases.append(entry)
        return True
    return False


def is_run(key: str) -> bool:
    try:
        return run_key(key) == key
    except UsageError:
        return False


def classify(repo: Repo, save: SaveDirectory) -> None:
    """Sets `state` and what goes with it, from the bytes that lie there now."""
    begin = _read(repo, object_names.begin_name(save.id), objects.SMALL)
    manifest = _read(repo, save.id.manifest, MAX_MANIFEST)
    try:
        save.begin = decode_begin(begin, save.id, repo.id) if begin is not None else None
    except CorruptionError as error:
        save.origin = objects.origin(object_names.begin_name(save.id), begin or b"", repo.id)
        save.state, save.message = "damaged" if save.origin is None else "copied", error.message
        if manifest is None:
            return
    save.save_id = save.begin.save_id if save.begin else ""
    if manifest is not None:
        _classify_by_manifest(save, manifest, repo.id)
        if save.state == "committed":
            save.sealed = _sealed(repo, save, manifest)
    elif save.trash:
        _classify_by_trash(repo, save)
    elif save.begin is not None:
        save.state = "unfinished"


def _classify_by_manifest(save: SaveDirectory, data: bytes, repository: str) -> None:
    try:
        outline = decode_outline(data, save.id, repository)  # its digest covers the tree, which need not be read
        found: Manifest | Aborted = decode_manifest(data, save.id, repository) if outline is None else outline[0]
    except CorruptionError as error:
        # With a begin.json of its own the place is no copied directory: there its manifest was replaced. With another's
        # it is one, whatever has become of the manifest: `Repo.exists` says the same.
        if save.begin is None and save.state != "damaged" and save.origin is None:
            save.origin = objects.origin(save.id.manifest, data, repository)
        save.state = "damaged" if save.origin is None else "copied"
        save.message = error.message
        return
    if isinstance(found, Aborted):
        # A begin.json that cannot be read leaves the save's objects unknown: then they stay.
        save.state = save.state if save.message else "closed"
        save.save_id = save.save_id or found.save_id
    else:
        save.state, save.manifest, save.save_id = "committed", found, found.save_id
        save.manifest_length, save.manifest_digest = len(data), data[-canonical_json.TAIL :]


def _sealed(repo: Repo, save: SaveDirectory, data: bytes) -> str:
    assert save.manifest is not None, "committed"
    try:
        if repo.keys is None and repo.closed_ring is None:
            return ""
        repo.authenticate(save.manifest, data)
    except CorruptionError:
        return "refused"
    except KeyMissing:
        pass  # its key is not on the ring any more: said where it is read
    return "sealed" if save.manifest.code else "plain"


def _classify_by_trash(repo: Repo, save: SaveDirectory) -> None:
    """Classifies a save whose manifest only the trash has. A damaged one was removed too, but cannot come back."""
    for entry in save.trash:
        data = _read(repo, entry.name, MAX_MANIFEST)
        try:
            found = decode_manifest(data, save.id, repo.id) if data is not None else None
        except CorruptionError as error:
            save.message = f"{entry.name} cannot be read: {error.message}"
            continue
        if isinstance(found, Manifest):
            save.manifest, save.save_id = found, found.save_id
    if save.manifest is not None or save.begin is not None:
        save.state = "removed"
    else:
        save.state = "damaged"


def _read(repo: Repo, name: str, limit: int) -> bytes | None:
    try:
        return repo.store.get(name, limit=limit)
    except ObjectNotFound:
        return None
