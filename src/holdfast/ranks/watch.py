"""Who is alive, by signs of life that each rank gives on the board, and the observer's own clock.

A rank's beat is a counter with what it does. Nothing is concluded from what the observer did not watch: where it has
looked away for long (or was itself stopped), the silence begins anew.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.ranks.contract import Board
from holdfast.ranks.timing import Settings

NAMED: Final = 8
"""So many ranks are described one by one; of more only how many they are."""


@dataclass(slots=True)
class _Seen:
    looked_at: float
    silent_since: float
    raw: bytes | None
    phase: str = ""
    phase_since: float = 0.0
    left: str | None = None
    word: str = ""
    given_up: frozenset[str] = frozenset()


class Watch:
    """What one rank has seen of the others' beats. May be used by several threads."""

    def __init__(self, board: Board, key: Callable[[int], str], settings: Settings) -> None:
        self._board = board
        self._key = key
        self._settings = settings
        self._seen: dict[int, _Seen] = {}
        self._lock = threading.Lock()

    def look(self, ranks: Sequence[int], timeout: float) -> None:
        """Reads their beats. Raises RankStoreLost."""
        raws = self._board.get_many([self._key(rank) for rank in ranks], timeout=timeout)
        now = self._settings.clock.now()
        with self._lock:
            for rank, raw in zip(ranks, raws, strict=True):
                self._note(rank, raw, now)

    def _note(self, rank: int, raw: bytes | None, now: float) -> None:
        seen = self._seen.get(rank)
        if seen is None:
            seen = self._seen[rank] = _Seen(now, now, None)
        elif now - seen.looked_at > self._settings.dead_after_s / 2:
            seen.silent_since = now
        seen.looked_at = now
        if raw is None or raw == seen.raw:
            return
        seen.raw, seen.silent_since = raw, now
        phase, seen.left, seen.word, seen.given_up = _told(raw)
        if phase != seen.phase:
            seen.phase, seen.phase_since = phase, now

    def due(self, ranks: Sequence[int]) -> bool:
        """Whether one of them has not been looked at for as long as beats are apart."""
        since = self._settings.clock.now() - self._settings.beat_s
        with self._lock:
            return any(rank not in self._seen or self._seen[rank].looked_at <= since for rank in ranks)

    def dead(self, ranks: Iterable[int]) -> list[int]:
        """Those that were watched without a sign of life for `dead_after_s`."""
        limit = self._settings.dead_after_s
        with self._lock:
            return [
                rank for rank in ranks if (seen := self._seen.get(rank)) and seen.looked_at - seen.silent_since >= limit
            ]

    def left(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those that have said that they leave, and why."""
        with self._lock:
            return {rank: seen.left for rank in ranks if (seen := self._seen.get(rank)) and seen.left is not None}

    def word(self, rank: int) -> str:
        """The word of the roll that the rank has repeated last."""
        with self._lock:
            return self._seen[rank].word if rank in self._seen else ""

    def given_up(self, topic: str) -> list[int]:
        """The ranks that have given up `topic` while the board did not answer them."""
        with self._lock:
            return [rank for rank, seen in self._seen.items() if topic in seen.given_up]

    def describe(self, ranks: Sequence[int]) -> str:
        """`rank 2 (last reported "writing", 12 s ago; no sign of life for 8 s)`, for each."""
        with self._lock:
            texts = [self._describe(rank) for rank in ranks[:NAMED]]
        if len(ranks) > NAMED:
            texts.append(f"{len(ranks) - NAMED} more")
        return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)

    def _describe(self, rank: int) -> str:
        seen = self._seen.get(rank)
        if seen is None or seen.raw is None:
            return f"rank {rank} (has reported nothing)"
        now = self._settings.clock.now()
        said = (
            f"last reported {seen.phase!r}, {now - seen.phase_since:.1f} s ago" if seen.phase else "reported no phase"
        )
        silent = seen.looked_at - seen.silent_since
        quiet = f"; no sign of life for {silent:.1f} s" if silent > 2 * self._settings.beat_s else ""
        return f"rank {rank} ({said}{quiet})"


def beat(
    count: int,
    phase: str,
    left: str | None,
    topics: dict[str, list[int]],
    *,
    word: str = "",
    given_up: Sequence[str] = (),
) -> bytes:
    """One sign of life. `topics`: the numbers of each kind's topics that may still be on the board, first and last;
    `word`, `given_up`: see `roll`."""
    told = {"beat": count, "phase": phase, "left": left, "topics": topics, "word": word, "given_up": list(given_up)}
    return json.dumps(told).encode()


def _told(raw: bytes) -> tuple[str, str | None, str, frozenset[str]]:
    try:
        values = json.loads(raw)
        left = None if values["left"] is None else str(values["left"])
        return str(values["phase"]), left, str(values["word"]), frozenset(map(str, values["given_up"]))
    except (ValueError, KeyError, TypeError):
        return "something unreadable", None, "", frozenset()


def topics_of(raw: bytes) -> dict[str, range]:
    """The topics that a beat tells of. Nothing, of a beat that cannot be read."""
    try:
        told = json.loads(raw)["topics"]
        return {str(kind): range(int(first), int(last) + 1) for kind, (first, last) in told.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
