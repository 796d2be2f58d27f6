"""Verify: proves that every byte is what was saved, or names the leaf, the object and the offset that are not.

Every byte of every object is in some digest: a pack's header in its index, its leaves in the index's chunk digests, the
index in the manifest, and each small object in its own seal. `assert_whole` is the oracle of the tests.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tenuto.engine.read.chunk_reader import long_reads, threads_for
from tenuto.errors import CheckpointNotFound, CorruptionError, StoreError
from tenuto.events import Emitter, Progress
from tenuto.maintenance.census import SaveDirectory, census_of, take_census
from tenuto.maintenance.findings import Finding, repository_findings
from tenuto.maintenance.inspect import inspect, scan
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json
from tenuto.repo.notes import add_note
from tenuto.repo.replicated.places import reporting_to, unreachable
from tenuto.repo.repository import Repo


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification. `bytes_read` counts bytes of packs and indexes; `every_byte` says whether packs
    were read."""

    findings: tuple[Finding, ...]
    checked: tuple[CheckpointId, ...]
    bytes_read: int
    objects: int
    every_byte: bool
    seconds: float = 0.0
    unnoted: StoreError | None = None
    """Why a note could not be put; what came after it was read, and has none."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def unseen(self) -> int:
        """Returns the number of packs that were not read."""
        return sum(finding.unseen for finding in self.findings)

    def of(self, id: CheckpointId) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.id == id)

    def damaged(self) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints that cannot be restored bit for bit."""
        return tuple(
            sorted({finding.id for finding in self.errors if finding.id is not None and finding.harms_restore})
        )


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """`everything`: includes the store's other objects (attempts, refs, unfinished saves, copies, foreign objects).
    `bytes`: of the packs to read, as far as manifests are readable."""

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
    """Plans a verification. `ids` None: every checkpoint, and everything else in the store. `listed`: the ids come from
    a listing, and one that has gone since is no error.

    Raises CheckpointNotFound for an id that does not exist.
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
    "verified", or "suspect" if it cannot be restored bit for bit. If the store refuses a note, the report says so, no
    more notes are tried, and reading continues.

    Reports damage and does not raise it. Raises FormatTooNew, and the error of a store that cannot be listed.
    """
    problems: list[str] = []
    with reporting_to(repo.store, problems.append):
        default = threads_for(repo).read if long_reads(repo) else max(2, min(8, (os.cpu_count() or 1) + 1))
        report = _executed(repo, plan, emitter or Emitter(), threads or default, note)
    # What was read from another place since it was damaged in the first, and which mirrors were not looked at at all.
    more = [Finding(None, "error", message, harms_restore=False) for message in dict.fromkeys(problems)]
    mirrors = [place for place in unreachable(repo.store) if not place.node]
    more += [Finding(None, "info", f"{place} is not found from here: not looked at") for place in mirrors]
    return replace(report, findings=(*report.findings, *more))


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
    """Counts bytes over all threads and emits progress."""

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
    """Returns findings, bytes read and objects read of a checkpoint. One that was removed meanwhile is not damaged."""
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
    """Checks whether `undelete` would bring back an intact checkpoint. If not, no checkpoint is harmed."""
    if save.manifest is None:
        return [], 0, 0
    found = inspect(repo, save.id, save.manifest)
    if plan.every_byte:
        scan(found, on_bytes=progress.advance, threads=threads)
    if found.findings and census_of(repo, save.id).state != "removed":
        return [], found.bytes_read, found.objects  # brought back or collected meanwhile
    return [replace(finding, harms_restore=False) for finding in found.findings], found.bytes_read, found.objects


def _note(repo: Repo, id: CheckpointId, findings: Sequence[Finding]) -> StoreError | None:
    """Adds the note. Returns the store's error, None if it succeeded."""
    harmful = [finding for finding in findings if finding.severity == "error" and finding.harms_restore]
    texts: list[Json] = [str(finding)[:1000] for finding in harmful[:20]]
    try:
        if harmful:
            add_note(repo, id, "suspect", {"count": len(harmful), "findings": texts})
        elif not any(finding.unseen for finding in findings):
            add_note(repo, id, "verified", {"every_byte": True})
    except CheckpointNotFound:
        pass  # removed while it was verified: nothing is left to say of it
    except StoreError as error:
        return error
    return None
