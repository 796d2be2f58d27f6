"""Calling the roll: after it was stopped, or its board did not answer, the coordinator does not trust what it reads.

While a coordinator is stopped whose process also serves the board, the others can give up and cannot say so there. What
they had posted before is there when it goes on, as if they still waited. So each rank's beat tells which topics it has
given up without being able to say so; and after a gap in its own time the coordinator believes no posts before it has
seen, from each rank, a beat that was made after the gap: one that repeats a word drawn since.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Final

from holdfast.ranks.contract import Board
from holdfast.ranks.timing import Settings
from holdfast.ranks.watch import Watch

_KEPT: Final = 64
_SLACK_S: Final = 0.3


class Roll:
    """`turned` is called at each beat; a longer pause between two is a gap."""

    def __init__(self, board: Board, key: Callable[[str], str], watch: Watch, settings: Settings) -> None:
        self._board = board
        self._key = key
        self._watch = watch
        self._settings = settings
        self._lock = threading.Lock()
        self._turned_at: float | None = None
        self._word = ""
        self._called = True
        self.heard = ""
        """The word that this rank has read, for its beat."""
        self._given_up: list[str] = []

    # -- every rank

    def give_up(self, topic: str) -> None:
        """This rank has given up `topic` without being able to say so there."""
        with self._lock:
            self._given_up = [*self._given_up, topic][-_KEPT:]

    @property
    def given_up(self) -> list[str]:
        with self._lock:
            return list(self._given_up)

    def listen(self, raw: bytes | None) -> None:
        """`raw` stands under the key of the word."""
        self.heard = raw.decode("ascii", "replace") if raw is not None else ""

    @property
    def key(self) -> str:
        return self._key("roll")

    # -- the coordinator

    def turned(self) -> None:
        """Another beat begins."""
        with self._lock:
            self._look_for_gap()
            self._turned_at = self._settings.clock.now()

    def silent(self, ranks: list[int], timeout: float) -> list[int]:
        """Those of `ranks` that have not been heard since the last gap. Raises RankStoreLost."""
        with self._lock:
            self._look_for_gap()
            word, called = self._word, self._called
        if not word:
            return []
        if not called:
            self._board.put(self.key, word.encode("ascii"), timeout=timeout)
            with self._lock:
                self._called = self._called or word == self._word
        missing = [rank for rank in ranks if self._watch.word(rank) != word]
        if missing:
            self._watch.look(missing, timeout)
        return [rank for rank in missing if self._watch.word(rank) != word]

    def _look_for_gap(self) -> None:
        now, last = self._settings.clock.now(), self._turned_at
        if last is not None and now - last > 3 * self._settings.beat_s + _SLACK_S:
            self._word, self._called, self._turned_at = secrets.token_hex(8), False, now
