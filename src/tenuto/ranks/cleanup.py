"""Removal of stale keys: the key-value store holds as few keys after a month as after an hour.

`StaleSession` and `ConvenedSessions` find what earlier sessions left because their processes were killed; `StaleRounds`
removes the rounds of this session that no rank needs any more.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Final

from tenuto.errors import RankStoreLost
from tenuto.ranks.common_step import CommonStep
from tenuto.ranks.contract import KVStore, Settings
from tenuto.ranks.heartbeats import rounds_of
from tenuto.ranks.round import Round
from tenuto.ranks.session import OFFER, Session
from tenuto.record import record

_SEARCH_LIMIT: Final = 1000
"""The number of rounds per kind that are searched for keys."""


@record
class StaleSession:
    """An ended session of `world_size` ranks."""

    session: str
    world_size: int

    def keys(self, kv_store: KVStore, timeout: float) -> list[str]:
        """Returns the keys it may have left. Raises RankStoreLost."""
        session = Session(self.session, 0, self.world_size, kv_store, Settings())
        keys = [session.key(name) for name in ("open", "hosts", "wish", "proposal", "roll")]
        keys += [session.key("host", host) for host in _hosts(kv_store.get(session.key("hosts"), timeout=timeout))]
        keys += [key for rank in range(self.world_size) for key in (session.key("ack", rank), session.beat_key(rank))]
        keys += CommonStep.keys(session)
        raw = kv_store.get(session.beat_key(0), timeout=timeout)
        for kind, numbers in rounds_of(raw or b"").items():
            for number in numbers[-_SEARCH_LIMIT:]:
                keys += Round(session, kind, number, int, _ignore_end).keys(every=True)
        return keys


def _hosts(raw: bytes | None) -> list[str]:
    try:
        return [str(host) for host in json.loads(raw or b"[]")]
    except (ValueError, TypeError):
        return []


class ConvenedSessions:
    """The sessions that this process convened, so that live ones are not taken for stale ones."""

    def __init__(self) -> None:
        self._live: set[str] = set()
        self._ended: dict[str, list[StaleSession]] = {}
        self._lock = threading.Lock()

    def stale(self, kv_store: KVStore) -> list[StaleSession]:
        """Returns the stale sessions of the store: the one offered there, and those of this process that ended."""
        try:
            raw = kv_store.get(OFFER, timeout=Settings().answer_s)
            offered = json.loads(raw or b"null")
            found = StaleSession(str(offered["session"]), min(int(offered["world_size"]), 1 << 20))
        except (ValueError, KeyError, TypeError, RankStoreLost):
            found = None  # no valid offer; if the store is lost, the handshake reports it
        with self._lock:
            ended = self._ended.pop(kv_store.name, [])
            if found is not None and found.session not in self._live and found not in ended:
                ended.append(found)
            return ended

    def opened(self, session: Session) -> None:
        with self._lock:
            self._live.add(session.id)

    def closed(self, session: Session) -> None:
        with self._lock:
            if session.id in self._live:
                self._live.discard(session.id)
                self._ended.setdefault(session.kv_store.name, []).append(StaleSession(session.id, session.world_size))


def _ignore_end(round: Round, lowest: int) -> None:
    """Ignores the end of a round that nobody has open."""


_UNREAD_LIMIT: Final = 64
"""Rounds kept per kind when no rank sends to them: nothing shows that they were received."""


class StaleRounds:
    """The rounds this rank opened in one session. Only the coordinator removes any.

    Each message carries the lowest round of its kind that its rank still needs. Once all messages of a round are read,
    no rank needs the rounds below the lowest of these numbers.
    """

    def __init__(self, session: Session, stale: Sequence[StaleSession] = ()) -> None:
        self._session = session
        self._stale = list(stale)
        self._open: dict[str, dict[int, Round]] = {}
        self._ended: dict[str, dict[int, Round]] = {}
        self._needed: dict[str, int] = {}
        self._lock = threading.Lock()

    def opened(self, kind: str, number: int) -> Round:
        round = Round(self._session, kind, number, lambda: self._low(kind, number), self._end)
        with self._lock:
            self._open.setdefault(kind, {})[number] = round
        return round

    def of(self, kind: str, number: int) -> Round | None:
        """Returns the open round of that number, if there is one."""
        with self._lock:
            return self._open.get(kind, {}).get(number)

    def live(self) -> dict[str, list[int]]:
        """Returns the first and last number per kind that may be in the key-value store."""
        with self._lock:
            found = {}
            for kind in {*self._open, *self._ended}:
                numbers = [*self._open.get(kind, ()), *self._ended.get(kind, ())]
                if numbers:
                    found[kind] = [min(numbers), max(numbers)]
            return found

    def delete(self) -> None:
        """Deletes what no rank needs. Raises RankStoreLost; the next call retries."""
        if not self._session.is_coordinator:
            return
        while self._stale:
            self._delete(self._stale[-1].keys(self._session.kv_store, self._session.settings.answer_s))
            self._stale.pop()
        for round in self._unneeded():
            self._delete(round.keys())
            with self._lock:
                del self._ended[round.kind][round.number]

    def _low(self, kind: str, number: int) -> int:
        with self._lock:
            return min(number, *self._open.get(kind, ()), number)

    def _end(self, round: Round, lowest: int) -> None:
        with self._lock:
            self._open.get(round.kind, {}).pop(round.number, None)
            if not self._session.is_coordinator:
                return
            self._ended.setdefault(round.kind, {})[round.number] = round
            self._needed[round.kind] = max(lowest, self._needed.get(round.kind, 0))
        if self._session.world_size == 1:
            self._delete(round.keys())
            with self._lock:
                del self._ended[round.kind][round.number]

    def _unneeded(self) -> list[Round]:
        with self._lock:
            found = []
            for kind, rounds in self._ended.items():
                newest = sorted(rounds)[-_UNREAD_LIMIT:]
                needed = max(self._needed.get(kind, 0), newest[0] if newest else 0)
                found += [round for number, round in rounds.items() if number < needed]
            return found

    def _delete(self, keys: list[str]) -> None:
        if keys:
            self._session.kv_store.delete(keys, timeout=self._session.settings.answer_s)
