"""What must hold after a fault, whatever it was: judged on what the training was told, then on a healthy disk.

Rules: only Tenuto's errors come out; training goes on unless told otherwise; a failure that stands is in the exit
status, and one that is made good is not; what was reported as committed is there, whole, bit for bit; `latest` is the
newest of it; a restarted job goes on and leaves no litter behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from campaigns.faulty_disk.faults import FailingDisk
from campaigns.faulty_disk.training import KEPT, ONCE, OWN_CALLS, Observed, State, Training, equal
from campaigns.recorded_jobs import RUN
from campaigns.restart_check import left_of
from tenuto.engine.read import choose
from tenuto.engine.read.choose import restore_checkpoint
from tenuto.errors import DeadlineExceeded, NotARepository, OwnershipError, TenutoError
from tenuto.maintenance import gc, verify
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.repo.lineage import latest
from tenuto.repo.repository import Repo
from tenuto.state.contract import Prepared
from tenuto.state.restore.match import match_state
from tenuto.store.local.store import LocalStore
from tenuto.testing.checker import PLACE
from tenuto.testing.simulated_disk import SimulatedDisk

GOES_ON: Final = ("save", "note", "beat")
"""Phases out of which nothing may come where `on_error` is "warn"."""
BEFORE_TRAINING: Final = ("construct", "restore", "claim")


def judge_observed(told: Observed, disk: FailingDisk) -> Iterator[str]:
    """What the training was told, against what it was asked to do about errors."""
    for phase, error in told.raised:
        if not isinstance(error, TenutoError):
            yield f"{phase} raised {type(error).__name__}, which is no error of Tenuto's: {error!r}"
        elif isinstance(error, OwnershipError):
            yield f"{phase} raised {error!r}, although nobody else has claimed the run"
        elif not error.message:
            yield f"{phase} raised an error that says nothing: {error!r}"
    if told.on_error == "warn":
        for error in told.raised_in(*GOES_ON):
            yield f'training was ended by {error!r}, although on_error is "warn"'
    way = disk.way
    # Deadlines are short beside what hangs, and a call that is only slow may meet one before anything was struck.
    if way is None or way.harmless or (disk.struck is None and not way.blocks):
        for phase, error in told.raised:
            yield f"{phase} raised {error!r}, although nothing that matters went wrong"
    yield from _judge_exit(told)
    yield from _judge_recovery(told, disk)


def _judge_exit(told: Observed) -> Iterator[str]:
    """The exit status tells whether the newest save committed."""
    loud = told.raised_in(*BEFORE_TRAINING, "close")
    if not told.closed:
        return
    good = told.due in [id.step for id in told.committed if id.run == RUN]
    if not good and told.exit_failure is None and not loud:
        yield f"step {told.due} was to be saved and is not, and the exit status would be 0"
    if good and told.exit_failure is not None and not loud:
        yield f"every save is made good, and the exit status would not be 0: {told.exit_failure}"
    if told.on_error == "raise" and not good and not told.raised:
        yield f'step {told.due} was to be saved and is not, on_error is "raise", and nothing was raised'


def _judge_recovery(told: Observed, disk: FailingDisk) -> Iterator[str]:
    """A fault that strikes once costs one save at most: the last one commits, unless it is the one that was struck."""
    way = disk.way
    if disk.struck is None or way is None or way.stays or way.blocks or not told.claimed:
        return
    lost = [id for id in told.taken if id not in told.committed]
    if len(lost) > 1:
        yield f"one fault cost {len(lost)} saves: {', '.join(map(str, lost))}"
    if way.harmless and lost:
        yield f"a passing fault cost the save {lost[0]}"


def judge_wait(told: Observed, disk: FailingDisk, stuck: str | None) -> Iterator[str]:
    """A training that met a call that hangs: what it waits for without a deadline, and what `close` said."""
    if stuck is not None and stuck not in OWN_CALLS:
        yield f"{stuck} waits without a deadline for a call that hangs: {disk.struck}"
    for error in told.raised_in("close", "drain"):
        if isinstance(error, DeadlineExceeded) and not (error.subject and error.message):
            yield f"a deadline was exceeded, and the error does not say what hangs: {error!r}"


def judge_disk(
    disk: SimulatedDisk, before: dict[CheckpointId, State], newest: CheckpointId | None, told: Observed
) -> Iterator[str]:
    """The healthy disk that the fault left. `before`: the checkpoints that were there, `newest` of them `latest`."""
    store = LocalStore(PLACE, filesystem=disk, create=False)
    committed = [id for id in told.committed if id.run == RUN]
    try:
        repo = Repo.open(store)
    except NotARepository:
        if committed or before:
            yield "the repository is gone"
        return
    known = {**before, **told.begun}
    for run in repo.runs():
        for attempt in repo.attempts(run):
            for step in repo.committed(run, attempt):
                id = CheckpointId(run, attempt, step)
                yield from _whole(repo, id, known.get(id))
    now = latest(repo, RUN)
    last = committed[-1] if committed else newest
    later = [id for id in told.taken if id not in told.committed and (last is None or id > last)]
    if now != last and now not in later:
        yield f"latest is {now}; {last} was the newest that was reported"
    for id in committed[-KEPT:]:
        if not repo.exists(id):
            yield f"{id} was reported as committed and is lost"
    if not committed and newest is not None and not repo.exists(newest):
        yield f"{newest} was there before, nothing newer committed, and it is lost"
    for id in told.committed:
        if id.run == ONCE and not repo.exists(id):
            yield f"{id} was saved at once, and is lost"
    report = verify.execute(repo, verify.plan_verify(repo), threads=1)
    doubtful = [id for id in told.taken if id not in told.committed]
    # One that was not reported and could be seen may have got a note, and be lost without it.
    yield from (f"verify: {finding}" for finding in report.errors if finding.id not in doubtful)


def _whole(repo: Repo, id: CheckpointId, state: State | None) -> Iterator[str]:
    if state is None:
        yield f"{id} exists and was never saved"
        return

    def match(manifest: Manifest, leaves: choose.CheckpointLeaves) -> Prepared:
        return match_state(manifest.tree, leaves.private, leaves.specs, None)

    try:
        found: Any = restore_checkpoint(repo, id, match).state
    except TenutoError as error:
        yield f"{id} exists and cannot be restored: {error!r}"
        return
    if not equal(state, found):
        yield f"{id} does not hold what was saved"


def judge_restart(disk: SimulatedDisk, seed: int, *, collect: bool) -> list[str]:
    """A job that is restarted on the healthy disk restores, trains, saves, closes, and leaves nothing unfinished.
    `collect`: what a failed flush left in doubt is gc's to free."""
    store = LocalStore(PLACE, filesystem=disk)
    training = Training(store, seed, "raise", with_upkeep=False)
    told = training.run()
    problems = [f"restarted, {phase} raised {error!r}" for phase, error in told.raised]
    if problems:
        return problems
    if not told.taken or told.taken[-1] not in told.committed or told.exit_failure is not None:
        problems.append(f"restarted, the last save did not commit: {told.exit_failure}")
    repo = Repo.open(store)
    if collect:
        for _ in range(2):
            gc.execute(repo, gc.plan_gc(repo, grace_s=0.0))
    for run in repo.runs():
        for attempt in repo.attempts(run)[:-1]:
            for step in repo.steps(run, attempt):
                problems += [f"{entry.name} was not freed" for entry in left_of(repo, CheckpointId(run, attempt, step))]
    return problems
