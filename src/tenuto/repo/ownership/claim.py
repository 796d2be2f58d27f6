"""Claims a run: puts the next attempt by create-if-absent. Attempts are never removed and never renumbered."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Final

from tenuto.concurrency.process import judge, this_process
from tenuto.crashpoints import crashpoint
from tenuto.errors import (
    AlreadyExists,
    CheckpointNotFound,
    CorruptionError,
    KeyMissing,
    RunInUse,
    Superseded,
    TenutoError,
    typed,
)
from tenuto.events import WaitingForOwner
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId, check_run, run_key
from tenuto.model.records import AttemptRecord
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.small_records import LeaseRecord, decode_attempt, encode_attempt
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.lease import BEAT_S, Lease, Trouble, read_last
from tenuto.repo.ownership.owner_watch import (
    ClaimUnderWay,
    OwnerFinding,
    OwnerWatch,
    owned_here,
    release_ownership,
    take_ownership,
)
from tenuto.repo.repository import Repo, check_decides, now_text
from tenuto.repo.tombstones import dead_tombstones, is_tombstoned, take_back
from tenuto.repo.unfinished import close_save, close_unfinished
from tenuto.store.probes import kept

_POLL_S: Final = 0.25
DYING_S: Final = 60.0
"""How long a claim waits for an owner that is alive: it may be dying."""
STAYING_S: Final = 5.0
"""How long it waits for one whose process this host sees running, and that has not said that it is leaving: what makes
it leave may have reached it by then."""
SAID_S: Final = 2.0
"""A claim says that it waits once it has waited for so long."""

Report = Callable[[str], None]
Waiting = Callable[[WaitingForOwner], None]


class Attempt:
    """A claimed attempt: the fencing token of one process. Every object of its saves lies under its name."""

    def __init__(self, repo: Repo, record: AttemptRecord, lease: Lease | None) -> None:
        """`lease`: None if another process of the job renews it."""
        self.repo = repo
        self.record = record
        self.unsettled: set[CheckpointId] = set()
        """Saves of this process whose manifests may be visible and are not known to be durable, also those under way:
        nothing else may be removed because of them."""
        self.unclosed: set[CheckpointId] = set()
        """Saves of this process that failed and are not closed and freed yet: the next one closes them first."""
        self._lease = lease
        self._begun = -1
        self._pid = os.getpid()

    @property
    def run(self) -> str:
        return self.record.run

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def parent(self) -> CheckpointId | None:
        return self.record.parent

    def __repr__(self) -> str:
        return f"Attempt({self.run}/{self.number})"

    def check(self) -> None:
        """Raises Superseded if a higher attempt has been claimed. One listing."""
        for number in self.repo.attempts(self.run):
            if number <= self.number:
                continue
            try:
                newer = self.repo.find_attempt(self.run, number)
                if newer is None:
                    continue
                who = f"process {newer.owner.pid} of {newer.owner.user} on {newer.owner.host}"
            except CorruptionError:
                who = "a process whose record is damaged"
            except KeyMissing:
                who = "a process with a newer key"
            raise Superseded(
                f"run {self.run!r} has been claimed as attempt {number} by {who}; "
                f"attempt {self.number} can no longer save",
                subject=self.run,
                hint="let one of the two processes train, or give each a run of its own",
            )

    def is_new(self, step: int) -> bool:
        """Returns whether this process has begun no save of so high a step, and nobody else could: it has claimed the
        attempt, and nothing is below a new one. Notes the step."""
        new = self._lease is not None and step > self._begun
        self._begun = max(step, self._begun)
        return new

    def committed(self, step: int) -> None:
        """Has the lease say from its next beat on that this step was committed last. No I/O."""
        if self._lease is not None:
            self._lease.newest = step

    def leave(self) -> None:
        """Lets others know that this process is about to give the run back, so that they wait for it. No I/O."""
        if os.getpid() == self._pid and self._lease is not None:
            self._lease.leave()

    def release(self, timeout: float | None = None) -> None:
        """Gives the run back. Once, until `resume`; in a forked child it does nothing. Raises what `Lease.release`
        raises: the run then counts as used until its lease runs out."""
        if os.getpid() == self._pid and self._lease is not None:
            release_ownership(self.repo, self.run, self.number)
            self._lease.release(timeout)

    def resume(self) -> None:
        """Owns the run again after `release`. Raises Superseded if another process has claimed it since, and errors of
        the store: it is released again then. In a forked child it only checks."""
        try:
            if os.getpid() == self._pid and self._lease is not None:
                take_ownership(self.repo, self.run, self.number, self)
                # Before the check: a claim that inspects from here on finds an owner, and one that was put before is
                # found. One that inspected before the beat and is put after the check is found at the commit.
                self._lease.resume()
            self.check()
        except BaseException:
            try:
                self.release()
            except TenutoError:
                pass  # the run counts as used until the lease runs out: what is raised matters more
            raise


def joined(repo: Repo, record: AttemptRecord) -> Attempt:
    """Returns the attempt that the coordinator of this job has claimed, for another process, which does not release
    it."""
    return Attempt(repo, record, None)


def announced(repo: Repo, record: bytes) -> Attempt:
    """Returns the attempt that rank 0 has claimed and announced. Raises CorruptionError for what is no attempt."""
    found = canonical_json.loads(record)
    return joined(repo, decode_attempt(record, str(found["run"]), int(found["attempt"]), repo.id))


def claim(
    repo: Repo,
    run: str,
    parent: CheckpointId | None,
    *,
    takeover: bool = False,
    wait_s: float | None = None,
    observe: OwnerWatch | None = None,
    beat_s: float = BEAT_S,
    trouble: Trouble | None = None,
    report: Report | None = None,
    waiting: Waiting | None = None,
    before_put: Callable[[], object] | None = None,
    withdrawn: set[int] | None = None,
    by: str = "",
    reason: str = "",
) -> Attempt:
    """Claims the run's next attempt, whose training resumes from `parent` (None: from nothing).

    Claims over a dead owner at once. Waits for one that is leaving, or that this host cannot see, a minute at most; for
    one that runs on this host and is not leaving a few seconds; for any of them `wait_s` where that is given. Then
    raises RunInUse, or claims over it with `takeover`. `observe`: a watch begun earlier (before the restore), so that a
    lease has begun to run out. Afterwards closes and frees unfinished saves of earlier attempts.

    Raises CheckpointNotFound if `parent` vanished or is being removed: where that was seen only after the claim, the
    attempt stays, as one that resumes from there and has no commit. `claim_newest` tries again, and walks I4 again
    after the claim.

    An attempt that stays unused hides what was committed between its parent and itself. So `before_put` is called when
    the owner before has ended, right before the claim is put: what it raises ends the claim, and nothing was put. It is
    not called before an owner is claimed over alive: only the claim stops that one. `withdrawn`: the number of an
    attempt that was put and given back is added; who claims again walks as if it had never been.

    `trouble` receives lease beats that fail, `report` damage that was passed over, `waiting` that the claim has waited
    for two seconds. `by`, `reason`: what the record says of a claim that is not a training's.
    """
    run = run_key(check_run(run))
    found = repo.store.capabilities
    if (found.remote or not found.commits) and not (kept(repo.store.url) or {}).get("atomic"):
        check_decides(repo.store)  # other tools may have copied the repository to where none would have been made
    watch = observe or OwnerWatch(repo, run)
    warn: Report = report or (lambda message: None)
    claiming = ClaimUnderWay()
    try:
        record, previous = _put_claim(
            repo,
            run,
            parent,
            watch,
            claiming,
            takeover=takeover,
            wait_s=wait_s,
            waiting=waiting,
            before_put=before_put,
            why=(by, reason),
        )
        crashpoint("attempt claimed")
        lease = Lease(repo, record, interval_s=beat_s, trouble=trouble)
        attempt = Attempt(repo, record, lease)
        take_ownership(repo, run, record.number, attempt)
    finally:
        claiming.is_over()
    lease.start()
    try:
        _take_back_tombstones(repo, record, previous, warn)
        _rely_on(repo, parent)
        _close_earlier(repo, record, lease, previous, warn)
    except BaseException:
        if withdrawn is not None:
            withdrawn.add(record.number)
        try:
            attempt.release()
        except TenutoError as error:
            warn(f"the attempt just claimed cannot be released, others will watch its lease: {error.message}")
        raise
    return attempt


def _put_claim(
    repo: Repo,
    run: str,
    parent: CheckpointId | None,
    watch: OwnerWatch,
    claiming: ClaimUnderWay,
    *,
    takeover: bool,
    wait_s: float | None,
    waiting: Waiting | None,
    before_put: Callable[[], object] | None,
    why: tuple[str, str],
) -> tuple[AttemptRecord, OwnerFinding]:
    began = watch.clock.now()
    while True:
        found = watch.inspect()
        patience = wait_s if wait_s is not None else STAYING_S if found.staying else DYING_S
        waited = watch.clock.now() - began
        over = waited >= patience
        ended = found.verdict in ("free", "dead")
        if ended or (takeover and (over or found.verdict == "here")):
            if parent is not None and not repo.exists(parent):
                raise CheckpointNotFound(
                    f"there is no checkpoint {parent} to resume from",
                    subject=str(parent),
                    hint=f"{typed('tenuto', 'ls', repo.url)} shows what is left",
                )
            if ended and before_put is not None:
                before_put()
            how = (found.beats, found.verdict == "dead" and not found.released) if found.beats else None
            record = _try_put(repo, run, found.number + 1, parent, claiming=claiming, why=why, ended=how)
            if record is not None:
                return record, found
            continue
        # An owner elsewhere whose lease has not been watched for long enough is neither: that ends within the ttl,
        # unless the store answers too slowly.
        hopeless = waited >= patience + DYING_S
        if found.verdict == "here" or (over and found.verdict == "alive") or hopeless:
            raise _in_use(repo, run, found)
        if waiting is not None and waited >= SAID_S:
            waiting(_waiting(run, found, patience - waited))
            waiting = None
        watch.clock.sleep(_POLL_S)


def _try_put(
    repo: Repo,
    run: str,
    number: int,
    parent: CheckpointId | None,
    *,
    claiming: ClaimUnderWay,
    why: tuple[str, str],
    ended: tuple[int, bool] | None,
) -> AttemptRecord | None:
    """Claims the first number from `number` on that no copied directory occupies; returns None if another process was
    faster."""
    while True:
        if parent is not None and parent.run == run and parent.attempt >= number:
            raise CheckpointNotFound(f"there is no checkpoint {parent} to resume from", subject=str(parent))
        before = _reached(repo, run, number - 1)
        owner, now = this_process(), now_text()
        record = AttemptRecord(run, number, secrets.token_hex(16), parent, owner, now, before, ended, *why)
        try:
            name, data = object_names.attempt_name(run, number), encode_attempt(record, repo.id, repo.signer)
            claiming.puts(record)
            objects.put(repo.store, name, data, token=record.id)
            return record
        except AlreadyExists:
            try:
                if repo.find_attempt(run, number) is not None:
                    return None
            except CorruptionError:
                return None
            number += 1


def _reached(repo: Repo, run: str, number: int) -> tuple[int, int] | None:
    """Returns how far an attempt has come: a place that has more of it knows more than its home."""
    highest = next(repo.newest_steps(run, number), None) if number else None
    return (number, highest) if highest is not None else None


def _in_use(repo: Repo, run: str, found: OwnerFinding) -> RunInUse:
    where = "this very process" if found.verdict == "here" else _owner_words(found)
    since = f", since {found.record.created}" if found.record is not None and found.verdict != "here" else ""
    return RunInUse(
        f"run {run!r} at {repo.url} is in use: attempt {found.number} belongs to {where} ({found.reason}{since})",
        subject=run,
        hint="stop that process, wait for it with wait_for_owner=600, use another run name, or pass takeover=True",
    )


def _waiting(run: str, found: OwnerFinding, left_s: float) -> WaitingForOwner:
    owner = found.record.owner if found.record is not None else None
    pid, host = (owner.pid, owner.host) if owner is not None else (0, "")
    return WaitingForOwner(run, _owner_words(found), pid, host, found.reason, max(left_s, 0.0))


def _owner_words(found: OwnerFinding) -> str:
    if found.record is None:
        return "a process whose record is damaged"
    owner = found.record.owner
    return f"process {owner.pid} of {owner.user} on {owner.host}"


def _rely_on(repo: Repo, parent: CheckpointId | None) -> None:
    """Raises CheckpointNotFound if `parent` was removed. The claim is durable by now, so a later remover sees it."""
    if parent is None:
        return
    repo.store.settle(parent.manifest)
    if not repo.exists(parent) or is_tombstoned(repo, parent):
        raise CheckpointNotFound(
            f"checkpoint {parent} was removed, or is being removed, while it was being claimed",
            subject=str(parent),
            hint=f"{typed('tenuto', 'ls', repo.url)} shows what is left",
        )


def _take_back_tombstones(repo: Repo, record: AttemptRecord, previous: OwnerFinding, report: Report) -> None:
    """Takes back the tombstones of dead removers; closes the save where one had removed the manifest already."""
    now_name = object_names.attempt_name(record.run, record.number)
    dead_below = record.number if previous.verdict in ("dead", "free") else 0
    first = record.number == 1  # nothing of this run could be removed before
    for stone in () if first else dead_tombstones(repo, record.run, now_name=now_name, dead_below=dead_below):
        if stone.id.attempt < record.number:
            close_save(repo, stone.id, by="its removal was cut short", owner_dead=True, report=report)
        take_back(repo, stone)
    parent = record.parent
    if parent is not None and parent.run != record.run:
        # A fork: that run may never be claimed again, and what died there must not block this one.
        for stone in dead_tombstones(repo, parent.run, now_name=now_name, dead_below=0):
            if stone.id == parent:
                take_back(repo, stone)


def _close_earlier(repo: Repo, record: AttemptRecord, lease: Lease, previous: OwnerFinding, report: Report) -> None:
    """Closes unfinished saves of earlier attempts, highest first, down to one whose lease says that all below it are
    closed.

    Leases are removed only after this attempt's own lease durably says so: there always is one that does, and a claim
    never has to inspect every attempt that ever was. An owner that is still alive (it was claimed over) may put more
    objects: then the lease says nothing, and the next claim inspects them again.
    """
    if record.number == 1:
        return  # its lease says so from the first beat on
    by = f"attempt {record.number} claimed run {record.run}"
    dead: list[int] = []
    all_dead = True
    for number in reversed([n for n in repo.attempts(record.run) if n < record.number]):
        if number == previous.number:
            gone, claimed, closed = previous.verdict == "dead", True, previous.closed
        else:
            last = read_last(repo, record.run, number)[1]
            gone, claimed = _is_gone(repo, record.run, number, last)
            closed = last is not None and last.closed
        close_unfinished(repo, record.run, number, by=by, owner_dead=gone, report=report)
        if gone and claimed:
            dead.append(number)
        all_dead = all_dead and gone
        if closed:
            break
    if not all_dead:
        return
    try:
        lease.mark_closed()
    except TenutoError as error:
        report(f"the lease could not say that earlier saves are closed: {error}")
        return
    for number in dead:
        directory = object_names.lease_directory(record.run, number)
        repo.store.delete([entry.name for entry in repo.store.walk(directory, leftovers=True)])


def _is_gone(repo: Repo, run: str, number: int, last: LeaseRecord | None) -> tuple[bool, bool]:
    """Returns whether the owner of an attempt below the previous one has ended, and whether it was claimed at all: the
    directory may be a copy, or of another repository, whose lease nobody removes. Where only its lease could show that
    it has ended, it counts as ended: an earlier claim has watched it."""
    try:
        record = repo.find_attempt(run, number)
    except CorruptionError:
        return True, True
    if record is None:
        return True, False
    if last is not None and last.released and last.id == record.id:
        return True, True
    if record.owner == this_process():
        return not owned_here(repo, run, number), True
    return judge(record.owner) != "alive", True


# --------------------------------------------------------------------------------------------------
# Claiming a run for work that continues from its newest checkpoint, anew where another process has committed since.

CLAIMS = 3
"""How often a claim is tried where others keep committing."""


class _Newer(Exception):
    """Another checkpoint is the newest by now; no claim was put."""


def claim_newest(
    repo: Repo,
    run: str,
    newest: CheckpointId | None,
    parent: CheckpointId | None,
    *,
    again: Callable[[], tuple[CheckpointId | None, CheckpointId | None]],
    stale: Callable[[], bool] = lambda: False,
    withdrawn: set[int] | None = None,
    takeover: bool = False,
    wait_s: float | None = None,
    observe: OwnerWatch | None = None,
    trouble: Trouble | None = None,
    report: Report | None = None,
    waiting: Waiting | None = None,
) -> Attempt:
    """Claims the run for work that continues from `newest`, the checkpoint that `latest` meant before; `parent` is what
    the attempt is claimed from.

    An owner that is waited for commits at its end. So `latest` is compared right before the claim is put, and again
    after it. Where it means another checkpoint, where `parent` is gone, or where `stale` says that the work is
    outdated, a claim that was put is given back, `again` returns both anew, and the run is claimed anew. Raises
    Superseded if that has happened three times; the rest as in `claim`.
    """
    run, withdrawn = run_key(check_run(run)), set() if withdrawn is None else withdrawn

    def refuse_if_newer() -> None:
        if latest(repo, run, withdrawn=withdrawn) != newest:
            raise _Newer

    gone: CheckpointNotFound | None = None
    for tries in range(CLAIMS):
        if tries:
            newest, parent = again()
        try:
            attempt = claim(
                repo,
                run,
                parent,
                takeover=takeover,
                wait_s=wait_s,
                observe=observe,
                trouble=trouble,
                report=report,
                waiting=waiting,
                before_put=refuse_if_newer,
                withdrawn=withdrawn,
            )
        except _Newer:
            gone = None
            continue
        except CheckpointNotFound as error:
            gone = error
            continue
        unused = True
        try:
            unused = latest(repo, run, below=attempt.number, withdrawn=withdrawn) != newest or stale()
        finally:
            if unused:
                withdrawn.add(attempt.number)
                attempt.release()
        if not unused:
            return attempt
        gone = None
    if gone is not None:
        raise gone
    raise Superseded(
        f"another process keeps committing to run {run!r} while this one claims it",
        subject=run,
        hint=typed("tenuto", "ls", repo.url, "--run", run),
    )
