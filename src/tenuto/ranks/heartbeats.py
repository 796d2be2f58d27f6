"""Liveness of the ranks: from the processes of this host, and from heartbeats and the clock of the observer.

A heartbeat is a counter with the phase of its rank, and the ranks that it knows to be dead: so those of another host
learn at once what the operating system shows there. `RankWatch` concludes nothing from time it did not observe: after a
long pause of its own, the silence of a rank starts anew. `StallGuard` keeps the coordinator from trusting what it reads
after such a pause.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tenuto.errors import RankStoreLost
from tenuto.ranks.contract import KVStore, Settings
from tenuto.ranks.host_processes import HostProcesses

NAMED: Final = 8
"""The number of ranks that are described one by one; the rest is only counted."""


@dataclass(slots=True)
class _Seen:
    read_at: float
    silent_since: float
    raw: bytes | None
    phase: str = ""
    phase_since: float = 0.0
    left: str | None = None
    challenge: str = ""
    given_up: frozenset[str] = frozenset()


class RankWatch:
    """The other ranks as one rank observed them. Safe to use from several threads.

    It alone says who is dead (gone for good), lost (dead, stopped, or silent on another host), or has left. A rank
    whose process runs on this host is never lost, however silent it is: it computes, and is slow.
    """

    def __init__(self, kv_store: KVStore, key: Callable[[int], str], settings: Settings) -> None:
        self._kv_store = kv_store
        self._key = key
        self._settings = settings
        self._seen: dict[int, _Seen] = {}
        self._dead: dict[int, float] = {}
        """When each dead rank was found to be dead."""
        self._lock = threading.Lock()
        self.processes = HostProcesses(settings)
        """The processes of the ranks on this host."""

    def refresh(self, timeout: float) -> None:
        """Looks at the processes on this host, at most once a beat."""
        self.processes.refresh()
        with self._lock:
            ended = [rank for rank in self.processes.dead() if rank not in self._dead]
            ended = [rank for rank in ended if rank not in self._seen or self._seen[rank].left is None]
        if not ended:
            return
        try:
            self.read(ended, timeout)  # one that has left may end
        except RankStoreLost:
            # Ranks end because the store is lost, without being able to say so: they are not what was lost.
            ended = [rank for rank in ended if rank == self._kv_store.host_rank]
        left, now = self.departed(ended), self._settings.clock.now()
        with self._lock:
            self._dead |= {rank: now for rank in ended if rank not in left and rank not in self._dead}

    def read(self, ranks: Sequence[int], timeout: float) -> None:
        """Reads the heartbeats of `ranks`. Raises RankStoreLost."""
        raws = self._kv_store.get_many([self._key(rank) for rank in ranks], timeout=timeout)
        now = self._settings.clock.now()
        with self._lock:
            for rank, raw in zip(ranks, raws, strict=True):
                self._note(rank, raw, now)

    def _note(self, rank: int, raw: bytes | None, now: float) -> None:
        seen = self._seen.get(rank)
        if seen is None:
            seen = self._seen[rank] = _Seen(now, now, None)
        elif now - seen.read_at > self._settings.dead_after_s / 2:
            seen.silent_since = now
        seen.read_at = now
        if raw is None or raw == seen.raw:
            return
        seen.raw, seen.silent_since = raw, now
        phase, seen.left, seen.challenge, seen.given_up, dead = _parse(raw)
        self._dead |= {rank: now for rank in dead if rank not in self._dead}
        if phase != seen.phase:
            seen.phase, seen.phase_since = phase, now

    def due(self, ranks: Sequence[int]) -> bool:
        """Returns whether one of `ranks` has not been read for a heartbeat interval."""
        since = self._settings.clock.now() - self._settings.beat_s
        with self._lock:
            return any(rank not in self._seen or self._seen[rank].read_at <= since for rank in ranks)

    def lost(self, ranks: Iterable[int]) -> list[int]:
        """Returns those of `ranks` that are not waited for: dead, or stopped for `dead_after_s`, or observed on another
        host without a new heartbeat for as long."""
        return [rank for rank in ranks if rank in self._dead or self._is_stopped(rank) or self._is_silent(rank)]

    def _is_stopped(self, rank: int) -> bool:
        return self.processes.stopped_s(rank) >= self._settings.dead_after_s

    def _is_silent(self, rank: int) -> bool:
        with self._lock:
            seen, limit = self._seen.get(rank), self._settings.dead_after_s
            silent = seen is not None and seen.read_at - seen.silent_since >= limit
        return silent and not self.processes.runs(rank)

    def dead(self, for_s: float = 0.0) -> list[int]:
        """Returns the ranks whose processes have ended without a word, known for `for_s` seconds at least."""
        until = self._settings.clock.now() - for_s
        with self._lock:
            return sorted(rank for rank, since in self._dead.items() if since <= until)

    def departed(self, ranks: Iterable[int]) -> dict[int, str]:
        """Returns the ranks that reported that they leave, with their reasons."""
        with self._lock:
            return {rank: seen.left for rank in ranks if (seen := self._seen.get(rank)) and seen.left is not None}

    def challenge(self, rank: int) -> str:
        """Returns the challenge that the rank repeated last."""
        with self._lock:
            return self._seen[rank].challenge if rank in self._seen else ""

    def given_up(self, round: str) -> list[int]:
        """Returns the ranks that gave up `round` while the key-value store did not answer them."""
        with self._lock:
            return [rank for rank, seen in self._seen.items() if round in seen.given_up]

    def describe(self, ranks: Sequence[int]) -> str:
        """Describes each rank: `rank 2 (last reported "writing", 12 s ago; no sign of life for 8 s)`."""
        with self._lock:
            texts = [self._describe(rank) for rank in ranks[:NAMED]]
        if len(ranks) > NAMED:
            texts.append(f"{len(ranks) - NAMED} more")
        return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)

    def _describe(self, rank: int) -> str:
        seen, process = self._seen.get(rank), self.processes.describe(rank)
        if process == "" and rank in self._dead:
            process = "its process has ended"
        if seen is None or seen.raw is None:
            return f"rank {rank} ({process or 'has reported nothing'})"
        now = self._settings.clock.now()
        report = (
            f"last reported {seen.phase!r}, {now - seen.phase_since:.1f} s ago" if seen.phase else "reported no phase"
        )
        silent = seen.read_at - seen.silent_since
        quiet = f"; no sign of life for {silent:.1f} s" if silent > 2 * self._settings.beat_s else ""
        return f"rank {rank} ({report}{quiet}{process and '; ' + process})"


def beat(
    count: int,
    phase: str,
    left: str | None,
    rounds: dict[str, list[int]],
    *,
    challenge: str = "",
    given_up: Sequence[str] = (),
    dead: Sequence[int] = (),
) -> bytes:
    """Encodes one heartbeat.

    - `rounds`: first and last number of each kind's rounds that may still be in the key-value store.
    - `challenge`, `given_up`: see `StallGuard`.
    - `dead`: the ranks that this one knows to be dead.
    """
    facts = {
        "beat": count,
        "phase": phase,
        "left": left,
        "topics": rounds,
        "word": challenge,
        "given_up": list(given_up),
        "dead": list(dead),
    }
    return json.dumps(facts).encode()


def _parse(raw: bytes) -> tuple[str, str | None, str, frozenset[str], list[int]]:
    try:
        values = json.loads(raw)
        left = None if values["left"] is None else str(values["left"])
        given_up, dead = frozenset(map(str, values["given_up"])), list(map(int, values["dead"]))
        return str(values["phase"]), left, str(values["word"]), given_up, dead
    except (ValueError, KeyError, TypeError):
        return "something unreadable", None, "", frozenset(), []


def rounds_of(raw: bytes) -> dict[str, range]:
    """Returns the rounds a heartbeat names; none if it cannot be decoded."""
    try:
        facts = json.loads(raw)["topics"]
        return {str(kind): range(int(first), int(last) + 1) for kind, (first, last) in facts.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


# -- the coordinator after a pause of its own

_MAX_GIVEN_UP: Final = 64
_SLACK_S: Final = 0.3


class StallGuard:
    """Makes the coordinator distrust the store after it was stopped, or the store did not answer.

    While a coordinator whose process also serves the store is stopped, other ranks can give up and cannot report that
    in the round. Their earlier messages are still there when it resumes, as if they waited. So each heartbeat lists the
    rounds its rank gave up silently. After a gap in its own time (a longer pause between two `begin_beat`) the
    coordinator trusts no message before it has, from each rank, a heartbeat made after the gap: one that repeats a
    challenge drawn since.
    """

    def __init__(self, kv_store: KVStore, key: Callable[[str], str], watch: RankWatch, settings: Settings) -> None:
        self._kv_store = kv_store
        self._key = key
        self._watch = watch
        self._settings = settings
        self._lock = threading.Lock()
        self._last_beat_at: float | None = None
        self._challenge = ""
        self._published = True
        self.last_challenge = ""
        """The challenge this rank read last, for its heartbeat."""
        self._given_up: list[str] = []

    # -- every rank

    def give_up(self, round: str) -> None:
        """Notes that this rank gave up `round` without being able to report it there."""
        with self._lock:
            self._given_up = [*self._given_up, round][-_MAX_GIVEN_UP:]

    @property
    def given_up(self) -> list[str]:
        with self._lock:
            return list(self._given_up)

    def receive_challenge(self, raw: bytes | None) -> None:
        """Takes `raw`, the value under `key`, as the current challenge."""
        self.last_challenge = raw.decode("ascii", "replace") if raw is not None else ""

    @property
    def key(self) -> str:
        return self._key("roll")

    # -- the coordinator

    def begin_beat(self) -> None:
        """Marks the start of another heartbeat."""
        with self._lock:
            self._detect_gap()
            self._last_beat_at = self._settings.clock.now()

    def unconfirmed(self, ranks: list[int], timeout: float) -> list[int]:
        """Returns those of `ranks` without a heartbeat since the last gap. Raises RankStoreLost."""
        with self._lock:
            self._detect_gap()
            challenge, published = self._challenge, self._published
        if not challenge:
            return []
        if not published:
            self._kv_store.put(self.key, challenge.encode("ascii"), timeout=timeout)
            with self._lock:
                self._published = self._published or challenge == self._challenge
        missing = [rank for rank in ranks if self._watch.challenge(rank) != challenge]
        if missing:
            self._watch.read(missing, timeout)
        return [rank for rank in missing if self._watch.challenge(rank) != challenge]

    def _detect_gap(self) -> None:
        now, last = self._settings.clock.now(), self._last_beat_at
        if last is not None and now - last > 3 * self._settings.beat_s + _SLACK_S:
            self._challenge, self._published, self._last_beat_at = secrets.token_hex(8), False, now
