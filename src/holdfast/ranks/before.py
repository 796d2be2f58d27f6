"""Sessions that the board held before this one: what their processes could not remove, because they were killed."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Final

from holdfast.errors import RankStoreLost
from holdfast.ranks.contract import Board
from holdfast.ranks.kept import Kept
from holdfast.ranks.session import OFFER, Session
from holdfast.ranks.timing import Settings
from holdfast.ranks.topic import Topic
from holdfast.ranks.watch import topics_of

_MOST: Final = 1000
"""Topics of a kind that are looked for."""


@dataclass(frozen=True, slots=True)
class Before:
    """A session of that many ranks, which lives no longer."""

    session: str
    world_size: int

    def keys(self, board: Board, timeout: float) -> list[str]:
        """The keys that it may have left. Raises RankStoreLost."""
        session = Session(self.session, 0, self.world_size, board, Settings())
        keys = [session.key(name) for name in ("open", "wish", "proposal", "roll")]
        keys += [key for rank in range(self.world_size) for key in (session.key("ack", rank), session.beat_key(rank))]
        keys += Kept.keys(session)
        raw = board.get(session.beat_key(0), timeout=timeout)
        for kind, numbers in topics_of(raw or b"").items():
            for number in numbers[-_MOST:]:
                keys += Topic(session, kind, number, int, _nothing).keys(every=True)
        return keys


class Past:
    """The sessions that this process has convened: those that live must not be taken for leftovers."""

    def __init__(self) -> None:
        self._live: set[str] = set()
        self._ended: dict[str, list[Before]] = {}
        self._lock = threading.Lock()

    def before(self, board: Board) -> list[Before]:
        """What the board may still hold: the session that is offered there, and this process's own that have ended."""
        try:
            raw = board.get(OFFER, timeout=Settings().answer_s)
            offered = json.loads(raw or b"null")
            found = Before(str(offered["session"]), min(int(offered["world_size"]), 1 << 20))
        except (ValueError, KeyError, TypeError, RankStoreLost):
            found = None  # nothing is offered there; where the board is lost, the handshake tells
        with self._lock:
            ended = self._ended.pop(board.name, [])
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
                self._ended.setdefault(session.board.name, []).append(Before(session.id, session.world_size))


def _nothing(topic: Topic, lowest: int) -> None:
    """Nobody has it open."""
