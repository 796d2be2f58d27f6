"""One checkpoint's structure: every object that it needs is there, of the right length, and agrees with the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TypeVar

import numpy as np

from tenuto.codec.chunk_map import ChunkMap
from tenuto.codec.digest import digest
from tenuto.engine.read.chunk_reader import AlignedBuffers, ChunkRun, chunk_runs, differing, split_run
from tenuto.engine.read.packs import OpenPack
from tenuto.engine.staging.buffer_layout import stored_name
from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    FormatTooNew,
    ObjectNotFound,
    RepositoryError,
    ShardMismatch,
    StateError,
    StoreError,
    TenutoError,
    typed,
)
from tenuto.maintenance.findings import Finding, numbered_findings
from tenuto.maintenance.reading import PartRead
from tenuto.maintenance.replica_tidy import targets
from tenuto.maintenance.shared_packs import has_another
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import dtype
from tenuto.model.records import Index, Manifest
from tenuto.record import record
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import content_of
from tenuto.repo.format.safetensors import Header, parse_header
from tenuto.repo.format.shard_table import BoxTable, check_rank, saved_boxes
from tenuto.repo.format.small_records import decode_begin, read_attempt
from tenuto.repo.notes import notes
from tenuto.repo.refs import numbers
from tenuto.repo.replicated.places import (
    all_places,
    describe_missing_pack,
    followers_of,
    places_in_order,
    unreachable,
)
from tenuto.repo.replicated.replica import is_there
from tenuto.repo.repository import Repo
from tenuto.sharding.coverage import check_coverage
from tenuto.state.tree import leaf_paths
from tenuto.store.contract import Store, is_inconclusive
from tenuto.units import count

# --------------------------------------------------------------------------------------------------
# What a verification says: one finding for each thing that is not as it was saved, or that is worth a check.

# --------------------------------------------------------------------------------------------------
# Reads every byte of a checkpoint's packs and compares each chunk with its digest, several pieces at once.


Fault = tuple[int, int, int, str]
"""A damaged chunk: leaf, pack, offset, and the problem."""


class Scan:
    """Compares one checkpoint's packs with one index.

    `on_bytes(n)` is called after each piece, from any thread. `run` returns one finding for each damaged leaf.
    """

    def __init__(self, store: Store, id: CheckpointId, index: Index, *, on_bytes: Callable[[int], None]) -> None:
        self._store = store
        self._id = id
        self._index = index
        self._on_bytes = on_bytes
        self._chunks = ChunkMap.of(index)
        self._buffers = AlignedBuffers()
        self._packs: dict[int, OpenPack] = {}
        self._unread: dict[int, str] = {}
        """The packs that the store does not let be read any more, and why."""

    def run(self, usable: set[int], threads: int, part: PartRead | None = None) -> list[Finding]:
        """Scans the packs numbered in `usable` (present, and as long as they should be). `part`: only what of them has
        not been read yet, and as much as may be."""
        found: list[Finding] = []
        try:
            for number in sorted(usable):
                try:
                    name = self._name(number)
                    self._packs[number] = OpenPack(name, self._store.open(name), None)
                except StoreError as error:
                    if is_inconclusive(error):
                        self._unread[number] = error.message
                        continue
                    found.append(
                        Finding(self._id, "error", f"cannot be opened: {error.message}", object=self._name(number))
                    )
            todo = [piece for piece in chunk_runs(self._chunks) if piece.pack in self._packs]
            if part is not None:
                todo = self._chosen(todo, part)
            scan = self._piece if part is None else partial(self._paced, part)
            if len(todo) <= 1:
                bad = self._collected(todo, map(scan, todo), part)
            else:
                with ThreadPoolExecutor(max(1, threads), thread_name_prefix="tenuto-verify") as pool:
                    bad = self._collected(todo, pool.map(scan, todo), part)
        finally:
            for pack in self._packs.values():
                pack.close()
        unread = [not_read(self._id, message, self._name(number)) for number, message in self._unread.items()]
        if unread and part is not None:
            part.complete = False
        return [*found, *unread, *self._by_leaf([*bad, *self._of_copies(bad)])]

    def _place(self, number: int) -> str:
        return f"{self._store.url} {self._name(number)}"

    def _chosen(self, pieces: Sequence[ChunkRun], part: PartRead) -> list[ChunkRun]:
        """Returns the pieces to read now, each pack from where it was left."""
        left = [piece for piece in pieces if piece.start >= part.begin(self._place(piece.pack))]
        found = list(takewhile(lambda piece: part.pace.take(piece.stop - piece.start), left))
        part.complete &= len(found) == len(left)
        return found

    def _paced(self, part: PartRead, piece: ChunkRun) -> list[Fault] | None:
        return self._piece(piece) if part.pace.wait(piece.stop - piece.start) else None

    def _collected(
        self, pieces: Sequence[ChunkRun], results: Iterable[list[Fault] | None], part: PartRead | None
    ) -> list[Fault]:
        """Returns the faults of all pieces up to the first that was not read any more."""
        bad: list[Fault] = []
        for piece, faults in zip(pieces, results, strict=True):
            if faults is None:
                assert part is not None, "only a pace ends early"
                part.complete = False
                break
            if piece.pack in self._unread:
                continue
            bad += faults
            if part is not None:
                part.read(self._place(piece.pack), piece.stop, piece.stop - piece.start)
        return bad

    def _name(self, number: int) -> str:
        return self._index.packs[number].object_name(self._id)

    def _piece(self, piece: ChunkRun) -> list[Fault]:
        """Returns the damaged chunks of a piece: leaf, pack, offset, and the problem."""
        chunks = piece.chunks
        if piece.pack in self._unread:
            return []
        try:
            data = self._buffers.fetch(self._packs[piece.pack], piece.start, piece.stop)
        except (CorruptionError, StoreError) as error:
            if is_inconclusive(error):
                self._unread.setdefault(piece.pack, error.message)
                return []
            if len(chunks) > 1:
                # Somewhere in it: splitting finds the chunk that cannot be read, and checks the others.
                return [fault for part in split_run(piece) for fault in self._piece(part)]
            return [(int(chunks.row[0]), piece.pack, piece.start, f"cannot be read: {error.message}")]
        wrong = chunks.take(differing(chunks, self._chunks.stored_digests, data))
        columns = (wrong.row.tolist(), wrong.offset.tolist(), wrong.stored.tolist())
        bad = [
            (leaf, piece.pack, offset, f"{size} bytes are not what was saved")
            for leaf, offset, size in zip(*columns, strict=True)
        ]
        self._on_bytes(piece.stop - piece.start)
        return bad

    def _of_copies(self, bad: list[Fault]) -> list[Fault]:
        """Returns the chunks that are rounded from what these damaged ones hold, and lie elsewhere."""
        stored = self._chunks.stored
        if not bad or stored is None or stored.rounded is None:
            return []
        places = {(pack, offset): message for _, pack, offset, message in bad}
        whose = list(zip(stored.pack.tolist(), stored.offset.tolist(), strict=True))
        first = {number: place for number, place in enumerate(whose) if place in places}
        hurt = dict(first)
        built = np.flatnonzero(stored.base >= 0).tolist()
        below = {number: stored.below(np.array([number])).tolist() for number in built}
        grown = True
        while grown:  # once for each link of the longest chain
            more = {
                number: hurt[one]
                for number, others in below.items()
                if number not in hurt
                for one in others
                if one in hurt
            }
            hurt |= more
            grown = bool(more)
        row = np.searchsorted(self._chunks.first, np.arange(len(self._chunks.digests)), side="right") - 1
        return [
            (int(row[number]), *hurt[number], f"it is rounded from a tensor of which {places[hurt[number]]}")
            for number in np.flatnonzero(stored.rounded).tolist()
            if number in hurt and number not in first
        ]

    def _by_leaf(self, bad: list[Fault]) -> list[Finding]:
        """Returns one finding per leaf, at its first damaged chunk: a lost disk must not print a million lines."""
        first: dict[int, tuple[int, int, str]] = {}
        count: dict[int, int] = {}
        for leaf, pack, offset, message in bad:
            count[leaf] = count.get(leaf, 0) + 1
            if leaf not in first or offset < first[leaf][1]:
                first[leaf] = (pack, offset, message)
        return [
            Finding(
                self._id,
                "error",
                message if count[leaf] == 1 else f"{message} (and {count[leaf] - 1} more chunks of this leaf)",
                leaf=self._index.specs[leaf].path,
                object=self._name(pack),
                offset=offset,
            )
            for leaf, (pack, offset, message) in sorted(first.items())
        ]


Small = TypeVar("Small")
UNREADABLE = (CorruptionError, RepositoryError, StoreError)


@record
class PackCopy:
    """One copy of a pack whose leaves are worth reading. `flawed`: whether something else of it is wrong. `prefix`:
    begins the messages about it."""

    store: Store
    flawed: bool
    prefix: str


@dataclass(slots=True)
class Inspection:
    """The result of inspecting one checkpoint. `mirrors`: the places that must have each of its packs, if there are
    several: mirrors, and the tiers that have it."""

    id: CheckpointId
    mirrors: Sequence[Store] = ()
    findings: list[Finding] = field(default_factory=list)
    manifest: Manifest | None = None
    indexes: list[Index] = field(default_factory=list)
    packs: list[dict[int, list[PackCopy]]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    """Packs that may lie on a node that is not found from here."""
    lacking: Counter[str] = field(default_factory=Counter)
    """How many objects each mirror lacks."""
    apart: Sequence[Store] = ()
    """Places that have another checkpoint under this name."""
    objects: int = 0
    bytes_read: int = 0

    def error(
        self, message: str, name: str, *, leaf: str | None = None, offset: int | None = None, harms: bool = True
    ) -> None:
        self.findings.append(Finding(self.id, "error", message, leaf, name, offset, harms))

    def failed(self, error: TenutoError, name: str, *, prefix: str = "", harms: bool = True) -> None:
        """Adds what reading an object has come to: it is damaged or missing, or its store does not say."""
        if is_inconclusive(error):
            self.findings.append(not_read(self.id, prefix + error.message, name))
        else:
            self.error(prefix + _words(error), name, harms=harms)

    @property
    def harmed(self) -> bool:
        """Whether it is not known that all of it can be restored."""
        return any(one.severity == "unread" or (one.severity == "error" and one.harms_restore) for one in self.findings)


def not_read(id: CheckpointId, why: str, name: str) -> Finding:
    """Returns the finding of an object whose store did not let it be read."""
    return Finding(
        id, "unread", f"could not be read, so it may be whole or not: {why}", object=name, harms_restore=False
    )


def inspect(repo: Repo, id: CheckpointId, manifest: Manifest | None = None) -> Inspection:
    """Reads everything of a checkpoint except what is behind its packs' headers. `manifest`: replaces the one that is
    not in its place."""
    # A tier gets and keeps what its settings say: neither what it passed over nor what is removed is lacking there.
    passing = [place for place in followers_of(repo.store) if manifest is not None or not _has_begun(place, id)]
    mirrors = [place for place in targets(repo) if place not in passing]
    found = Inspection(id)
    try:
        found.manifest = repo.manifest(id) if manifest is None else manifest
    except FormatTooNew:
        raise
    except UNREADABLE as error:
        found.failed(error, id.manifest)
        return found
    found.objects += 1
    found.apart = _apart(repo, found, found.manifest)
    mirrors = [place for place in mirrors if place not in found.apart]
    found.mirrors = mirrors if len(mirrors) > 1 else ()
    _read_indexes(repo, found, found.manifest)
    _check_copies(repo, found, found.manifest)
    for url, lacking in found.lacking.items():
        if lacking:
            brings = typed("tenuto", "replicate", repo.url)
            message = f"{url} lacks {count(lacking, 'object')} of it: `{brings}` brings what can be read elsewhere"
            found.findings.append(Finding(found.id, "info", message, harms_restore=False))
    _check_begin(repo, found, found.manifest)
    name = object_names.attempt_name(id.run, id.attempt)
    _read_small(repo, found, name, lambda data: read_attempt(repo.decode("attempt", name, data), id.run, id.attempt))
    _check_notes(repo, found)
    return found


def _apart(repo: Repo, found: Inspection, manifest: Manifest) -> list[Store]:
    """Returns the places that have another checkpoint under this name, as of another line of training."""
    apart = []
    for place in [*all_places(repo.store)[1:], *followers_of(repo.store)]:
        try:
            if has_another(repo, place, manifest):
                apart.append(place)
                message = f"{place.url} has another checkpoint under this name, which is not compared with this one"
                found.findings.append(Finding(found.id, "info", message, harms_restore=False))
        except StoreError as error:
            found.failed(error, found.id.manifest, prefix=f"in {place.url}: ")
    return apart


def _has_begun(tier: Store, id: CheckpointId) -> bool:
    """Returns whether a tier has the checkpoint, with all that belongs to it or without."""
    try:
        tier.stat(id.manifest)
    except ObjectNotFound:
        return False
    except UNREADABLE:
        return True  # whoever reads it finds out what is wrong
    return True


def _check_copies(repo: Repo, found: Inspection, manifest: Manifest) -> None:
    """Compares the copies of the manifest, the indexes and the table of parts in other places, byte for byte. A node's
    own place has the indexes of its own ranks; a mirror has all."""
    others = [store for store in all_places(repo.store)[1:] if store not in found.apart]
    if not others:
        return
    wanted = [(f"{found.id.directory}/{entry.name}", entry.length, entry.digest) for entry in manifest.tables]
    try:
        data = repo.manifest_bytes(found.id)
        wanted.append((found.id.manifest, len(data), digest(data)))
    except (CheckpointNotFound, *UNREADABLE):
        pass  # of one that was removed; what is damaged has been told
    for store in others:
        for name, length, expected in wanted:
            try:
                if digest(store.get(name, limit=length)) == expected:
                    continue
                found.error(f"in {store.url}: is not what it has to be", name, harms=False)
            except ObjectNotFound:
                found.lacking[store.url] += store in found.mirrors
            except UNREADABLE as error:
                found.failed(error, name, prefix=f"in {store.url}: ", harms=False)


def _read_indexes(repo: Repo, found: Inspection, manifest: Manifest) -> None:
    boxes = _read_boxes(repo, found, manifest)
    for rank, entry in enumerate(manifest.indexes):
        index = _read_index(repo, found, manifest, rank, boxes)
        if index is None:
            continue
        found.objects += 1
        found.bytes_read += entry.length
        found.indexes.append(index)
        found.packs.append({number: _pack_copies(repo, found, index, number) for number in range(len(index.packs))})
    if found.unseen:
        unseen, first = len(found.unseen), found.unseen[0]
        message = f"{count(unseen, 'data file')} not looked at; the first {describe_missing_pack(repo.store)}"
        found.findings.append(Finding(found.id, "info", message, object=first, harms_restore=False, unseen=unseen))
    if len(found.indexes) == len(manifest.indexes):
        _check_totals(found, manifest, boxes)


def _read_boxes(repo: Repo, found: Inspection, manifest: Manifest) -> BoxTable | None:
    """Reads the table of parts and checks that it has every element of every leaf once. Returns None without a usable
    one."""
    if manifest.boxes is None:
        return None
    name = f"{found.id.directory}/{manifest.boxes.name}"
    try:
        boxes = repo.boxes(manifest)
        assert boxes is not None, "the manifest names one"
    except FormatTooNew:
        raise
    except (*UNREADABLE, StateError) as error:
        found.failed(error, name)
        return None
    found.objects += 1
    found.bytes_read += manifest.boxes.length
    try:
        check_coverage(saved_boxes(boxes, leaf_paths(manifest.tree)))
    except ShardMismatch as error:
        found.error(f"does not have every element of every leaf once: {error.message}", name, leaf=error.subject)
    return boxes


def _read_index(repo: Repo, found: Inspection, manifest: Manifest, rank: int, boxes: BoxTable | None) -> Index | None:
    name = f"{found.id.directory}/{manifest.indexes[rank].name}"
    try:
        if boxes is None or manifest.boxes is None:
            return repo.index(manifest, rank)
        table = repo.table(manifest, rank)
        index = table.index(manifest.tree)
    except FormatTooNew:
        raise
    except UNREADABLE as error:
        found.failed(error, name)
        return None
    try:
        check_rank(boxes, table, f"{found.id.directory}/{manifest.boxes.name}")
    except CorruptionError as error:
        found.error(error.message, f"{found.id.directory}/{manifest.boxes.name}")
    return index


def _check_totals(found: Inspection, manifest: Manifest, boxes: BoxTable | None) -> None:
    nbytes = sum(pack.length for index in found.indexes for pack in index.packs if pack.at is None)
    leaves = boxes.leaves if boxes is not None else sum(len(index.specs) for index in found.indexes)
    said = manifest.stored_bytes
    if (nbytes, leaves) != (said, manifest.leaves) and (boxes is None) == (manifest.boxes is None):
        message = f"counts {manifest.leaves} leaves in {said} bytes, its indexes {leaves} in {nbytes}"
        found.error(message, found.id.manifest, harms=False)
    tree = canonical_json.spell(manifest.tree)
    if (boxes is None) == (manifest.boxes is None) and content_of(tree, found.indexes, boxes) != manifest.content:
        found.error("its content digest is not that of its leaves", found.id.manifest)


def _pack_copies(repo: Repo, found: Inspection, index: Index, number: int) -> list[PackCopy]:
    """Returns the copies of one pack whose leaves are worth reading. Damage of one copy does no harm while another is
    intact."""
    name = index.packs[number].object_name(found.id)
    stores: list[Store] = []
    unread: list[Store] = []
    for store in places_in_order(repo.store, name):
        try:
            if store not in found.apart and is_there(store, name):
                stores.append(store)
        except StoreError as error:
            unread.append(store)
            found.failed(error, name, prefix=f"in {store.url}: ")
    if not stores and unread:
        return []
    if not stores and unreachable(repo.store):
        found.unseen.append(name)
        return []
    found.lacking.update(store.url for store in found.mirrors if store not in (*stores, *unread))
    stores = stores or [repo.store]
    checks = [check_pack(store, found.id, index, number) for store in stores]
    copies = [
        PackCopy(store, bool(check.findings), f"in {store.url}: " if len(stores) > 1 else "")
        for store, check in zip(stores, checks, strict=True)
    ]
    _take(found, copies, [check.findings for check in checks], unread=bool(unread))
    found.objects += sum(check.read for check in checks)
    found.bytes_read += sum(check.read for check in checks) * index.packs[number].header_length
    return [copy for copy, check in zip(copies, checks, strict=True) if check.readable]


def _take(
    found: Inspection, copies: Sequence[PackCopy], findings: Sequence[Sequence[Finding]], *, unread: bool = False
) -> None:
    """Adds the findings of the copies of one pack. They harm if no intact copy is left, and none that is not judged.
    `unread`: whether there may be one more that is not."""
    harms = not unread and all(
        (copy.flawed or some) and not any(one.severity == "unread" for one in some)
        for copy, some in zip(copies, findings, strict=True)
    )
    for copy, some in zip(copies, findings, strict=True):
        found.findings += [
            replace(one, message=copy.prefix + one.message, harms_restore=harms and one.severity == "error")
            for one in some
        ]


@dataclass(slots=True)
class PackCheck:
    """A copy of a pack without its leaves. `read`: whether its header could be read; `readable`: whether its leaves are
    worth reading."""

    findings: list[Finding] = field(default_factory=list)
    read: bool = False
    readable: bool = False


def check_pack(store: Store, id: CheckpointId, index: Index, number: int) -> PackCheck:
    """Checks presence, length and header of one copy of a pack."""
    pack, check = index.packs[number], PackCheck()
    name = pack.object_name(id)

    def wrong(message: str, leaf: str | None, offset: int | None = None) -> None:
        whose = "" if pack.at is None else f" (a data file of {pack.at}, on which it rests)"
        check.findings.append(Finding(id, "error", message + whose, leaf, name, offset))

    try:
        with store.open(name) as reader:
            if reader.length != pack.length:
                leaf = _first_leaf(index, number, beyond=reader.length)
                wrong(f"is {reader.length} bytes long; {pack.length} were saved", leaf)
                return check
            block = np.empty(pack.header_length, np.uint8)
            reader.read_into(0, block.data)
    except ObjectNotFound:
        wrong("is missing", _first_leaf(index, number))
        return check
    except UNREADABLE as error:
        if is_inconclusive(error):
            check.findings.append(not_read(id, error.message, name))
        else:
            wrong(_words(error), _first_leaf(index, number))
        return check
    check.read = check.readable = True
    if digest(block) != pack.header_digest:
        wrong("its header is not what was saved", _first_leaf(index, number), 0)
        return check
    if pack.adopted or index.stored is not None:  # what other tools make of it is their own; nothing, if it is encoded
        return check
    try:
        header = parse_header(block.data, name=name, file_length=pack.length)
    except CorruptionError as error:
        wrong(_words(error), _first_leaf(index, number), 0)
        return check
    for leaf, message in _disagreements(header, index, number):
        wrong(message, leaf)
    return check


def scan(found: Inspection, *, on_bytes: Callable[[int], None], threads: int, part: PartRead | None = None) -> None:
    """Reads every byte of each copy of the packs that are worth reading, and adds the findings. `part`: only what has
    not been read yet, and as much as may be."""
    before = part.cycle.bytes if part is not None else 0
    for index, packs in zip(found.indexes, found.packs, strict=True):
        stores = {id(copy.store): copy.store for copies in packs.values() for copy in copies}
        scanned: dict[tuple[int, str], list[Finding]] = {}
        for key, store in stores.items():
            numbers = {number for number, copies in packs.items() if any(copy.store is store for copy in copies)}
            for finding in Scan(store, found.id, index, on_bytes=on_bytes).run(numbers, threads, part):
                scanned.setdefault((key, finding.object or ""), []).append(finding)
            if part is None:
                found.bytes_read += sum(index.packs[one].length - index.packs[one].header_length for one in numbers)
        for number, copies in packs.items():
            name = index.packs[number].object_name(found.id)
            _take(found, copies, [scanned.get((id(copy.store), name), []) for copy in copies])
    if part is not None:
        found.bytes_read += part.cycle.bytes - before


def _disagreements(header: Header, index: Index, number: int) -> Iterator[tuple[str | None, str]]:
    """Yields where a pack's header disagrees with the index: another tool would read other bytes than Tenuto."""
    if header.metadata.get("tenuto.save_id") != index.save_id:
        yield None, "its header carries another save's id"
    rows = np.flatnonzero(index.pack == number).tolist()
    for row in rows:
        spec, start = index.specs[row], int(index.offset[row])
        entry = header.get(stored_name(spec))
        code = dtype(spec.dtype).code or "U8"
        stop = start + int(index.length[row])
        if entry is None or (entry.start, entry.stop, entry.code) != (start, stop, code):
            yield spec.path, "the data file's header and the index do not agree on this leaf"
    if len(header) != len(rows):
        yield None, f"its header names {len(header)} leaves, the index {len(rows)}"


def _first_leaf(index: Index, number: int, *, beyond: int = 0) -> str | None:
    """Returns the path of the first leaf in a pack that ends behind byte `beyond`."""
    chunks = ChunkMap.of(index).all_stored()
    behind = np.flatnonzero((chunks.pack == number) & (chunks.end > beyond))
    if not len(behind):  # only leaves of no bytes lie there
        rows = np.flatnonzero((index.pack == number) & (index.stored is None))
        return index.specs[int(rows[0])].path if len(rows) and not beyond else None
    return index.specs[int(chunks.row[behind[np.argmin(chunks.offset[behind])]])].path


def _check_begin(repo: Repo, found: Inspection, manifest: Manifest) -> None:
    name = object_names.begin_name(found.id)
    begin = _read_small(repo, found, name, lambda data: decode_begin(data, found.id, repo.id))
    if begin is None:
        return
    if begin.save_id != manifest.save_id:
        found.error("belongs to another save than the manifest", name, harms=False)
    named = {entry.name for entry in manifest.tables}
    named.update(pack.name for index in found.indexes for pack in index.packs if pack.at is None)
    if not named <= set(begin.names):
        found.error(f"does not list {', '.join(sorted(named - set(begin.names)))}", name, harms=False)


def _read_small(repo: Repo, found: Inspection, name: str, decode: Callable[[bytes], Small]) -> Small | None:
    """Reads and decodes an object. Returns None if it cannot be read, a finding that harms no restore."""
    try:
        read = decode(repo.store.get(name, limit=objects.SMALL))
    except FormatTooNew:
        raise
    except UNREADABLE as error:
        found.failed(error, name, harms=False)
        return None
    found.objects += 1
    return read


def _check_notes(repo: Repo, found: Inspection) -> None:
    directory = object_names.notes_directory(found.id)
    there = numbers(repo, directory)
    found.findings += numbered_findings(repo, directory, there, found.id)
    try:
        found.objects += len(notes(repo, found.id))
    except StoreError as error:
        found.failed(error, error.subject or directory, harms=False)


def _words(error: TenutoError) -> str:
    return "is missing" if isinstance(error, ObjectNotFound) else error.message
