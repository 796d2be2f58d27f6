"""What may still lie on the board, and its removal: its keys are as few after a month as after an hour."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tenuto.errors import RankStoreLost
from tenuto.ranks.common_step import CommonStep
from tenuto.ranks.contract import KVStore
from tenuto.ranks.heartbeats import rounds_of
from tenuto.ranks.round import Round
from tenuto.ranks.session import OFFER, Session
from tenuto.ranks.timeouts import Settings

# --------------------------------------------------------------------------------------------------
# Sessions that the board held before this one: what their processes could not remove, because they were killed.

_MOST: Final = 1000
"""Topics of a kind that are looked for."""


@dataclass(frozen=True, slots=True)
class StaleSession:
    """A session of that many ranks, which lives no longer."""

    session: str
    world_size: int

    def keys(self, kv_store: KVStore, timeout: float) -> list[str]:
        """The keys that it may have left. Raises RankStoreLost."""
        session = Session(self.session, 0, self.world_size, kv_store, Settings())
        keys = [session.key(name) for name in ("open", "wish", "proposal", "roll")]
        keys += [key for rank in range(self.world_size) for key in (session.key("ack", rank), session.beat_key(rank))]
        keys += CommonStep.keys(session)
        raw = kv_store.get(session.beat_key(0), timeout=timeout)
        for kind, numbers in rounds_of(raw or b"").items():
            for number in numbers[-_MOST:]:
                keys += Round(session, kind, number, int, _nothing).keys(every=True)
        return keys


class ConvenedSessions:
    """The sessions that this process has convened: those that live must not be taken for leftovers."""

    def __init__(self) -> None:
        self._live: set[str] = set()
        self._ended: dict[str, list[StaleSession]] = {}
        self._lock = threading.Lock()

    def before(self, kv_store: KVStore) -> list[StaleSession]:
        """What the board may still hold: the session that is offered there, and this process's own that have ended."""
        try:
            raw = kv_store.get(OFFER, timeout=Settings().answer_s)
            offered = json.loads(raw or b"null")
            found = StaleSession(str(offered["session"]), min(int(offered["world_size"]), 1 << 20))
        except (ValueError, KeyError, TypeError, RankStoreLost):
            found = None  # nothing is offered there; where the board is lost, the handshake tells
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


def _nothing(round: Round, lowest: int) -> None:
    """Nobody has it open."""


_KEPT: Final = 64
"""Topics of a kind that nobody posts to are kept so long: nobody tells that he has heard them."""


class StaleRounds:
    """The topics of one session that this rank has opened. Only the coordinator removes any.

    Each post says which topics of its kind its rank still needs. So once all posts to one topic are read, all those
    below the lowest number so told are needed by nobody.
    """

    def __init__(self, session: Session, before: Sequence[StaleSession] = ()) -> None:
        self._session = session
        self._before = list(before)
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
        """The topic of that number, if it is open."""
        with self._lock:
            return self._open.get(kind, {}).get(number)

    def live(self) -> dict[str, list[int]]:
        """The first and last number of each kind that may be on the board."""
        with self._lock:
            found = {}
            for kind in {*self._open, *self._ended}:
                numbers = [*self._open.get(kind, ()), *self._ended.get(kind, ())]
                if numbers:
                    found[kind] = [min(numbers), max(numbers)]
            return found

    def tidy(self) -> None:
        """Removes what nobody needs any more. Raises RankStoreLost; then it is tried again."""
        if not self._session.is_coordinator:
            return
        while self._before:
            self._delete(self._before[-1].keys(self._session.kv_store, self._session.settings.answer_s))
            self._before.pop()
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
                newest = sorted(rounds)[-_KEPT:]
                needed = max(self._needed.get(kind, 0), newest[0] if newest else 0)
                found += [round for number, round in rounds.items() if number < needed]
            return found

    def _delete(self, keys: list[str]) -> None:
        if keys:
            self._session.kv_store.delete(keys, timeout=self._session.settings.answer_s)
