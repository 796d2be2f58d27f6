"""Verify: proves that every byte is what was saved, or names the leaf, the object and the offset that are not.

Every byte of every object is in some digest: a pack's header in its index, its leaves in the index's chunk digests, the
index in the manifest, and each small object in its own seal. `assert_whole` is the oracle of the tests.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tenuto.errors import CheckpointNotFound, CorruptionError, ObjectNotFound, StoreError, UsageError
from tenuto.events import Emitter, Progress
from tenuto.maintenance.census import Census, SaveDirectory, everything, look_at, take_census
from tenuto.maintenance.inspect import (
    Finding,
    LostManifests,
    Severity,
    VerifyReport,
    attempt_findings,
    inspect,
    is_strange,
    row_oddities,
    scan,
)
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import MAX_MANIFEST
from tenuto.repo.notes import add_note
from tenuto.repo.refs import KINDS, read_ref
from tenuto.repo.replicated.places import reporting_to, unreachable
from tenuto.repo.repository import Repo
from tenuto.store.contract import Entry
from tenuto.store.names import leftovers_of

# --------------------------------------------------------------------------------------------------
# What else lies in a repository's store: attempts, refs, the trash, unfinished saves, copies, strangers, leftovers.


def repository_findings(repo: Repo, census: Census, checked: frozenset[CheckpointId]) -> Iterator[Finding]:
    """Findings about all but the checkpoints in `checked`. What Tenuto did not write is shown, never an error."""
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
        yield Finding(None, "info", "not written by Tenuto, and may not be listed; passed over", object=directory)
    for entry in everything(repo, partial(leftovers_of, repo.store), []):
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
        yield Finding(save.id, "error", save.message, object=place, harms_restore=save.has(object_names.MANIFEST))
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
        name = object_names.attempt_name(save.id.run, save.id.attempt)
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
            found = canonical_json.open_seal(data, name=entry.name)
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
        rows.setdefault(directory, []).append(object_names.parse_numbered(file) or 0)
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
        yield Finding(None, "info", f"not written by Tenuto{more}; never touched", object=found[0].name or directory)


def _get(repo: Repo, name: str, limit: int = objects.SMALL) -> bytes | None:
    try:
        return repo.store.get(name, limit=limit)
    except ObjectNotFound:
        return None


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """`everything`: the store's other objects too (attempts, refs, unfinished saves, copies, strangers). `bytes`: of
    the packs that will be read, as far as manifests tell."""

    where: str
    ids: tuple[CheckpointId, ...]
    every_byte: bool
    everything: bool
    bytes: int

    def __str__(self) -> str:
        what = f"{len(self.ids)} checkpoint{'' if len(self.ids) == 1 else 's'}"
        how = f"every byte of {self.bytes / 2**20:,.1f} MiB" if self.every_byte else "structure only"
        return f"verify {what} at {self.where}: {how}{', and everything else there' if self.everything else ''}"


def plan_verify(
    repo: Repo, ids: Sequence[CheckpointId] | None = None, *, every_byte: bool = True, listed: bool = False
) -> VerifyPlan:
    """What a verification reads. `ids` None: every checkpoint, and everything else in the store. `listed`: nobody has
    asked for these by name, and one that has gone since it was listed is no error.

    Raises CheckpointNotFound for an id that is not there.
    """
    everything = ids is None
    if ids is None:
        ids = tuple(
            CheckpointId(run, attempt, step)
            for run in repo.runs()
            for attempt in repo.attempts(run)
            for step in sorted(repo.committed(run, attempt))
        )
    nbytes = 0
    for id in ids:
        try:
            nbytes += repo.manifest(id).bytes
        except CorruptionError:
            pass  # executing the plan reports it as a finding
        except CheckpointNotFound:
            if not (everything or listed):
                raise
    return VerifyPlan(repo.url, tuple(ids), every_byte, everything, nbytes if every_byte else 0)


def execute(
    repo: Repo, plan: VerifyPlan, *, emitter: Emitter | None = None, threads: int | None = None, note: bool = False
) -> VerifyReport:
    """Verifies. `threads`: ranges read at once. With `note`, each checkpoint of which every byte was read gets a note:
    "verified", or "suspect" if it cannot be restored bit for bit. A store that takes no note is no reason to read no
    further: it is in the report, and no more notes are tried.

    Damage is reported, not raised; FormatTooNew, and a store that cannot be listed, are raised.
    """
    told: list[str] = []
    with reporting_to(repo.store, told.append):
        report = _executed(repo, plan, emitter or Emitter(), threads or _threads(), note)
    # What was read from another place since it was damaged in the first, and which mirrors were not looked at at all.
    said = [Finding(None, "error", message, harms_restore=False) for message in dict.fromkeys(told)]
    mirrors = [place for place in unreachable(repo.store) if not place.node]
    said += [Finding(None, "info", f"{place} is not found from here: not looked at") for place in mirrors]
    return replace(report, findings=(*report.findings, *said))


def _executed(repo: Repo, plan: VerifyPlan, emitter: Emitter, threads: int, note: bool) -> VerifyReport:
    began = time.perf_counter()
    progress = _Progress(repo.url, plan.bytes, emitter)
    findings: list[Finding] = []
    nbytes = count = 0
    unnoted: StoreError | None = None
    for id in plan.ids:
        found, read, number = _verify_one(repo, id, plan, progress, threads)
        findings.extend(found)
        nbytes, count = nbytes + read, count + number
        if note and plan.every_byte and unnoted is None:
            unnoted = _note(repo, id, found)
    if plan.everything:
        census = take_census(repo)
        findings.extend(repository_findings(repo, census, frozenset(plan.ids)))
        for removed in (save for save in census.saves.values() if save.state == "removed" and not save.freed):
            found, read, number = _verify_removed(repo, removed, plan, progress, threads)
            findings.extend(found)
            nbytes, count = nbytes + read, count + number
    seconds = time.perf_counter() - began
    return VerifyReport(tuple(findings), plan.ids, nbytes, count, plan.every_byte, seconds, unnoted)


def assert_whole(repo: Repo) -> VerifyReport:
    """Verifies every byte of everything; CorruptionError with all findings if anything is damaged, missing, or not
    found from here."""
    report = execute(repo, plan_verify(repo))
    wrong = [finding for finding in report.findings if finding.severity == "error" or finding.unseen]
    if wrong:
        raise CorruptionError(
            "\n".join([f"{repo.url} is not whole:", *(f"  {finding}" for finding in wrong)]), subject=repo.url
        )
    return report


class _Progress:
    """Counts bytes over all threads and tells."""

    def __init__(self, subject: str, total: int, emitter: Emitter) -> None:
        self._subject, self._total, self._emitter = subject, total, emitter
        self._done = 0
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            done = self._done
        if self._emitter.listened:
            self._emitter.emit(Progress("verify", self._subject, done, max(done, self._total)))


def _verify_one(
    repo: Repo, id: CheckpointId, plan: VerifyPlan, progress: _Progress, threads: int
) -> tuple[list[Finding], int, int]:
    """Findings, bytes read and objects read. One that was removed meanwhile has none: removal is no damage."""
    found = inspect(repo, id)
    if plan.every_byte:
        scan(found, on_bytes=progress.advance, threads=threads)
    if found.findings and not repo.exists(id):
        removed = Finding(id, "info", "was removed while it was verified")
        return [removed], found.bytes_read, found.objects
    return found.findings, found.bytes_read, found.objects


def _verify_removed(
    repo: Repo, save: SaveDirectory, plan: VerifyPlan, progress: _Progress, threads: int
) -> tuple[list[Finding], int, int]:
    """Whether `undelete` would bring a removed checkpoint back whole. No checkpoint is harmed if not."""
    if save.manifest is None:
        return [], 0, 0
    found = inspect(repo, save.id, save.manifest)
    if plan.every_byte:
        scan(found, on_bytes=progress.advance, threads=threads)
    if found.findings and look_at(repo, save.id).state != "removed":
        return [], found.bytes_read, found.objects  # brought back or collected meanwhile
    return [replace(finding, harms_restore=False) for finding in found.findings], found.bytes_read, found.objects


def _note(repo: Repo, id: CheckpointId, findings: Sequence[Finding]) -> StoreError | None:
    """What the store has against the note, None if it is there."""
    harmful = [finding for finding in findings if finding.severity == "error" and finding.harms_restore]
    told: list[Json] = [str(finding)[:1000] for finding in harmful[:20]]
    try:
        if harmful:
            add_note(repo, id, "suspect", {"count": len(harmful), "findings": told})
        elif not any(finding.unseen for finding in findings):
            add_note(repo, id, "verified", {"every_byte": True})
    except CheckpointNotFound:
        pass  # removed while it was verified: nothing is left to say of it
    except StoreError as error:
        return error
    return None


def _threads() -> int:
    return max(2, min(8, (os.cpu_count() or 1) + 1))
