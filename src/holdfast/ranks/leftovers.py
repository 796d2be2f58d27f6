"""What may still lie on the board, and its removal: its keys are as few after a month as after an hour."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from holdfast.ranks.before import Before
from holdfast.ranks.session import Session
from holdfast.ranks.topic import Topic

_KEPT: Final = 64
"""Topics of a kind that nobody posts to are kept so long: nobody tells that he has heard them."""


class Leftovers:
    """The topics of one session that this rank has opened. Only the coordinator removes any.

    Each post says which topics of its kind its rank still needs. So once all posts to one topic are read, all those
    below the lowest number so told are needed by nobody.
    """

    def __init__(self, session: Session, before: Sequence[Before] = ()) -> None:
        self._session = session
        self._before = list(before)
        self._open: dict[str, dict[int, Topic]] = {}
        self._ended: dict[str, dict[int, Topic]] = {}
        self._needed: dict[str, int] = {}
        self._lock = threading.Lock()

    def opened(self, kind: str, number: int) -> Topic:
        topic = Topic(self._session, kind, number, lambda: self._low(kind, number), self._end)
        with self._lock:
            self._open.setdefault(kind, {})[number] = topic
        return topic

    def of(self, kind: str, number: int) -> Topic | None:
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
            self._delete(self._before[-1].keys(self._session.board, self._session.settings.answer_s))
            self._before.pop()
        for topic in self._unneeded():
            self._delete(topic.keys())
            with self._lock:
                del self._ended[topic.kind][topic.number]

    def _low(self, kind: str, number: int) -> int:
        with self._lock:
            return min(number, *self._open.get(kind, ()), number)

    def _end(self, topic: Topic, lowest: int) -> None:
        with self._lock:
            self._open.get(topic.kind, {}).pop(topic.number, None)
            if not self._session.is_coordinator:
                return
            self._ended.setdefault(topic.kind, {})[topic.number] = topic
            self._needed[topic.kind] = max(lowest, self._needed.get(topic.kind, 0))
        if self._session.world_size == 1:
            self._delete(topic.keys())
            with self._lock:
                del self._ended[topic.kind][topic.number]

    def _unneeded(self) -> list[Topic]:
        with self._lock:
            found = []
            for kind, topics in self._ended.items():
                newest = sorted(topics)[-_KEPT:]
                needed = max(self._needed.get(kind, 0), newest[0] if newest else 0)
                found += [topic for number, topic in topics.items() if number < needed]
            return found

    def _delete(self, keys: list[str]) -> None:
        if keys:
            self._session.board.delete(keys, timeout=self._session.settings.answer_s)
