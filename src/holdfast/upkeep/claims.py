"""What verify says of attempts and their leases, and what these say of manifests that are gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.errors import CorruptionError, ObjectNotFound
from holdfast.model.checkpoint import AttemptRecord
from holdfast.model.names import CheckpointId
from holdfast.repo import layout, objects
from holdfast.repo.records import decode_attempt, decode_lease
from holdfast.repo.repository import Repo
from holdfast.store.contract import Entry
from holdfast.upkeep.census import AttemptDirectory, SaveDirectory, is_note
from holdfast.upkeep.findings import Finding, Severity


@dataclass(slots=True)
class LostManifests:
    """Tells a checkpoint that has lost its manifest from a save that never had one, by what else speaks of it."""

    named: dict[CheckpointId, str] = field(default_factory=dict)
    """Checkpoints that attempts go on from, or refs name, and which of them does."""
    closed_below: dict[str, int] = field(default_factory=dict)
    """Run to the highest attempt whose lease says that no unfinished save is left below it."""

    def evidence(self, save: SaveDirectory) -> str:
        """Why this save, which has a begin.json and no manifest, must have had one; empty if nothing tells."""
        if save.tombstones:
            return ""  # a removal that was cut short: the next claim ends it
        prefix = len(save.id.directory) + 1
        if any(is_note(entry.name[prefix:]) for entry in save.entries):
            return "notes were added to it"
        if save.id in self.named:
            return self.named[save.id]
        complete = save.begin is not None and all(save.has(file) for file in save.begin.names)
        if complete and save.id.attempt < self.closed_below.get(save.id.run, 0):
            return "all else of it is there, and a later attempt has closed every unfinished save"
        return ""


def attempt_findings(
    repo: Repo, found: AttemptDirectory, copies: set[tuple[str, int]], lost: LostManifests
) -> Iterator[Finding]:
    """Its record and its lease. A copied directory is added to `copies`."""
    name = layout.attempt_name(found.run, found.number)
    data = _get(repo, name)
    record: AttemptRecord | None = None
    try:
        record = decode_attempt(data, found.run, found.number) if data is not None else None
    except CorruptionError as error:
        if objects.is_copy(name, data or b""):
            copies.add((found.run, found.number))
            message = f"a copied directory, never chosen, kept or deleted: {error.message}"
            yield Finding(None, "info", message, object=name)
        else:
            yield _error(name, error.message)
    if record is not None:
        if record.repository not in ("", repo.id):
            yield _error(name, f"belongs to another repository than {layout.REPOSITORY} says")
        if record.parent is not None:
            lost.named[record.parent] = f"attempt {found.number} of run {found.run} goes on from it"
    for beat in found.leases:
        yield from _beat(repo, found, beat, record, lost)


def _beat(
    repo: Repo, found: AttemptDirectory, beat: Entry, record: AttemptRecord | None, lost: LostManifests
) -> Iterator[Finding]:
    data = _get(repo, beat.name)
    if data is None:
        return
    try:
        number = layout.parse_numbered(beat.name.rpartition("/")[2]) or 0
        lease = decode_lease(data, found.run, found.number, number)
    except CorruptionError as error:
        copied: Severity = "info" if record is None and objects.is_copy(beat.name, data) else "error"
        yield Finding(None, copied, error.message, object=beat.name, harms_restore=False)
        return
    if record is not None and (lease.id, lease.parent) != (record.id, record.parent):
        yield _error(beat.name, f"was not written by the owner of {layout.attempt_name(found.run, found.number)}")
    elif lease.closed:
        lost.closed_below[found.run] = max(found.number, lost.closed_below.get(found.run, 0))


def _error(name: str, message: str) -> Finding:
    return Finding(None, "error", message, object=name, harms_restore=False)


def _get(repo: Repo, name: str) -> bytes | None:
    try:
        return repo.store.get(name, limit=objects.SMALL)
    except ObjectNotFound:
        return None
