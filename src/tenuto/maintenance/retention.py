"""Retention: removes what the keep policy drops, for the live attempt of a run and only in that run.

What goes is freed at once, for the run needs the room. But of a line of training that was left behind, the checkpoints
that somebody may want to go back to (`policy.keep.worth_a_grace`) go into the trash, and are freed a day later. Into
the trash goes also what is dropped while others rest on its packs; it is freed as soon as none does.

The order (I2): tombstones; a snapshot of what is needed and of who owns the run (I11); the manifest, durably gone
before anything else; packs and index; notes; begin.json; the tombstone. The policy and I7 are judged anew by a snapshot
taken after the tombstones were put, whatever the plan says.

So a plan may be made from cached facts (`tenuto.repo.catalog`): it costs no call of the store, and can only name too
much or too little. The snapshot lists the refs and the run, and reads what is new. Before anything is removed, the
manifests of those checkpoints that have to be intact for that (I7) are read again, unless this process has just put
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Final, Literal

from tenuto.crashpoints import crashpoint
from tenuto.errors import CheckpointNotFound, CorruptionError, StoreFull, typed
from tenuto.events import Emitter, Removed
from tenuto.maintenance.census import census_of
from tenuto.maintenance.facts import gather_facts, lines_left_behind, relied_on
from tenuto.maintenance.gc import free_announced, listed, needed_by
from tenuto.maintenance.marks import By
from tenuto.maintenance.trash import move_into_trash
from tenuto.model.ids import CheckpointId, run_key
from tenuto.policy.keep import CheckpointFacts, KeepPolicy, KeepVerdict, worth_a_grace
from tenuto.record import record
from tenuto.repo.bases import forks_besides
from tenuto.repo.catalog import Catalog, Snapshot
from tenuto.repo.format import object_names
from tenuto.repo.lineage import latest
from tenuto.repo.notes import judged_without
from tenuto.repo.ownership.claim import Attempt, claim_newest
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import Tombstone, put_tombstone, still_there, take_back
from tenuto.repo.unfinished import notes_and_leftovers_among
from tenuto.units import count, size

Copying = Callable[[], Mapping[CheckpointId, str]]
"""Returns the checkpoints that are being copied to another tier, with its name."""

Grace = Literal["left behind", "all", "none"]
"""What goes into the trash first: what `worth_a_grace` says of lines of training that were left behind, as a training's
own retention does; everything that goes, as `tenuto keep` does; or nothing."""


PAGE: Final = 1000
"""Objects in one request of a listing, on most stores."""


@record
class RetentionPlan:
    """One verdict for each checkpoint of the run, newest first.

    policy: the one that is applied.
    bytes: of each checkpoint that goes, 0 where nobody knows, and where one that is kept rests on its packs.
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
    unmet: tuple[str, ...] = ()
    """What of the policy cannot be met, in words."""
    unjudged: tuple[str, ...] = ()
    """What cannot be judged, in words."""

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self.unmet, *self.unjudged)

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
    copying: Copying = dict,
) -> RetentionPlan:
    """Plans what `policy` removes from the attempt's run. Raises CorruptionError if a ref cannot be read.

    `catalog`: known facts of the repository. A plan that removes something may come from these alone; `execute` reads
    the repository's present state.
    """
    known = None if catalog is None else catalog.last_snapshot(attempt.run)
    without = frozenset(attempt.unsettled)
    if known is not None:
        plan = _plan(known, attempt.run, attempt.number, policy, grace, without=without, copying=copying)
        if plan.dropped:
            return plan
    snapshot = (catalog or Catalog()).snapshot(repo, attempt.run)
    if _superseded(snapshot, attempt):
        return RetentionPlan(repo.url, attempt.run, attempt.number, policy, (), (), superseded=True)
    plan = _plan(snapshot, attempt.run, attempt.number, policy, grace, without=without, copying=copying)
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
    copying: Copying = dict,
) -> RetentionPlan:
    found = gather_facts(snapshot, run, without=without, copying=copying())
    facts = sorted(found, key=lambda facts: facts.id, reverse=True)
    verdicts = tuple(policy.decide(facts))
    dropped = [verdict.id for verdict in verdicts if not verdict.keep]
    going = set(dropped)
    rested_on = {base for verdict in verdicts if verdict.keep for base in snapshot.bases(verdict.id)}
    nbytes = tuple((id, 0 if id in rested_on else _bytes(snapshot, id)) for id in dropped)
    trash = _into_trash(snapshot, run, facts, going, policy=policy, grace=grace)
    unread = {one.id: one.unread for one in facts if one.unread}
    kept = judged_without(unread, "kept without a decision", snapshot.url)
    unmet, unjudged = tuple(policy.warnings(facts)), (kept,) if kept else ()
    return RetentionPlan(
        snapshot.url, run, attempt, policy, verdicts, nbytes, grace, trash, unmet=unmet, unjudged=unjudged
    )


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
    copying: Copying = dict,
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
    waiting = catalog.unneeded(attempt.run)
    if not going and not waiting:
        return ()
    removed: list[CheckpointId] = []
    stones: list[Tombstone] = []
    remaining: list[Tombstone] = []
    try:
        for id in (*going, *waiting):
            try:
                stones.append(put_tombstone(repo, id, reason="retention", attempt=attempt.number))
            except StoreFull:
                if not stones:
                    raise
                break  # what these free makes room for the others, next time
            remaining.append(stones[-1])
        crashpoint("tombstone put, manifest still there")
        snapshot = catalog.snapshot(repo, attempt.run, anew=[stone.id for stone in stones])
        judged = _still_free(snapshot, attempt, plan, {stone.id for stone in stones}, copying)
        free, trash, needs = judged.free, judged.trash, judged.needs
        for stone in [stone for stone in stones if stone.id in free and (stone.id in trash or stone.id in needs)]:
            graced = stone.id in trash
            if _moved(repo, stone, by="retention" if graced else "needed"):
                snapshot.drop(stone.id)
                removed.append(stone.id)
                why = _way_back(repo, stone.id) if graced else needed_by(needs[stone.id])
                emitter.emit(Removed(stone.id, f"{plan.reason(stone.id)}; {why}", repo.url))
                if not graced:
                    known = stone.id in catalog.known_needs(attempt.run)
                    catalog.waiting[stone.id] = None if known else needs[stone.id]
        if judged.owns:
            _free_waiting(repo, [stone for stone in stones if stone.id in waiting], needs, catalog)
        direct = [stone for stone in stones if stone.id in free and stone.id not in trash and stone.id not in needs]
        at_once = len(direct) if repo.store.capabilities.remote else 1
        for start in range(0, len(direct), max(at_once, 1)):
            files = _own_files(repo, direct[start : start + at_once], snapshot)
            # Where it breaks off from here on, their tombstones stay: without them, what is left of a checkpoint looks
            # like one that has lost its manifest. The next claim ends the removal.
            remaining = [stone for stone in remaining if stone not in files]
            _free(repo, {stone.id: own for stone, own in files.items()}, snapshot.listed_objects)
            for stone in files:
                snapshot.drop(stone.id)
                removed.append(stone.id)
                emitter.emit(Removed(stone.id, plan.reason(stone.id), repo.url))
            take_back(repo, *files)
    except Exception:
        take_back(repo, *remaining)
        raise
    take_back(repo, *remaining)
    catalog.plan_again = not free.issubset(going) or bool(catalog.unneeded(attempt.run))
    return tuple(removed)


def _free_waiting(
    repo: Repo, stones: Sequence[Tombstone], needs: Mapping[CheckpointId, CheckpointId], catalog: Catalog
) -> None:
    """Frees what has waited in the trash until nothing rests on its packs any more. `needs`: as found after the
    tombstones were put."""
    for stone in stones:
        if stone.id in needs:
            catalog.waiting[stone.id] = needs[stone.id]
            continue
        save = census_of(repo, stone.id)
        if save.state != "removed" or not free_announced(repo, save, stone, {}):
            del catalog.waiting[stone.id]  # it was brought back, or is freed; what broke off the next look finds


def _moved(repo: Repo, stone: Tombstone, *, by: By) -> bool:
    """Moves a checkpoint into the trash. Returns False if that has to wait for the next round, or is done already."""
    try:
        return move_into_trash(repo, stone, by=by)
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


@record
class _Judged:
    """free: the checkpoints that the policy does not keep and nothing needs. trash: those of them that go into the
    trash. needs: what rests on whose packs. owns: whether the run is still the attempt's."""

    free: frozenset[CheckpointId] = frozenset()
    trash: frozenset[CheckpointId] = frozenset()
    needs: Mapping[CheckpointId, CheckpointId] = field(default_factory=dict)
    owns: bool = False


def _still_free(
    snapshot: Snapshot, attempt: Attempt, plan: RetentionPlan, going: Collection[CheckpointId], copying: Copying
) -> _Judged:
    """Judges anew what the plan drops.

    `snapshot`: taken after the tombstones of `going` were put. `going`: those that may be removed now. The manifests of
    the checkpoints that must be intact for that are read again.
    """
    if _superseded(snapshot, attempt):
        return _Judged()
    without = frozenset(attempt.unsettled)
    while True:
        facts = gather_facts(snapshot, attempt.run, without=without, copying=copying())
        free = frozenset(verdict.id for verdict in plan.policy.decide(facts) if not verdict.keep)
        relied = relied_on(snapshot, attempt.run, free.intersection(going), without=without)
        stale = [id for id in relied if not snapshot.is_fresh(id)]
        if not stale:
            trash = _into_trash(snapshot, attempt.run, facts, free, policy=plan.policy, grace=plan.grace)
            needs = snapshot.needs(forks_besides(snapshot, attempt.run))
            snapshot.close()
            return _Judged(free, trash, needs, owns=True)
        for id in stale:
            snapshot.read_again(id)


def _own_files(repo: Repo, stones: Sequence[Tombstone], snapshot: Snapshot) -> dict[Tombstone, list[str]]:
    """Returns the file names of each checkpoint's objects: those that its save announced, if this process saved it.
    Leaves out a checkpoint of which nothing lists them, and one whose tombstone was withdrawn."""
    found: dict[Tombstone, list[str]] = {}
    for stone in stones:
        files = sorted(snapshot.files(stone.id)) or listed(repo, census_of(repo, stone.id))
        # I7: what a kept checkpoint needs lies in its own directory, or in that of one that is not freed here.
        assert all(object_names.is_file(file) for file in files), f"{stone.id} lists names outside its own directory"
        if files:
            found[stone] = files
    there = still_there(repo, found)
    return {stone: files for stone, files in found.items() if stone in there}


def _free(repo: Repo, going: Mapping[CheckpointId, list[str]], objects: int) -> None:
    """Frees checkpoints with these files, all of them together. `objects`: how many there are about in the run, 0 where
    nobody knows."""
    if not going:
        return
    repo.store.delete([id.manifest for id in going])
    for id in going:
        repo.store.settle(id.manifest)
    crashpoint("manifest removed, packs still there")
    # Listed now: whoever adds a note looks for the manifest afterwards, and withdraws the note if that is gone. What
    # was noted before the manifest's removal is found here.
    own = {id: [f"{id.directory}/{file}" for file in files] for id, files in going.items()}
    there = _directories(repo, own, whole_run=len(going) > 1 and 0 < objects <= len(going) * PAGE)
    found = [notes_and_leftovers_among(there[id], id, own[id]) for id in going]
    repo.store.delete([name for names in own.values() for name in names] + [one for _, more in found for one in more])
    crashpoint("packs removed, notes still there")
    notes = [name for names, _ in found for name in names]
    if notes:
        repo.store.delete(notes)
    repo.store.delete([object_names.begin_name(id) for id in going])


def _directories(repo: Repo, ids: Iterable[CheckpointId], *, whole_run: bool) -> dict[CheckpointId, list[str]]:
    """Returns the names of all that lies in the directories of these checkpoints of one run, leftovers too.
    `whole_run`: one listing of the run is cheaper than one of each."""
    if not whole_run:
        return {id: [entry.name for entry in repo.store.walk(id.directory, leftovers=True)] for id in ids}
    found: dict[str, list[str]] = {id.directory: [] for id in ids}
    run = next(iter(ids)).run
    for entry in repo.store.walk(object_names.run_directory(run), leftovers=True):
        place = "/".join(entry.name.split("/", 4)[:4])
        if place in found:
            found[place].append(entry.name)
    return {id: found[id.directory] for id in ids}


def _bytes(snapshot: Snapshot, id: CheckpointId) -> int:
    entry = snapshot.entry(id)
    return 0 if entry is None else entry.bytes
