"""Another name for a run: copies of all its checkpoints that share its data files, and the originals removed.

Identities hold the run's name, so a run cannot be renamed in place. The copies keep the lineage: an attempt for each
that has checkpoints, in their order, each resumed from the copy of what its original resumed from. What breaks off is
continued when it is run again: a copy says what it was made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tenuto.errors import (
    CorruptionError,
    RemovalRefused,
    RunInUse,
    RunNotFound,
    UsageError,
    did_you_mean,
    typed,
)
from tenuto.events import Emitter
from tenuto.maintenance import remove
from tenuto.maintenance.checkpoint_copy import COPIED, CheckpointCopier, CopiedCheckpoint
from tenuto.model.ids import CheckpointId, check_run, run_key
from tenuto.record import record
from tenuto.repo.keys import unlock
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.claim import Attempt, claim, claim_newest
from tenuto.repo.ownership.owner_watch import finished_runs
from tenuto.repo.refs import list_refs, put_ref
from tenuto.repo.repository import Repo, known_runs


@record
class AttemptCopy:
    """One attempt to make. `source`: the number of its original; `parent`: what that resumed from; `steps`: of its
    checkpoints that are still to be copied, ascending."""

    source: int
    parent: CheckpointId | None
    steps: tuple[int, ...]


@record
class RenamePlan:
    """What `execute` will do.

    attempts: in the order in which they are made. there: copies that an earlier call has made, by their originals.
    tags: that move, with their checkpoints in `run`. checkpoints: of `run`, which go into the trash.
    bytes: of their states, which are shared.
    """

    where: str
    run: str
    new: str
    attempts: tuple[AttemptCopy, ...]
    there: tuple[tuple[CheckpointId, CheckpointId], ...]
    tags: tuple[tuple[str, CheckpointId], ...]
    checkpoints: tuple[CheckpointId, ...]
    bytes: int


@record
class RenamedRun:
    """What became of a run: each old identity with the new one, and the tags that have moved. The old checkpoints lie
    in the trash."""

    run: str
    checkpoints: tuple[tuple[CheckpointId, CheckpointId], ...]
    tags: tuple[str, ...]


def plan_rename(repo: Repo, run: str, new: str) -> RenamePlan:
    """Plans the new name, and writes nothing.

    Raises RunNotFound; UsageError where `new` has checkpoints of its own; RunInUse while a process trains the run;
    RemovalRefused where a pin or a hold names one of its checkpoints, or another run would resume from one.
    """
    old, new = run_key(run), run_key(check_run(new))
    runs = repo.runs()
    if old not in runs:
        raise RunNotFound(
            f"no run {run!r} at {repo.url}; {known_runs(runs)}", subject=run, hint=did_you_mean(run, runs)
        )
    if new == old:
        raise UsageError(f"run {run!r} has that name: names that differ only in case are one run", subject=new)
    finished = finished_runs(repo, [old])
    if old not in finished:
        raise RunInUse(
            f"run {run!r} is not renamed while a process trains it", subject=run, hint="stop that process first"
        )
    committed = {number: sorted(repo.committed(old, number)) for number in repo.attempts(old)}
    ids = [CheckpointId(old, number, step) for number, steps in sorted(committed.items()) for step in steps]
    if not ids:
        raise RunNotFound(f"run {run!r} has no checkpoint", subject=run, hint=typed("tenuto", "ls", repo.url))
    there = _copies(repo, new, old)
    tags = check_refs(repo, old)
    check_dependents(repo, ids, besides=(old, new))
    parents = {number: _parent(repo, old, number) for number in committed}
    attempts = []
    last = max(number for number, steps in committed.items() if steps or parents[number] is not None)
    for number, parent in sorted(parents.items()):
        steps = tuple(step for step in committed[number] if CheckpointId(old, number, step) not in there)
        if steps or (number == last and not committed[number]):  # the run resumes from its parent
            attempts.append(AttemptCopy(number, parent, steps))
    nbytes = sum(repo.manifest(id).bytes for id in ids)
    return RenamePlan(repo.url, old, new, tuple(attempts), tuple(there.items()), tags, tuple(ids), nbytes)


def _parent(repo: Repo, run: str, number: int) -> CheckpointId | None:
    record = repo.find_attempt(run, number)
    return None if record is None else record.parent


def _copies(repo: Repo, new: str, old: str) -> dict[CheckpointId, CheckpointId]:
    """Returns the copies of the run's checkpoints that lie in `new`, by their originals. Raises UsageError if anything
    else lies there."""
    found: dict[CheckpointId, CheckpointId] = {}
    for number in repo.attempts(new):
        for step in repo.committed(new, number):
            id = CheckpointId(new, number, step)
            try:
                copied = repo.manifest(id).environment.get(COPIED, {})
            except CorruptionError:
                copied = {}
            run, _, rest = str(copied.get("checkpoint", "")).partition("/")
            attempt, _, _ = rest.removeprefix("a").partition("/")
            if run != old or copied.get("repository") != repo.id or not attempt.isdigit():
                raise UsageError(
                    f"run {new!r} at {repo.url} has checkpoints of its own, such as {id}",
                    subject=new,
                    hint=f"another name, or {typed('tenuto', 'cp', repo.url, 'STEP', '--run', old, '--to-run', new)}",
                )
            found[CheckpointId(old, int(attempt), step)] = id
    return found


def check_refs(repo: Repo, run: str) -> tuple[tuple[str, CheckpointId], ...]:
    """Returns the tags of a run, with what they name. Raises RemovalRefused for a pin or a hold."""
    refs = [ref for ref in list_refs(repo) if ref.id.run == run]
    for ref in refs:
        if ref.kind != "tag":
            raise RemovalRefused(
                f"{ref.id} cannot get another name: {ref.kind} {ref.name!r} names it",
                subject=str(ref.id),
                hint=f"clear the {ref.kind} first",
            )
    return tuple((ref.name, ref.id) for ref in refs)


def check_dependents(repo: Repo, ids: Sequence[CheckpointId], *, besides: Sequence[str]) -> None:
    """Raises RemovalRefused where another run has nothing but a checkpoint of this one to resume from."""
    gone = set(ids)
    for other in (run for run in repo.runs() if run not in besides):
        newest = latest(repo, other)
        if newest in gone:
            raise RemovalRefused(
                f"{newest} cannot get another name: run {other!r} was forked from it, and has no checkpoint yet",
                subject=str(newest),
                hint=f"let {other!r} save first",
            )


def execute(repo: Repo, plan: RenamePlan, *, emitter: Emitter | None = None) -> RenamedRun:
    """Makes the copies, moves the tags, and puts the originals into the trash.

    The run is claimed for as long as that takes. Raises RunInUse if a process trains one of the two by now, and what a
    copy and a removal raise; run again, it continues where it stopped.
    """
    emit = emitter or Emitter()
    unlock(repo, writing=True)
    newest = latest(repo, plan.run)
    again = partial(_refuse_newer, repo, plan)
    guard = claim_newest(repo, plan.run, newest, newest, again=again, wait_s=0.0)
    try:
        present = {
            CheckpointId(plan.run, number, step)
            for number in repo.attempts(plan.run)
            for step in repo.committed(plan.run, number)
        }
        if present != set(plan.checkpoints):
            again()
        new_of = dict(plan.there)
        for attempt in plan.attempts:
            for one in _copy_attempt(repo, plan, attempt, new_of, emit):
                new_of[one.source] = one.id
        for name, id in plan.tags:
            put_ref(repo, "tag", name, new_of[id])
        _remove(repo, plan, guard)
    finally:
        guard.release()
    pairs = tuple((id, new_of[id]) for id in plan.checkpoints)
    return RenamedRun(plan.new, pairs, tuple(name for name, _ in plan.tags))


def _refuse_newer(repo: Repo, plan: RenamePlan) -> tuple[CheckpointId | None, CheckpointId | None]:
    raise RunInUse(
        f"run {plan.run!r} has changed since the plan was made",
        subject=plan.run,
        hint=typed("tenuto", "mv", repo.url, plan.run, plan.new),
    )


def _copy_attempt(
    repo: Repo,
    plan: RenamePlan,
    attempt: AttemptCopy,
    new_of: dict[CheckpointId, CheckpointId],
    emitter: Emitter,
) -> list[CopiedCheckpoint]:
    claimed = claim(repo, plan.new, _new_parent(repo, plan, attempt, new_of), wait_s=0.0)
    copier = CheckpointCopier(repo, claimed, shares=True, emitter=emitter)
    try:
        for step in attempt.steps:
            id = CheckpointId(plan.run, attempt.source, step)
            copier.write(id, step, created=repo.manifest(id).created, suspect=remove.is_suspect(repo, id))
        return copier.show()
    finally:
        try:
            copier.take_back()
        finally:
            claimed.release()


def _new_parent(
    repo: Repo, plan: RenamePlan, attempt: AttemptCopy, new_of: dict[CheckpointId, CheckpointId]
) -> CheckpointId | None:
    """Returns what the copy of an attempt resumes from: the copy of the newest that is left of what its original did.

    Where that is nothing, it is a checkpoint of the run itself: only a run that was forked from another may rest on
    data files of others.
    """
    below = [id for id in new_of if id.attempt == attempt.source]
    if below:
        return new_of[max(below)]  # an earlier call was cut off in this attempt
    parent, visited = attempt.parent, set()
    while parent is not None and parent.run == plan.run and parent.attempt not in visited:
        visited.add(parent.attempt)
        left = [id for id in new_of if id.attempt == parent.attempt and id.step <= parent.step]
        if left:
            return new_of[max(left)]
        parent = _parent(repo, plan.run, parent.attempt)
    if parent is not None and parent.run != plan.run and repo.exists(parent):
        return parent
    return CheckpointId(plan.run, attempt.source, attempt.steps[0]) if attempt.steps else None


def _remove(repo: Repo, plan: RenamePlan, guard: Attempt) -> None:
    finished = {plan.run: guard.number, **finished_runs(repo, [plan.new])}
    removal = remove.plan_remove(repo, plan.checkpoints, force=True, finished=finished)
    remove.execute(repo, removal)
