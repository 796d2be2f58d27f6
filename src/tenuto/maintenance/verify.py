"""Verify: proves that every byte is what was saved, or names the leaf, the object and the offset that are not.

Every byte of every object is in some digest: a pack's header in its index, its leaves in the index's chunk digests, the
index in the manifest, and each small object in its own seal. `assert_whole` is the oracle of the tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from datetime import UTC, datetime
from functools import partial
from math import ceil
from types import MappingProxyType

from tenuto.engine.read.chunk_reader import scan_threads
from tenuto.errors import CheckpointNotFound, CorruptionError, StoreError
from tenuto.events import Emitter, Progress
from tenuto.maintenance.census import SaveDirectory, census_of, take_census
from tenuto.maintenance.findings import Finding, repository_findings
from tenuto.maintenance.inspect import inspect, scan
from tenuto.maintenance.reading import SAVED_EVERY_S, Pace, PartRead, ReadingState
from tenuto.maintenance.replica_tidy import targets
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Note
from tenuto.record import record
from tenuto.repo.notes import add_note, notes, verification_of
from tenuto.repo.replicated.places import reporting_to, unreachable
from tenuto.repo.replicated.replica import is_there
from tenuto.repo.repository import Repo


@record
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
    partly: tuple[CheckpointId, ...] = ()
    """Of those that were checked, what was read in part: the rest is for the next verification."""
    due: int = 0
    """How many more were to be read and were not begun."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def unread(self) -> tuple[Finding, ...]:
        """Returns what its store did not let be read, so that it is not judged."""
        return tuple(finding for finding in self.findings if finding.severity == "unread")

    @property
    def ok(self) -> bool:
        """Returns whether all that was looked at could be read, and nothing is damaged but what lies in the trash."""
        return not self.exit_code

    @property
    def exit_code(self) -> int:
        if not all(finding.removed for finding in self.errors):
            return CorruptionError.exit_code
        return StoreError.exit_code if self.unread else 0

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


@record
class VerifyPlan:
    """`everything`: includes the store's other objects (attempts, refs, unfinished saves, copies, foreign objects).
    `bytes`: of the state to read, and `stored_bytes`: of the data files in one place, as far as manifests are
    readable."""

    where: str
    ids: tuple[CheckpointId, ...]
    every_byte: bool
    everything: bool
    bytes: int
    stored_bytes: int = 0

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
        ids = repo.checkpoints()
    nbytes = stored = 0
    for id in ids:
        try:
            manifest = repo.manifest(id)
            nbytes, stored = nbytes + manifest.bytes, stored + manifest.stored_bytes
        except CorruptionError:
            pass  # executing the plan reports it as a finding
        except CheckpointNotFound:
            if not (everything or listed):
                raise
    return VerifyPlan(repo.url, tuple(ids), every_byte, everything, nbytes if every_byte else 0, stored)


@record
class Parts:
    """How a verification in parts proceeds.

    pace: how much it reads. state: what was read before, and is read by it.
    ordered: begins with what is under way, then what was verified longest ago, instead of in the plan's order.
    since: leaves out what was verified since then, in seconds since 1970.
    of: the key in the state's `passes`; None for one that is not to be continued as such.
    last_read: since when nobody knows whether a checkpoint is whole, of each with a readable manifest that `choose` has
    looked at.
    """

    pace: Pace
    state: ReadingState
    ordered: bool = True
    since: float | None = None
    of: str | None = None
    last_read: dict[CheckpointId, float] = field(default_factory=dict)

    def choose(self, repo: Repo, ids: Sequence[CheckpointId]) -> list[CheckpointId]:
        """Returns the checkpoints to read, in their order."""
        if not self.ordered and self.since is None:
            return list(ids)
        found = []
        for id in ids:
            noted = _notes_of(repo, id)
            try:
                manifest = repo.manifest(id)
            except (CheckpointNotFound, CorruptionError):
                manifest = None
            when = self.state.last_read(id, manifest, noted)
            if manifest is not None:
                self.last_read[id] = when
            if self.since is None or when < self.since:
                found.append((str(id) not in self.state.under_way, when, id))
        return [id for _, _, id in (sorted(found) if self.ordered else found)]


def plan_parts(
    repo: Repo,
    plan: VerifyPlan,
    *,
    amount: float | int | None = None,
    rate: int | None = None,
    seconds: float | None = None,
    resume: bool = False,
) -> Parts:
    """Returns how to read `amount` of a plan: a share of all (a float), bytes (an int), or all of it (None).

    rate: bytes per second at most. seconds: how long. resume: continues the verification of the same run, or of
    everything, that was cut off; without it one begins.
    """
    state = ReadingState.load(repo.id)
    nbytes = ceil(amount * plan.stored_bytes * len(targets(repo))) if isinstance(amount, float) else amount
    pace = Pace(nbytes, seconds=seconds, rate=rate)
    if amount is not None or seconds is not None:
        return Parts(pace, state)
    of = "" if plan.everything else "/".join(sorted({id.run for id in plan.ids}))
    if resume and of in state.passes:
        return Parts(pace, state, ordered=False, since=state.passes[of], of=of)
    for id in plan.ids:
        state.under_way.pop(str(id), None)
    state.passes[of] = time.time()
    return Parts(pace, state, ordered=False, of=of)


def execute(
    repo: Repo,
    plan: VerifyPlan,
    *,
    emitter: Emitter | None = None,
    threads: int | None = None,
    note: bool = False,
    parts: Parts | None = None,
) -> VerifyReport:
    """Verifies. `threads`: ranges read at once. With `note`, each checkpoint of which every byte was read gets a note:
    "verified", or "suspect" if it cannot be restored bit for bit. If the store refuses a note, the report says so, no
    more notes are tried, and reading continues. `parts`: reads a part of it, from where earlier ones have ended.

    Reports damage and does not raise it. Raises FormatTooNew, the error of a store that cannot be listed, and with
    `note` KeyMissing in a sealed repository, without its key.
    """
    if note:
        repo.require_key()
    problems: list[str] = []
    with reporting_to(repo.store, problems.append):
        default = scan_threads(repo)
        if parts is None:
            report = _executed(repo, plan, emitter or Emitter(), threads or default, note)
        else:
            try:
                report = _executed_in_parts(
                    repo, plan, parts, emitter or Emitter(), threads=threads or default, note=note
                )
            except BaseException as error:
                # An interrupt, or a store that fails: what is read is worth going back to. Any other error comes again.
                if not isinstance(error, Exception) or isinstance(error, StoreError):
                    parts.state.save()
                raise
            if parts.ordered or parts.state.path_of(repo.id).exists():
                parts.state.save()
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
        found, read, number = _verify_one(repo, id, plan, progress, threads=threads)
        findings.extend(found)
        nbytes, count = nbytes + read, count + number
        if note and plan.every_byte and unnoted is None:
            unnoted = _note(repo, id, found)
    if plan.everything:
        found, read, number = _everything_else(repo, plan, progress, threads, every_byte=plan.every_byte)
        findings, nbytes, count = [*findings, *found], nbytes + read, count + number
    seconds = time.perf_counter() - began
    return VerifyReport(tuple(findings), plan.ids, nbytes, count, plan.every_byte, seconds, unnoted)


def _executed_in_parts(
    repo: Repo, plan: VerifyPlan, parts: Parts, emitter: Emitter, *, threads: int, note: bool
) -> VerifyReport:
    began, state = time.perf_counter(), parts.state
    progress = _Progress(repo.url, plan.bytes, emitter)
    findings: list[Finding] = []
    checked: list[CheckpointId] = []
    partly: list[CheckpointId] = []
    nbytes = count = 0
    unnoted: StoreError | None = None
    if plan.everything:
        state.keep_only({str(id) for id in plan.ids})
    chosen = parts.choose(repo, plan.ids)
    for id in chosen:
        if parts.pace.over:
            break
        noted = _notes_of(repo, id)
        try:
            save_id = repo.manifest(id).save_id
        except (CheckpointNotFound, CorruptionError):
            save_id = ""
        part = PartRead(parts.pace, state.cycle(id, save_id, noted), partial(state.save, at_most_every=SAVED_EVERY_S))
        found, read, number = _verify_one(repo, id, plan, progress, threads=threads, part=part)
        findings.extend(found)
        checked.append(id)
        nbytes, count = nbytes + read, count + number
        harmed = any(finding.severity == "error" and finding.harms_restore for finding in found)
        if (not part.complete or any(finding.severity == "unread" for finding in found)) and not harmed:
            partly.append(id)
            continue
        if not harmed and state.outdated(id, _notes_of(repo, id)):
            partly.append(id)  # somebody has found damage meanwhile, perhaps in what was read before
            continue
        state.end(id)
        if note and unnoted is None and not (harmed and verification_of(noted) == "suspect"):
            begun = datetime.fromtimestamp(part.cycle.begun, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            unnoted = _note(repo, id, found, {"begun": begun, "bytes": part.cycle.bytes})
    due = len(chosen) - len(checked)
    if parts.of is not None and not due and not partly:
        state.passes.pop(parts.of, None)
    if plan.everything:
        found, read, number = _everything_else(repo, plan, progress, threads, every_byte=not (due or partly))
        findings, nbytes, count = [*findings, *found], nbytes + read, count + number
    seconds = time.perf_counter() - began
    return VerifyReport(
        tuple(findings), tuple(checked), nbytes, count, plan.every_byte, seconds, unnoted, tuple(partly), due
    )


def _everything_else(
    repo: Repo, plan: VerifyPlan, progress: _Progress, threads: int, *, every_byte: bool
) -> tuple[list[Finding], int, int]:
    """Checks what lies in the store beside the checkpoints. Returns findings, bytes read and objects read."""
    census, nbytes, count = take_census(repo), 0, 0
    findings = list(repository_findings(repo, census, frozenset(plan.ids)))
    needed = {base for save in census.saves.values() for base in save.bases}
    for removed in (save for save in census.saves.values() if save.state == "removed" and not save.freed):
        found, read, number = _verify_removed(repo, removed, progress, threads, every_byte=every_byte)
        findings.extend(_of_base(repo, found) if removed.id in needed else found)
        nbytes, count = nbytes + read, count + number
    return findings, nbytes, count


def _of_base(repo: Repo, found: Sequence[Finding]) -> Iterator[Finding]:
    """Yields the findings of a removed checkpoint that lies in the trash because others need data files of it. A copy
    or a tier has only those, and what others lack is found with them: the rest is no loss."""
    for one in found:
        if one.severity == "error" and one.object is not None and not is_there(repo.store, one.object):
            gone = f"not all of it lies here, only what others need: {one.message}"
            yield replace(one, severity="info", message=gone)
        else:
            yield one


def _notes_of(repo: Repo, id: CheckpointId) -> list[Note]:
    try:
        return notes(repo, id)
    except StoreError:
        return []  # inspecting the checkpoint reports it


def assert_whole(repo: Repo) -> VerifyReport:
    """Verifies every byte of everything; CorruptionError with all findings if anything is damaged, missing, or not
    found from here."""
    report = execute(repo, plan_verify(repo))
    wrong = [finding for finding in report.findings if finding.severity != "info" or finding.unseen]
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
    repo: Repo, id: CheckpointId, plan: VerifyPlan, progress: _Progress, *, threads: int, part: PartRead | None = None
) -> tuple[list[Finding], int, int]:
    """Returns findings, bytes read and objects read of a checkpoint. One that was removed meanwhile is not damaged."""
    found = inspect(repo, id)
    if plan.every_byte:
        scan(found, on_bytes=progress.advance, threads=threads, part=part)
    if found.findings and not repo.exists(id):
        removed = Finding(id, "info", "was removed while it was verified")
        return [removed], found.bytes_read, found.objects
    return found.findings, found.bytes_read, found.objects


def _verify_removed(
    repo: Repo, save: SaveDirectory, progress: _Progress, threads: int, *, every_byte: bool
) -> tuple[list[Finding], int, int]:
    """Checks whether `undelete` would bring back an intact checkpoint. If not, no checkpoint is harmed."""
    if save.manifest is None:
        return [], 0, 0
    found = inspect(repo, save.id, save.manifest)
    if every_byte:
        scan(found, on_bytes=progress.advance, threads=threads)
    if found.findings and census_of(repo, save.id).state != "removed":
        return [], found.bytes_read, found.objects  # brought back or collected meanwhile
    return (
        [replace(finding, harms_restore=False, removed=True) for finding in found.findings],
        found.bytes_read,
        found.objects,
    )


def _note(
    repo: Repo, id: CheckpointId, findings: Sequence[Finding], how: Mapping[str, Json] = MappingProxyType({})
) -> StoreError | None:
    """Adds the note. Returns the store's error, None if it succeeded."""
    harmful = [finding for finding in findings if finding.severity == "error" and finding.harms_restore]
    texts: list[Json] = [str(finding)[:1000] for finding in harmful[:20]]
    try:
        if harmful:
            leaves: list[Json] = list(dict.fromkeys(finding.leaf for finding in harmful if finding.leaf is not None))
            body = {"count": len(harmful), "findings": texts, "leaves": leaves[:8], "leaves_count": len(leaves)}
            add_note(repo, id, "suspect", body)
        elif not any(finding.unseen or finding.severity == "unread" for finding in findings):
            add_note(repo, id, "verified", {"every_byte": True, **how})
    except CheckpointNotFound:
        pass  # removed while it was verified: nothing is left to say of it
    except StoreError as error:
        return error
    return None
