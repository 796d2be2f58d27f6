"""Retention: frees at once what the keep policy lets go of, for the live attempt of a run and in that run alone.

The order (I2): tombstones; a look at who needs what, and whether this attempt still owns the run (I11); the manifest,
durably gone before anything else goes; packs and index; notes; begin.json; the tombstone. What I7 protects is judged
anew after the tombstones are put, whatever the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from tenuto.crashpoints import crashpoint
from tenuto.errors import CheckpointNotFound, CorruptionError, StoreFull, Superseded, TenutoError, typed
from tenuto.events import Emitter, Removed
from tenuto.maintenance.census import SaveDirectory, is_note, look_at
from tenuto.maintenance.facts import gather_facts
from tenuto.maintenance.gc import listed, listed_names
from tenuto.model.ids import CheckpointId, run_key
from tenuto.policy.keep import KeepPolicy, KeepVerdict, protections
from tenuto.repo.format import object_names
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.claim import CLAIMS, Attempt, claim_for_maintenance
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import Tombstone, put_tombstone, stands, take_back
from tenuto.store.names import TEMPORARY


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """One verdict for each checkpoint of the run, newest first. `bytes`: of each one that goes, 0 where nobody knows.
    `superseded`: the run belongs to a later attempt, and nothing goes (I11)."""

    where: str
    run: str
    attempt: int
    verdicts: tuple[KeepVerdict, ...]
    bytes: tuple[tuple[CheckpointId, int], ...]
    superseded: bool = False

    @property
    def dropped(self) -> tuple[CheckpointId, ...]:
        """What goes, oldest first: cut short, retention leaves the newest."""
        return tuple(verdict.id for verdict in reversed(self.verdicts) if not verdict.keep)

    def reason(self, id: CheckpointId) -> str:
        return next(verdict.reason for verdict in self.verdicts if verdict.id == id)

    def __str__(self) -> str:
        total = sum(nbytes for _, nbytes in self.bytes)
        head = f"retention of run {self.run} at {self.where}: {len(self.dropped)} go, {total / 2**20:,.1f} MiB"
        return "\n".join([head, *(f"  {verdict.id}  {verdict}" for verdict in self.verdicts)])


def plan_retention(repo: Repo, attempt: Attempt, policy: KeepPolicy) -> RetentionPlan:
    """What `policy` lets go of in the attempt's run. Raises CorruptionError where a ref cannot be read."""
    if _superseded(repo, attempt):
        return RetentionPlan(repo.url, attempt.run, attempt.number, (), (), superseded=True)
    return _plan(repo, attempt.run, attempt.number, policy, without=frozenset(attempt.unsettled))


def preview(repo: Repo, run: str, policy: KeepPolicy) -> RetentionPlan:
    """What `policy` would let go of in the run, looked at by nobody's attempt: no plan to execute."""
    return _plan(repo, run_key(run), 0, policy)


def retain(
    repo: Repo,
    run: str,
    policy: KeepPolicy,
    *,
    wait_s: float = 0.0,
    emitter: Emitter | None = None,
    report: Callable[[str], None] | None = None,
) -> tuple[RetentionPlan, tuple[CheckpointId, ...]]:
    """Applies `policy` to a run that nobody trains: claims it, as only its live attempt may remove (I11), frees, and
    gives it back. The plan, and what went. Where nothing would go, nothing is claimed.

    The attempt goes on from what `latest` means, and so changes nothing of that. Raises RunInUse if the run has a live
    owner (one on another host is watched for 15 s), Superseded if others keep committing to it meanwhile.
    """
    plan = preview(repo, run, policy)
    withdrawn: set[int] = set()
    for _ in range(CLAIMS):
        newest = latest(repo, run, withdrawn=withdrawn)
        if newest is None or not plan.dropped:
            return plan, ()
        try:
            attempt = claim_for_maintenance(
                repo, run, newest, newest, withdrawn=withdrawn, wait_s=wait_s, report=report
            )
        except CheckpointNotFound:
            continue
        if attempt is None:
            continue
        try:
            plan = plan_retention(repo, attempt, policy)
            return plan, execute(repo, attempt, plan, emitter=emitter)
        finally:
            attempt.release()
    raise Superseded(
        f"others keep committing to run {run!r}", subject=run, hint=typed("tenuto", "ls", repo.url, "--run", run)
    )


def _plan(
    repo: Repo, run: str, attempt: int, policy: KeepPolicy, *, without: Container[CheckpointId] = frozenset()
) -> RetentionPlan:
    facts = sorted(gather_facts(repo, run, without=without), key=lambda facts: facts.id, reverse=True)
    verdicts = tuple(policy.decide(facts))
    nbytes = tuple((verdict.id, _bytes(repo, verdict.id)) for verdict in verdicts if not verdict.keep)
    return RetentionPlan(repo.url, run, attempt, verdicts, nbytes)


def execute(
    repo: Repo, attempt: Attempt, plan: RetentionPlan, *, emitter: Emitter | None = None
) -> tuple[CheckpointId, ...]:
    """Frees; returns what went. What somebody has come to need since the plan stays; once a later attempt has claimed
    the run, nothing goes. A store that fails is raised, and what it leaves is closed by the next claim."""
    assert (plan.run, plan.attempt) == (attempt.run, attempt.number), "a plan is executed by the attempt that made it"
    going = [id for id in plan.dropped if id.run == attempt.run]
    if not going:
        return ()
    removed: list[CheckpointId] = []
    stones: list[Tombstone] = []
    standing: list[Tombstone] = []
    try:
        for id in going:
            try:
                stones.append(put_tombstone(repo, id, reason="retention", attempt=attempt.number))
            except StoreFull:
                if not stones:
                    raise
                break  # what these free makes room for the others, next time
            standing.append(stones[-1])
        crashpoint("tombstone put, manifest still there")
        for stone in _still_free(repo, attempt, stones):
            found = _own_files(repo, stone)
            if found is None:
                continue
            # Where it breaks off from here on, its tombstone stays: without it, what is left of the checkpoint looks
            # like one that has lost its manifest. The next claim ends the removal.
            standing.remove(stone)
            _free(repo, *found)
            removed.append(stone.id)
            (emitter or Emitter()).emit(Removed(stone.id, plan.reason(stone.id)))
            take_back(repo, stone)
    except TenutoError:
        _take_back_all(repo, standing)
        raise
    _take_back_all(repo, standing)
    return tuple(removed)


def _take_back_all(repo: Repo, stones: list[Tombstone]) -> None:
    repo.store.delete([stone.name for stone in stones])


def _superseded(repo: Repo, attempt: Attempt) -> bool:
    """Whether a higher attempt exists. One whose record is damaged counts; a copied directory does not."""
    for number in repo.attempts(attempt.run):
        if number > attempt.number:
            try:
                if repo.find_attempt(attempt.run, number) is not None:
                    return True
            except CorruptionError:
                return True
    return False


def _still_free(repo: Repo, attempt: Attempt, stones: list[Tombstone]) -> Iterator[Tombstone]:
    """Those of the tombstones whose checkpoints nobody needs, seen after all of them were put."""
    if _superseded(repo, attempt):
        return
    protected = protections(gather_facts(repo, attempt.run, without=frozenset(attempt.unsettled)))
    for stone in stones:
        if not protected.get(stone.id, ["it is gone"]):
            yield stone


def _own_files(repo: Repo, stone: Tombstone) -> tuple[SaveDirectory, list[str]] | None:
    """What one checkpoint is made of; None if its tombstone was taken back, or nothing says which objects are its."""
    save = look_at(repo, stone.id)
    files = listed(repo, save)
    if not files or not stands(repo, stone):
        return None
    _assert_own(save, files)
    return save, files


def _free(repo: Repo, save: SaveDirectory, files: list[str]) -> None:
    """Frees one checkpoint, made of these files."""
    repo.store.delete([save.id.manifest])
    repo.store.settle(save.id.manifest)
    crashpoint("manifest removed, packs still there")
    names = listed_names(repo, save)
    directory = save.id.directory
    leftovers = [e.name for e in repo.store.leftovers(directory) if e.name.partition(TEMPORARY)[0] in names]
    repo.store.delete([*(f"{directory}/{file}" for file in files), *leftovers])
    crashpoint("packs removed, notes still there")
    prefix = len(directory) + 1
    # Listed anew: whoever notes something looks for the manifest afterwards, and withdraws the note if that is gone;
    # what was noted between the first look and the manifest's removal is found here.
    noted = [entry.name for entry in repo.store.walk(directory) if is_note(entry.name[prefix:])]
    repo.store.delete(noted)
    repo.store.delete([object_names.begin_name(save.id)])


def _assert_own(save: SaveDirectory, files: list[str]) -> None:
    """I7: a pack that a kept checkpoint needs lies in that one's directory: names with a way out of it are not read."""
    assert all(object_names.is_file(file) for file in files), f"{save.id} lists names outside its own directory"


def _bytes(repo: Repo, id: CheckpointId) -> int:
    try:
        return repo.manifest(id).bytes
    except TenutoError:
        return 0
