"""Watches the owner of a run: by its process where this host can judge it, else by its lease."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import field, replace
from typing import Final, Literal

from tenuto.concurrency.deadlines import Clock
from tenuto.concurrency.process import judge, this_process
from tenuto.errors import CorruptionError
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import AttemptRecord
from tenuto.record import record
from tenuto.repo.format.small_records import LeaseRecord
from tenuto.repo.ownership.lease import BEAT_S, TTL_S, read_last
from tenuto.repo.repository import Repo

SLOW_S: Final = 2 * BEAT_S
"""A store that takes longer to answer one inspection may have delayed its owner's beats as well: that time says
nothing about the owner."""

_owned: Final[MutableMapping[tuple[int, str, str, int], object]] = weakref.WeakValueDictionary()
_claiming: Final[MutableMapping[tuple[int, str], object]] = weakref.WeakValueDictionary()
"""Claims of this process that are being put, by process and the record's id."""
"""(pid, repository id, run, attempt) of what this process has claimed and not released, weakly: where an interrupt came
between a claim and whoever was to hold it, nobody can save by it. A forked child's pid differs. Each change is one
operation on a dict: an interrupt where a lock is taken would leave it locked."""


@record
class OwnerFinding:
    """What is known of the run's owner. `number`: the highest claimed attempt, 0 if none.

    free: the run was never claimed. dead, alive: known. here: this very process. unknown: its lease has to be watched
    for longer.
    """

    verdict: Literal["free", "dead", "alive", "here", "unknown"]
    number: int = 0
    record: AttemptRecord | None = None
    reason: str = ""
    staying: bool = False
    """Alive on this host, its lease moves, and nothing says that it is about to leave. A process that was killed, and
    takes long to give its memory back, still runs; its lease does not move."""
    closed: bool = field(default=False, compare=False)
    """Its lease says that every attempt below it is closed. That stays so."""
    beats: int = field(default=0, compare=False)
    """How many its lease has come to."""
    released: bool = field(default=False, compare=False)


class OwnerWatch:
    """Watches one run. Each inspection is one listing and a few small reads; a lease is judged by two inspections, at
    least `ttl_s` apart by this process's own clock. Begun before a restore, it has decided when that is done."""

    def __init__(self, repo: Repo, run: str, *, clock: Clock | None = None, ttl_s: float = TTL_S) -> None:
        self.repo = repo
        self.run = run_key(run)
        self.clock = clock or Clock()
        self._ttl_s = ttl_s
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._moved = False

    def inspect(self) -> OwnerFinding:
        began = self.clock.now()
        number, record = self._owner()
        if number == 0:
            return OwnerFinding("free")
        counter, beat = read_last(self.repo, self.run, number)
        found = self._judged(number, record, counter, beat, began)
        if beat is None:
            return replace(found, beats=counter)
        return replace(found, closed=beat.closed, beats=counter, released=beat.released)

    def _judged(
        self, number: int, record: AttemptRecord | None, counter: int, beat: LeaseRecord | None, began: float
    ) -> OwnerFinding:
        if beat is not None and beat.released and (record is None or beat.id == record.id):
            return OwnerFinding("dead", number, record, "it has released its lease")
        if record is not None:
            verdict = judge(record.owner)
            if verdict == "dead":
                return OwnerFinding("dead", number, record, "its process has ended")
            if record.owner == this_process():
                if owned_here(self.repo, self.run, number) or (os.getpid(), record.id) in _claiming:
                    return OwnerFinding("here", number, record, "which has not closed it")
                return OwnerFinding("dead", number, record, "this process has closed it")
            if verdict == "alive":
                leaving = beat is not None and beat.leaving and beat.id == record.id
                reason = "it is leaving" if leaving else "its process is running"
                self._note(number, counter)
                return OwnerFinding("alive", number, record, reason, staying=self._moved and not leaving)
        return self._watched(number, record, counter, began)

    def _owner(self) -> tuple[int, AttemptRecord | None]:
        """Returns the highest claimed attempt; its record is None if it is damaged."""
        for number in reversed(self.repo.attempts(self.run)):
            try:
                record = self.repo.find_attempt(self.run, number)
            except CorruptionError:
                return number, None
            if record is not None or self.repo.committed(self.run, number):
                return number, record
        return 0, None

    def _watched(self, number: int, record: AttemptRecord | None, counter: int, began: float) -> OwnerFinding:
        now = self.clock.now()
        if not self._note(number, counter) and now - began > SLOW_S:
            self._since = now
        # What this inspection has read may be as old as its beginning: the lease may have changed since then.
        if began - self._since >= self._ttl_s:
            return OwnerFinding("dead", number, record, f"its lease has not moved for {began - self._since:.0f} s")
        if self._moved:
            return OwnerFinding("alive", number, record, "its lease moves")
        return OwnerFinding("unknown", number, record, "its lease is being watched")

    def _note(self, number: int, counter: int) -> bool:
        """Notes what the lease says now; returns whether that is new."""
        if self._seen == (number, counter):
            return False
        self._moved = self._seen is not None and self._seen[0] == number
        self._seen, self._since = (number, counter), self.clock.now()
        return True


class ClaimUnderWay:
    """Keeps other threads of this process from taking an attempt for one that nobody owns any more, from before its
    record is put until `take_ownership`. They would claim the next one, and both would have the run."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, str]] = []

    def puts(self, record: AttemptRecord) -> None:
        key = os.getpid(), record.id
        self._keys.append(key)
        _claiming[key] = self

    def is_over(self) -> None:
        """Has to be called however the claim ends: a traceback that somebody keeps would keep this object."""
        for key in self._keys:
            _claiming.pop(key, None)


def take_ownership(repo: Repo, run: str, number: int, holder: object) -> None:
    _owned[(os.getpid(), repo.id, run, number)] = holder


def release_ownership(repo: Repo, run: str, number: int) -> None:
    _owned.pop((os.getpid(), repo.id, run, number), None)


def owned_here(repo: Repo, run: str, number: int) -> bool:
    """Returns whether this process has claimed the attempt and not released it."""
    return (os.getpid(), repo.id, run, number) in _owned


# --------------------------------------------------------------------------------------------------
# Runs without a live owner.

Finished = Mapping[str, int]
"""The highest attempt of each run whose owner was found dead. It stays dead; a higher number seen later is a new
owner."""

_POLL_S = 0.5


def finished_runs(repo: Repo, runs: Iterable[str], watches: Iterable[OwnerWatch] = ()) -> dict[str, int]:
    """Returns the runs whose owner is dead. Takes a lease's ttl (15 s) if an owner on another host has not released its
    lease; else no time. `watches`: begun earlier, or with a clock of the caller's."""
    begun = {watch.run: watch for watch in watches}
    waiting = [begun.get(run) or OwnerWatch(repo, run) for run in runs]
    found: dict[str, int] = {}
    while waiting:
        again = []
        for watch in waiting:
            seen = watch.inspect()
            if seen.verdict == "dead":
                found[watch.run] = seen.number
            elif seen.verdict == "unknown":
                again.append(watch)
        if again:
            again[0].clock.sleep(_POLL_S)
        waiting = again
    return found


def is_finished(repo: Repo, run: str, finished: Finished) -> bool:
    """Returns whether the owner that was found dead still is the run's last one."""
    known = finished.get(run)
    return known is not None and not any(
        _is_claimed(repo, run, n, damaged=True) for n in repo.attempts(run) if n > known
    )


def may_still_save(repo: Repo, id: CheckpointId, finished: Finished) -> bool:
    """Returns whether the attempt of `id` may have a save in flight: the run's last one, unless found dead. One without
    a readable record may."""
    higher = any(_is_claimed(repo, id.run, n, damaged=False) for n in repo.attempts(id.run) if n > id.attempt)
    return not higher and not is_finished(repo, id.run, finished)


def _is_claimed(repo: Repo, run: str, number: int, *, damaged: bool) -> bool:
    """Returns whether this attempt was claimed, and is not a copied or empty directory; `damaged`: the answer for a
    damaged record."""
    try:
        return repo.find_attempt(run, number) is not None
    except CorruptionError:
        return damaged
