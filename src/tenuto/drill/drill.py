"""A drill: proves that a checkpoint can be restored, and trained on from, and notes that where it did.

Planned, then carried out: a process of its own restores the checkpoint from the place that is tried, and what it holds
is compared with the indexes; then the user's script, if one is given, trains on from a copy. A proof is a note of kind
`proven` on the checkpoint; wrong bytes in the repository are noted as `suspect`. Nothing else is written.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final
from urllib.parse import urlsplit

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.drill.restore import Failure, Restore, restore
from tenuto.drill.resume import Resume, later_metrics, resume, steps_to_train
from tenuto.engine.read.chunk_reader import threads_for
from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    StoreError,
    TenutoError,
    UsageError,
    did_you_mean,
    typed,
)
from tenuto.events import Emitter, Warned
from tenuto.maintenance.copy_record import registered_copies
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import Json
from tenuto.model.sizes import seconds_of
from tenuto.record import record
from tenuto.repo.keys import unlock
from tenuto.repo.lineage import resolve, walk
from tenuto.repo.notes import add_note, last_proof, notes
from tenuto.repo.replicated.places import all_places, followers_of
from tenuto.repo.repository import Repo, now_text
from tenuto.store.contract import Where
from tenuto.store.registry import open_store

PROVEN: Final = "proven"
TIMEOUT_S: Final = 3600.0
"""How long a restore may take, and each step of a script, unless told otherwise."""
SLOW: Final = 27
"""The exit status of a restore that is right, and slower than its target."""
_LOOKED_AT: Final = 100
"""Checkpoints of a run whose notes are looked at for an earlier proof."""


@record
class ProvenRestore:
    """A restore that was proven. when: wall clock, as in manifests. seconds: that it took. place: from where."""

    id: CheckpointId
    when: str
    place: str
    seconds: float
    host: str

    @classmethod
    def of(cls, id: CheckpointId, body: Any) -> ProvenRestore:
        """Reads a note, of whatever version."""
        seconds = body.get("seconds")
        known = float(seconds) if isinstance(seconds, int | float) else 0.0
        return cls(id, str(body.get("when", "")), str(body.get("place", "")), known, str(body.get("host", "")))

    def age_s(self, now: str) -> float | None:
        """Returns how many seconds before `now` it was; None where its time cannot be read."""
        then, at = seconds_of(self.when), seconds_of(now)
        return None if then is None or at is None else at - then


@record
class DrillPlan:
    """What `execute` will do.

    where: the repository. place: what is restored from: the same, or another location of it, or a copy.
    target_s: within how many seconds the state has to be in memory; None: any. command, steps: what trains on, and
    for how long. recorded: metrics of later checkpoints, by step, that it is compared with.
    last: the newest proof of the run, read only where that says whether another one is due. due: whether it is.
    """

    id: CheckpointId
    where: str
    place: str
    target_s: float | None
    timeout_s: float
    command: tuple[str, ...]
    steps: int
    tolerance: float
    recorded: dict[int, dict[str, float]]
    last: ProvenRestore | None
    due: bool = True


@record
class DrillResult:
    """What a drill has shown. A true value if nothing speaks against the checkpoint.

    restore, resume: None where that was not tried. when, host: wall clock and name of the machine.
    noted: the note that it left: `proven`, `suspect`, or none.
    before: where this one failed, the newest proof of an older checkpoint of the run, which is what is left; where
        nothing was due, the newest of all.
    """

    plan: DrillPlan
    when: str
    host: str
    restore: Restore | None = None
    resume: Resume | None = None
    noted: str | None = None
    before: ProvenRestore | None = None

    @property
    def proven(self) -> bool:
        """Returns whether the restore, and training on from it where that was asked for, came out as recorded."""
        return (
            self.restore is not None
            and self.restore.ok
            and (self.resume.ok if self.resume is not None else not self.plan.command)
        )

    @property
    def slow(self) -> bool:
        """Returns whether the restore took longer than its target."""
        target = self.plan.target_s
        return self.restore is not None and target is not None and self.restore.seconds > target

    @property
    def exit_code(self) -> int:
        """Returns what `tenuto drill` leaves with."""
        if not self.plan.due:
            return 0
        for part in (self.restore, self.resume):
            if part is not None and part.failure is not None:
                return part.failure.exit_code
        if self.restore is not None and self.restore.wrong:
            return CorruptionError.exit_code
        if not self.proven:
            return RESUME_DIFFERS
        return SLOW if self.slow else 0

    def __bool__(self) -> bool:
        return self.exit_code == 0


RESUME_DIFFERS: Final = 20
"""The exit status of a script that trains on otherwise than it did: as of a certification."""


# --------------------------------------------------------------------------------------------------
# The plan.


def plan_drill(
    repo: Repo,
    step: int | str | CheckpointId | None = None,
    *,
    run: str = "main",
    place: Where | None = None,
    target_s: float | None = None,
    timeout_s: float = TIMEOUT_S,
    command: Sequence[str] = (),
    steps: int | None = None,
    metrics: Sequence[str] = (),
    tolerance: float = 0.0,
    due_s: float | None = None,
) -> DrillPlan:
    """Plans a drill, and writes nothing.

    step: None: the latest; with a command, the newest with later checkpoints that have recorded metrics.
    place: a location of the repository, a copy, or a part of such a URL that one alone has; None: as a restore does it.
    due_s: nothing is due while the newest proof of the run is younger than so many seconds.

    Raises RunNotFound and CheckpointNotFound; KeyMissing in a sealed repository, without its key; UsageError for a
    place that is no location of the repository, for one in the memory of this process, and where a script could not be
    compared.
    """
    unlock(repo)
    repo.require_key()
    last = None if due_s is None else newest_proven(repo, run)
    if step is None:
        id = _with_later_metrics(repo, run, metrics) if command else resolve(repo, run, "latest")
    else:
        id = resolve(repo, run, step)
    source = repo.url if place is None else _place(repo, place)
    if urlsplit(source).scheme == "memory":
        raise UsageError(
            f"{source} lies in the memory of this process, and a drill restores in another one",
            subject=source,
            hint="a directory or an object store can be drilled",
        )
    recorded: dict[int, dict[str, float]] = {}
    count = 0
    if command:
        manifest = repo.manifest(id)
        if manifest.code:
            raise UsageError(
                f"{id} is sealed, and a script trains on a copy that would not be",
                subject=str(id),
                hint=f"{typed('tenuto', 'drill', repo.url, id)} proves the restore without a script",
            )
        recorded = later_metrics(repo, id, metrics)
        count = steps_to_train(id, recorded, steps)
    age = None if last is None else last.age_s(now_text())
    due = due_s is None or age is None or age >= due_s
    return DrillPlan(
        id,
        repo.url,
        source,
        target_s,
        timeout_s,
        tuple(command),
        count,
        tolerance,
        recorded,
        last,
        due,
    )


def _with_later_metrics(repo: Repo, run: str, metrics: Sequence[str]) -> CheckpointId:
    """Returns the newest checkpoint on the line with a later one that has recorded metrics."""
    newest = resolve(repo, run, "latest")
    measured = False
    for id in walk(repo, run):
        if measured:
            return id
        try:
            logged = repo.manifest(id).metrics
        except (CheckpointNotFound, CorruptionError):
            continue
        measured = any(not metrics or name in metrics for name in logged)
    return newest


def _place(repo: Repo, place: Where) -> str:
    """Returns the URL of the one location of the repository, or copy of it, that is meant."""
    known = [store.url for store in (*all_places(repo.store), *followers_of(repo.store))]
    known += [copy.url for copy in registered_copies(repo) if copy.url not in known]
    text = os.fspath(place) if isinstance(place, str | os.PathLike) else place.url
    if text in known:
        return text
    meant = [url for url in known if url.rstrip("/").endswith(f"/{text}")] or [url for url in known if text in url]
    if len(meant) == 1:
        return meant[0]
    if "://" in text or text.startswith(("/", ".", "~")):
        there = Repo.open(open_store(text))
        if there.id == repo.id:
            return there.url
        what = f"{there.url} is another repository, and no copy of {repo.url}"
    else:
        what = f"{repo.url} has {'several locations' if meant else 'no location'} {text!r}; it has {', '.join(known)}"
    raise UsageError(what, subject=text, hint=did_you_mean(text, known) or typed("tenuto", "status", repo.url))


# --------------------------------------------------------------------------------------------------
# Proofs.


def proven_restores(repo: Repo, run: str) -> Iterator[ProvenRestore]:
    """Yields the newest proof of each checkpoint that has one, from the newest of the run down; of the newest
    hundred checkpoints."""
    for id in islice(_newest_first(repo, run), _LOOKED_AT):
        found = proven_of(repo, id)
        if found is not None:
            yield found


def _newest_first(repo: Repo, run: str) -> Iterator[CheckpointId]:
    for attempt in reversed(repo.attempts(run)):
        yield from (CheckpointId(run_key(run), attempt, step) for step in repo.committed(run, attempt))


def proven_of(repo: Repo, id: CheckpointId) -> ProvenRestore | None:
    """Returns a checkpoint's newest proof; None where it has none, or has been found damaged since."""
    proof = last_proof(notes(repo, id))
    return None if proof is None else ProvenRestore.of(id, proof.body)


def newest_proven(repo: Repo, run: str) -> ProvenRestore | None:
    """Returns the proof of the run that was made last, among those that `proven_restores` looks at."""
    found: list[ProvenRestore | None] = []
    ids = list(islice(_newest_first(repo, run), _LOOKED_AT))
    threads = threads_for(repo).read if repo.store.capabilities.remote else 1
    parallel_for(lambda id: found.append(proven_of(repo, id)), ids, threads)
    return max(filter(None, found), key=lambda one: seconds_of(one.when) or 0.0, default=None)


# --------------------------------------------------------------------------------------------------
# Execution.


def execute(
    repo: Repo,
    plan: DrillPlan,
    *,
    note: bool = True,
    on_step: Callable[[int], None] = lambda step: None,
    emitter: Emitter | None = None,
) -> DrillResult:
    """Carries a drill out. What it finds wrong is in the result. `note`: whether it is noted on the checkpoint.

    Raises CheckpointNotFound where the checkpoint is removed meanwhile; errors of the store; what a copy raises.
    """
    when, host = now_text(), socket.gethostname()
    if not plan.due:
        return DrillResult(plan, when, host, before=plan.last)
    try:
        restored = restore(repo, plan.id, plan.place, timeout_s=plan.timeout_s)
    except CorruptionError as error:
        said = Failure(type(error).__name__, error.message, error.hint, damage=True, exit_code=error.exit_code)
        restored = Restore(0.0, 0.0, 0, 0, 0, failure=said)
    if not restored.ok and not repo.exists(plan.id):
        raise CheckpointNotFound(f"{plan.id} was removed while it was restored", subject=str(plan.id))
    resumed: Resume | None = None
    if plan.command and restored.ok:
        resumed = resume(
            repo,
            plan.id,
            plan.command,
            recorded=plan.recorded,
            steps=plan.steps,
            tolerance=plan.tolerance,
            patience_s=plan.timeout_s,
            on_step=on_step,
        )
    result = DrillResult(plan, when, host, restored, resume=resumed)
    if not result.proven:
        result = replace(result, before=_before(repo, plan.id))
    return replace(result, noted=_note(repo, result, emitter or Emitter())) if note else result


def _note(repo: Repo, result: DrillResult, emitter: Emitter) -> str | None:
    """Notes what a drill has shown of the checkpoint; returns the kind of the note. A store that refuses it does not
    change the outcome."""
    plan, restored = result.plan, result.restore
    assert restored is not None
    body: dict[str, Json] = {"when": result.when, "host": result.host, "place": plan.place}
    if result.proven:
        kind = PROVEN
        compared = 0 if result.resume is None else len({one.step for one in result.resume.compared})
        body |= {
            "seconds": round(restored.seconds, 3),
            "bytes": restored.bytes,
            "leaves": restored.leaves,
            "steps": compared,
        }
    elif plan.place == repo.url and restored.damaged:
        kind = "suspect"
        found = [str(one) for one in restored.wrong] or [restored.failure.message if restored.failure else ""]
        body |= {"count": len(found), "findings": [text[:1000] for text in found[:20]]}
    else:
        return None
    try:
        add_note(repo, plan.id, kind, body)
    except StoreError as error:
        emitter.emit(Warned(f"the outcome could not be noted on {plan.id}: {error.message}", str(plan.id)))
        return None
    return kind


def _before(repo: Repo, id: CheckpointId) -> ProvenRestore | None:
    """Returns the proof of the newest older checkpoint that has one."""
    try:
        return next((one for one in proven_restores(repo, id.run) if one.id < id), None)
    except TenutoError:
        return None  # what failed matters more
