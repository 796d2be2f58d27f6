"""Facts by which retention judges the checkpoints of a run: the place on the walk, how good each is, who needs it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType

from tenuto.errors import CheckpointNotFound, CorruptionError
from tenuto.model.ids import CheckpointId
from tenuto.model.records import ROLLBACK
from tenuto.model.sizes import seconds_of
from tenuto.policy.keep import CheckpointFacts
from tenuto.repo.bases import forks_besides
from tenuto.repo.catalog import Catalog, CatalogEntry, Snapshot
from tenuto.repo.lineage import walk
from tenuto.repo.notes import unread, verification_of, with_notes
from tenuto.repo.refs import Ref, list_refs
from tenuto.repo.repository import Repo


def gather_facts(
    repo: Repo,
    run: str,
    *,
    without: Container[CheckpointId] = frozenset(),
    copying: Mapping[CheckpointId, str] = MappingProxyType({}),
) -> list[CheckpointFacts]:
    """Returns the facts of every checkpoint of `run`, also on lines of training that were left behind.

    repo: a snapshot, whose listings and memory are used, or a repository that is read anew.
    without: checkpoints that are left out, as if they were not there.
    copying: those that are being copied, with the name of the tier.
    Where a ref cannot be read it may name any of them, so that none is judged.
    """
    snapshot = repo if isinstance(repo, Snapshot) else Catalog().snapshot(repo, run)
    # Before the walk: what commits between the two is not judged yet. The other way round it would seem left behind.
    there = (
        id
        for attempt in snapshot.attempts(run)
        for step in snapshot.steps(run, attempt)
        if snapshot.exists(id := CheckpointId(run, attempt, step))
    )
    ids = {id: None for id in there if id not in without}
    refs: dict[CheckpointId, list[Ref]] = {}
    damaged: list[str] = []
    for ref in list_refs(snapshot, damaged=damaged.append):
        refs.setdefault(ref.id, []).append(ref)
    line = {id: place for place, id in enumerate(id for id in walk(snapshot, run, known=ids) if id not in without)}
    needed: dict[CheckpointId, list[str]] = {}
    for id, reason in _needed_elsewhere(snapshot, run):
        needed.setdefault(id, []).append(reason)
    entries: dict[CheckpointId, CatalogEntry | None] = {}
    for id in ids:
        with suppress(CheckpointNotFound):  # removed since it was listed
            entries[id] = snapshot.entry(id)
    rolled_back = _after_rollbacks(snapshot, run, entries)
    found = []
    for id, entry in entries.items():
        noted = snapshot.notes(id)
        note = verification_of(noted)
        unreadable = f"{id.manifest} cannot be read" if entry is None else unread(id, noted)
        named = refs.get(id, ())
        facts = CheckpointFacts(
            id=id,
            walk=line.get(id),
            metrics=with_notes({} if entry is None else entry.metrics, noted),
            verified=note == "verified" and entry is not None,
            suspect=entry is None or note == "suspect",
            healthy=entry is None or entry.healthy,
            created_s=None if entry is None else seconds_of(entry.created),
            pinned=any(ref.kind == "pin" for ref in named),
            tags=tuple(ref.name for ref in named if ref.kind == "tag"),
            held=any(ref.kind == "hold" for ref in named),
            copied_to=copying.get(id, ""),
            needed_by=tuple(needed.get(id, ())),
            bytes=0 if entry is None else entry.bytes,
            bases=() if entry is None else entry.bases,
            forked_from=_other_run(run, entry),
            rolled_back=id.attempt in rolled_back,
            unread=unreadable or (f"{damaged[0]}, and may name it" if damaged else ""),
        )
        found.append(facts)
    return found


def _other_run(run: str, entry: CatalogEntry | None) -> str:
    """Returns the run that a checkpoint's attempt has forked; empty where it began in its own."""
    parent = None if entry is None else entry.parent
    return "" if parent is None or parent.run == run else parent.run


def _after_rollbacks(repo: Repo, run: str, entries: Mapping[CheckpointId, CatalogEntry | None]) -> set[int]:
    """Returns the attempts that are the first with checkpoints since a rollback of `run`.

    A rollback is an attempt without checkpoints. What was claimed since without saving anything (a training that died
    early, `tenuto keep`) continues the same checkpoint, so nothing below another one is looked at: of a run that was
    never rolled back at most one record for each attempt, and only where the attempt before has no checkpoints.
    """
    parents: dict[int, CheckpointId | None] = {}
    for id, entry in entries.items():
        parents[id.attempt] = parents.get(id.attempt) or (None if entry is None else entry.parent)
    numbers = repo.attempts(run)
    found = set()
    for attempt, parent in parents.items():
        for number in reversed(numbers[: bisect_left(numbers, attempt)]):
            if number in parents:
                break
            try:
                record = repo.find_attempt(run, number)
            except CorruptionError:
                found.add(attempt)  # it may say so: then the first one after it stays
                break
            if record is None:
                continue  # a copied directory, which nobody has claimed
            if record.by == ROLLBACK:
                found.add(attempt)
            if record.by == ROLLBACK or record.parent != parent:
                break
    return found


def lines_left_behind(repo: Repo, run: str, facts: Iterable[CheckpointFacts]) -> Iterator[list[CheckpointFacts]]:
    """Yields the lines of training of `run` that were left behind, each with its checkpoints, newest first. What
    several of them share is the newest one's. `facts`: of every checkpoint of the run."""
    left = {one.id: one for one in facts if one.walk is None}
    for newest in sorted(left, reverse=True):
        if newest in left:
            line = [id for id in walk(repo, run, below=newest.attempt + 1) if id in left]
            yield [left.pop(id) for id in line]


def relied_on(
    snapshot: Snapshot, run: str, going: Collection[CheckpointId], *, without: Container[CheckpointId] = frozenset()
) -> Iterator[CheckpointId]:
    """Yields the checkpoints that keep those of `going` from being needed, as long as they are whole themselves.

    Of each walk that one of `going` is on: the first that is not known to be damaged, and, where one of `going` was
    verified, the first that was.
    """
    for name in (run, *forks_besides(snapshot, run)):
        line = [id for id in walk(snapshot, name) if name != run or (id.run == run and id not in without)]
        mine = [id for id in line if id in going]
        if mine:
            yield from _first_in(snapshot, line, ("", "verified"))
        if any(_state(snapshot, id) == "verified" for id in mine):
            yield from _first_in(snapshot, line, ("verified",))


def _first_in(snapshot: Snapshot, line: Iterable[CheckpointId], states: Collection[str]) -> list[CheckpointId]:
    found = next((id for id in line if _state(snapshot, id) in states), None)
    return [] if found is None else [found]


def _state(snapshot: Snapshot, id: CheckpointId) -> str:
    """Returns verified, suspect (also where the manifest or a note cannot be read) or, where nothing was noted, an
    empty string."""
    if snapshot.entry(id) is None or unread(id, noted := snapshot.notes(id)):
        return "suspect"
    return verification_of(noted)


def _needed_elsewhere(snapshot: Snapshot, run: str) -> Iterator[tuple[CheckpointId, str]]:
    """Yields the checkpoints of `run` that other runs, forked from it, resume from or would fall back to."""
    for other in forks_besides(snapshot, run):
        fallback = True
        for place, id in enumerate(walk(snapshot, other)):
            state = _state(snapshot, id)
            if id.run == run and place == 0:
                yield id, f"what latest means in run {other!r}"
            elif id.run == run and state == "verified":
                yield id, f"the last one verified that run {other!r} has"
            elif id.run == run and state != "suspect" and fallback:
                yield id, f"the newest not known to be damaged that run {other!r} has"
            fallback = fallback and state == "suspect"
            if state == "verified":
                break
