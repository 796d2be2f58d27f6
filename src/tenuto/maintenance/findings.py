"""Findings of a verification, and the search for those outside checkpoints: in attempts, leases, refs, notes, the
trash, unfinished saves, copies, foreign objects and leftovers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from tenuto.errors import CorruptionError, ObjectNotFound, UsageError, typed
from tenuto.maintenance.census import AttemptDirectory, Census, SaveDirectory, everything
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.records import AttemptRecord, Json
from tenuto.record import record
from tenuto.repo import identity
from tenuto.repo.format import key_records, object_names, objects
from tenuto.repo.format.manifest import MAX_MANIFEST
from tenuto.repo.format.object_names import save_of
from tenuto.repo.format.objects import Origin
from tenuto.repo.format.small_records import decode_lease, read_attempt
from tenuto.repo.refs import KINDS, read_ref
from tenuto.repo.replicated.members import member_in
from tenuto.repo.replicated.places import home_of
from tenuto.repo.repository import Repo
from tenuto.store.contract import Entry, leftovers_of

Severity = Literal["error", "unread", "info"]


@record
class Finding:
    """One thing that is damaged or missing (`error`), that its store did not let be read, so that nobody can judge it
    (`unread`), or that is unusual and harmless (`info`)."""

    id: CheckpointId | None
    severity: Severity
    message: str
    leaf: str | None = None
    """Path of the first leaf concerned."""
    object: str | None = None
    offset: int | None = None
    """Bytes from the object's first byte."""
    harms_restore: bool = True
    """Whether the state cannot be restored bit for bit because of it (errors only)."""
    removed: bool = False
    """Whether it lies in the trash: nothing that is kept is damaged, and `undelete` refuses what is."""
    unseen: int = 0
    """The number of packs that were not read because they may be on a node out of reach."""

    def __str__(self) -> str:
        place = (self.object or "") + ("" if self.offset is None else f" at byte {self.offset}")
        head = ", ".join(part for part in (str(self.id or ""), self.leaf or "", place) if part)
        return f"{self.severity}: {head}: {self.message}" if head else f"{self.severity}: {self.message}"


def repository_findings(repo: Repo, census: Census, checked: frozenset[CheckpointId]) -> Iterator[Finding]:
    """Yields findings about everything but the checkpoints in `checked`. Foreign objects are never errors."""
    yield from _identity(repo)
    copies: set[tuple[str, int]] = set()
    named: dict[CheckpointId, str] = {}
    resting = {base: save.id for save in census.saves.values() for base in save.bases}
    for attempt in census.attempts.values():
        yield from attempt_findings(repo, attempt, copies, named)
    yield from _refs(repo, census, named)
    yield from _keys(repo, census)
    for save in census.saves.values():
        # The inspection of a checkpoint has reported the rest.
        if save.id not in checked or save.state not in ("committed", "damaged"):
            yield from _save(repo, census, save, copies, named, needed_by=resting.get(save.id))
        yield from _around(save, needed=save.state == "removed" and save.id in resting)
    yield from _seals(repo, census)
    yield from _strangers(census.foreign)
    for directory in census.unlisted:
        yield Finding(None, "info", "not written by Tenuto, and may not be listed; passed over", object=directory)
    for entry in everything(repo, partial(leftovers_of, repo.store), []):
        what = "put"
        if object_names.is_staged(entry.name):
            what = f"repair, which `{typed('tenuto', 'repair', repo.url)}` completes"
        yield Finding(None, "info", f"left over from an unfinished {what} ({entry.length} bytes)", object=entry.name)


def _identity(repo: Repo) -> Iterator[Finding]:
    """Yields findings about the two objects that say what the repository is."""
    for name in identity.NAMES:
        try:
            found = identity.decode(name, repo.store.get(name, limit=objects.SMALL))
        except ObjectNotFound:
            if name == object_names.REPOSITORY:  # a single save leaves the second to the next writer
                yield _error(name, "is missing: the next training there puts it")
        except CorruptionError as error:
            yield _error(name, f"{error.message}; the next training there puts it right")
        else:
            if found.id != repo.id:
                yield _error(name, Origin(name, found.id).words(repo.id))


def _save(
    repo: Repo,
    census: Census,
    save: SaveDirectory,
    copies: set[tuple[str, int]],
    named: Mapping[CheckpointId, str],
    *,
    needed_by: CheckpointId | None = None,
) -> Iterator[Finding]:
    nbytes = sum(entry.length for entry in save.entries)
    attempt = census.attempts.get((save.id.run, save.id.attempt))
    place = save.id.directory
    if save.state == "copied" or (save.id.run, save.id.attempt) in copies:
        why = _not_harmless(repo, census, save, named)
        strange = save.origin is not None and save.origin.repository != repo.id
        kind = "a directory of another repository" if strange else "a copied directory"
        message = f"{kind}, never chosen, kept or deleted: {save.message}{why}"
        severity: Severity = "error" if strange or why else "info"
        yield Finding(save.id, severity, message, object=place, harms_restore=False)
        return
    if save.lost:
        yield Finding(save.id, "error", f"is missing: {save.lost}", object=save.id.manifest)
    elif save.state == "damaged":
        yield Finding(save.id, "error", save.message, object=place, harms_restore=save.has(object_names.MANIFEST))
    elif save.state == "unfinished":
        member = member_in(home_of(repo.store))
        if member is not None and member.copy:
            again = typed("tenuto", "replicate", member.home, repo.url)
            yield Finding(save.id, "info", f"not all of it is copied yet: `{again}` continues", object=place)
        else:
            yield Finding(save.id, "info", f"an unfinished save ({nbytes} bytes)", object=place)
    elif save.state == "closed" and any(True for _ in save.own()):
        yield Finding(save.id, "info", f"an aborted save whose objects are still there ({nbytes} bytes)", object=place)
    elif save.state == "removed":
        then = "its data has been freed" if save.freed else f"`undelete` can bring it back ({nbytes} bytes)"
        then = then if needed_by is None else f"its data files are needed by {needed_by} ({nbytes} bytes)"
        yield Finding(save.id, "info", f"removed; {then}", object=place)
    if save.begin is not None and (attempt is None or not attempt.claimed):
        name = object_names.attempt_name(save.id.run, save.id.attempt)
        message = "is missing, although a save was begun under it"
        yield Finding(save.id, "error", message, object=name, harms_restore=False)


def _not_harmless(repo: Repo, census: Census, save: SaveDirectory, named: Mapping[CheckpointId, str]) -> str:
    """Returns why a copied directory is no backup that a person has put beside the original; empty if it may be one."""
    if save.id in named:
        return f"; it lies in the place of a checkpoint that is lost: {named[save.id]}"
    origin = save.origin
    original = save_of(origin.path) if origin is not None and origin.repository == repo.id else None
    displaced = census.saves.get(original) if original is not None else None
    if displaced is not None and displaced.state == "copied":
        return f"; where the original of {displaced.id} lay, there is a copy as well: were the two swapped?"
    return ""


def _seals(repo: Repo, census: Census) -> Iterator[Finding]:
    """Yields findings about small objects that no checkpoint's inspection has read. An object in the trash keeps the
    path of the manifest that it was."""
    entries = [(entry, entry.name) for entry in (*census.probes, *census.places)]
    for save in census.saves.values():
        entries += [(entry, entry.name) for entry in (*save.tombstones, *save.marks)]
        entries += [(entry, save.id.manifest) for entry in save.trash]
    trash = {entry.name for save in census.saves.values() for entry in save.trash}
    for entry, path in entries:
        data = _get(repo, entry.name, MAX_MANIFEST)
        if data is None:
            continue
        try:
            found = canonical_json.open_seal(data, name=entry.name)
        except CorruptionError as error:
            yield replace(_error(entry.name, error.message), removed=entry.name in trash)
            continue
        origin = objects.origin_in(found, path, repo.id)
        if origin is not None:
            copied: Severity = "info" if path == entry.name and origin.repository == repo.id else "error"
            yield Finding(None, copied, origin.words(repo.id), object=entry.name, harms_restore=False)


def _refs(repo: Repo, census: Census, named: dict[CheckpointId, str]) -> Iterator[Finding]:
    """Yields findings about the versions of refs and of proofs, and about refs to checkpoints that do not exist."""
    rows: dict[str, list[int]] = {}
    for entry in (*census.refs, *census.proofs):
        directory, _, file = entry.name.rpartition("/")
        rows.setdefault(directory, []).append(object_names.parse_numbered(file) or 0)
    for directory, there in rows.items():
        yield from numbered_findings(repo, directory, there)
    member = member_in(home_of(repo.store))
    filled = member is not None and (member.copy or member.follows)  # with names first, and not with every checkpoint
    for kind in KINDS:
        for name in {directory.split("/")[2] for directory in rows if directory.startswith(f"refs/{kind}/")}:
            try:
                id = read_ref(repo, kind, name)
            except (CorruptionError, UsageError):
                continue
            if id is not None and not repo.exists(id):
                if filled:
                    message = f"names {id}, which this place does not have"
                    yield Finding(None, "info", message, object=f"refs/{kind}/{name}", harms_restore=False)
                    continue
                yield _error(f"refs/{kind}/{name}", f"names {id}, which is not there")
                named[id] = f"{kind} {name!r} names it"


def _keys(repo: Repo, census: Census) -> Iterator[Finding]:
    """Yields findings about key rings, as far as they can be read without a key."""
    rings = {object_names.parse_numbered(entry.name.rpartition("/")[2]) or 0: entry.name for entry in census.keys}
    for number, name in rings.items():
        data = _get(repo, name)
        if number == max(rings) and data is not None:
            try:
                key_records.decode_ring(name, data, repo.id)
            except CorruptionError as error:
                yield _error(name, f"{error.message}: without it nothing sealed here can be opened")
        elif data is not None:
            message = "an older key ring, which removed slots may still open: any `tenuto key add` or `rm` removes it"
            yield Finding(None, "info", message, object=name)


def _around(save: SaveDirectory, *, needed: bool) -> Iterator[Finding]:
    for entry in save.tombstones:
        yield Finding(save.id, "info", "a removal was begun and has not ended", object=entry.name)
    for entry in save.marks if not needed else ():
        yield Finding(save.id, "info", "gc has found that nothing needs it, and waits for its grace", object=entry.name)
    if save.state == "committed":
        for entry in save.trash:
            yield Finding(save.id, "info", "a copy of a manifest that still is in its place", object=entry.name)
    if save.state not in ("copied", "foreign"):
        yield from _strangers(save.strangers())
    elif save.entries and save.state == "foreign":
        yield from _strangers(save.entries)


def _strangers(entries: Iterable[Entry]) -> Iterator[Finding]:
    """Yields one finding per directory: a foreign tree may hold millions of files."""
    directories: dict[str, list[Entry]] = {}
    for entry in entries:
        directories.setdefault(entry.name.rpartition("/")[0], []).append(entry)
    for directory, found in directories.items():
        more = f" and {len(found) - 1} more beside it" if len(found) > 1 else ""
        yield Finding(None, "info", f"not written by Tenuto{more}; never touched", object=found[0].name or directory)


def attempt_findings(
    repo: Repo, found: AttemptDirectory, copies: set[tuple[str, int]], named: dict[CheckpointId, str]
) -> Iterator[Finding]:
    """Yields findings about the record of an attempt and its lease. Adds a copied directory to `copies`, and
    what the attempt began from to `named`."""
    name = object_names.attempt_name(found.run, found.number)
    data = _get(repo, name)
    record: AttemptRecord | None = None
    try:
        if data is not None:
            record = read_attempt(repo.decode("attempt", name, data), found.run, found.number)
    except CorruptionError as error:
        origin = objects.origin(name, data or b"", repo.id)
        if origin is not None and origin.repository == repo.id:
            copies.add((found.run, found.number))
            message = f"a copied directory, never chosen, kept or deleted: {error.message}"
            yield Finding(None, "info", message, object=name)
        else:
            yield _error(name, error.message)
    if record is not None and record.parent is not None:
        named[record.parent] = f"attempt {found.number} of run {found.run} starts from it"
    for entry in found.leases:
        yield from _lease(repo, found, entry, record)


def _lease(repo: Repo, found: AttemptDirectory, entry: Entry, record: AttemptRecord | None) -> Iterator[Finding]:
    data = _get(repo, entry.name)
    if data is None:
        return
    try:
        number = object_names.parse_numbered(entry.name.rpartition("/")[2]) or 0
        lease = decode_lease(data, found.run, found.number, number, repo.id)
    except CorruptionError as error:
        copied: Severity = "info" if record is None and objects.is_copy(entry.name, data, repo.id) else "error"
        yield Finding(None, copied, error.message, object=entry.name, harms_restore=False)
        return
    if record is not None and (lease.id, lease.parent) != (record.id, record.parent):
        yield _error(
            entry.name, f"was not written by the owner of {object_names.attempt_name(found.run, found.number)}"
        )


def _error(name: str, message: str) -> Finding:
    return Finding(None, "error", message, object=name, harms_restore=False)


def _get(repo: Repo, name: str, limit: int = objects.SMALL) -> bytes | None:
    try:
        return repo.store.get(name, limit=limit)
    except ObjectNotFound:
        return None


def numbered_findings(
    repo: Repo, directory: str, numbers: Sequence[int], id: CheckpointId | None = None
) -> Iterator[Finding]:
    """Yields what is wrong with `<directory>/<n>.json` for these numbers: the notes of `id`, or the versions of a ref.
    None is ever removed by itself: a gap is a loss."""

    def odd(name: str, severity: Severity, message: str) -> Finding:
        return Finding(id, severity, message, object=name, harms_restore=False)

    read: dict[int, dict[str, Json]] = {}
    for number in sorted(numbers):
        name = object_names.numbered(directory, number)
        try:
            data = repo.store.get(name, limit=objects.SMALL)
            read[number] = canonical_json.open_seal(data, name=name)
            if objects.origin_in(read[number], name, repo.id) is None:
                repo.vouch(name, data, str(read[number].get("code", "")))
        except ObjectNotFound:
            continue
        except CorruptionError as error:
            yield odd(name, "error", error.message)
    names = {number: object_names.numbered(directory, number) for number in read}
    origins = {number: objects.origin_in(found, names[number], repo.id) for number, found in read.items()}
    own = {number for number, origin in origins.items() if origin is None}
    for number, origin in origins.items():
        if origin is not None:
            # Where nothing is in its place a person has copied the row; beside objects that are, one was replaced.
            harmless = not own and origin.repository == repo.id
            yield odd(names[number], "info" if harmless else "error", origin.words(repo.id))
    if own:
        for number in sorted(set(range(1, max(own))) - set(numbers)):
            yield odd(object_names.numbered(directory, number), "error", "is missing, although a later one is there")
