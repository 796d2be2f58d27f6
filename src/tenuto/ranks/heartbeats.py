"""Who is alive, by signs of life that each rank gives on the board, and the observer's own clock.

A rank's beat is a counter with what it does. Nothing is concluded from what the observer did not watch: where it has
looked away for long (or was itself stopped), the silence begins anew.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tenuto.ranks.contract import KVStore
from tenuto.ranks.timeouts import Settings

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


class RankWatch:
    """What one rank has seen of the others' beats. May be used by several threads."""

    def __init__(self, kv_store: KVStore, key: Callable[[int], str], settings: Settings) -> None:
        self._kv_store = kv_store
        self._key = key
        self._settings = settings
        self._seen: dict[int, _Seen] = {}
        self._lock = threading.Lock()

    def read(self, ranks: Sequence[int], timeout: float) -> None:
        """Reads their beats. Raises RankStoreLost."""
        raws = self._kv_store.get_many([self._key(rank) for rank in ranks], timeout=timeout)
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

    def departed(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those that have said that they leave, and why."""
        with self._lock:
            return {rank: seen.left for rank in ranks if (seen := self._seen.get(rank)) and seen.left is not None}

    def word(self, rank: int) -> str:
        """The word of the roll that the rank has repeated last."""
        with self._lock:
            return self._seen[rank].word if rank in self._seen else ""

    def given_up(self, round: str) -> list[int]:
        """The ranks that have given up `topic` while the board did not answer them."""
        with self._lock:
            return [rank for rank, seen in self._seen.items() if round in seen.given_up]

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
    rounds: dict[str, list[int]],
    *,
    word: str = "",
    given_up: Sequence[str] = (),
) -> bytes:
    """One sign of life. `topics`: the numbers of each kind's topics that may still be on the board, first and last;
    `word`, `given_up`: see `roll`."""
    told = {"beat": count, "phase": phase, "left": left, "topics": rounds, "word": word, "given_up": list(given_up)}
    return json.dumps(told).encode()


def _told(raw: bytes) -> tuple[str, str | None, str, frozenset[str]]:
    try:
        values = json.loads(raw)
        left = None if values["left"] is None else str(values["left"])
        return str(values["phase"]), left, str(values["word"]), frozenset(map(str, values["given_up"]))
    except (ValueError, KeyError, TypeError):
        return "something unreadable", None, "", frozenset()


def rounds_of(raw: bytes) -> dict[str, range]:
    """The topics that a beat tells of. Nothing, of a beat that cannot be read."""
    try:
        told = json.loads(raw)["topics"]
        return {str(kind): range(int(first), int(last) + 1) for kind, (first, last) in told.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


# --------------------------------------------------------------------------------------------------
# Calling the roll: after it was stopped, or its board did not answer, the coordinator does not trust what it reads.
#
# While a coordinator is stopped whose process also serves the board, the others can give up and cannot say so there.
# What they had posted before is there when it goes on, as if they still waited. So each rank's beat tells which
# topics it has given up without being able to say so; and after a gap in its own time the coordinator believes no
# posts before it has seen, from each rank, a beat that was made after the gap: one that repeats a word drawn since.

_KEPT: Final = 64
_SLACK_S: Final = 0.3


class StallGuard:
    """`turned` is called at each beat; a longer pause between two is a gap."""

    def __init__(self, kv_store: KVStore, key: Callable[[str], str], watch: RankWatch, settings: Settings) -> None:
        self._kv_store = kv_store
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

    def give_up(self, round: str) -> None:
        """This rank has given up `topic` without being able to say so there."""
        with self._lock:
            self._given_up = [*self._given_up, round][-_KEPT:]

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
            self._kv_store.put(self.key, word.encode("ascii"), timeout=timeout)
            with self._lock:
                self._called = self._called or word == self._word
        missing = [rank for rank in ranks if self._watch.word(rank) != word]
        if missing:
            self._watch.read(missing, timeout)
        return [rank for rank in missing if self._watch.word(rank) != word]

    def _look_for_gap(self) -> None:
        now, last = self._settings.clock.now(), self._turned_at
        if last is not None and now - last > 3 * self._settings.beat_s + _SLACK_S:
            self._word, self._called, self._turned_at = secrets.token_hex(8), False, now
