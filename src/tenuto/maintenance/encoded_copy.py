"""Copies checkpoints to a tier that stores them in an encoding of its own: compressed, or as differences to what lies
there already.

It is the same checkpoint under the same name: run, attempt and step, save id, content digest. Its manifest, its indexes
and its data files are that place's own, so the place is a repository like any other, whose retention, `verify` and
restores need to know nothing of this. No data file has the name of one of another place with other bytes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from tenuto.codec.digest import digest
from tenuto.crashpoints import crashpoint
from tenuto.engine.read.lazy_reader import LazyReader
from tenuto.engine.save.baseline import Baseline, baseline_in, baseline_of
from tenuto.engine.save.encoded_pack import Segment
from tenuto.engine.save.job import stored_in
from tenuto.engine.save.transcoder import TranscodedIndex, Transcoder, bases_of, bytes_from, pack_names, rows_of
from tenuto.errors import CheckpointNotFound, CorruptionError, KeyMissing, ObjectNotFound, StoreError, typed
from tenuto.maintenance.place_copy import PlaceCopy, removed
from tenuto.maintenance.replica_tidy import free_in
from tenuto.maintenance.shared_packs import lacking, manifest_of, out_of_trash, packs_of
from tenuto.maintenance.sign import SIGNED
from tenuto.maintenance.tables_again import SAVED
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, IndexEntry, Json, Manifest
from tenuto.policy.encoding import Encoding
from tenuto.repo.bases import usable_bases
from tenuto.repo.commit import signed
from tenuto.repo.encoded_places import encoding_of_place, is_encoded_in
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.index import encode_index
from tenuto.repo.format.manifest import MAX_MANIFEST, encode_manifest
from tenuto.repo.format.small_records import Begin, decode_begin, encode_begin
from tenuto.repo.lineage import latest
from tenuto.repo.replicated.places import home_of, places_of
from tenuto.repo.repository import Repo
from tenuto.seal.cipher import Identity, PackSealer
from tenuto.state.contract import Buffer
from tenuto.store.contract import Bytes, Store


class EncodedCopy(PlaceCopy):
    """Copies checkpoints to one place, encoded. One that was cut off begins anew: what it has left is freed first."""

    def __init__(
        self,
        repo: Repo,
        place: Store,
        encoding: Encoding,
        report: Callable[[str, int], None] = lambda name, nbytes: None,
        whole: Callable[[], Iterable[CheckpointId]] | None = None,
    ) -> None:
        """`whole`: returns the checkpoints that the place has, where somebody keeps account of them. Raises
        MissingExtra."""
        super().__init__(repo, place, report)
        self._there = Repo(place, repo.id, repo.chunk_bytes)
        self._whole = whole
        self._transcoder = Transcoder(encoding)
        self._last: tuple[CheckpointId, list[Index]] | None = None
        """What was encoded last, with its indexes there."""

    def send(self, name: str) -> None:
        """Copies a small object, but for signatures: those are of the objects that another place has."""
        with suppress(ObjectNotFound):
            data = self.repo.store.get(name, limit=MAX_MANIFEST)
            if not _is_signature(name, data, self.repo.id):
                self.put(name, data)

    def bring(self, id: CheckpointId, packs: Collection[str] | None = None) -> bool:
        """Encodes a checkpoint into the place, unless it is there; returns whether its manifest was put by this call.
        `packs`: given where some of it is lacking there: one that lacks data files is made anew.

        Every byte is verified as it is read, and decoded again after it was encoded. Raises as `PlaceCopy.bring`, and
        KeyMissing for a sealed checkpoint whose keys are not open.
        """
        there, self._there.keys = self.there(id), self.repo.keys
        if object_names.MANIFEST in there:
            if packs is None or is_whole_in(self.repo, self.place, id):
                self.bring_notes(id)
                return False
            if not is_encoded_in(self.repo, self.place, id):
                return super().bring(id, packs)  # it came before the place had an encoding
            return encode_again(self.repo, self.place, id)
        if self.place.children(object_names.trash_directory(id)).objects:
            return self._back_from_trash(id)
        if there:
            free_in(self.place, id)
        manifest = self.repo.manifest(id)
        with self._unless_removed(id):
            made = self._encoded(manifest)
            tables = [self._put_table(manifest, index) for index, _ in made]
            if manifest.boxes is not None:
                self.put(f"{id.directory}/{manifest.boxes.name}", self.repo.index_bytes(id, manifest.boxes))
        new = self._manifest(manifest, made, tables)
        crashpoint("packs copied, checkpoint not looked for again")
        if not self.repo.exists(id):
            free_in(self.place, id)
            raise removed(id)
        crashpoint("place has the data files of a checkpoint, not its manifest")
        self.put(id.manifest, encode_manifest(new, self.repo.id))
        crashpoint("place has a checkpoint")
        self._take_back_unless_own(new, {pack.object_name(id) for index, _ in made for pack in index.packs})
        self._transcoder.checkpoints += 1
        self._last = id, [index for index, _ in made]
        self.bring_notes(id)
        return True

    def _take_back_unless_own(self, manifest: Manifest, packs: Collection[str]) -> None:
        """Takes back the manifest that was put just now where a part is gone, or is another's: somebody else who copies
        to this place has taken it for what a copy has left that was cut short."""
        self._take_back_unless_whole(manifest.id, packs)
        try:
            for entry in manifest.tables:
                self._there.index_bytes(manifest.id, entry)
        except CorruptionError as error:
            self.place.delete([manifest.id.manifest])
            raise StoreError(
                f"{error.message}: another process copies {manifest.id} too", subject=error.subject
            ) from None

    def _back_from_trash(self, id: CheckpointId) -> bool:
        """Makes a checkpoint again of one that lies in the trash there because others rest on it."""
        manifest, data = manifest_of(self._there, id)
        if lost := lacking(self.place, packs_of(self._there, manifest)):
            raise StoreError(
                f"{id} lies in the trash of {self.place.url}, needed by others, and {lost[0]} of it is gone",
                subject=str(id),
                hint="it can be copied there once nothing there rests on it",
            )
        self.put(id.manifest, data)
        out_of_trash(self.place, id)
        self.bring_notes(id)
        return True

    # -- encoding ------------------------------------------------------------------------------------------------------

    def _encoded(self, manifest: Manifest) -> list[tuple[Index, Json]]:
        """Puts the data files, and before them what announces them. Returns the indexes with what became of each."""
        id, token, base = manifest.id, secrets.token_hex(4), self._newest_before(manifest.id)
        indexes = [self.repo.index(manifest, rank) for rank in range(len(manifest.indexes))]
        baselines = [self._baseline(base, index) for index in indexes]
        names = [object_names.BOXES] if manifest.boxes is not None else []
        for index in indexes:
            names += [object_names.index_file(index.rank), *pack_names(index, token)]
        bases = bases_of(baselines)
        self._begin(Begin(id, manifest.save_id, tuple(names), self._parent(id), bases))
        usable = usable_bases(self._there, id, bases, through=base)
        return [
            self._encoded_rank(manifest, index, None if one is None else _resting_on(one, usable), base, token)
            for index, one in zip(indexes, baselines, strict=True)
        ]

    def _begin(self, begin: Begin) -> None:
        data, places = encode_begin(begin, self.repo.id), places_of(self.repo.store)
        assert places is not None, "it has a tier"
        places.replica(self.place).prepare(begin.id.manifest, data)
        crashpoint("place has the tables of a checkpoint, not its data files")

    def _parent(self, id: CheckpointId) -> CheckpointId | None:
        """Returns the parent of a checkpoint's attempt, as its `begin.json` says."""
        name = object_names.begin_name(id)
        try:
            return decode_begin(self.repo.store.get(name, limit=MAX_MANIFEST), id, self.repo.id).parent
        except ObjectNotFound:
            return self.repo.attempt(id.run, id.attempt).parent

    def _newest_before(self, id: CheckpointId) -> CheckpointId | None:
        """Returns the newest checkpoint there of the run that is older: the one that is named, and differed from."""
        if self._whole is not None:
            known = [one for one in self._whole() if one.run == id.run]
        else:
            known = self._there.checkpoints(id.run)
        return max((one for one in known if (one.attempt, one.step) < (id.attempt, id.step)), default=None)

    def _baseline(self, base: CheckpointId | None, index: Index) -> Baseline | None:
        """Returns what the chunks of an index may be named in, and be differences to."""
        if base is None or not self._transcoder.encoding.dedupe:
            return None
        if self._last is not None and self._last[0] == base:
            known = next((one for one in self._last[1] if one.rank == index.rank), None)
            found = None if known is None else baseline_in(known, base)
        else:
            found = baseline_of(self._there, base, index.rank)
        # What is sealed rests on what is sealed by the same key, and nothing else.
        fits = found is not None and (found.chunk_bytes, found.sealed) == (index.chunk_bytes, index.sealed)
        return found if fits else None

    def _encoded_rank(
        self, manifest: Manifest, index: Index, baseline: Baseline | None, base: CheckpointId | None, token: str
    ) -> tuple[Index, Json]:
        id, rank = manifest.id, index.rank
        if index.sealed is not None and self.repo.keys is None:
            raise KeyMissing(
                f"{id} is sealed, and what is sealed cannot be made smaller without its keys",
                subject=str(id),
                hint="give the keys, or leave the tier's encoding out: it gets the sealed bytes then",
            )
        with ExitStack() as opened:
            reader = LazyReader(self.repo, id, self.repo.table(manifest, rank))
            opened.callback(reader.close)
            behind = None
            if baseline is not None and base is not None and self._transcoder.encoding.delta:
                behind = _BaseReader(self._base_readers(base, rank), opened)
            made = TranscodedIndex(
                self._transcoder,
                index,
                rows_of(reader, index),
                lambda segment: self._put_segment(id, segment),
                token=token,
                baseline=baseline,
                base=None if behind is None else behind.read,
                seal=None if index.sealed is None else lambda file, start: self._sealer(manifest, file, start),
            )
            return made.run()

    def _base_readers(self, base: CheckpointId, rank: int) -> list[Callable[[], LazyReader]]:
        """Returns what opens the checkpoint that differences are made to: in a faster place, where one has the same,
        else in this one."""

        def opened(repo: Repo) -> LazyReader:
            manifest = repo.manifest(base)
            if manifest.content != self._there.manifest(base).content:
                raise CorruptionError(f"{base} is another checkpoint in {repo.url}", subject=str(base))
            return LazyReader(repo, base, repo.table(manifest, rank))

        return [lambda: opened(self.repo), lambda: opened(self._there)]

    def _sealer(self, manifest: Manifest, file: str, start: int) -> PackSealer:
        assert self.repo.keys is not None, "checked before"
        identity = Identity(self.repo.id, manifest.save_id, f"{manifest.id.directory}/{file}")
        return self.repo.keys.new_pack(identity, start=start)

    def _put_segment(self, id: CheckpointId, segment: Segment) -> None:
        name = f"{id.directory}/{segment.entry.name}"
        self.place.put_if_absent(name, segment, token=secrets.token_hex(16))
        self._report(name, segment.length)

    def _put_table(self, manifest: Manifest, index: Index) -> IndexEntry:
        file, data = object_names.index_file(index.rank), encode_index(index, manifest.id, self.repo.id)
        self.place.put_if_absent(f"{manifest.id.directory}/{file}", Bytes(data), token=secrets.token_hex(16))
        sha256 = hashlib.sha256(data).hexdigest() if index.sealed is not None else ""
        return IndexEntry(file, len(data), digest(data), sha256)

    def _manifest(
        self, manifest: Manifest, made: Sequence[tuple[Index, Json]], tables: Sequence[IndexEntry]
    ) -> Manifest:
        saved = {SAVED: manifest.environment["encoding"]} if "encoding" in manifest.environment else {}
        about = {**manifest.environment, "encoding": {**self._transcoder.about(made), **saved}}
        stored = stored_in(*(index for index, _ in made))
        new = replace(manifest, indexes=tuple(tables), environment=about, **stored)
        return signed(self.repo, new) if manifest.code else new


class _BaseReader:
    """Reads a checkpoint from the first of several places that has it undamaged."""

    def __init__(self, makers: Sequence[Callable[[], LazyReader]], opened: ExitStack) -> None:
        self._makers = list(makers)
        self._opened = opened
        self._reader: LazyReader | None = None

    def read(self, row: int, start: int, out: Buffer) -> bool:
        while self._reader is not None or self._makers:
            try:
                if self._reader is None:
                    self._reader = self._makers.pop(0)()
                    self._opened.callback(self._reader.close)
                self._reader.read(row, f"leaf {row}", bytes_from(start, len(out)), 1, out)
                return True
            except (CheckpointNotFound, CorruptionError, StoreError):
                self._reader = None  # the next place; without one, chunks are stored by themselves
        return False


def copy_to(
    repo: Repo,
    place: Store,
    encoding: Encoding | None,
    report: Callable[[str, int], None] = lambda name, nbytes: None,
    whole: Callable[[], Iterable[CheckpointId]] | None = None,
) -> PlaceCopy:
    """Returns what copies checkpoints to a place. `encoding`: that of the place; None: as they are."""
    if encoding is None or encoding.plain:
        return PlaceCopy(repo, place, report)
    return EncodedCopy(repo, place, encoding, report, whole)


def encode_again(repo: Repo, place: Store, id: CheckpointId) -> bool:
    """Frees what a place has of a checkpoint in an encoding of its own, and makes it again, resting on nothing there;
    before that those that rest on it. Returns False where it is removed here meanwhile. Raises StoreError where one of
    those is not here, so that it would be lost."""
    there = Repo(place, repo.id, repo.chunk_bytes)
    for one in resting_on(there, id):
        if not repo.exists(one):
            raise StoreError(
                f"{id} is damaged in {place.url}, and {one}, which rests on it there, is nowhere else",
                subject=str(id),
                hint=f"once that is removed there, {typed('tenuto', 'replicate', repo.url)} copies {id} again",
            )
    encoding = encoding_of_place(there.manifest(id))
    assert encoding is not None, "it is encoded there"
    for one in resting_on(there, id):
        encode_again(repo, place, one)
    try:
        free_in(place, id)
        return EncodedCopy(repo, place, encoding, whole=tuple).bring(id)
    except CheckpointNotFound:
        return False


def resting_on(there: Repo, id: CheckpointId) -> list[CheckpointId]:
    """Returns the checkpoints of a place that rest on data files of this one, newest first."""
    found = []
    for one in there.checkpoints(id.run):
        with suppress(CheckpointNotFound):  # removed meanwhile
            if id in there.manifest(one).bases:
                found.append(one)
    return sorted(found, reverse=True)


def encoding_in(repo: Repo, place: Store, run: str) -> Encoding | None:
    """Returns the encoding of its own in which a place has the newest checkpoint of a run; None where it stores what
    comes as it came."""
    there = Repo(place, repo.id, repo.chunk_bytes)
    try:
        newest = latest(there, run)
        found = None if newest is None else encoding_of_place(there.manifest(newest))
        if newest is None or found is None or (repo.exists(newest) and not is_encoded_in(repo, place, newest)):
            return None
        return found
    except (CheckpointNotFound, CorruptionError, StoreError):
        return None


def is_whole_in(repo: Repo, place: Store, id: CheckpointId) -> bool:
    """Returns whether a place has a checkpoint in an encoding of its own, with all data files that it needs there."""
    there = Repo(place, repo.id, repo.chunk_bytes)
    try:
        if place is home_of(repo.store) or not is_encoded_in(repo, place, id):
            return False
        return not lacking(place, packs_of(there, there.manifest(id)))
    except (CheckpointNotFound, CorruptionError, StoreError):
        return False  # whoever needs it finds out what is wrong


def _resting_on(baseline: Baseline, usable: Collection[CheckpointId]) -> Baseline:
    gone = [pack.at not in usable for pack in baseline.packs]
    return baseline.without(gone) if any(gone) else baseline


def _is_signature(name: str, data: bytes, repository: str) -> bool:
    if f"/{object_names.NOTES}/" not in name:
        return False
    try:
        return objects.decode("note", name, data, repository).text("note") == SIGNED
    except CorruptionError:
        return False
