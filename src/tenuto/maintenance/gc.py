"""Gc: frees what no manifest, ref or live save reaches, a grace after it was marked.

A removal marks what it moves into the trash; the first visit marks the rest. A visit after the grace, or one that is
told not to wait (`now`), deletes what still is unreached. It deletes only names that a save listed itself; what cannot
be read or was not written by Tenuto counts as reached (I6). Before it deletes, it takes the manifest's name for an
aborted mark, so that neither a late commit nor an undelete can come to rely on what goes.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from tenuto.crashpoints import crashpoint
from tenuto.errors import CorruptionError, StoreFull, TenutoError, typed
from tenuto.maintenance.census import (
    Census,
    SaveDirectory,
    census_of,
    classify_all,
    everything,
    ids_in_trash,
    list_names,
    place,
    take_census,
)
from tenuto.maintenance.inspect import inspect
from tenuto.maintenance.marks import GRACE_S, By, age_s, probe, put_mark, valid_marks, wait_s
from tenuto.maintenance.remove import verification_state
from tenuto.maintenance.replica_tidy import ForgottenSave, free_forgotten, unknown
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.record import record
from tenuto.repo.bases import forks_besides
from tenuto.repo.catalog import Catalog
from tenuto.repo.format import object_names
from tenuto.repo.ownership.lease import read_last
from tenuto.repo.ownership.owner_watch import Finished, finished_runs, is_finished, may_still_save
from tenuto.repo.refs import list_refs
from tenuto.repo.replicated.members import member_in
from tenuto.repo.replicated.places import home_of
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import STALE_S, Tombstone, dead_tombstones, put_tombstone, still_exists, take_back
from tenuto.repo.unfinished import abort, free
from tenuto.store.contract import TEMPORARY, Entry, final_name, leftovers_of
from tenuto.units import count, size

# --------------------------------------------------------------------------------------------------
# Deletes what a save has left that nothing reaches: only names that it listed itself, and `begin.json` last;
# where that is gone behind an aborted mark, names of a save's own form.


def close(repo: Repo, save: SaveDirectory, *, by: str) -> bool:
    """Takes the manifest's name for an aborted mark: from now on nobody can commit this save, or bring it back. False
    if it has a manifest after all."""
    return abort(repo, save.id, save.save_id or secrets.token_hex(16), by=by)


def sweep(repo: Repo, save: SaveDirectory, *, keep_begin: bool) -> None:
    """Deletes the objects of a save that has been closed: packs, indexes and notes, then the copies in the trash, then
    begin.json. `keep_begin`: its process may still put more, so that somebody has to come back."""
    if not free(repo, save.id, names=listed(repo, save), keep_begin=True):
        return
    crashpoint("objects swept, copy in trash still there")
    repo.store.delete([entry.name for entry in save.trash])
    if not keep_begin:
        repo.store.delete([object_names.begin_name(save.id)])


def listed(repo: Repo, save: SaveDirectory) -> list[str]:
    """Returns file names of packs and indexes that the save's begin.json or manifest lists, also through its indexes;
    of a closed save without begin.json those with names of a save's parts."""
    names = {*(save.begin.names if save.begin else ()), *save.unlisted()}
    if save.manifest is not None:
        names.update(entry.name for entry in save.manifest.tables)
        if save.begin is None:
            names.update(_own_packs(repo, save.manifest))
    return sorted(names)


def listed_names(repo: Repo, save: SaveDirectory) -> set[str]:
    """Returns the full names of everything that the save may have put: what it listed, what lists it, and its notes."""
    files = {*listed(repo, save), object_names.BEGIN, object_names.MANIFEST}
    prefix = len(save.id.directory) + 1
    notes = {entry.name for entry in save.entries if object_names.is_note(entry.name[prefix:])}
    return notes | {f"{save.id.directory}/{file}" for file in files}


def _own_packs(repo: Repo, manifest: Manifest) -> set[str]:
    """Returns the packs in the checkpoint's own directory that its indexes name, as far as those can be read."""
    found: set[str] = set()
    for rank in range(len(manifest.indexes)):
        try:
            found.update(pack.name for pack in repo.packs(manifest, rank) if pack.at is None)
        except CorruptionError:
            continue
    return found


Needs = Mapping[CheckpointId, Collection[CheckpointId]]
"""The checkpoints on whose packs others rest, each with those others."""


def needs_in(repo: Repo, census: Census, finished: Finished) -> dict[CheckpointId, set[CheckpointId]]:
    """Returns who rests on the packs of whom: checkpoints, those in the trash, and saves that may be under way.

    Lists the names once more, and reads what is new: a save that has looked whether a checkpoint is there before the
    census found that one removed has put its `begin.json` before.
    """
    found: dict[CheckpointId, set[CheckpointId]] = {}
    begun = {id for id, save in census.saves.items() if save.has(object_names.BEGIN)}
    new = [save for id, save in list_names(repo).saves.items() if id not in begun]
    classify_all(repo, new)
    for save in (*census.saves.values(), *new):
        ended = save.state == "unfinished" and _claimed(repo, save.id) and not may_still_save(repo, save.id, finished)
        for base in save.bases if not ended else ():
            found.setdefault(base, set()).add(save.id)
    return found


def needed_now(repo: Repo, run: str, catalog: Catalog | None = None) -> dict[CheckpointId, CheckpointId]:
    """Returns the checkpoints of `run` on whose packs others rest, each with one of those; reads what is not in
    `catalog`. Whoever frees one has announced that before."""
    snapshot = (catalog or Catalog()).snapshot(repo, run)
    return snapshot.needs(forks_besides(snapshot, run))


def needed_by(id: CheckpointId) -> str:
    """Returns why a removed checkpoint's data files stay."""
    return f"its data files are needed by {id}"


@record
class Garbage:
    """One save that nothing reaches. `left_s`: seconds of grace that are left, 0 if it goes now. `due`: it goes now.
    `trash`: the copies of its manifest there: others mean that it was brought back and removed again."""

    id: CheckpointId
    reason: str
    objects: int
    bytes: int
    marked: bool
    left_s: float
    due: bool
    trash: frozenset[str] = frozenset()

    def __str__(self) -> str:
        what = "delete" if self.due else f"marked, {self.left_s / 3600:,.1f} h left" if self.marked else "mark"
        return f"{self.id}  {what}: {self.reason}, {count(self.objects, 'object')}, {size(self.bytes)}"


@record
class GcPlan:
    """`garbage`: to be marked, waiting, or due. `odds`: single names to be deleted, each with its reason: temporaries
    and copies in the trash that outlived their use, leases of superseded attempts. `void`: marks that speak of nothing
    any more, and tombstones of removers that died. `kept`: saves that look like garbage and are left alone, each with
    the reason. `forgotten`: what other places of the repository still hold of saves that it no longer knows. `now`:
    nothing waits for its grace; `force`: with it, also what has lost its manifest goes. `needs`: of what is to be
    deleted, what rests on its packs and has to go before."""

    where: str
    grace_s: float
    garbage: tuple[Garbage, ...]
    odds: tuple[tuple[str, str], ...]
    void: tuple[str, ...]
    kept: tuple[tuple[CheckpointId, str], ...]
    finished: tuple[tuple[str, int], ...]
    forgotten: tuple[ForgottenSave, ...] = ()
    now: bool = False
    force: bool = False
    needs: tuple[tuple[CheckpointId, tuple[CheckpointId, ...]], ...] = ()

    @property
    def bytes(self) -> int:
        """Returns the bytes that executing it frees."""
        return sum(found.bytes for found in self.garbage if found.due) + sum(found.bytes for found in self.forgotten)

    def __str__(self) -> str:
        due = sum(found.due for found in self.garbage)
        lines = [f"gc of {self.where}: {count(due, 'save')} to delete, {size(self.bytes)}"]
        lines += [f"  {found}" for found in self.garbage]
        lines += [f"  {name}  delete: {reason}" for name, reason in self.odds]
        lines += [f"  {found.id}  delete from {found.place}: no longer known" for found in self.forgotten]
        lines += [f"  {id}  left alone: {reason}" for id, reason in self.kept]
        return "\n".join(lines)


@record
class GcReport:
    """What a visit did. `spared`: was due, and something came to need it, or could not be read, since the plan.
    `forgotten`: saves freed in other places."""

    marked: tuple[CheckpointId, ...]
    deleted: tuple[CheckpointId, ...]
    bytes: int
    odds: int
    spared: tuple[tuple[CheckpointId, str], ...] = ()
    forgotten: int = 0


def plan_gc(
    repo: Repo,
    *,
    grace_s: float = GRACE_S,
    finished: Finished | None = None,
    now: bool = False,
    force: bool = False,
) -> GcPlan:
    """What a visit would mark and delete. `grace_s`: seconds between mark and deletion, by the store's own clock; to
    read that, one small object is put and deleted again.

    `now`: deletes everything that nothing reaches in this one visit, also what was never marked; but, unless `force`,
    not the last checkpoint of a run that could still be restored, nor what has lost its manifest, or may have.

    `finished`: runs known to have no live owner; by default found out where it matters, which takes 15 s if one lived
    on another host and did not say goodbye. Raises CorruptionError where a ref cannot be read: it may name anything.
    """
    census = take_census(repo)
    named = {ref.id for ref in list_refs(repo)}
    leftovers = everything(repo, partial(leftovers_of, repo.store), [])
    open_runs = {save.id.run for save in census.saves.values() if save.lost or save.state in ("unfinished", "closed")}
    if now:
        open_runs |= {
            run
            for run, _ in census.attempts
            if any(entry.name.startswith(f"{object_names.run_directory(run)}/") for entry in leftovers)
        }
    known = finished_runs(repo, sorted(open_runs)) if finished is None else dict(finished)
    now_ns, void = _clock_and_dead_tombstones(repo, census, now=now)
    garbage, kept = [], []
    last = {} if force or not now else {**_last_restorable(repo, census), **_whole_but_for_manifests(repo, census)}
    for save in sorted(census.saves.values(), key=lambda save: save.id):
        reached = _reached(repo, save, named, known, lost_too=now and force)
        valid = [] if reached else valid_marks(repo, save)
        marks = [mark.entry for mark in valid]
        void += [entry.name for entry in save.marks if entry not in marks]
        if not reached and save.id in last:
            kept.append((save.id, last[save.id]))
        elif not reached:
            age = max((age_s(repo, mark, now_ns) for mark in marks), default=0.0)
            no_wait = now or any(mark.by == "needed" for mark in valid)
            left_s = 0.0 if no_wait else max(0.0, wait_s(save, grace_s) - age)
            garbage.append(_garbage(save, marked=bool(marks), left_s=left_s, due=now or (bool(marks) and left_s <= 0)))
        elif save.state in ("unfinished", "removed", "damaged", "closed") and reached != NOTHING_LEFT:
            kept.append((save.id, reached))
    needs = needs_in(repo, census, known) if garbage else {}
    garbage, needed = _without_needed(garbage, needs)
    kept += needed
    forgotten, ahead = unknown(repo)
    kept += ahead
    odds = tuple(_odds(repo, census, leftovers, now_ns, known, grace_s=grace_s, now=now)) if now_ns else ()
    return GcPlan(
        repo.url,
        grace_s,
        tuple(garbage),
        odds,
        tuple(void),
        tuple(kept),
        tuple(sorted(known.items())),
        forgotten,
        now,
        force,
        tuple((found.id, tuple(sorted(needs[found.id]))) for found in garbage if found.due and found.id in needs),
    )


def _without_needed(garbage: list[Garbage], needs: Needs) -> tuple[list[Garbage], list[tuple[CheckpointId, str]]]:
    """Splits off what something that stays rests on, each with the reason. What goes comes in the order in which it
    may go: first what rests on others."""
    going, kept = list(garbage), []
    while True:
        due = {found.id for found in going if found.due}
        stay = [found for found in going if set(needs.get(found.id, ())) - due]
        if not stay:
            break
        kept += [(found.id, needed_by(min(set(needs[found.id]) - due))) for found in stay]
        going = [found for found in going if found not in stay]
    ordered: list[Garbage] = []
    while going:
        left = {found.id for found in going}
        free = [found for found in going if not left.intersection(needs.get(found.id, ()))] or going
        ordered += free
        going = [found for found in going if found not in free]
    return ordered, kept


def _clock_and_dead_tombstones(repo: Repo, census: Census, *, now: bool) -> tuple[int, list[str]]:
    """Returns the store's clock in ns, and the tombstones of dead removers. With `now` on a full disk, where not even
    an object to read the clock from can be put: 0, and none."""
    try:
        with probe(repo) as name:
            return repo.store.stat(name).modified_ns, list(_dead_tombstones(repo, census, name))
    except StoreFull:
        if not now:
            raise
        return 0, []


def _last_restorable(repo: Repo, census: Census) -> dict[CheckpointId, str]:
    """Returns, for each run without a checkpoint that can be restored, the newest in the trash that can, and why it is
    left alone. Looks at every object of a checkpoint, but not at every byte."""
    found: dict[CheckpointId, str] = {}
    for run in sorted({save.id.run for save in census.saves.values() if save.state == "removed"}):
        newest_first = sorted((save for save in census.saves.values() if save.id.run == run), key=lambda save: save.id)
        newest_first.reverse()
        if any(save.state == "committed" and _can_be_restored(repo, save) for save in newest_first):
            continue
        removed = (save for save in newest_first if save.state == "removed" and _can_be_restored(repo, save))
        last = next(removed, None)
        if last is not None:
            back = typed("tenuto", "undelete", repo.url, last.id)
            found[last.id] = f"the last of run {run} that can be restored: {back} brings it back, --force frees it"
    return found


def _whole_but_for_manifests(repo: Repo, census: Census) -> dict[CheckpointId, str]:
    """Returns the saves of which everything is there but the manifest, and why they are left alone: most were killed
    right before it, and one may have lost it. A grace is time to find that out."""
    back = typed("tenuto", "repair", repo.url, "--from", "BACKUP")
    why = f"all of it is there but its manifest, which `{back}` may bring; it goes after the grace, or with --force"
    return {save.id: why for save in census.saves.values() if save.is_whole_but_for_its_manifest}


def _can_be_restored(repo: Repo, save: SaveDirectory) -> bool:
    if save.state == "removed":
        return save.manifest is not None and not inspect(repo, save.id, save.manifest).harmed
    return verification_state(repo, save.id) != "suspect" and not inspect(repo, save.id).harmed


def execute(repo: Repo, plan: GcPlan) -> GcReport:
    """Marks, and deletes what is due and still unreached, after one more check of each."""
    finished = dict(plan.finished)
    repo.store.delete(plan.void)
    marked: list[CheckpointId] = []
    deleted: list[CheckpointId] = []
    spared: list[tuple[CheckpointId, str]] = []
    nbytes = 0
    needs = {id: set(others) for id, others in plan.needs}
    for found in plan.garbage:
        if found.due:
            left = needs.get(found.id, set()).difference(deleted)
            try:
                why = (
                    needed_by(min(left))
                    if left
                    else _delete(repo, found.id, finished, now=plan.now, lost_too=plan.force, trash=found.trash)
                )
            except CorruptionError as error:
                why = error.message
            if why:
                spared.append((found.id, why))
            else:
                deleted.append(found.id)
                nbytes += found.bytes
        elif not found.marked:
            put_mark(repo, census_of(repo, found.id), by="gc")
            marked.append(found.id)
    repo.store.delete([name for name, _ in plan.odds])
    lost = [one for one in plan.forgotten if free_forgotten(repo, one)]
    nbytes += sum(one.bytes for one in lost)
    return GcReport(tuple(marked), tuple(deleted), nbytes, len(plan.odds), tuple(spared), len(lost))


def free_expired(
    repo: Repo, run: str, *, by: By, grace_s: float = GRACE_S, catalog: Catalog | None = None
) -> tuple[CheckpointId, ...]:
    """Frees what removals by `by` have put into the trash of a run and whose grace is over, as a visit of gc would.
    Returns what it freed. Costs one listing where the trash is empty. `catalog`: learns what waits there because others
    need its packs.

    Also ends what others had begun there: the grace of what has no mark, because its remover died or the disk was full,
    begins now; and what a freeing has closed goes.
    """
    freed = []
    # The newest first: what rests on others goes before those, all in one visit.
    for save in [census_of(repo, id) for id in sorted(ids_in_trash(repo, run), reverse=True)]:
        if save.state == "closed" and save.trash:
            _delete(repo, save.id, {}, now=True)
        marks = valid_marks(repo, save) if save.state == "removed" else []
        if save.state == "removed" and not marks:
            with suppress(StoreFull):
                put_mark(repo, save, by=by)
        if catalog is not None and any(mark.by == "needed" for mark in marks):
            catalog.waiting[save.id] = None
        own = [mark for mark in marks if mark.by == by]
        if own:
            with probe(repo) as name:
                age = max(age_s(repo, mark.entry, repo.store.stat(name).modified_ns) for mark in own)
            if age >= wait_s(save, grace_s) and not _delete(repo, save.id, {}, among=catalog or Catalog()):
                freed.append(save.id)
    return tuple(freed)


def _delete(
    repo: Repo,
    id: CheckpointId,
    finished: Finished,
    *,
    now: bool = False,
    lost_too: bool = False,
    trash: Collection[str] | None = None,
    among: Catalog | None = None,
) -> str:
    """Deletes one marked save, or with `now` one that need not be; or says why it is spared. That nothing rests on its
    packs was found while it lay in the trash under these names, or is asked here, of what `among` does not know."""
    try:
        stone = put_tombstone(repo, id, reason="gc")
    except StoreFull:
        if not now:
            raise
        return _delete_on_full_disk(repo, id, trash)
    crashpoint("tombstone put, manifest still there")
    try:
        save = census_of(repo, id)
        why = _moved_since(save, trash)
        if not why and among is not None:
            others = needed_now(repo, id.run, among)
            why = needed_by(others[id]) if id in others else ""
        why = why or free_announced(repo, save, stone, finished, marked=not now, lost_too=now and lost_too)
    except TenutoError:
        take_back(repo, stone)
        raise
    take_back(repo, stone)
    return why


def free_announced(
    repo: Repo,
    save: SaveDirectory,
    stone: Tombstone,
    finished: Finished,
    *,
    marked: bool = True,
    lost_too: bool = False,
) -> str:
    """Deletes a save on whose packs nothing rests, and whose tombstone has been put; or says why it is spared.
    `marked`: only with a mark. `lost_too`: also a checkpoint that has lost its manifest."""
    why = _reached(repo, save, {ref.id for ref in list_refs(repo)}, finished, lost_too=lost_too)
    if not why and marked and not valid_marks(repo, save):
        why = "its mark has been taken back"
    if not why and not still_exists(repo, stone):
        why = "its tombstone has been taken back"
    if not why and not close(repo, save, by="gc"):
        why = "it has a manifest"
    if not why:
        # What has been in the trash had been committed: no writer is left that could put more of it.
        sweep(repo, save, keep_begin=not save.trash and may_still_save(repo, save.id, finished))
        repo.store.delete([entry.name for entry in save.marks])
    return why


def _moved_since(save: SaveDirectory, trash: Collection[str] | None) -> str:
    """Returns whether a checkpoint was brought back and removed again, so that others may have come to rest on it."""
    if trash is None or save.state != "removed" or {entry.name for entry in save.trash} == set(trash):
        return ""
    return "it was brought back meanwhile"


def _delete_on_full_disk(repo: Repo, id: CheckpointId, trash: Collection[str] | None) -> str:
    """Deletes what lies in the trash where there is no room for a tombstone; says why, if it does not.

    The copies in the trash make room for the aborted mark, and go first. Without them no undelete can begin, and one
    that has begun either finds the mark, or has put the manifest and is found here.
    """
    save = census_of(repo, id)
    named = {ref.id for ref in list_refs(repo)}
    if save.state != "removed" or id in named:
        return "there is no room to announce its removal"
    if why := _moved_since(save, trash):
        return why
    repo.store.delete([entry.name for entry in save.trash])
    if not close(repo, save, by="gc"):
        return "it has a manifest"
    sweep(repo, save, keep_begin=False)
    repo.store.delete([entry.name for entry in save.marks])
    return ""


NOTHING_LEFT = "nothing is left of it"


def _reached(
    repo: Repo, save: SaveDirectory, named: Collection[CheckpointId], finished: Finished, *, lost_too: bool = False
) -> str:
    """Returns why a save is not garbage; empty if it is."""
    if save.state == "committed":
        return "it has a manifest"
    if save.lost and save.id not in named:
        back = typed("tenuto", "repair", repo.url, "--from", "BACKUP")
        return "" if lost_too else f"{save.message}; `{back}` brings it back, `gc --now --force` frees it"
    if save.state in ("copied", "foreign", "damaged"):
        return save.message or "it was not written by Tenuto for this location"
    if save.id in named:
        return "a ref names it"
    if save.state == "closed":
        return "" if _anything_left(save) else NOTHING_LEFT
    if save.state == "unfinished" and may_still_save(repo, save.id, finished):
        return "its process may still be saving it"
    if save.state == "unfinished" and not _claimed(repo, save.id):
        return "its attempt has no readable record"
    return ""


def _dead_tombstones(repo: Repo, census: Census, now_name: str) -> Iterator[str]:
    """Returns the tombstones of dead removers that only block others. If the remover had begun to delete, its tombstone
    shows a claim what to finish, and stays until nothing is left."""
    for run in repo.runs():
        for stone in dead_tombstones(repo, run, now_name=now_name, dead_below=0):
            save = census.saves.get(stone.id)
            begun = save is not None and save.state in ("unfinished", "closed") and _anything_left(save)
            if not begun:
                yield stone.name


def _anything_left(save: SaveDirectory) -> bool:
    return save.begin is not None or bool(save.trash) or any(True for _ in save.own())


def _claimed(repo: Repo, id: CheckpointId) -> bool:
    try:
        return repo.find_attempt(id.run, id.attempt) is not None
    except CorruptionError:
        return False


def _garbage(save: SaveDirectory, *, marked: bool, left_s: float, due: bool) -> Garbage:
    reason = {
        "unfinished": "a save that its process never finished",
        "closed": "a save that was aborted",
        "removed": "in the trash",
        "damaged": save.message,
    }[save.state]
    own = list(save.own())
    trash = frozenset(entry.name for entry in save.trash)
    return Garbage(save.id, reason, len(own), sum(entry.length for entry in own), marked, left_s, due, trash)


def _odds(
    repo: Repo,
    census: Census,
    leftovers: Sequence[Entry],
    now_ns: int,
    finished: Finished,
    *,
    grace_s: float,
    now: bool,
) -> Iterator[tuple[str, str]]:
    """Yields single names that nothing will ever read: older than the grace or, with `now`, than a put of a living
    process can be, or left by a process that has ended."""
    least_s = STALE_S if now else grace_s

    def old(entry: Entry) -> bool:
        return age_s(repo, entry, now_ns) >= least_s

    for save in census.saves.values():
        if save.state == "committed" and not save.tombstones:
            yield from ((e.name, "a copy of a manifest that is in its place") for e in save.trash if old(e))
    yield from ((entry.name, "left by a gc that died") for entry in census.probes if old(entry))
    ended = _ended_attempts(repo, census, finished) if now and leftovers else frozenset()
    for entry in leftovers:
        # What a repair has staged may be the only whole copy by now; the next repair completes it.
        if (
            not object_names.is_staged(entry.name)
            and _was_ours(repo, census, entry)
            and (_is_of_ended(census, entry, ended) or old(entry))
        ):
            yield entry.name, "left over from an unfinished put"
    closed_below = {run: _closing_attempt(repo, run) for run in {run for run, _ in census.attempts}}
    for attempt in census.attempts.values():
        if attempt.number < closed_below[attempt.run] and all(old(beat) for beat in attempt.leases):
            yield from ((beat.name, "the lease of a superseded attempt") for beat in attempt.leases)


def _ended_attempts(repo: Repo, census: Census, finished: Finished) -> frozenset[tuple[str, int]]:
    """Returns the attempts whose process has ended. In a place that is filled from another one nobody knows who puts
    what."""
    if member_in(home_of(repo.store)) is not None:
        return frozenset()
    highest: dict[str, int] = {}
    for run, number in (key for key, attempt in census.attempts.items() if attempt.claimed):
        highest[run] = max(number, highest.get(run, 0))
    return frozenset(
        (run, number)
        for run, number in census.attempts
        if number < highest.get(run, 0) or (number <= finished.get(run, 0) and is_finished(repo, run, finished))
    )


def _is_of_ended(census: Census, leftover: Entry, ended: Collection[tuple[str, int]]) -> bool:
    """Returns whether only the process of an attempt that has ended can have put this: its claim, its lease, the
    beginning of a save, or what is called after the save."""
    alone = Census()
    place(alone, Entry(final_name(leftover.name), 0))
    for id, there in alone.saves.items():
        save, token = census.saves.get(id), leftover.name.rpartition(TEMPORARY)[2].partition("-")[0]
        begins = there.has(object_names.BEGIN)
        return (id.run, id.attempt) in ended and (begins or (save is not None and save.save_id == token))
    return any(key in ended for key in alone.attempts)


def _was_ours(repo: Repo, census: Census, leftover: Entry) -> bool:
    """Returns whether a temporary was to become an object of Tenuto. Those of open saves go with the save."""
    final = Entry(final_name(leftover.name), 0)
    final_census = Census()
    if not place(final_census, final):
        return False
    for id, there in final_census.saves.items():
        save = census.saves.get(id)
        if save is None:  # killed before there was anything of it
            return there.has(object_names.BEGIN)
        if there.entries and save.state == "closed":
            return object_names.is_part(final.name.rpartition("/")[2]) or final.name == id.manifest
        if there.entries:
            return save.state == "committed" and final.name in listed_names(repo, save)
    return True


def _closing_attempt(repo: Repo, run: str) -> int:
    """Returns the highest attempt whose lease says that everything below it is closed; 0 if none does. Nothing reads
    the leases below it."""
    for number in reversed(repo.attempts(run)):
        beat = read_last(repo, run, number)[1]
        if beat is not None and beat.closed:
            return number
    return 0
