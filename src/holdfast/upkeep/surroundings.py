"""What else lies in a repository's store: attempts, refs, the trash, unfinished saves, copies, strangers, leftovers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.errors import CorruptionError, ObjectNotFound, UsageError
from holdfast.model import canonical
from holdfast.model.names import CheckpointId
from holdfast.repo import layout, objects
from holdfast.repo.manifest import MAX_MANIFEST
from holdfast.repo.refs import KINDS, read_ref
from holdfast.repo.repository import Repo
from holdfast.store.contract import Entry
from holdfast.upkeep.census import Census, SaveDirectory, everything, look_at
from holdfast.upkeep.claims import LostManifests, attempt_findings
from holdfast.upkeep.findings import Finding, Severity
from holdfast.upkeep.rows import is_strange, row_oddities


def surroundings(repo: Repo, census: Census, checked: frozenset[CheckpointId]) -> Iterator[Finding]:
    """Findings about all but the checkpoints in `checked`. What Holdfast did not write is shown, never an error."""
    copies: set[tuple[str, int]] = set()
    lost = LostManifests()
    for attempt in census.attempts.values():
        yield from attempt_findings(repo, attempt, copies, lost)
    yield from _refs(repo, census, lost)
    for save in census.saves.values():
        # What the inspection of a checkpoint has said is not said again.
        if save.id not in checked or save.state not in ("committed", "damaged"):
            yield from _save(repo, census, save, copies, lost)
        yield from _around(save)
    yield from _seals(repo, census)
    yield from _strangers(census.foreign)
    for directory in census.unlisted:
        yield Finding(None, "info", "not written by Holdfast, and may not be listed; passed over", object=directory)
    for entry in everything(repo, repo.store.leftovers, []):
        yield Finding(None, "info", f"left over from an unfinished put ({entry.length} bytes)", object=entry.name)


def _save(
    repo: Repo, census: Census, save: SaveDirectory, copies: set[tuple[str, int]], lost: LostManifests
) -> Iterator[Finding]:
    nbytes = sum(entry.length for entry in save.entries)
    attempt = census.attempts.get((save.id.run, save.id.attempt))
    place = save.id.directory
    if save.state == "copied" or (save.id.run, save.id.attempt) in copies:
        yield Finding(
            save.id, "info", f"a copied directory, never chosen, kept or deleted: {save.message}", object=place
        )
        return
    if save.state == "damaged":
        yield Finding(save.id, "error", save.message, object=place, harms_restore=save.has(layout.MANIFEST))
    elif save.state == "unfinished":
        why = lost.evidence(save)
        if why:
            # The census takes time: a removal, or a save, that ended meanwhile is no loss.
            now = look_at(repo, save.id)
            if now.state != "unfinished" or not lost.evidence(now):
                return
            yield Finding(save.id, "error", f"is missing: {why}", object=save.id.manifest)
        else:
            yield Finding(save.id, "info", f"an unfinished save ({nbytes} bytes)", object=place)
    elif save.state == "closed" and any(True for _ in save.own()):
        yield Finding(save.id, "info", f"an aborted save whose objects are still there ({nbytes} bytes)", object=place)
    elif save.state == "removed":
        then = "what it held has been freed" if save.freed else f"`undelete` can bring it back ({nbytes} bytes)"
        yield Finding(save.id, "info", f"removed; {then}", object=place)
    if save.begin is not None and (attempt is None or not attempt.claimed):
        name = layout.attempt_name(save.id.run, save.id.attempt)
        yield Finding(
            save.id, "error", "is missing, although a save was begun under it", object=name, harms_restore=False
        )


def _seals(repo: Repo, census: Census) -> Iterator[Finding]:
    """The small objects that no checkpoint's inspection has read. What lies in the trash says another path than its
    own: that of the manifest it was."""
    entries = [(entry, entry.name) for entry in (*census.probes, *census.places)]
    for save in census.saves.values():
        entries += [(entry, entry.name) for entry in (*save.tombstones, *save.marks)]
        entries += [(entry, save.id.manifest) for entry in save.trash]
    for entry, path in entries:
        data = _get(repo, entry.name, MAX_MANIFEST)
        if data is None:
            continue
        try:
            found = canonical.open_seal(data, name=entry.name)
        except CorruptionError as error:
            yield Finding(None, "error", error.message, object=entry.name, harms_restore=False)
            continue
        if found.get("path") != path:
            severity: Severity = "error" if path != entry.name else "info"
            message = f"a copy of {str(found.get('path'))[:300]!r}"
            yield Finding(None, severity, message, object=entry.name, harms_restore=False)
        elif is_strange(repo, found):
            yield Finding(None, "error", "belongs to another repository", object=entry.name, harms_restore=False)


def _refs(repo: Repo, census: Census, lost: LostManifests) -> Iterator[Finding]:
    """Each ref's versions, and whether what it names is there."""
    rows: dict[str, list[int]] = {}
    for entry in census.refs:
        directory, _, file = entry.name.rpartition("/")
        rows.setdefault(directory, []).append(layout.parse_numbered(file) or 0)
    for directory, there in rows.items():
        for odd in row_oddities(repo, directory, there):
            yield Finding(None, odd.severity, odd.message, object=odd.name, harms_restore=False)
    for kind in KINDS:
        for name in {directory.split("/")[2] for directory in rows if directory.startswith(f"refs/{kind}/")}:
            try:
                id = read_ref(repo, kind, name)
            except (CorruptionError, UsageError):
                continue
            if id is not None and not repo.exists(id):
                message = f"names {id}, which is not there"
                yield Finding(None, "error", message, object=f"refs/{kind}/{name}", harms_restore=False)
                lost.named[id] = f"{kind} {name!r} names it"


def _around(save: SaveDirectory) -> Iterator[Finding]:
    for entry in save.tombstones:
        yield Finding(save.id, "info", "a removal was begun and has not ended", object=entry.name)
    for entry in save.marks:
        yield Finding(save.id, "info", "gc has found that nothing needs it, and waits for its grace", object=entry.name)
    if save.state == "committed":
        for entry in save.trash:
            yield Finding(save.id, "info", "a copy of a manifest that still is in its place", object=entry.name)
    if save.state not in ("copied", "foreign"):
        yield from _strangers(save.strangers())
    elif save.entries and save.state == "foreign":
        yield from _strangers(save.entries)


def _strangers(entries: Iterable[Entry]) -> Iterator[Finding]:
    """One finding a directory: a neighbour's tree may hold millions of files."""
    directories: dict[str, list[Entry]] = {}
    for entry in entries:
        directories.setdefault(entry.name.rpartition("/")[0], []).append(entry)
    for directory, found in directories.items():
        more = f" and {len(found) - 1} more beside it" if len(found) > 1 else ""
        yield Finding(None, "info", f"not written by Holdfast{more}; never touched", object=found[0].name or directory)


def _get(repo: Repo, name: str, limit: int = objects.SMALL) -> bytes | None:
    try:
        return repo.store.get(name, limit=limit)
    except ObjectNotFound:
        return None
