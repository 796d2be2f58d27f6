"""Remove (`rm`): a checkpoint's manifest goes into the trash. Its packs stay until gc, and until then it can come back.

The order (I2): a tombstone, so that whoever comes to need the checkpoint sees it; a check of who needs it, so that
whoever came before is seen; the copy in the trash; the manifest; the mark; the tombstone taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.crashpoints import crashpoint
from tenuto.engine.read.chunk_reader import threads_for
from tenuto.errors import CheckpointNotFound, CorruptionError, ObjectNotFound, RemovalRefused, TenutoError, typed
from tenuto.events import Emitter, Removed
from tenuto.maintenance.trash import move_into_trash
from tenuto.model.ids import CheckpointId
from tenuto.record import record
from tenuto.repo.bases import forks_besides
from tenuto.repo.format import objects
from tenuto.repo.format.object_names import begin_name
from tenuto.repo.format.small_records import decode_begin
from tenuto.repo.lineage import walk
from tenuto.repo.notes import UNREADABLE, notes, verification_of
from tenuto.repo.ownership.owner_watch import Finished, finished_runs, is_finished
from tenuto.repo.refs import list_refs, pin_name
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import put_tombstone, take_back
from tenuto.units import count, size

# --------------------------------------------------------------------------------------------------
# Who needs a checkpoint: what a removal asks after it has announced itself, and before it removes anything.


@record
class Dependent:
    """`reason` follows "it is needed: ". `hint`: what to do first. `forcible`: nobody but a person can mind."""

    reason: str
    hint: str
    forcible: bool = False


def dependents(repo: Repo, id: CheckpointId, finished: Finished) -> list[Dependent]:
    """Returns everything that needs `id` now. Raises CorruptionError if a ref cannot be read: it may name `id`."""
    return [*_refs(repo, id), *(need for run in repo.runs() for need in _run(repo, run, id, finished))]


def _refs(repo: Repo, id: CheckpointId) -> Iterator[Dependent]:
    for ref in list_refs(repo):
        if ref.id == id:
            if ref.kind == "tag":
                yield Dependent(f"tag {ref.name!r} names it", typed("tenuto", "tag", repo.url, ref.name, "--delete"))
                continue
            hold = ["--hold"] if ref.kind == "hold" else []
            keeps = f"{ref.kind} {ref.name!r} names it"
            if ref.name == pin_name(id):
                keeps = "it is on hold" if hold else "it is pinned"
            way = typed("tenuto", "pin", repo.url, id, *hold, "--remove")
            yield Dependent(f"{keeps}: {ref.reason}" if ref.reason else keeps, way)


def _run(repo: Repo, run: str, id: CheckpointId, finished: Finished) -> Iterator[Dependent]:
    """Yields a dependent if a run would resume from `id`: it is `latest`, or the newest not known to be damaged."""
    line = walk(repo, run)
    first = next(line, None)
    if first is None:
        return
    whole: CheckpointId | None = first
    while whole is not None and verification_state(repo, whole) in ("suspect", UNREADABLE):
        whole = next(line, None)
    if id not in (first, whole):
        return
    what = "what `latest` means in" if id == first else "the newest not known to be damaged in"
    if is_finished(repo, run, finished):
        yield Dependent(
            f"it is {what} run {run!r}", f"--force removes it; run {run!r} then resumes from an older one", True
        )
    else:
        yield Dependent(f"it is {what} run {run!r}, which a process is training now", "stop that process first")


def is_suspect(repo: Repo, id: CheckpointId) -> bool:
    """Returns whether the last verification that left a note found it damaged."""
    return verification_state(repo, id) == "suspect"


def verification_state(repo: Repo, id: CheckpointId) -> str:
    """Returns the last verification's verdict, as `verification_of` has it."""
    return verification_of(notes(repo, id))


@record
class Removal:
    """One checkpoint to be removed, and what stands in the way. `bytes`: what gc will free later; 0 if nobody knows.
    `rested_on`: checkpoints that stay and rest on its packs, which stay with them."""

    id: CheckpointId
    bytes: int
    needs: tuple[Dependent, ...] = ()
    rested_on: tuple[CheckpointId, ...] = ()

    @property
    def stays(self) -> str:
        """Returns why its data files stay; empty if they do not."""
        more = f" and {count(len(self.rested_on) - 1, 'other')}" if len(self.rested_on) > 1 else ""
        return f"its data files are needed by {self.rested_on[0]}{more}" if self.rested_on else ""


@record
class RemovePlan:
    """`finished`: runs whose owner was found dead, with the attempt's number."""

    where: str
    removals: tuple[Removal, ...]
    force: bool = False
    finished: tuple[tuple[str, int], ...] = ()

    @property
    def bytes(self) -> int:
        return sum(removal.bytes for removal in self.removals)

    @property
    def refused(self) -> tuple[Removal, ...]:
        return tuple(removal for removal in self.removals if _blocking(removal.needs, force=self.force))

    def __str__(self) -> str:
        lines = [f"remove {count(len(self.removals), 'checkpoint')} of {self.where}, {size(self.bytes)} after gc"]
        for removal in self.removals:
            blocking = _blocking(removal.needs, force=self.force)
            why = f"refused: {'; '.join(need.reason for need in blocking)}" if blocking else "removed"
            why += f"; {removal.stays}" if removal.stays and not blocking else ""
            lines.append(f"  {removal.id}  {why}")
        return "\n".join(lines)


def plan_remove(
    repo: Repo, ids: Sequence[CheckpointId], *, force: bool = False, finished: Finished | None = None
) -> RemovePlan:
    """Plans the removal of `ids`. `force` also removes what a run without a live owner would resume from.

    `finished`: runs known to have no live owner; by default found out, which takes 15 s if one lived on another host
    and did not say goodbye. Raises CheckpointNotFound. The plan contains refusals; executing it raises them.
    """
    for id in ids:
        if not repo.exists(id):
            raise CheckpointNotFound(
                f"no checkpoint {id} at {repo.url}",
                subject=str(id),
                hint=f"{typed('tenuto', 'ls', repo.url)} shows those there are",
            )
    known = finished_runs(repo, repo.runs()) if finished is None else dict(finished)
    resting = _resting_on(repo, set(ids))
    removals = tuple(
        Removal(id, 0 if resting[id] else _bytes(repo, id), tuple(dependents(repo, id, known)), resting[id])
        for id in dict.fromkeys(ids)
    )
    # The oldest goes first: cut short, the removal of a whole run leaves its newest checkpoints.
    ordered = tuple(sorted(removals, key=lambda removal: removal.id))
    return RemovePlan(repo.url, ordered, force, tuple(sorted(known.items())))


def execute(repo: Repo, plan: RemovePlan, *, emitter: Emitter | None = None) -> tuple[CheckpointId, ...]:
    """Removes checkpoints and returns them. Raises RemovalRefused: before anything is removed if the plan contains a
    refusal, else at the first checkpoint that has come to be needed since (those before it are removed)."""
    if plan.refused:
        raise refusal(plan.refused[0].id, _blocking(plan.refused[0].needs, force=plan.force))
    removed = []
    for removal in plan.removals:
        remove(repo, removal.id, finished=dict(plan.finished), force=plan.force)
        removed.append(removal.id)
        (emitter or Emitter()).emit(Removed(removal.id, "removed by hand; `tenuto undelete` brings it back for 24 h"))
    return tuple(removed)


def remove(repo: Repo, id: CheckpointId, *, finished: Finished, force: bool) -> None:
    """Removes one checkpoint, in the order above."""
    stone = put_tombstone(repo, id, reason="rm")
    crashpoint("tombstone put, manifest still there")
    try:
        blocking = _blocking(dependents(repo, id, finished), force=force)
        if blocking:
            raise refusal(id, blocking)
        if not move_into_trash(repo, stone, by="rm"):
            raise RemovalRefused(
                f"{id} was not removed: its tombstone has been taken back by a claim of the run",
                subject=str(id),
                hint=typed("tenuto", "rm", repo.url, id),
            )
    except TenutoError:
        take_back(repo, stone)
        raise
    take_back(repo, stone)


def refusal(id: CheckpointId, blocking: Sequence[Dependent]) -> RemovalRefused:
    reasons = "; ".join(need.reason for need in blocking)
    return RemovalRefused(f"{id} is not removed: {reasons}", subject=str(id), hint=blocking[0].hint)


def _blocking(found: Sequence[Dependent], *, force: bool) -> list[Dependent]:
    return [need for need in found if not (force and need.forcible)]


def _bytes(repo: Repo, id: CheckpointId) -> int:
    try:
        return repo.manifest(id).stored_bytes
    except CorruptionError:
        return 0


def _resting_on(repo: Repo, ids: Collection[CheckpointId]) -> dict[CheckpointId, tuple[CheckpointId, ...]]:
    """Returns for each of `ids` the other checkpoints that rest on its packs. Reads the `begin.json` of every save of
    the runs that may, several at once, and the manifests of those that may rest on one."""
    found: dict[CheckpointId, list[CheckpointId]] = {id: [] for id in ids}
    runs = {run for id in ids for run in (id.run, *forks_besides(repo, id.run))}
    saves = [
        CheckpointId(run, attempt, step)
        for run in sorted(runs)
        for attempt in repo.attempts(run)
        for step in repo.steps(run, attempt)
    ]
    named: dict[CheckpointId, tuple[CheckpointId, ...]] = {}

    def read_bases(id: CheckpointId) -> None:
        with suppress(ObjectNotFound, CorruptionError, CheckpointNotFound):
            begin = decode_begin(repo.store.get(begin_name(id), limit=objects.SMALL), id, repo.id)
            if not found.keys().isdisjoint(begin.bases):
                named[id] = repo.manifest(id).bases

    others = [id for id in saves if id not in found]
    parallel_for(read_bases, others, threads_for(repo).read if repo.store.capabilities.remote else 1)
    for id, bases in sorted(named.items()):
        for base in found.keys() & set(bases):
            found[base].append(id)
    return {id: tuple(some) for id, some in found.items()}
