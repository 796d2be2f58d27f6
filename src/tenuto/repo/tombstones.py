"""Tombstones: the announcement that a checkpoint is about to be removed.

A remover puts one, and only then checks whether the checkpoint is needed. A process that comes to need it puts its own
object, and only then checks for a tombstone. Whichever comes second finds the other's object, and withdraws.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Final

from tenuto.concurrency.process import judge, this_process
from tenuto.errors import CorruptionError, ObjectNotFound, StoreError, UsageError
from tenuto.model.ids import CheckpointId, parse_attempt, parse_step
from tenuto.model.records import Owner
from tenuto.record import record
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.small_records import owner_json, read_owner
from tenuto.repo.repository import Repo, now_text
from tenuto.store.contract import is_unreadable, time_of

STALE_S: Final = 900.0
"""Seconds by the store's own clock after which a remover on another host counts as dead. A removal takes seconds, and a
remover looks for its own tombstone again right before it deletes."""


@record
class Tombstone:
    """`attempt`: the attempt that removes by retention; 0 for a person's or gc's removal."""

    name: str
    id: CheckpointId
    owner: Owner
    reason: str
    attempt: int = 0


def put_tombstone(repo: Repo, id: CheckpointId, *, reason: str, attempt: int = 0) -> Tombstone:
    """Announces the removal of `id`. The caller checks afterwards, not before, who needs it."""
    token = secrets.token_hex(16)
    name = f"{object_names.tombstone_directory(id)}/{token}.json"
    stone = Tombstone(name, id, this_process(), reason, attempt)
    body = {
        "attempt": attempt,
        "created": now_text(),
        "owner": owner_json(stone.owner),
        "reason": reason,
    }
    objects.put(repo.store, name, objects.encode("tombstone", name, body, repo.id), token=token)
    return stone


def still_there(repo: Repo, stones: Collection[Tombstone]) -> set[Tombstone]:
    """Returns those of the tombstones, all of one run, that are still there. One call."""
    if len(stones) == 1:
        return {stone for stone in stones if still_exists(repo, stone)}
    runs = {stone.id.run for stone in stones}
    there = {entry.name for run in runs for entry in repo.store.walk(f"tombstones/{run}")}
    return {stone for stone in stones if stone.name in there}


def still_exists(repo: Repo, stone: Tombstone) -> bool:
    """Returns whether the tombstone is still there; a remover asks right before it deletes anything."""
    try:
        repo.store.stat(stone.name)
    except ObjectNotFound:
        return False
    return True


def is_tombstoned(repo: Repo, id: CheckpointId) -> bool:
    """Returns whether a removal of `id` is announced. An unreadable tombstone counts; a copy, or one that was announced
    in another repository, does not."""
    directory = object_names.tombstone_directory(id)
    return any(_counts(repo, f"{directory}/{file}") for file in repo.store.children(directory).objects)


def _counts(repo: Repo, name: str) -> bool:
    try:
        return not objects.is_copy(name, repo.store.get(name, limit=objects.SMALL), repo.id)
    except ObjectNotFound:
        return False
    except CorruptionError:
        return True
    except StoreError as error:
        if not is_unreadable(error):
            raise
        return True


def take_back(repo: Repo, *stones: Tombstone) -> None:
    repo.store.delete([stone.name for stone in stones])


def dead_tombstones(repo: Repo, run: str, *, now_name: str, dead_below: int) -> list[Tombstone]:
    """Returns the tombstones in `run` whose removers are dead.

    A remover is dead if this host knows that its process has ended; if it is the retention of an attempt below
    `dead_below` (all of which the caller has found dead); or if its tombstone was put STALE_S before the object
    `now_name`, which the caller put just now, by the store's clock.
    """
    found, now_ns = [], None
    for entry in repo.store.walk(f"tombstones/{run}"):
        stone = _read(repo, entry.name)
        if stone is None:
            continue
        verdict = judge(stone.owner)
        dead = verdict == "dead" or (verdict == "unknown" and 0 < stone.attempt < dead_below)
        if not dead and verdict == "unknown":
            now_ns = repo.store.stat(now_name).modified_ns if now_ns is None else now_ns
            modified_ns = time_of(repo.store, entry)
            dead = modified_ns is not None and now_ns - modified_ns > STALE_S * 1e9
        if dead:
            found.append(stone)
    return found


def _read(repo: Repo, name: str) -> Tombstone | None:
    """Returns the tombstone; None if it vanished, is a copy, or is damaged: then its owner is unknown and it stays."""
    id = _id_of(name)
    if id is None:
        return None
    try:
        found = objects.decode("tombstone", name, repo.store.get(name, limit=objects.SMALL), repo.id)
        return Tombstone(name, id, read_owner(found), found.text("reason"), found.whole("attempt"))
    except (ObjectNotFound, CorruptionError):
        return None


def _id_of(name: str) -> CheckpointId | None:
    match name.split("/"):
        case ["tombstones", run, attempt_key, step_key, _]:
            attempt, step = parse_attempt(attempt_key), parse_step(step_key)
            if attempt is not None and step is not None:
                try:
                    return CheckpointId(run, attempt, step)
                except UsageError:
                    return None
    return None
