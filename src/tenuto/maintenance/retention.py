"""Retention: removes what the keep policy drops, for the live attempt of a run and only in that run.

What goes is freed at once, for the run needs the room. But of a line of training that was left behind, the checkpoints
that somebody may want to go back to (`policy.keep.worth_a_grace`) go into the trash, and are freed a day later.

The order (I2): tombstones; a snapshot of what is needed and of who owns the run (I11); the manifest, durably gone
before anything else; packs and index; notes; begin.json; the tombstone. The policy and I7 are judged anew by a snapshot
taken after the tombstones were put, whatever the plan says.

So a plan may be made from cached facts (`tenuto.repo.catalog`): it costs no call of the store, and can only name too
much or too little. The snapshot lists the refs and the run, and reads what is new. Before anything is removed, the
manifests of those checkpoints that have to be intact for that (I7) are read again, unless this process has just put
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import Literal

from tenuto.crashpoints import crashpoint
from tenuto.errors import CheckpointNotFound, CorruptionError, StoreFull, typed
from tenuto.events import Emitter, Removed
from tenuto.maintenance.census import census_of
from tenuto.maintenance.facts import gather_facts, lines_left_behind, relied_on
from tenuto.maintenance.gc import listed
from tenuto.maintenance.trash import move_into_trash
from tenuto.model.ids import CheckpointId, run_key
from tenuto.policy.keep import CheckpointFacts, KeepPolicy, KeepVerdict, worth_a_grace
from tenuto.repo.catalog import Catalog, Snapshot
from tenuto.repo.format import object_names
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.claim import Attempt, claim_newest
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import Tombstone, put_tombstone, still_exists, take_back
from tenuto.repo.unfinished import notes_and_leftovers
from tenuto.units import count, size

Grace = Literal["left behind", "all", "none"]
"""What goes into the trash first: what `worth_a_grace` says of lines of training that were left behind, as a training's
own retention does; everything that goes, as `tenuto keep` does; or nothing."""


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """One verdict for each checkpoint of the run, newest first.

    policy: the one that is applied.
    bytes: of each checkpoint that goes, 0 where nobody knows.
    grace: what of it goes into the trash first.
    trash: those checkpoints, as far as the plan can tell.
    superseded: the run belongs to a later attempt, and nothing goes (I11).
    """

    where: str
    run: str
    attempt: int
    policy: KeepPolicy
    verdicts: tuple[KeepVerdict, ...]
    bytes: tuple[tuple[CheckpointId, int], ...]
    grace: Grace = "left behind"
    trash: frozenset[CheckpointId] = frozenset()
    superseded: bool = False

    @property
    def dropped(self) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints to remove, oldest first: if it breaks off, the newest are left."""
        return tuple(verdict.id for verdict in reversed(self.verdicts) if not verdict.keep)

    def reason(self, id: CheckpointId) -> str:
        return next(verdict.reason for verdict in self.verdicts if verdict.id == id)

    def __str__(self) -> str:
        total = sum(nbytes for _, nbytes in self.bytes)
        gone = count(len(self.dropped), "checkpoint")
        head = f"retention of run {self.run} at {self.where}: {gone} removed, {size(total)}"
        return "\n".join([head, *(f"  {verdict.id}  {verdict}" for verdict in self.verdicts)])


def plan_retention(
    repo: Repo,
    attempt: Attempt,
    policy: KeepPolicy,
    catalog: Catalog | None = None,
    *,
    grace: Grace = "left behind",
) -> RetentionPlan:
    """Plans what `policy` removes from the attempt's run. Raises CorruptionError if a ref cannot be read.

    `catalog`: known facts of the repository. A plan that removes something may come from these alone; `execute` reads
    the repository's present state.
    """
    known = None if catalog is None else catalog.last_snapshot(attempt.run)
    without = frozenset(attempt.unsettled)
    if known is not None:
        plan = _plan(known, attempt.run, attempt.number, policy, grace, without=without)
        if plan.dropped:
            return plan
    snapshot = (catalog or Catalog()).snapshot(repo, attempt.run)
    if _superseded(snapshot, attempt):
        return RetentionPlan(repo.url, attempt.run, attempt.number, policy, (), (), superseded=True)
    plan = _plan(snapshot, attempt.run, attempt.number, policy, grace, without=without)
    snapshot.close()
    return plan


def preview(repo: Repo, run: str, policy: KeepPolicy, *, grace: Grace = "left behind") -> RetentionPlan:
    """Plans what `policy` would remove from the run, without an attempt: such a plan cannot be executed."""
    run = run_key(run)
    return _plan(Catalog().snapshot(repo, run), run, 0, policy, grace)


def retain(
    repo: Repo,
    run: str,
    policy: KeepPolicy,
    *,
    grace: Grace = "left behind",
    wait_s: float = 0.0,
    emitter: Emitter | None = None,
    report: Callable[[str], None] | None = None,
) -> tuple[RetentionPlan, tuple[CheckpointId, ...]]:
    """Applies `policy` to a run without a live owner: claims it, since only its live attempt may remove (I11), removes,
    and releases it. Returns the plan and what was removed. Claims nothing if nothing would be removed.

    The attempt continues from what `latest` means, and so does not change it. Raises RunInUse if the run has a live
    owner (one on another host is watched for 15 s), Superseded if others keep committing to it meanwhile.
    """
    plan = preview(repo, run, policy, grace=grace)
    withdrawn: set[int] = set()

    def newest() -> tuple[CheckpointId | None, CheckpointId | None]:
        found = latest(repo, run, withdrawn=withdrawn)
        return found, found

    if not plan.dropped:
        return plan, ()
    attempt = claim_newest(repo, run, *newest(), again=newest, withdrawn=withdrawn, wait_s=wait_s, report=report)
    attempt.leave()
    try:
        plan = plan_retention(repo, attempt, policy, grace=grace)
        return plan, execute(repo, attempt, plan, emitter=emitter)
    finally:
        attempt.release()


def _plan(
    snapshot: Snapshot,
    run: str,
    attempt: int,
    policy: KeepPolicy,
    grace: Grace,
    *,
    without: Container[CheckpointId] = frozenset(),
) -> RetentionPlan:
    facts = sorted(gather_facts(snapshot, run, without=without), key=lambda facts: facts.id, reverse=True)
    verdicts = tuple(policy.decide(facts))
    nbytes = tuple((verdict.id, _bytes(snapshot, verdict.id)) for verdict in verdicts if not verdict.keep)
    going = {verdict.id for verdict in verdicts if not verdict.keep}
    trash = _into_trash(snapshot, run, facts, going, policy=policy, grace=grace)
    return RetentionPlan(snapshot.url, run, attempt, policy, verdicts, nbytes, grace, trash)


def _into_trash(
    snapshot: Snapshot,
    run: str,
    facts: list[CheckpointFacts],
    going: Collection[CheckpointId],
    *,
    policy: KeepPolicy,
    grace: Grace,
) -> frozenset[CheckpointId]:
    """Returns what of `going` goes into the trash. `facts`: of every checkpoint of the run."""
    if grace != "left behind":
        return frozenset(going if grace == "all" else ())
    if not any(one.walk is None and one.id in going for one in facts):
        return frozenset()
    lines = lines_left_behind(snapshot, run, facts)
    return frozenset(id for line in lines for id in worth_a_grace(line, policy) if id in going)


def execute(
    repo: Repo,
    attempt: Attempt,
    plan: RetentionPlan,
    *,
    emitter: Emitter | None = None,
    catalog: Catalog | None = None,
) -> tuple[CheckpointId, ...]:
    """Removes what the plan drops; returns what was removed. Keeps what the policy keeps by now and what has come to be
    needed since; once a later attempt has claimed the run, removes nothing.

    `catalog`: the facts from which the plan was made; without one everything is read anew. Its `plan_again` says
    afterwards whether more may go than the plan knew of. Raises what the store or the policy raises; the next claim
    frees what a failed store leaves.
    """
    assert (plan.run, plan.attempt) == (attempt.run, attempt.number), "a plan is executed by the attempt that made it"
    emitter, catalog = emitter or Emitter(), catalog or Catalog()
    catalog.plan_again = False
    going = [id for id in plan.dropped if id.run == attempt.run]
    if not going:
        return ()
    removed: list[CheckpointId] = []
    stones: list[Tombstone] = []
    remaining: list[Tombstone] = []
    try:
        for id in going:
            try:
                stones.append(put_tombstone(repo, id, reason="retention", attempt=attempt.number))
            except StoreFull:
                if not stones:
                    raise
                break  # what these free makes room for the others, next time
            remaining.append(stones[-1])
        crashpoint("tombstone put, manifest still there")
        snapshot = catalog.snapshot(repo, attempt.run, anew=[stone.id for stone in stones])
        free, trash = _still_free(snapshot, attempt, plan, {stone.id for stone in stones})
        for stone in [stone for stone in stones if stone.id in free]:
            if stone.id in trash:
                if _moved(repo, stone):
                    snapshot.drop(stone.id)
                    removed.append(stone.id)
                    emitter.emit(Removed(stone.id, f"{plan.reason(stone.id)}; {_way_back(repo, stone.id)}"))
                continue
            files = _own_files(repo, stone, snapshot.files(stone.id))
            if not files:
                continue
            # Where it breaks off from here on, its tombstone stays: without it, what is left of the checkpoint looks
            # like one that has lost its manifest. The next claim ends the removal.
            remaining.remove(stone)
            _free(repo, stone.id, files)
            snapshot.drop(stone.id)
            removed.append(stone.id)
            emitter.emit(Removed(stone.id, plan.reason(stone.id)))
            take_back(repo, stone)
    except Exception:
        take_back(repo, *remaining)
        raise
    take_back(repo, *remaining)
    catalog.plan_again = not free.issubset(going)
    return tuple(removed)


def _moved(repo: Repo, stone: Tombstone) -> bool:
    """Moves a checkpoint into the trash. Returns False if that has to wait for the next round, or is done already."""
    try:
        return move_into_trash(repo, stone, by="retention")
    except (StoreFull, CheckpointNotFound):
        return False  # what else goes makes room for the copy; or a person has removed it meanwhile


def _way_back(repo: Repo, id: CheckpointId) -> str:
    return f"it lies in the trash for 24 h: {typed('tenuto', 'undelete', repo.url, id)} brings it back"


def _superseded(repo: Repo, attempt: Attempt) -> bool:
    """Returns whether a higher attempt exists. One with a damaged record counts; a copied directory does not."""
    for number in repo.attempts(attempt.run):
        if number > attempt.number:
            try:
                if repo.find_attempt(attempt.run, number) is not None:
                    return True
            except CorruptionError:
                return True
    return False


def _still_free(
    snapshot: Snapshot, attempt: Attempt, plan: RetentionPlan, going: Collection[CheckpointId]
) -> tuple[frozenset[CheckpointId], frozenset[CheckpointId]]:
    """Returns the checkpoints that the policy does not keep and nothing needs, and those of them that go into the
    trash.

    `snapshot`: taken after the tombstones of `going` were put. `going`: those that may be removed now. The manifests of
    the checkpoints that must be intact for that are read again.
    """
    if _superseded(snapshot, attempt):
        return frozenset(), frozenset()
    without = frozenset(attempt.unsettled)
    while True:
        facts = gather_facts(snapshot, attempt.run, without=without)
        free = frozenset(verdict.id for verdict in plan.policy.decide(facts) if not verdict.keep)
        relied = relied_on(snapshot, attempt.run, free.intersection(going), without=without)
        stale = [id for id in relied if not snapshot.is_fresh(id)]
        if not stale:
            trash = _into_trash(snapshot, attempt.run, facts, free, policy=plan.policy, grace=plan.grace)
            snapshot.close()
            return free, trash
        for id in stale:
            snapshot.read_again(id)


def _own_files(repo: Repo, stone: Tombstone, known: tuple[str, ...]) -> list[str]:
    """Returns the file names of a checkpoint's objects; none if its tombstone was withdrawn, or nothing lists them.
    `known`: those that its save announced, if this process saved it."""
    files = sorted(known) or listed(repo, census_of(repo, stone.id))
    # I7: a pack that a kept checkpoint needs lies in that one's directory; names with a way out of it are not read.
    assert all(object_names.is_file(file) for file in files), f"{stone.id} lists names outside its own directory"
    return files if still_exists(repo, stone) else []


def _free(repo: Repo, id: CheckpointId, files: list[str]) -> None:
    """Frees one checkpoint with these files."""
    repo.store.delete([id.manifest])
    repo.store.settle(id.manifest)
    crashpoint("manifest removed, packs still there")
    # Listed now: whoever adds a note looks for the manifest afterwards, and withdraws the note if that is gone. What
    # was noted before the manifest's removal is found here.
    own = [f"{id.directory}/{file}" for file in files]
    notes, leftovers = notes_and_leftovers(repo, id, own)
    repo.store.delete([*own, *leftovers])
    crashpoint("packs removed, notes still there")
    repo.store.delete(notes)
    repo.store.delete([object_names.begin_name(id)])


def _bytes(snapshot: Snapshot, id: CheckpointId) -> int:
    entry = snapshot.entry(id)
    return 0 if entry is None else entry.bytes
