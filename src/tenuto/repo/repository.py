"""A repository: one store, opened, with what it holds by name. Reading only, but for its creation."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain, takewhile
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from tenuto.codec.digest import CHUNK_BYTES, digest
from tenuto.errors import (
    AlreadyExists,
    CheckpointNotFound,
    CorruptionError,
    NotARepository,
    ObjectNotFound,
    RepositoryError,
    StoreError,
    StoreUnavailable,
    Tampered,
    UsageError,
    typed,
)
from tenuto.events import warn
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId, parse_attempt, parse_steps, run_key, step_key
from tenuto.model.records import AttemptRecord, Index, IndexEntry, Manifest, PackEntry
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.index import MAX_INDEX, Table, decode_index, decode_packs, decode_table
from tenuto.repo.format.manifest import MAX_ABORTED, MAX_MANIFEST, Aborted, decode_manifest
from tenuto.repo.format.object_names import KEYS, REPOSITORY, numbered, parse_numbered
from tenuto.repo.format.objects import Fields, Origin, Sign
from tenuto.repo.format.shard_table import BoxTable, decode_boxes
from tenuto.repo.format.small_records import decode_lease, read_attempt
from tenuto.repo.identity import Identity, decode, keep_twice, read_identity, warn_of_damage
from tenuto.repo.replicated.members import identity_of_followers, join, keys_of_followers, known, one_of_many
from tenuto.repo.replicated.places import mark_damaged, places_of
from tenuto.seal.cipher import tampered
from tenuto.seal.keys import KeyRing, RepositoryKeys, no_key
from tenuto.state.tree import leaf_paths
from tenuto.store.contract import Bytes, Store, is_unreadable
from tenuto.store.wrappers.stripe import stripe_around
from tenuto.version import __version__

# --------------------------------------------------------------------------------------------------
# For the error where no repository is: the nearest place that is one. A bounded look, for local places above too.

_ABOVE: Final = 8
_BELOW: Final = 64
_HEAD: Final = 64 << 10
"""Bytes of a manifest that are read to tell whether it is one: its path stands before its tree."""
_HINTED: Final = 10_000_000
"""Steps below this have a nought first, and come before all longer ones in a listing."""
_TRIES: Final = 20
"""How often a key ring is looked for that others change."""
_ABORTED: Final = b'{"by":'
"""How each aborted mark begins, and no manifest does."""


def nearby(store: Store) -> str | None:
    """Returns the URL or path of a repository one level below, or at most eight levels above, or of the stripe that
    this is a place of; None if there is none."""
    place = store.url.rstrip("/")
    stripe = stripe_around(store)
    if stripe is not None:
        return stripe
    try:
        for directory in store.children("").directories[:_BELOW]:
            if REPOSITORY in store.children(directory).objects:
                return f"{place}/{directory}"
    except StoreError:
        return None  # only the hint is lost; what is wrong with the place is said by the read that came before
    return _above(store.url)


def _above(url: str) -> str | None:
    parts = urlsplit(url)
    if parts.scheme not in ("", "file"):
        return None
    path = Path(unquote(parts.path) if parts.scheme else url).absolute()
    for parent in list(path.parents)[:_ABOVE]:
        try:
            if (parent / REPOSITORY).is_file():
                return str(parent)
        except OSError:
            continue
    return None


def now_text() -> str:
    """Returns the wall clock as text, for display and for milestones of hours; it decides nothing else."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


BeforeCreate = Callable[[Store], object]
"""Called with the store before a repository is made in it. What it raises keeps that from happening."""


class CommitObserver(Protocol):
    """Learns of the saves that this process begins and commits, and of notes on them, in the threads that do so."""

    def begun(self, id: CheckpointId, names: Sequence[str], bases: Sequence[CheckpointId]) -> None: ...

    def committed(self, manifest: Manifest, data: bytes) -> None: ...

    def noted(self, id: CheckpointId) -> None: ...


_deciding: Final[set[str]] = set()
"""The URLs of stores that this process has seen refuse a second put."""


def check_decides(store: Store) -> None:
    """Raises RepositoryError where a second writer could replace an object: claims and commits would decide nothing."""
    if store.url in _deciding:
        return
    if not store.probe().commits:
        raise RepositoryError(
            f"{store.url} can hold copies of checkpoints, but cannot decide which exist: it lets a second writer "
            "replace an object that is there",
            subject=store.url,
            hint="keep the repository in an object store that refuses that (If-None-Match), or on a file system "
            f"with hard links, and copies here: tenuto.Mirror(THAT_PLACE, {store.url!r})",
        )
    _deciding.add(store.url)


class Repo:
    """What is in `store`. `id`: 32 hexadecimal digits, drawn at creation; `chunk_bytes`: the size of a leaf's
    chunks."""

    def __init__(self, store: Store, id: str, chunk_bytes: int) -> None:
        self.store = store
        self.id = id
        self.chunk_bytes = chunk_bytes
        self.observer: CommitObserver | None = None
        self.keys: RepositoryKeys | None = None
        """Open where this process has been given what opens them: then all that it acts on is authenticated."""
        self._closed: list[KeyRing | None] = []
        """The key ring where its keys are not open here, None where there is none; empty until that was asked."""
        self._top: frozenset[str] | None = None
        self._hints: dict[tuple[str, int], int | None] = {}

    @property
    def url(self) -> str:
        return self.store.url

    def had(self, directory: str) -> bool:
        """Returns whether it had anything below this directory at its top when it was opened, or where that could not
        be listed then, when that was asked first."""
        if self._top is None:
            self._top = frozenset(self.store.children("").directories)
        return directory in self._top

    @classmethod
    def open(cls, store: Store, *, report: Callable[[str], None] = warn) -> Repo:
        """Raises NotARepository, naming one found nearby; CorruptionError; FormatTooNew. Writes nothing. `report` is
        called with each of its other places that does not answer."""
        found = read_identity(store)
        if found is None:
            near = nearby(store)
            raise NotARepository(
                f"there is no Tenuto repository at {store.url}",
                subject=store.url,
                hint=f"there is one at {near}"
                if near
                else "name the directory that your script gives to tenuto.Checkpointer or tenuto.save; they create it",
            )
        identity, wrong = found
        if wrong:
            warn_of_damage(store, wrong)
        return cls._of(store, identity, report)

    @classmethod
    def create_or_open(
        cls,
        store: Store,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        once: bool = False,
        before_create: BeforeCreate | None = None,
    ) -> Repo:
        """Opens the repository, creating it where there is none, beside whatever else lies there. However many
        processes create it at once, all end with one repository. RepositoryError for a place that is not its home.

        `once`: a repository that is made here says what it is in one object, and the next writer adds the second: a
        single save shall not wait for it. `before_create` is called before a repository is made; what it raises is
        raised, and nothing was put.
        """
        found = read_identity(store)
        created = found is None
        if found is None:
            kept = identity_of_followers(store)
            if kept is None and before_create is not None:
                before_create(store)
            if kept is not None:
                keys_of_followers(store)
            identity, created = cls._create(store, chunk_bytes, kept)
            wrong = ""
        else:
            identity, wrong = found
        repo = cls._of(store, identity)
        places = places_of(repo.store)
        if places is not None and places.of:
            raise one_of_many(store.url, places.of)
        if not created:
            # Another process may have made it a moment ago: what is put from now on relies on it.
            store.settle(object_names.REPOSITORY)
        if not (created and once):
            keep_twice(store, identity, whole=not wrong)
        join(repo.store, repo.id)
        return repo

    @classmethod
    def _create(cls, store: Store, chunk_bytes: int, kept: bytes | None) -> tuple[Identity, bool]:
        """Returns what the repository says of itself and whether this call made it. `kept`: its `tenuto.json`, where
        another tier still has that."""
        if not 1 <= chunk_bytes <= objects.MAX_CHUNK:
            raise UsageError(f"a chunk cannot have {chunk_bytes} bytes")
        check_decides(store)
        if kept is not None:
            made, data = decode(object_names.REPOSITORY, kept), kept
        else:
            made = Identity(secrets.token_hex(16), chunk_bytes, now_text(), __version__)
            data = made.encode(object_names.REPOSITORY)
        try:
            store.put_if_absent(object_names.REPOSITORY, Bytes(data), token=made.id)
        except AlreadyExists:
            found = read_identity(store)
            if found is None:
                raise
            return found[0], False
        return made, True

    @classmethod
    def _of(cls, store: Store, identity: Identity, report: Callable[[str], None] = warn) -> Repo:
        found, top = known(store, identity.id, report)
        repo = cls(found, identity.id, identity.chunk_bytes)
        repo._top = top
        return repo

    # -- what a holder of the key vouches for ------------------------------------------------------------------------

    @property
    def signer(self) -> Sign | None:
        """What makes the code of an object that this process puts; None where there are no keys. Raises KeyMissing
        where there are some, and this process has none."""
        self.require_key()
        return None if self.keys is None else self.keys.sign_object

    def require_key(self) -> None:
        """Raises KeyMissing where there are keys, and this process has none: what it put would not be believed."""
        ring = None if self.keys is not None else self.closed_ring
        if ring is not None:
            raise no_key(ring)

    def share_keys(self, other: Repo) -> None:
        """Goes by the keys of another view of the same repository."""
        self.keys = other.keys
        self._closed = [None if other.keys is not None else other.closed_ring]

    def decode(self, kind: str, name: str, data: bytes) -> Fields:
        """Returns the fields of a small object that this process acts on, read from `name`. Raises CorruptionError like
        `objects.decode`, and like `vouch`."""
        found = objects.decode(kind, name, data, self.id)
        self.vouch(name, data, found.text("code") if "code" in found.values else "")
        return found

    def vouch(self, name: str, data: bytes, code: str) -> None:
        """Checks that a holder of the repository's key has put the object `name`, or vouches for it as it is. Without
        the key no code can be checked, and what has none must be among what the key ring lists.

        Raises Tampered; KeyMissing where its key is not on the ring any more; CorruptionError for a damaged ring.
        """
        keys = self.keys
        if keys is not None and code and keys.made(code, name):
            keys.check_object(objects.signed_part(data, code), code, name)
            return
        if keys is None and code:
            return
        ring = keys or self.closed_ring
        if ring is None or hashlib.sha256(data).digest() in ring.vouched:
            return
        if keys is not None and code:
            keys.check_object(data, code, name)  # raises: that key is not on the ring
        id = object_names.save_of(name)
        raise Tampered(
            f"{name} is not sealed: no holder of the repository's key has put it or vouches for it",
            subject=name,
            hint=f"if you know who has put it: {typed('tenuto', 'key', 'trust', self.url, *([id] if id else []))}",
            object=name,
        )

    @property
    def closed_ring(self) -> KeyRing | None:
        """The key ring where this process has not opened its keys, read once; None where there is none, or where its
        keys were destroyed. Raises CorruptionError for a damaged one."""
        if not self._closed:
            ring = self.read_ring()[1] if self.had(KEYS) else None
            self._closed = [ring if ring is not None and ring.slots else None]
        return self._closed[0]

    def read_ring(self) -> tuple[int, KeyRing | None]:
        """Returns the newest key ring and the number of its object; 0 and None where there is none. Raises
        CorruptionError if it cannot be read: an older one would open with slots that were removed."""
        from tenuto.repo.format.key_records import decode_ring  # most repositories have no keys

        for _ in range(_TRIES):
            number = max(filter(None, map(parse_numbered, self.store.children(KEYS).objects)), default=0)
            if not number:
                return 0, None
            name = numbered(KEYS, number)
            try:
                data = self.store.get(name, limit=objects.SMALL)
            except ObjectNotFound:
                continue  # a newer one has replaced it
            return number, decode_ring(name, data, self.id)
        raise StoreUnavailable(f"the key ring of {self.url} changed {_TRIES} times while it was read", subject=KEYS)

    # -- what it holds -----------------------------------------------------------------------------------------------

    def runs(self) -> list[str]:
        """Returns the runs that have an attempt, by directory name, sorted. Ignores foreign directories."""
        return [
            key for key in self.store.children(object_names.RUNS).directories if _is_run(key) and self.attempts(key)
        ]

    def attempts(self, run: str) -> list[int]:
        """Returns the numbers of the run's attempt directories, ascending. They may include unclaimed ones and copies,
        which `find_attempt` excludes."""
        found = (parse_attempt(key) for key in self.store.children(object_names.run_directory(run)).directories)
        return sorted(number for number in found if number is not None)

    def find_attempt(self, run: str, number: int) -> AttemptRecord | None:
        """Returns the attempt's record, None if it is unclaimed or its directory is a copy of another, or of another
        repository. Raises
        CorruptionError if the record is damaged."""
        name = object_names.attempt_name(run, number)
        try:
            data = self.store.get(name, limit=objects.SMALL)
        except ObjectNotFound:
            return None
        if objects.is_copy(name, data, self.id):
            return None
        return read_attempt(self.decode("attempt", name, data), run_key(run), number)

    def attempt(self, run: str, number: int) -> AttemptRecord:
        """Raises CheckpointNotFound where there is no such attempt, CorruptionError where its record is damaged."""
        found = self.find_attempt(run, number)
        if found is None:
            raise CheckpointNotFound(f"run {run!r} has no attempt {number} at {self.url}", subject=f"{run}/{number}")
        return found

    def steps(self, run: str, attempt: int) -> list[int]:
        """Returns the steps with a directory in the attempt, descending, committed or not. Costs one listing and reads
        nothing."""
        return parse_steps(self.store.children(object_names.attempt_directory(run, attempt)).directories)

    def newest_steps(self, run: str, attempt: int) -> Iterator[int]:
        """Yields what `steps` returns, lazily. Where a listing of thousands is many requests, lists first what lies
        behind a hint, and the rest where more is asked for: a hint that is wrong costs that listing, and no more."""
        hint = self._hint(run, attempt) if self.store.capabilities.remote else None
        if hint is None:
            yield from self.steps(run, attempt)
            return
        directory = object_names.attempt_directory(run, attempt)
        keys = self.store.children(directory, after=step_key(hint - 1) if hint else "").directories
        yield from takewhile(lambda step: step >= hint, parse_steps(keys))
        yield from (step for step in self.steps(run, attempt) if step < hint)

    def _hint(self, run: str, attempt: int) -> int | None:
        """Returns the step that the attempt's newest lease says was committed last, looked up once; None where nothing
        says it, or where names are not in the order of steps: a name of nine digits comes before `step-10000000`."""
        key = (run, attempt)
        if key not in self._hints:
            directory, found = object_names.lease_directory(run, attempt), None
            beats = (object_names.parse_numbered(file) for file in self.store.children(directory).objects)
            number = max((beat for beat in beats if beat is not None), default=None)
            if number is not None:
                try:
                    data = self.store.get(object_names.numbered(directory, number), limit=objects.SMALL)
                    found = decode_lease(data, run, attempt, number, self.id).newest
                except (ObjectNotFound, CorruptionError):
                    found = None  # only a hint: everything is listed then
            self._hints[key] = found if found is not None and found < _HINTED else None
        return self._hints[key]

    def committed(self, run: str, attempt: int) -> list[int]:
        """Returns the attempt's committed steps, descending. A damaged manifest counts: its checkpoint exists."""
        return [step for step in self.steps(run, attempt) if self.exists(CheckpointId(run, attempt, step))]

    def checkpoints(self, run: str | None = None) -> list[CheckpointId]:
        """Returns every committed checkpoint of the run, or of all runs, ascending. A damaged manifest counts."""
        return [
            CheckpointId(key, attempt, step)
            for key in (self.runs() if run is None else [run])
            for attempt in self.attempts(key)
            for step in reversed(self.committed(key, attempt))
        ]

    def exists(self, id: CheckpointId) -> bool:
        """Returns whether the checkpoint exists: it has a manifest of its own, damaged or not, that is no aborted mark.
        An unreadable one is not its own if the directory's `begin.json` was written for another place."""
        found = self._exists_by_head(id)
        return self._exists_in_full(id) if found is None else found

    def _exists_by_head(self, id: CheckpointId) -> bool | None:
        """Answers `exists` from the first bytes of the manifest; None if those do not suffice."""
        try:
            with self.store.open(id.manifest) as reader:
                length = min(reader.length, _HEAD)
                head = bytearray(length)
                reader.read_into(0, memoryview(head))
                whole = reader.length == length
        except ObjectNotFound:
            return False
        except CorruptionError:
            return None
        except StoreError as error:
            if not is_unreadable(error):
                raise
            return None
        if not head.startswith(_ABORTED) and self._is_own(id, head):
            return True  # no aborted mark, no copy: damaged or not, it need not be parsed to be counted
        try:
            return isinstance(decode_manifest(bytes(head), id, self.id), Manifest) if whole else None
        except CorruptionError:
            return None

    def _exists_in_full(self, id: CheckpointId) -> bool:
        try:
            data = self.store.get(id.manifest, limit=MAX_MANIFEST)
        except ObjectNotFound:
            return False
        except CorruptionError:
            return True
        except StoreError as error:
            if not is_unreadable(error):
                raise
            return True  # it must not hide what is older, nor be taken for gone
        if len(data) > MAX_ABORTED and self._is_own(id, data):
            return True  # no aborted mark, no copy: a large tree need not be parsed to be counted
        try:
            return isinstance(decode_manifest(data, id, self.id), Manifest)
        except CorruptionError:
            begun = self._begun_here(id)
            return bool(begun) if objects.is_copy(id.manifest, data, self.id) else begun is not False

    def _is_own(self, id: CheckpointId, manifest: bytes | bytearray) -> bool:
        """Returns whether a manifest, or the head of one, says of its place what only the one of `id` in this
        repository says: no copy of another does."""
        place = b',"path":"%b",' % id.manifest.encode()
        repository = b',"repository":"%b","run":"%b",' % (self.id.encode(), id.run.encode())
        return place in manifest and repository in manifest

    def _begun_here(self, id: CheckpointId) -> bool | None:
        """Returns whether a save was begun in this very place, None if unknown. If True, a copy under the manifest's
        name has replaced the original; if False, the directory is a copy, and unreadable objects in it were damaged
        before."""
        name = object_names.begin_name(id)
        try:
            return not objects.is_copy(name, self.store.get(name, limit=objects.SMALL), self.id)
        except (ObjectNotFound, CorruptionError):
            return None

    def misplaced(self, id: CheckpointId) -> Origin | None:
        """Returns where the manifest was written that lies in the place of `id`'s; None if right there, or if no intact
        manifest lies there."""
        try:
            found = canonical_json.open_seal(self.store.get(id.manifest, limit=MAX_MANIFEST), name=id.manifest)
        except (ObjectNotFound, CorruptionError):
            return None
        return objects.origin_in(found, id.manifest, self.id) if found.get("kind") == "manifest" else None

    def manifest(self, id: CheckpointId) -> Manifest:
        """Raises CheckpointNotFound if the checkpoint is not there (or its save was aborted), CorruptionError if its
        manifest is damaged or a copy of another's."""
        found = self.mark(id)
        if found is None:
            raise self._not_found(id, "there is none")
        if isinstance(found, Aborted):
            raise self._not_found(id, "its save was never finished")
        return found

    def manifest_bytes(self, id: CheckpointId) -> bytes:
        """Returns the manifest as stored. Raises like `manifest`."""
        data = self._read_manifest(id)
        if data is None or isinstance(decode_manifest(data, id, self.id), Aborted):
            raise self._not_found(id, "there is none, or its save was never finished")
        return data

    def mark(self, id: CheckpointId) -> Manifest | Aborted | None:
        """Returns the manifest or aborted mark of a save, None without one. Raises CorruptionError if it is damaged or
        a copy."""
        data = self._read_manifest(id)
        if data is None:
            return None
        found = decode_manifest(data, id, self.id)
        if isinstance(found, Manifest):
            self.authenticate(found, data)
        return found

    def authenticate(self, manifest: Manifest, data: bytes) -> None:
        """Checks that a holder of the repository's key vouches for this manifest. Raises like `vouch`."""
        self.vouch(manifest.id.manifest, data, manifest.code)

    def _read_manifest(self, id: CheckpointId) -> bytes | None:
        try:
            return self.store.get(id.manifest, limit=MAX_MANIFEST)
        except ObjectNotFound:
            return None

    def _not_found(self, id: CheckpointId, why: str) -> CheckpointNotFound:
        return CheckpointNotFound(
            f"no checkpoint {id} at {self.url}: {why}",
            subject=str(id),
            hint=f"{typed('tenuto', 'ls', self.url)} shows those that exist",
        )

    def index(self, manifest: Manifest, rank: int = 0) -> Index:
        """Returns one rank's index. Its length and digest are checked against the manifest before it is parsed."""
        name = f"{manifest.id.directory}/{object_names.index_file(rank)}"
        data = self.index_bytes(manifest.id, _entry(manifest, rank))
        found = decode_index(data, id=manifest.id, rank=rank, tree=manifest.tree, repository=self.id)
        if found.save_id != manifest.save_id or found.chunk_bytes != manifest.chunk_bytes:
            raise CorruptionError(f"{name} belongs to another save than its manifest", subject=name)
        _check_bases(found.packs, manifest, name)
        return found

    def table(self, manifest: Manifest, rank: int = 0) -> Table:
        """Returns the rows of one rank's index, without the paths that the trees have. Raises like `index`."""
        data = self.index_bytes(manifest.id, _entry(manifest, rank))
        found = decode_table(data, id=manifest.id, rank=rank, repository=self.id)
        if found.save_id != manifest.save_id or found.chunk_bytes != manifest.chunk_bytes:
            raise CorruptionError(f"{found.name} belongs to another save than its manifest", subject=found.name)
        _check_bases(found.packs, manifest, found.name)
        return found

    def boxes(self, manifest: Manifest, leaves: int | None = None) -> BoxTable | None:
        """Returns which rank has which part of which leaf; None if one rank has them all. Raises like `index`.
        `leaves`: those of the manifest's tree, if known."""
        entry = manifest.boxes
        if entry is None:
            return None
        data = self.index_bytes(manifest.id, entry)
        return decode_boxes(
            data,
            id=manifest.id,
            save_id=manifest.save_id,
            ranks=len(manifest.indexes),
            leaves=len(leaf_paths(manifest.tree)) if leaves is None else leaves,
            repository=self.id,
        )

    def packs(self, manifest: Manifest, rank: int = 0) -> tuple[PackEntry, ...]:
        """Returns the packs that one rank's index names, without reading the rest of it or the tree. Raises like
        `index`."""
        entry = _entry(manifest, rank)
        data = self.index_bytes(manifest.id, entry)
        save_id, packs = decode_packs(data, id=manifest.id, rank=rank, repository=self.id)
        if save_id != manifest.save_id:
            name = f"{manifest.id.directory}/{entry.name}"
            raise CorruptionError(f"{name} belongs to another save than its manifest", subject=name)
        return packs

    def index_bytes(self, id: CheckpointId, entry: IndexEntry) -> bytes:
        """Returns the bytes of an index. Raises CorruptionError if it is missing or differs from its entry in the
        manifest."""
        name = f"{id.directory}/{entry.name}"
        if entry.length > MAX_INDEX:
            raise CorruptionError(f"{name} claims {entry.length} bytes; at most {MAX_INDEX} are read", subject=name)
        while True:
            try:
                data = self.store.get(name, limit=entry.length)
            except ObjectNotFound:
                raise CorruptionError(f"{name} is missing, which the manifest of {id} names", subject=name) from None
            if len(data) != entry.length:
                wrong = f"{name} has {len(data)} bytes, the manifest says {entry.length}"
            elif digest(data) != entry.digest:
                wrong = f"{name} is damaged: its digest is not the one in the manifest"
            elif entry.sha256 and hashlib.sha256(data).hexdigest() != entry.sha256:
                raise tampered(name)
            else:
                return data
            if not mark_damaged(self.store, name):
                raise CorruptionError(wrong, subject=name)


def _check_bases(packs: Sequence[PackEntry], manifest: Manifest, name: str) -> None:
    """Checks that the manifest names every checkpoint of which an index names packs: removals go by the manifest."""
    for pack in packs:
        if pack.at is not None and pack.at not in manifest.bases:
            raise CorruptionError(
                f"{name} names {pack.name} of {pack.at}, of which its manifest says nothing", subject=name
            )


def _entry(manifest: Manifest, rank: int) -> IndexEntry:
    wanted = object_names.index_file(rank)
    # By rank: of thousands of indexes not each is looked at for each.
    for entry in chain(manifest.indexes[rank : rank + 1], manifest.indexes):
        if entry.name == wanted:
            return entry
    raise CorruptionError(f"the manifest of {manifest.id} names no index {wanted}", subject=manifest.id.manifest)


def _is_run(key: str) -> bool:
    try:
        return run_key(key) == key
    except UsageError:
        return False


def known_runs(runs: Iterable[str]) -> str:
    """Describes the existing runs for a message."""
    names = list(runs)
    return f"there are: {', '.join(names[:20])}{', …' if len(names) > 20 else ''}" if names else "there are no runs yet"
