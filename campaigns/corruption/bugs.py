"""Bugs that are seeded one at a time: each lets some damage pass, and the campaign has to notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest import mock

import numpy as np

from campaigns.corruption.repairs import run_repairs
from campaigns.corruption.units import Unit, run_unit
from campaigns.simulated_processes import replacing
from tenuto.engine.read import choose, encoded_chunks
from tenuto.engine.read.chunk_reader import ChunkReader
from tenuto.engine.read.encoded_chunks import ChunkDecoder
from tenuto.errors import CorruptionError, ObjectNotFound
from tenuto.maintenance import findings, inspect, repair_plan, verify
from tenuto.maintenance.census import SaveDirectory
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.repo import repository
from tenuto.repo.format import objects
from tenuto.repo.lost import Witnesses

Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Bug:
    name: str
    breaks: str
    patch: Patch
    shapes: tuple[str, ...] = ("chunks", "steps", "loader")
    kinds: tuple[str, ...] = ()
    """The objects that it can be seen at; empty: those that most faults strike."""
    repair: bool = False
    """Whether it can be seen at repairs."""


@dataclass
class BugResult:
    name: str
    breaks: str
    caught: bool
    faults: int
    how: str


def hunt(bug: Bug, seed: int, *, limit: int = 4000, each: int = 100) -> BugResult:
    """Seeds one bug and looks for it, in at most `limit` faults."""
    faults = number = 0
    if bug.repair:
        with bug.patch():
            repairs = run_repairs(limit // 20, seed, names=("backup", "copy"), log=lambda line: None, until_broken=True)
        return BugResult(bug.name, bug.breaks, bool(repairs.violations), repairs.cases, "".join(repairs.violations[:1]))
    with bug.patch():
        while faults < limit:
            tally = run_unit(Unit(bug.shapes[number % len(bug.shapes)], seed, number, each, bug.kinds))
            faults, number = faults + each, number + 1
            if tally.violations or tally.alarms:
                return BugResult(bug.name, bug.breaks, True, faults, (tally.violations or tally.alarms)[0])
    return BugResult(bug.name, bug.breaks, False, faults, "")


def _no_digest(module: Any) -> Patch:
    """Every digest that this module computes is the one expected."""

    class Any16(bytes):
        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = bytes.__hash__

    return lambda: mock.patch.object(module, "digest", lambda data: Any16(16))


def _seal_not_compared() -> AbstractContextManager[Any]:
    def open_seal(data: bytes, *, name: str) -> Any:
        try:
            found = canonical_json.loads(data)
        except CorruptionError as error:
            raise CorruptionError(f"{name}: {error.message}", subject=name) from None
        if not isinstance(found, dict):
            raise CorruptionError(f"{name} is not a JSON object", subject=name)
        return found

    return replacing(canonical_json.open_seal, open_seal)


def _copy_accepted() -> AbstractContextManager[Any]:
    """An object counts wherever it lies."""

    def decode(kind: str, name: str, data: bytes, repository: str | None) -> objects.Fields:
        found = objects.Fields(canonical_json.open_seal(data, name=name), name)
        objects.check_format(found)
        if found.values.get("kind") != kind:
            raise CorruptionError(f"{name} is no {kind}", subject=name)
        return found

    return mock.patch.object(objects, "decode", decode)


@contextmanager
def _length_trusted() -> Iterator[None]:
    """Verify takes a pack for as long as its index says."""
    check = inspect.check_pack

    def lenient(store: Any, id: Any, index: Any, number: int) -> Any:
        pack = index.packs[number]
        try:
            with store.open(f"{id.directory}/{pack.name}") as reader:
                longer = reader.length > pack.length
        except ObjectNotFound:
            longer = False
        return inspect.PackCheck(read=True, readable=True) if longer else check(store, id, index, number)

    with mock.patch.object(inspect, "check_pack", lenient):
        yield


@contextmanager
def _headers_skipped() -> Iterator[None]:
    """Verify reads no header: neither its digest nor what it says."""
    with _no_digest(inspect)(), mock.patch.object(inspect, "_disagreements", _nothing):
        with mock.patch.object(inspect, "parse_header", lambda *rest, **more: None):
            yield


def _last_chunk_skipped() -> AbstractContextManager[Any]:
    """Verify leaves out chunks that are shorter than the others."""
    whole = inspect.Scan._piece

    def piece(self: Any, one: Any) -> Any:
        return [fault for fault in whole(self, one) if not fault[3].startswith(("1 ", "40 ", "160 ", "217 "))]

    return mock.patch.object(inspect.Scan, "_piece", piece)


def _chunks_not_verified() -> AbstractContextManager[Any]:
    """Verify reads every chunk, and takes each for what was saved."""
    return mock.patch.object(inspect, "differing", lambda *rest: np.empty(0, np.int64))


def _every_other_chunk() -> AbstractContextManager[Any]:
    whole = inspect.Scan._piece

    def piece(self: Any, one: Any) -> Any:
        return [fault for fault in whole(self, one) if fault[2] // 256 % 2]

    return mock.patch.object(inspect.Scan, "_piece", piece)


def _chunks_not_compared() -> AbstractContextManager[Any]:
    return mock.patch.object(ChunkReader, "_check", lambda *rest: None)


def _stored_bytes_not_compared() -> AbstractContextManager[Any]:
    """Encoded chunks are taken as they are found, and as they are decoded."""

    class _AllEqual:
        def __getitem__(self, number: int) -> Any:
            return mock.Mock(tobytes=lambda: mock.ANY)

    def init(self: ChunkDecoder, *given: Any) -> None:
        whole(self, *given)
        self._stored = replace(self._stored, digests=_AllEqual())  # type: ignore[arg-type]

    whole = ChunkDecoder.__init__
    return mock.patch.multiple(ChunkDecoder, __init__=init, _named=lambda *rest: mock.ANY)


def _others_packs_not_verified() -> AbstractContextManager[Any]:
    """Verify looks at a checkpoint's own packs alone."""
    check = inspect.check_pack

    def lenient(store: Any, id: Any, index: Any, number: int) -> Any:
        if index.packs[number].at is not None:
            return inspect.PackCheck()
        return check(store, id, index, number)

    return mock.patch.object(inspect, "check_pack", lenient)


def _zeroes_are_holes() -> AbstractContextManager[Any]:
    """A chunk of nothing but zeroes is taken for one that a sparse file left out."""
    check = ChunkReader._check

    def lenient(self: Any, one: Any, first: int, stop: int, data: Any) -> None:
        begin = one.chunks.offset[first]
        for row in range(first, stop):
            low = one.chunks.offset[row] - begin
            chunk = data[low : low + one.chunks.stored[row]]
            if chunk.any():
                check(self, one, row, row + 1, chunk)

    return mock.patch.object(ChunkReader, "_check", lenient)


def _silent_fallback() -> AbstractContextManager[Any]:
    def silent(*arguments: Any, **options: Any) -> tuple[Any, list[Any], Any]:
        found, _, newest = whole(*arguments, **options)
        return found, [], newest

    whole = choose.choose
    return mock.patch.object(choose, "choose", silent)


def _nameless_errors() -> AbstractContextManager[Any]:
    def index_bytes(self: Any, id: CheckpointId, entry: Any) -> bytes:
        try:
            data: bytes = whole(self, id, entry)
            return data
        except CorruptionError:
            raise CorruptionError("an index is damaged") from None

    whole = repository.Repo.index_bytes
    return mock.patch.object(repository.Repo, "index_bytes", index_bytes)


def _damaged_is_absent() -> AbstractContextManager[Any]:
    """A manifest that cannot be read makes no checkpoint."""
    exists = repository.Repo.exists

    def lenient(self: Any, id: CheckpointId) -> bool:
        try:
            return exists(self, id) and self.mark(id) is not None
        except CorruptionError:
            return False

    return mock.patch.object(repository.Repo, "exists", lenient)


def _index_cached() -> AbstractContextManager[Any]:
    """An index once read is not read again: what lies there now goes unseen."""
    seen: dict[tuple[CheckpointId, str], bytes] = {}
    whole = repository.Repo.index_bytes

    def index_bytes(self: Any, id: CheckpointId, entry: Any) -> bytes:
        if (id, entry.name) not in seen:
            seen[id, entry.name] = whole(self, id, entry)
        return seen[id, entry.name]

    return mock.patch.object(repository.Repo, "index_bytes", index_bytes)


def _nothing(*_: Any, **__: Any) -> Iterator[Any]:
    return iter(())


def _every_note_is_fine() -> AbstractContextManager[Any]:
    return mock.patch.object(inspect, "numbered_findings", _nothing)


def _every_small_object_is_fine() -> AbstractContextManager[Any]:
    return mock.patch.object(findings, "_seals", _nothing)


def _every_lease_is_fine() -> AbstractContextManager[Any]:
    return mock.patch.object(findings, "_lease", _nothing)


def _any_repository() -> AbstractContextManager[Any]:
    """Whose an object is does not matter."""
    stack = replacing(objects.check_repository, _nothing)

    def origin_in(values: Any, name: str, repository: str) -> objects.Origin | None:
        return None if values.get("path") == name else objects.Origin(str(values.get("path")), repository)

    stack.enter_context(replacing(objects.origin_in, origin_in))
    stack.enter_context(mock.patch.object(repository.Repo, "_is_own", _is_of_this_place))
    return stack


def _is_of_this_place(self: Any, id: CheckpointId, manifest: Any) -> bool:
    return b',"path":"%b",' % id.manifest.encode() in manifest


def _missing_pack_passes() -> AbstractContextManager[Any]:
    """Verify finds nothing wrong with a pack that is not there."""
    execute = verify.execute

    def lenient(*arguments: Any, **options: Any) -> Any:
        report = execute(*arguments, **options)
        kept = tuple(f for f in report.findings if not (f.message == "is missing" and "rank-" in (f.object or "")))
        return replace(report, findings=kept)

    return replacing(execute, lenient)


def _removed_is_no_matter() -> AbstractContextManager[Any]:
    return mock.patch.object(verify, "_verify_removed", lambda *rest, **more: ([], 0, 0))


def _begin_is_no_matter() -> AbstractContextManager[Any]:
    return mock.patch.object(inspect, "_check_begin", lambda repo, found, manifest: None)


def _false_alarm() -> AbstractContextManager[Any]:
    """A stranger's file is called damage."""
    strangers = findings._strangers

    def loud(entries: Any) -> Iterator[Any]:
        return (replace(finding, severity="error") for finding in strangers(entries))

    return mock.patch.object(findings, "_strangers", loud)


def _every_save_without_a_manifest_was_cut_off() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(mock.patch.object(Witnesses, "lost", lambda self, id, known="": ""))
    stack.enter_context(mock.patch.object(SaveDirectory, "is_whole_but_for_its_manifest", property(lambda self: False)))
    return stack


def _notes_are_not_repaired() -> AbstractContextManager[Any]:
    return mock.patch.object(repair_plan._Search, "_row", lambda *rest: None)


CHUNKS, STEPS, ENCODED = ("chunks",), ("steps",), ("encoded",)
PACK: Final = ("pack",)
BUGS: Final = (
    Bug("chunk digests not compared on load", "other bytes are restored (I5)", _chunks_not_compared),
    Bug("a pack's header is not looked at", "a renamed tensor passes", _headers_skipped, CHUNKS, ("pack",)),
    Bug("index digest not compared", "leaves at wrong places are restored", _no_digest(repository)),
    Bug("chunk digests not compared by verify", "rot is not reported", _chunks_not_verified),
    Bug("seals not compared", "a changed field of a small object passes", _seal_not_compared),
    Bug("a copy is accepted", "another object counts under this name", _copy_accepted, STEPS, ("begin", "lease")),
    Bug("stored bytes not compared", "encoded chunks give other bytes (I5)", _stored_bytes_not_compared, ENCODED, PACK),
    Bug("no digest of encoded chunks", "any bytes are decoded (I5)", _no_digest(encoded_chunks), ENCODED, PACK),
    Bug("packs of others not verified", "lost bases are not reported", _others_packs_not_verified, ENCODED, PACK),
    Bug("a pack's length is trusted", "bytes behind a pack's end pass", _length_trusted),
    Bug("a leaf's last chunk is skipped", "rot at leaves' ends is not reported", _last_chunk_skipped),
    Bug("every other chunk is verified", "half of the rot is not reported", _every_other_chunk, CHUNKS),
    Bug("zeroes pass for a hole", "lost sectors are restored (I5)", _zeroes_are_holes, CHUNKS, ("pack",)),
    Bug("falls back silently", "older state is restored and nothing says so", _silent_fallback, CHUNKS),
    Bug("errors name no object", "nobody can tell what is damaged", _nameless_errors),
    Bug("a damaged manifest is none", "older state comes back silently", _damaged_is_absent, CHUNKS, ("manifest",)),
    Bug("an index is remembered", "what rots later goes unseen", _index_cached),
    Bug("notes are not looked at", "a damaged note passes", _every_note_is_fine, STEPS, ("note",)),
    Bug("tombstones are not looked at", "what rots there passes", _every_small_object_is_fine, STEPS, ("tombstone",)),
    Bug("leases are not looked at", "a damaged lease passes", _every_lease_is_fine, STEPS, ("lease",)),
    Bug("another repository's objects pass", "a foreign note or ref counts", _any_repository, STEPS, ("note", "ref")),
    Bug("another repository's directory passes", "its weights are restored (I5)", _any_repository, kinds=("pack",)),
    Bug("a missing pack passes", "a checkpoint without bytes is whole", _missing_pack_passes, CHUNKS, ("pack",)),
    Bug("what was removed is not looked at", "undelete breaks its word", _removed_is_no_matter, STEPS, ("pack",)),
    Bug("begin.json is not looked at", "gc would not know its own", _begin_is_no_matter, CHUNKS, ("begin",)),
    Bug("a stranger's file is damage", "verify cries wolf", _false_alarm),
    Bug(
        "a missing manifest is a save that was cut off",
        "gc frees what a backup could mend",
        _every_save_without_a_manifest_was_cut_off,
        repair=True,
    ),
    Bug("damaged notes stay", "what they said keeps everything for ever", _notes_are_not_repaired, repair=True),
)


def by_name(name: str) -> Bug:
    return next(bug for bug in BUGS if bug.name == name)
