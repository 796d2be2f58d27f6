"""What else lies in a repository's store: attempts, refs, the trash, unfinished saves, copies, strangers, leftovers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.errors import CorruptionError, ObjectNotFound
from holdfast.model import canonical
from holdfast.model.names import CheckpointId
from holdfast.repo import layout, objects
from holdfast.repo.manifest import MAX_MANIFEST
from holdfast.repo.records import decode_attempt
from holdfast.repo.repository import Repo
from holdfast.store.contract import Entry
from holdfast.upkeep.census import AttemptDirectory, Census, SaveDirectory
from holdfast.upkeep.findings import Finding


def surroundings(repo: Repo, census: Census, checked: frozenset[CheckpointId]) -> Iterator[Finding]:
    """Findings about all but the checkpoints in `checked`. What Holdfast did not write is shown, never an error."""
    copies: set[tuple[str, int]] = set()
    for attempt in census.attempts.values():
        yield from _attempt(repo, attempt, copies)
    for save in census.saves.values():
        # What the inspection of a checkpoint has said is not said again.
        if save.id not in checked or save.state not in ("committed", "damaged"):
            yield from _save(census, save, copies)
        yield from _around(save)
    yield from _seals(repo, census)
    yield from _strangers(census.foreign)
    for entry in repo.store.leftovers(""):
        yield Finding(None, "info", f"left over from an unfinished put ({entry.length} bytes)", object=entry.name)


def _attempt(repo: Repo, found: AttemptDirectory, copies: set[tuple[str, int]]) -> Iterator[Finding]:
    name = layout.attempt_name(found.run, found.number)
    if not found.claimed:
        return
    data = _get(repo, name)
    if data is None:
        return
    try:
        decode_attempt(data, found.run, found.number)
    except CorruptionError as error:
        if objects.is_copy(name, data):
            copies.add((found.run, found.number))
            yield Finding(
                None, "info", f"a copied directory, never chosen, kept or deleted: {error.message}", object=name
            )
        else:
            yield Finding(None, "error", error.message, object=name, harms_restore=False)


def _save(census: Census, save: SaveDirectory, copies: set[tuple[str, int]]) -> Iterator[Finding]:
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
        yield Finding(save.id, "info", f"an unfinished save ({nbytes} bytes)", object=place)
    elif save.state == "closed" and any(True for _ in save.own()):
        yield Finding(save.id, "info", f"an aborted save whose objects are still there ({nbytes} bytes)", object=place)
    elif save.state == "removed":
        yield Finding(save.id, "info", f"removed; `undelete` can bring it back ({nbytes} bytes)", object=place)
    if save.begin is not None and (attempt is None or not attempt.claimed):
        name = layout.attempt_name(save.id.run, save.id.attempt)
        yield Finding(
            save.id, "error", "is missing, although a save was begun under it", object=name, harms_restore=False
        )


def _seals(repo: Repo, census: Census) -> Iterator[Finding]:
    """The small objects that no checkpoint's inspection has read."""
    entries = [*census.refs, *census.probes, *(beat for attempt in census.attempts.values() for beat in attempt.leases)]
    for save in census.saves.values():
        entries += [*save.tombstones, *save.marks, *save.trash]
    for entry in entries:
        data = _get(repo, entry.name, MAX_MANIFEST)
        try:
            found = canonical.open_seal(data, name=entry.name) if data is not None else {}
        except CorruptionError as error:
            yield Finding(None, "error", error.message, object=entry.name, harms_restore=False)
            continue
        if data is not None and found.get("path") != entry.name and not entry.name.startswith("trash/"):
            yield Finding(None, "info", f"a copy of {str(found.get('path'))[:300]!r}", object=entry.name)


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
