"""Checkpoints that have lost their manifest, told from saves that never had one.

Both have a `begin.json`, no manifest, no aborted mark, nothing in the trash, and no removal that is going on. A process
that is killed in a save leaves that. But what exists only of a checkpoint, or is said only of one, it never leaves:
then the manifest was lost, and nobody frees what is left of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from tenuto.errors import CorruptionError, ObjectNotFound, StoreError
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.small_records import Begin, LeaseRecord, decode_begin, decode_lease
from tenuto.repo.refs import Ref, list_refs, numbers
from tenuto.repo.replicated.members import member_in
from tenuto.repo.replicated.places import all_places, followers_of, home_of
from tenuto.repo.replicated.replica import exists
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import is_tombstoned
from tenuto.store.contract import Store, is_unreadable


class Witnesses:
    """What of a repository still knows of checkpoints. Looks once at what concerns many of them. `runs`: in whose
    attempts it looks for those that started from one; None for all."""

    def __init__(self, repo: Repo, runs: Sequence[str] | None = None) -> None:
        self._repo = repo
        self._runs = runs
        self._leases: dict[tuple[str, int], list[LeaseRecord]] = {}

    def lost(self, id: CheckpointId, known: str = "") -> str:
        """Returns what knows that `id` was a checkpoint, where its manifest is missing; empty for what is one, was
        removed, or never was one. `known`: what the caller has found that knows it.

        In a place that is filled from another one manifests come last: what lacks one there is not lost.
        """
        begun = self._begun(id)
        if begun is None or self._is_filled or not self._lacks_manifest(id):
            return ""
        why = known or next(self._witnesses(begun), "")
        # A save, a removal or an undelete that came between the two looks is no loss.
        return why if why and self._lacks_manifest(id) else ""

    def _lacks_manifest(self, id: CheckpointId) -> bool:
        repo = self._repo
        return (
            not _is_there(home_of(repo.store), id.manifest)
            and not repo.store.children(object_names.trash_directory(id)).objects
            and not is_tombstoned(repo, id)
            and _is_there(repo.store, object_names.begin_name(id))
        )

    def _begun(self, id: CheckpointId) -> Begin | None:
        try:
            data = self._repo.store.get(object_names.begin_name(id), limit=objects.SMALL)
            return decode_begin(data, id, self._repo.id)
        except (ObjectNotFound, CorruptionError):
            return None  # nothing, a copied directory, or one that nobody frees anyway
        except StoreError as error:
            if not is_unreadable(error):
                raise
            return None

    @cached_property
    def _is_filled(self) -> bool:
        return member_in(home_of(self._repo.store)) is not None

    def _witnesses(self, begun: Begin) -> Iterator[str]:
        """Yields what knows of a checkpoint, in words, what is found with least trouble first."""
        repo, id = self._repo, begun.id
        if numbers(repo, object_names.notes_directory(id)):
            yield "notes were added to it"
        named = next((ref for ref in self._refs if ref.id == id), None)
        if named is not None:
            yield f"{named.kind} {named.name!r} names it"
        if any(lease.newest is not None and lease.newest >= id.step for lease in self._leases_of(id.run, id.attempt)):
            yield "its process has said that it was committed"
        if not begun.newest_first and self._has_a_later_one(id):
            yield "its process has committed a later one"
        if not begun.newest_first and self._is_closed(id):
            yield "a later attempt has closed every save that was not finished"
        for place in (*all_places(repo.store)[1:], *followers_of(repo.store)):
            if exists(place, id.manifest):
                yield f"{place.url} has its manifest"
        if id in self._parents:
            yield self._parents[id]

    @cached_property
    def _refs(self) -> list[Ref]:
        return list_refs(self._repo, damaged=lambda message: None)

    @cached_property
    def _parents(self) -> dict[CheckpointId, str]:
        """What attempts began from."""
        repo, found = self._repo, dict[CheckpointId, str]()
        for run in repo.runs() if self._runs is None else self._runs:
            for number in repo.attempts(run):
                parent = _parent(repo, run, number)
                if parent is not None:
                    found[parent] = f"attempt {number} of run {run} starts from it"
        return found

    def _is_closed(self, id: CheckpointId) -> bool:
        above = (number for number in self._repo.attempts(id.run) if number > id.attempt)
        return any(lease.closed for number in above for lease in self._leases_of(id.run, number))

    def _leases_of(self, run: str, attempt: int) -> list[LeaseRecord]:
        if (run, attempt) not in self._leases:
            self._leases[run, attempt] = [*_leases(self._repo, run, attempt)]
        return self._leases[run, attempt]

    def _has_a_later_one(self, id: CheckpointId) -> bool:
        """Returns whether a later step of the attempt is a checkpoint: an attempt begins none before the one before has
        been committed, or closed."""
        steps = (step for step in self._repo.newest_steps(id.run, id.attempt) if step > id.step)
        return any(self._repo.exists(CheckpointId(id.run, id.attempt, step)) for step in steps)


def _is_there(store: Store, name: str) -> bool:
    try:
        store.stat(name)
    except ObjectNotFound:
        return False
    return True


def _parent(repo: Repo, run: str, number: int) -> CheckpointId | None:
    try:
        record = repo.find_attempt(run, number)
    except CorruptionError:
        return next((lease.parent for lease in _leases(repo, run, number)), None)
    return None if record is None else record.parent


def _leases(repo: Repo, run: str, attempt: int) -> Iterator[LeaseRecord]:
    directory = object_names.lease_directory(run, attempt)
    for number in reversed(numbers(repo, directory)):
        try:
            data = repo.store.get(object_names.numbered(directory, number), limit=objects.SMALL)
            yield decode_lease(data, run, attempt, number, repo.id)
        except (ObjectNotFound, CorruptionError):
            continue
