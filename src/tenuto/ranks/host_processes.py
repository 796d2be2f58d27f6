"""The processes of the other ranks on this host: which are dead and which are stopped, as the operating system shows.

No clock is needed to see that a process has ended, so a killed rank is noticed within a beat. A rank that computes
without releasing the interpreter sends no heartbeat; here it is seen to be alive.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from tenuto.concurrency.process import observe, this_process
from tenuto.model.records import Owner
from tenuto.ranks.contract import Settings


@dataclass(slots=True)
class _Seen:
    owner: Owner
    alive: bool = False
    dead: bool = False
    stopped_since: float | None = None


class HostProcesses:
    """The processes of some ranks, as one rank observes them. Safe to use from several threads."""

    def __init__(self, settings: Settings, owners: Mapping[int, Owner] | None = None) -> None:
        self._settings = settings
        self._seen = {rank: _Seen(owner) for rank, owner in (owners or {}).items()}
        self._refreshed_at: float | None = None
        self._lock = threading.Lock()

    def add(self, rank: int, owner: Owner) -> None:
        """Observes this process from now on, in place of an earlier one of the rank."""
        with self._lock:
            if rank not in self._seen or self._seen[rank].owner != owner:
                self._seen[rank] = _Seen(owner)
                self._refreshed_at = None

    def refresh(self) -> None:
        """Looks at each process, at most once a beat."""
        now = self._settings.clock.now()
        with self._lock:
            before, due_s = self._refreshed_at, self._settings.beat_s
            if before is not None and now - before < due_s:
                return
            # Nothing is concluded from a time in which this process was itself stopped.
            paused = before is None or now - before > self._settings.dead_after_s / 2
            self._refreshed_at = now
            own = this_process()
            for seen in self._seen.values():
                self._refresh(seen, own, now, paused=paused)

    def _refresh(self, seen: _Seen, own: Owner, now: float, *, paused: bool) -> None:
        if seen.dead:
            return
        found = observe(seen.owner, own)
        seen.alive, seen.dead = found.verdict == "alive", found.verdict == "dead"
        if not found.stopped:
            seen.stopped_since = None
        elif seen.stopped_since is None or paused:
            seen.stopped_since = now

    def dead(self) -> list[int]:
        """Returns the ranks whose processes have ended."""
        with self._lock:
            return [rank for rank, seen in self._seen.items() if seen.dead]

    def stopped_s(self, rank: int) -> float:
        """Returns for how long the process of the rank has been seen to be stopped; 0.0 where it is not."""
        with self._lock:
            seen = self._seen.get(rank)
            if seen is None or seen.stopped_since is None or self._refreshed_at is None:
                return 0.0
            return max(self._refreshed_at - seen.stopped_since, 1e-9)

    def runs(self, rank: int) -> bool:
        """Returns whether the process of the rank is known to be alive and not stopped."""
        with self._lock:
            seen = self._seen.get(rank)
            return seen is not None and seen.alive and seen.stopped_since is None

    def lost(self, ranks: Iterable[int]) -> list[int]:
        """Returns those of `ranks` whose processes have ended, or have been stopped for `dead_after_s`."""
        limit, dead = self._settings.dead_after_s, set(self.dead())
        return [rank for rank in ranks if rank in dead or self.stopped_s(rank) >= limit]

    def describe(self, rank: int) -> str:
        """Returns what is known of the process, in words; empty where that is nothing worth saying."""
        with self._lock:
            seen = self._seen.get(rank)
        if seen is None:
            return ""
        if seen.dead:
            return f"its process {seen.owner.pid} has ended"
        stopped = self.stopped_s(rank)
        return f"its process {seen.owner.pid} has been stopped for {stopped:.1f} s" if stopped else ""


# --------------------------------------------------------------------------------------------------
# How ranks learn which processes are on their host: each tells the coordinator its own in the handshake, and the
# coordinator puts one list for each host. So what a rank reads does not grow with the ranks of other hosts.


def encode_owner(owner: Owner) -> list[Any]:
    return list(astuple(owner))


def decode_owner(values: Sequence[Any]) -> Owner:
    """Raises TypeError or ValueError for what is no owner."""
    host, boot, pid_namespace, pid, started, user = values
    return Owner(str(host), str(boot), str(pid_namespace), int(pid), str(started), str(user))


def host_of(owner: Owner) -> str:
    """Returns a key segment for where pids mean the same as for `owner`; empty where that is not known."""
    if not (owner.boot and owner.pid_namespace and owner.started):
        return ""
    where = json.dumps([owner.host, owner.boot, owner.pid_namespace]).encode()
    return hashlib.sha256(where).hexdigest()[:24]


def by_host(owners: Mapping[int, Owner]) -> dict[str, bytes]:
    """Returns, for each host of more than one rank, the processes there, encoded."""
    found: dict[str, dict[int, list[Any]]] = {}
    for rank, owner in owners.items():
        found.setdefault(host_of(owner), {})[rank] = encode_owner(owner)
    found.pop("", None)
    return {host: json.dumps(there).encode() for host, there in found.items() if len(there) > 1}


def decode_host(raw: bytes | None, own_rank: int) -> dict[int, Owner]:
    """Returns the processes of the other ranks on this host."""
    found = {int(rank): decode_owner(values) for rank, values in json.loads(raw or b"{}").items()}
    found.pop(own_rank, None)
    return found
