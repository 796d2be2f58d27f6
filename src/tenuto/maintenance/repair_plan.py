"""What is damaged in checkpoints, object by object and place by place, and what each of them can be rebuilt from."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import partial
from typing import Final, Literal

from tenuto.codec.digest import digest
from tenuto.engine.read.chunk_reader import scan_threads
from tenuto.errors import CheckpointNotFound, CorruptionError, FormatTooNew, ObjectNotFound, StoreError, TenutoError
from tenuto.events import Emitter, Progress
from tenuto.maintenance.census import census_of, take_census
from tenuto.maintenance.inspect import Scan, check_pack
from tenuto.maintenance.repair_pack import PackRecipe
from tenuto.maintenance.repair_sources import Sources
from tenuto.maintenance.shared_packs import is_another, manifest_of
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, IndexEntry, Json, Manifest
from tenuto.record import record
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.index import MAX_INDEX, decode_table
from tenuto.repo.format.manifest import MAX_MANIFEST, Aborted, decode_manifest
from tenuto.repo.format.small_records import Begin, decode_attempt, decode_begin, encode_begin
from tenuto.repo.identity import NAMES, decode, read_identity
from tenuto.repo.notes import FORGOTTEN
from tenuto.repo.ownership.lease import read_last
from tenuto.repo.refs import KINDS, is_name, numbers
from tenuto.repo.replicated.members import node_of
from tenuto.repo.replicated.places import all_places, followers_of, home_of, reporting_to, unreachable
from tenuto.repo.repository import Repo, now_text
from tenuto.state.tree import leaf_paths
from tenuto.store.contract import Entry, Store, is_leftover, is_unreadable

Found = tuple[str, bytes]
"""What gave the bytes of an object, and they."""
Kind = Literal["manifest", "table", "pack", "begin", "attempt", "note", "ref", "repository"]
NEEDED: Final[frozenset[Kind]] = frozenset({"manifest", "table", "pack"})
"""What a checkpoint cannot be restored without."""
REBUILT: Final = "what the other objects say"
NOBODY: Final = "nobody: it says that it is forgotten"
"""What gives the bytes of a note or a ref that nothing has, where a person goes on without it."""
EVERYTHING: Final = "all of its leaves"
"""What is lost with a manifest, or with the table that says where the parts of leaves lie."""


@record
class Mending:
    """One damaged or missing object, in one place.

    id: the checkpoint that it belongs to; None for objects of the repository.
    wrong: the problem. missing: whether there is nothing at all. size: bytes of the whole object.
    sources: what gives its bytes, with how many. lost: the paths of the leaves that nobody has all bytes of, and
    `lost_words`: what is lost where the paths are not known; `lost_bytes`: of the chunks or tables that are lost. Where
    some are, the object stays as it is.
    copies: whether another place has it whole, so that a restore does not need this one.
    store: the place. data, recipe: the whole bytes of a small object; how to assemble a pack.
    """

    id: CheckpointId | None
    kind: Kind
    place: str
    name: str
    wrong: str
    missing: bool
    size: int
    sources: tuple[tuple[str, int], ...]
    lost: tuple[str, ...] = ()
    lost_words: str = ""
    lost_bytes: int = 0
    copies: bool = False
    store: Store | None = field(default=None, repr=False, compare=False)
    data: bytes | None = field(default=None, repr=False, compare=False)
    recipe: PackRecipe | None = field(default=None, repr=False, compare=False)

    @property
    def repairable(self) -> bool:
        return self.data is not None or (self.recipe is not None and self.recipe.complete)

    @property
    def harms(self) -> bool:
        """Whether the checkpoint cannot be restored as long as this stays as it is."""
        return self.kind in NEEDED and not self.copies and not self.repairable

    def __str__(self) -> str:
        what = f"{self.name} in {self.place} {self.wrong}"
        if not self.repairable:
            return f"{what}: nothing has these bytes"
        return f"{what}: from {', '.join(f'{name} ({nbytes} bytes)' for name, nbytes in self.sources)}"


@record
class RepairPlan:
    """What a repair would do. Every byte of every source in it has been read and verified.

    checked: the checkpoints that were looked at. unreached: sources that could not be opened, in words. unread: places
    of the repository that did not answer, in words: what they have is not judged. unseen: data files that may lie on
    nodes that are not found from here, and were not looked at.
    """

    where: str
    checked: tuple[CheckpointId, ...]
    mendings: tuple[Mending, ...]
    unreached: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    bytes_read: int = 0
    left: tuple[tuple[Store, Entry], ...] = field(default=(), repr=False)
    """What repairs that broke off have left beside objects that are whole."""

    @property
    def repairs(self) -> tuple[Mending, ...]:
        return tuple(one for one in self.mendings if one.repairable)

    @property
    def hopeless(self) -> tuple[Mending, ...]:
        return tuple(one for one in self.mendings if not one.repairable)

    @property
    def touched(self) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints of which something is damaged or missing."""
        return tuple(dict.fromkeys(one.id for one in self.mendings if one.id is not None))

    @property
    def lost(self) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints that cannot be restored whole after the repair either."""
        return tuple(dict.fromkeys(one.id for one in self.mendings if one.id is not None and one.harms))

    def __str__(self) -> str:
        head = f"repair of {len(self.checked)} checkpoints at {self.where}: {len(self.mendings)} objects"
        return "\n".join([head, *(f"  {one}" for one in self.mendings)])


def plan_repair(
    sources: Sources,
    ids: Sequence[CheckpointId] | None = None,
    *,
    emitter: Emitter | None = None,
    threads: int | None = None,
    forget: bool = False,
) -> RepairPlan:
    """Reads every byte of the checkpoints (`ids` None: of all), of those whose data files they use, and of the sources
    that what is damaged needs. Writes nothing. `forget`: a note or a ref that nothing has is to say so in its place,
    and nobody waits for it any more.

    Raises CheckpointNotFound for an id that does not exist, FormatTooNew, and the error of a store that fails.
    """
    repo = sources.repo
    everything = ids is None
    if ids is None:
        runs = ((run, attempt) for run in repo.runs() for attempt in repo.attempts(run))
        ids = [CheckpointId(run, attempt, step) for run, attempt in runs for step in repo.committed(run, attempt)]
        ids += [save.id for save in take_census(repo).saves.values() if save.lost]
    found = _Search(sources, emitter or Emitter(), threads or scan_threads(repo), forget=forget)
    waiting, checked = sorted(set(ids)), []
    with reporting_to(repo.store, lambda message: None):  # the plan says what is damaged where
        while waiting:
            id = waiting.pop(0)
            checked.append(id)
            if not everything and id in ids and not (repo.exists(id) or census_of(repo, id).lost):
                raise CheckpointNotFound(f"no checkpoint {id} at {repo.url}", subject=str(id))
            bases = found.search(id)
            waiting += [base for base in bases if base not in checked and base not in waiting]
        if everything:
            found.repository()
    return RepairPlan(
        repo.url,
        tuple(sorted(checked)),
        tuple(found.mendings),
        tuple(sources.unreached),
        tuple(f"{url}: {why}" for url, why in found.unread.items()),
        tuple(found.unseen),
        found.bytes_read,
        tuple(found.left),
    )


def _nothing() -> Found | None:
    return None


class _Search:
    def __init__(self, sources: Sources, emitter: Emitter, threads: int, *, forget: bool = False) -> None:
        self._forget = forget
        self.sources, self.repo = sources, sources.repo
        self.home = home_of(self.repo.store)
        self.places = sources.places()
        self.mendings: list[Mending] = []
        self.unseen: list[str] = []
        self.unread: dict[str, str] = {}
        """Places that did not answer, by URL, and what they said."""
        self.bytes_read = 0
        self.left: list[tuple[Store, Entry]] = []
        self._staged: list[tuple[Store, Entry]] = []
        self._there: dict[str, set[str]] = {}
        """What each place has of the checkpoint that is being looked at, by URL."""
        self._threads, self._emitter = threads, emitter
        self._attempts: set[str] = set()
        home, *others = all_places(self.repo.store)
        self._followers = {store.url for store in followers_of(self.repo.store)}
        mirrors = [store for store in others if not node_of(store)]
        self._every: list[Store] = [home, *mirrors] if mirrors and len(mirrors) == len(others) else []
        """The places that have to have every data file, if there are several."""

    def search(self, id: CheckpointId) -> Sequence[CheckpointId]:
        """Looks at one checkpoint. Returns the checkpoints whose data files it uses."""
        self._staged = []
        self._there = {}
        self.places = []
        own: dict[str, Manifest | Begin] = {}
        for store in self.sources.places():
            if store.url in self.unread:
                continue
            try:
                listed = list(store.walk(id.directory, leftovers=True))
                found = self._own(store, id)
                if found is not None:
                    own[store.url] = found
            except FormatTooNew:
                if store is self.home:
                    raise
                continue  # nobody here can tell what fits it
            except StoreError as error:
                if not is_unreadable(error):
                    self._give_up(store, error)
                    continue
            self.places.append(store)
            self._staged += [(store, entry) for entry in listed if object_names.is_staged(entry.name)]
            self._there[store.url] = {entry.name for entry in listed if not is_leftover(entry.name)}
        begun = self._begun(self.repo, id)
        known = begun or own.get(self.home.url)
        self._leave_out(lambda theirs: known is not None and theirs.save_id != known.save_id, own)
        manifest = self._manifest(id, begun)
        if manifest is None:
            return ()
        self._leave_out(
            lambda theirs: (
                is_another(theirs, manifest) if isinstance(theirs, Manifest) else theirs.save_id != manifest.save_id
            ),
            own,
        )
        if manifest.boxes is not None:
            self._table(id, manifest.boxes, words=EVERYTHING)
        for rank, entry in enumerate(manifest.indexes):
            if len(manifest.indexes) > 1:
                data = self._table(id, entry, words=f"all that rank {rank} has written")
            else:
                data = self._table(id, entry, lost=tuple(leaf_paths(manifest.tree)))
            if data is not None:
                with suppress(CorruptionError):
                    self._packs(id, decode_table(data, id=id, rank=rank, repository=self.repo.id).index(manifest.tree))
        attempt = object_names.attempt_name(id.run, id.attempt)
        if attempt not in self._attempts:
            self._attempts.add(attempt)
            alike = [one for one in self.places if one is self.home or not self._has_another_claim(one, id)]
            self._small(None, "attempt", attempt, partial(self._is_claim, id), places=alike)
        name = object_names.begin_name(id)
        self._small(id, "begin", name, partial(self._is_begin, manifest), rebuild=partial(self._begin, manifest))
        directory = object_names.notes_directory(id)
        self._row(id, "note", directory, {"body": {}, "note": FORGOTTEN})
        return manifest.bases

    def _own(self, store: Store, id: CheckpointId) -> Manifest | Begin | None:
        """Returns what a place itself says that it has of a checkpoint: its manifest, in its place or in the trash, or
        where that is damaged what began the save."""
        there = Repo(store, self.repo.id, self.repo.chunk_bytes)
        with suppress(CheckpointNotFound, CorruptionError):
            return manifest_of(there, id)[0]
        return self._begun(there, id)

    def _leave_out(self, other: Callable[[Manifest | Begin], bool], own: Mapping[str, Manifest | Begin]) -> None:
        """Leaves out the places that have another manifest of their `own`, as of another line of training: what they
        have of the checkpoint fits that one, and is never replaced."""
        self.places = [one for one in self.places if one is self.home or one.url not in own or not other(own[one.url])]

    def _give_up(self, store: Store, error: StoreError) -> None:
        """Judges nothing more of a place that does not answer. Raises its error if that is the home."""
        if store is self.home:
            raise error
        self.unread[store.url] = error.message
        self.places = [one for one in self.places if one is not store]

    def _begun(self, there: Repo, id: CheckpointId) -> Begin | None:
        with suppress(TenutoError):
            return decode_begin(there.store.get(object_names.begin_name(id), limit=objects.SMALL), id, there.id)
        return None

    def _table(
        self, id: CheckpointId, entry: IndexEntry, *, lost: tuple[str, ...] = (), words: str = ""
    ) -> bytes | None:
        def right(data: bytes) -> bool:
            return len(data) == entry.length and digest(data) == entry.digest

        name = f"{id.directory}/{entry.name}"
        limit = min(entry.length, MAX_INDEX)
        return self._small(id, "table", name, right, limit=limit, lost=lost, words=words)

    def _is_claim(self, id: CheckpointId, data: bytes) -> bool:
        """Returns whether this is the record of an attempt, and not of another that has the same number elsewhere: the
        lease here names the owner."""
        try:
            record = decode_attempt(data, id.run, id.attempt, self.repo.id)
        except CorruptionError:
            return False
        with suppress(CorruptionError):
            beat = read_last(self.repo, id.run, id.attempt)[1]
            return beat is None or beat.id == record.id
        return True

    def _has_another_claim(self, store: Store, id: CheckpointId) -> bool:
        """Returns whether a place has an intact claim of this number that is of another line of training."""
        with suppress(StoreError, CorruptionError):
            data = store.get(object_names.attempt_name(id.run, id.attempt), limit=objects.SMALL)
            decode_attempt(data, id.run, id.attempt, self.repo.id)
            return not self._is_claim(id, data)
        return False

    def _is_begin(self, manifest: Manifest, data: bytes) -> bool:
        return (
            _decodes(decode_begin, manifest.id, self.repo.id, data)
            and decode_begin(data, manifest.id, self.repo.id).save_id == manifest.save_id
        )

    def repository(self) -> None:
        """Looks at the two objects that say what the repository is; each can be rebuilt from the other."""
        identity = read_identity(self.repo.store)
        if identity is None:
            return
        for name in NAMES:
            made = REBUILT, identity[0].encode(name)
            right = partial(self._is_identity, name)
            self._small(None, "repository", name, right, rebuild=partial(_same, made), places=[self.home])
        self.places = [store for store in self.sources.places() if store.url not in self.unread]
        for kind in KINDS:
            for name in filter(is_name, self.repo.store.children(f"refs/{kind}").directories):
                self._row(None, "ref", f"refs/{kind}/{name}", {"reason": FORGOTTEN, "to": None})

    def _row(
        self, id: CheckpointId | None, kind: Literal["note", "ref"], directory: str, forgotten: dict[str, Json]
    ) -> None:
        """Looks at objects that are numbered: none is ever removed by itself, so that a gap is a loss."""
        there = numbers(self.repo, directory)
        for number in range(1, max(there, default=0) + 1):
            name = object_names.numbered(directory, number)
            right = partial(_is_object, kind, name, self.repo.id)
            self._small(id, kind, name, right, rebuild=partial(self._forgotten, kind, name, forgotten))

    def _forgotten(self, kind: str, name: str, body: dict[str, Json]) -> Found | None:
        if not self._forget:
            return None
        whole = {**body, "created": now_text(), "id": secrets.token_hex(16)}
        return NOBODY, objects.encode(kind, name, whole, self.repo.id)

    def _is_identity(self, name: str, data: bytes) -> bool:
        try:
            return decode(name, data).id == self.repo.id
        except CorruptionError:
            return False

    # -- small objects -------------------------------------------------------------------------------------------------

    def _manifest(self, id: CheckpointId, begun: Begin | None) -> Manifest | None:
        """Returns the manifest, from wherever it is whole; of a removed checkpoint whose data files others use, that in
        the trash."""
        if not self.repo.exists(id) and not census_of(self.repo, id).lost:
            return self._removed(id)

        def own(data: bytes) -> bool:
            try:
                found = decode_manifest(data, id, self.repo.id)
            except FormatTooNew:
                raise
            except TenutoError:
                return False
            return not isinstance(found, Aborted) and (begun is None or found.save_id == begun.save_id)

        data = self._small(id, "manifest", id.manifest, own, limit=MAX_MANIFEST, words=EVERYTHING)
        found = None if data is None else decode_manifest(data, id, self.repo.id)
        assert not isinstance(found, Aborted), "own has looked"
        return found

    def _removed(self, id: CheckpointId) -> Manifest | None:
        """Returns the manifest of a removed checkpoint. A follower may keep it all the same: its manifest is then the
        one in the trash."""
        try:
            manifest, data = manifest_of(self.repo, id)
        except (CheckpointNotFound, CorruptionError):
            return None
        for store in self.places:
            if store.url in self._followers and id.manifest in self._there[store.url]:
                whole = f"the trash of {self.repo.url}", data
                self._small(id, "manifest", id.manifest, lambda theirs: theirs == data, places=[store], whole=whole)
        return manifest

    def _small(
        self,
        id: CheckpointId | None,
        kind: Kind,
        name: str,
        right: Callable[[bytes], bool],
        *,
        limit: int = objects.SMALL,
        lost: tuple[str, ...] = (),
        words: str = "",
        rebuild: Callable[[], Found | None] = _nothing,
        places: Sequence[Store] | None = None,
        whole: Found | None = None,
    ) -> bytes | None:
        """Looks at an object in each place that has it (`places`: in these); the home has to. Returns its bytes, from
        wherever they are right; None if nobody has them. `whole`: those that are known."""
        damaged: list[tuple[Store, str, int]] = []
        for store in list(places or self.places):
            try:
                data, wrong = _read(store, name, limit)
            except StoreError as error:
                self._give_up(store, error)
                continue
            if data is not None and right(data):
                whole = whole or (store.url, data)
                self._keep_staged(store, name)
            elif wrong != "is missing" or store is self.home or self._has_to_have(store, kind, name):
                damaged.append((store, wrong or "is not what was saved", len(data or b"")))
        if not damaged:
            return whole[1] if whole is not None else None
        there = whole is not None
        if whole is None:
            whole = next(self._elsewhere(kind, name, right, limit), None)
        whole = whole or rebuild()
        for store, wrong, length in damaged:
            nbytes = length if whole is None else len(whole[1])
            self.mendings.append(
                Mending(
                    id=id,
                    kind=kind,
                    place=store.url,
                    name=name,
                    wrong=wrong,
                    missing=wrong == "is missing",
                    size=nbytes,
                    sources=() if whole is None else ((whole[0], nbytes),),
                    lost=lost if whole is None else (),
                    lost_words=words if whole is None else "",
                    lost_bytes=nbytes if whole is None else 0,
                    copies=there,
                    store=store,
                    data=None if whole is None else whole[1],
                )
            )
        return None if whole is None else whole[1]

    def _has_to_have(self, place: Store, kind: Kind, name: str) -> bool:
        """Returns whether another place of the repository lacks an object that goes with what it has of the checkpoint.
        A place that is filled in the background, and one that lacks data files, is for `tenuto replicate`."""
        if kind in ("note", "ref"):
            return False
        there = self._there[place.url]
        if place.url in self._followers or not any(map(object_names.is_pack, there)):
            return False
        if any(place is store for store in self._every):
            return True
        rank = name.removesuffix(".index")
        return (
            kind != "table"
            or name.endswith(f"/{object_names.BOXES}")
            or any(one.startswith(f"{rank}.") for one in there)
        )

    def _elsewhere(self, kind: Kind, name: str, right: Callable[[bytes], bool], limit: int) -> Iterator[Found]:
        """Yields whole copies of a small object beyond the places that have the checkpoint as the home has it. Of the
        others, tables have to have the digest that is known; manifests, what begins them and claims are their own."""
        places = self.sources.places()
        own = kind in ("manifest", "begin", "attempt")
        others = [one for one in places if one not in self.places] if own else []
        for source, store, other in self.sources.twins(self.home, name):
            if store in others:
                continue
            with suppress(StoreError):
                data, _ = _read(store, other, limit)
                if data is not None and right(data):
                    yield source, data
        for image in self.sources.images():
            data, _ = _read(image.repo.store, name, limit)
            if data is not None and right(data) and self._agrees(name, image.footer.id, data):
                yield f"the image of {image.footer.id} in memory", data

    def _agrees(self, name: str, id: CheckpointId, data: bytes) -> bool:
        """Returns whether a manifest from memory names the very tables that lie in the store: nothing else says which
        bytes the damaged one had. Other objects have digests of their own."""
        if name != id.manifest:
            return True
        found = decode_manifest(data, id, self.repo.id)
        tables = () if isinstance(found, Aborted) else found.tables
        return all(
            digest(_read(self.home, f"{id.directory}/{one.name}", one.length)[0] or b"") == one.digest for one in tables
        )

    def _begin(self, manifest: Manifest) -> Found | None:
        """What a save says before it begins follows from what it has written."""
        names = [entry.name for entry in manifest.tables]
        try:
            for rank in range(len(manifest.indexes)):
                names += [pack.name for pack in self.repo.packs(manifest, rank) if pack.at is None]
            record = self.repo.find_attempt(manifest.id.run, manifest.id.attempt)
        except TenutoError:
            return None
        parent = None if record is None else record.parent
        begin = Begin(manifest.id, manifest.save_id, tuple(names), parent, manifest.bases)
        return REBUILT, encode_begin(begin, self.repo.id)

    # -- packs ---------------------------------------------------------------------------------------------------------

    def _packs(self, id: CheckpointId, index: Index) -> None:
        for number, entry in enumerate(index.packs):
            if entry.at is None:  # those of other checkpoints are looked at with them
                self._pack(id, index, number)

    def _pack(self, id: CheckpointId, index: Index, number: int) -> None:
        name = index.packs[number].object_name(id)
        wrong: list[tuple[Store, str]] = []
        missing: list[Store] = []
        whole = 0
        for store in list(self.places):
            check = check_pack(store, id, index, number)
            scan = Scan(store, id, index, on_bytes=self._advance)
            damaged = scan.run({number}, self._threads) if check.readable else []
            unread = next((one for one in (*check.findings, *damaged) if one.severity == "unread"), None)
            if unread is not None:
                self._give_up(store, StoreError(unread.message, subject=name))
                continue
            problems = [finding.message for finding in check.findings]
            problems += [f"{one.message} (byte {one.offset})" for one in damaged]
            if problems == ["is missing"]:
                missing.append(store)
                continue
            if problems:
                more = f" and {len(problems) - 1} more problems" if len(problems) > 1 else ""
                wrong.append((store, f"{problems[0]}{more}"))
            else:
                whole += 1
                self._keep_staged(store, name)
        if not whole and not wrong and (self.unread or unreachable(self.repo.store)):
            self.unseen.append(name)
            return
        lacking = missing if not whole and not wrong else [store for store in missing if store in self._every]
        lacking = lacking[:1] if not whole and not wrong and not self._every else lacking
        for store, words in [*wrong, *((store, "is missing") for store in lacking)]:
            recipe = PackRecipe.find(self.sources, id, index, number, store)
            lost, nbytes = ([], 0) if recipe.complete else recipe.lost()
            if recipe.header is None:
                nbytes += index.packs[number].header_length
                lost = lost or [
                    spec.path for spec, pack in zip(index.specs, index.pack.tolist(), strict=True) if pack == number
                ]
            self.mendings.append(
                Mending(
                    id=id,
                    kind="pack",
                    place=store.url,
                    name=name,
                    wrong=words,
                    missing=words == "is missing",
                    size=recipe.length,
                    sources=tuple(recipe.shares().items()),
                    lost=tuple(lost),
                    lost_bytes=nbytes,
                    copies=bool(whole),
                    store=store,
                    recipe=recipe,
                )
            )

    def _keep_staged(self, store: Store, name: str) -> None:
        """Keeps in mind what lies beside an object that is whole."""
        start = name + object_names.STAGED
        self.left += [
            (there, entry) for there, entry in self._staged if there is store and entry.name.startswith(start)
        ]

    def _advance(self, nbytes: int) -> None:
        self.bytes_read += nbytes
        if self._emitter.listened:
            self._emitter.emit(Progress("verify", self.repo.url, self.bytes_read, self.bytes_read))


def _read(store: Store, name: str, limit: int) -> tuple[bytes | None, str]:
    """Returns an object's bytes, or what keeps them from being read. Raises StoreError where the store fails: that says
    nothing of the object."""
    try:
        return store.get(name, limit=limit), ""
    except ObjectNotFound:
        return None, "is missing"
    except CorruptionError as error:
        return None, error.message
    except StoreError as error:
        if not is_unreadable(error):
            raise
        return None, f"cannot be read: {error.message}"


def _decodes(decode: Callable[..., object], *arguments: object) -> bool:
    """Returns whether the last of the arguments, which `decode` takes first, is what it has to be."""
    *others, data = arguments
    try:
        decode(data, *others)
    except CorruptionError:
        return False
    return True


def _is_object(kind: str, name: str, repository: str, data: bytes) -> bool:
    try:
        objects.decode(kind, name, data, repository)
    except CorruptionError:
        return False
    return True


def _same(found: Found) -> Found:
    return found
