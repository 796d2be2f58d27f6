"""Watching the owner of a run, from here: by its process where this host can tell, else by its lease."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Final, Literal

from holdfast.errors import CorruptionError
from holdfast.model.checkpoint import AttemptRecord
from holdfast.model.names import run_key
from holdfast.repo.lease import BEAT_S, TTL_S, read_last
from holdfast.repo.liveness import Clock, judge, this_process
from holdfast.repo.repository import Repo

SLOW_S: Final = 2 * BEAT_S
"""A store that takes longer to answer one look may have answered its owner's beats no sooner: that time tells nothing
of the owner."""

_held: Final[set[tuple[int, str, str, int]]] = set()
"""(pid, repository id, run, attempt) of what this process has claimed and not released; a forked child's pid
differs."""
_held_lock: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of the run's owner. `number`: the highest attempt that somebody claimed, 0 if none.

    free: nobody has ever claimed the run. dead, alive: known. here: this very process. unknown: its lease has to be
    watched for longer.
    """

    verdict: Literal["free", "dead", "alive", "here", "unknown"]
    number: int = 0
    record: AttemptRecord | None = None
    reason: str = ""


class Watch:
    """Watches one run. Each `look` is one listing and a few small reads; a lease is judged by what two looks, at least
    `ttl_s` apart on this process's own clock, have seen of it. Begun before a restore, it has decided when that is
    done.
    """

    def __init__(self, repo: Repo, run: str, *, clock: Clock | None = None, ttl_s: float = TTL_S) -> None:
        self.repo = repo
        self.run = run_key(run)
        self.clock = clock or Clock()
        self._ttl_s = ttl_s
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._moved = False

    def look(self) -> Found:
        began = self.clock.now()
        number, record = self._owner()
        if number == 0:
            return Found("free")
        counter, beat = read_last(self.repo, self.run, number)
        if beat is not None and beat.released and (record is None or beat.id == record.id):
            return Found("dead", number, record, "it has released its lease")
        if record is not None:
            verdict = judge(record.owner)
            if verdict == "dead":
                return Found("dead", number, record, "its process has ended")
            if record.owner == this_process():
                if held_here(self.repo, self.run, number):
                    return Found("here", number, record, "which has not closed it")
                return Found("dead", number, record, "this process has closed it")
            if verdict == "alive":
                return Found("alive", number, record, "its process is running")
        return self._watched(number, record, counter, began)

    def _owner(self) -> tuple[int, AttemptRecord | None]:
        """The highest attempt that somebody claimed; its record is None where it is damaged."""
        for number in reversed(self.repo.attempts(self.run)):
            try:
                record = self.repo.find_attempt(self.run, number)
            except CorruptionError:
                return number, None
            if record is not None or self.repo.committed(self.run, number):
                return number, record
        return 0, None

    def _watched(self, number: int, record: AttemptRecord | None, counter: int, began: float) -> Found:
        now = self.clock.now()
        if self._seen is None or self._seen[0] != number:
            self._seen, self._since, self._moved = (number, counter), now, False
        elif self._seen[1] != counter:
            self._seen, self._since, self._moved = (number, counter), now, True
        elif now - began > SLOW_S:
            self._since = now
        # What this look has read may be as old as its beginning: the lease may have moved since then.
        if began - self._since >= self._ttl_s:
            return Found("dead", number, record, f"its lease has not moved for {began - self._since:.0f} s")
        if self._moved:
            return Found("alive", number, record, "its lease moves")
        return Found("unknown", number, record, "its lease is being watched")


def take_hold(repo: Repo, run: str, number: int) -> None:
    with _held_lock:
        _held.add((os.getpid(), repo.id, run, number))


def let_go(repo: Repo, run: str, number: int) -> None:
    with _held_lock:
        _held.discard((os.getpid(), repo.id, run, number))


def held_here(repo: Repo, run: str, number: int) -> bool:
    """Whether this process has claimed the attempt and not released it."""
    with _held_lock:
        return (os.getpid(), repo.id, run, number) in _held
