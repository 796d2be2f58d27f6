"""Verification in parts: how much is read, how fast, and what earlier verifications have read.

A *cycle* of a checkpoint begins with its first byte and ends when every byte has been read, over any number of
verifications. What of it has been read is kept on this machine, in a file of the user's: losing that costs reading
again, and nothing else. A cycle in which nothing was found damaged ends with one note, `verified`.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tenuto.errors import UsageError
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest, Note
from tenuto.model.sizes import parse_bytes, seconds_of
from tenuto.store.wrappers.throttle import Clock, SystemClock, TokenBucket

_LIMIT: Final = 64 << 20
SAVED_EVERY_S: Final = 30.0
_AHEAD_S: Final = 3600.0
"""How far the clock of another machine may be ahead."""


def parse_amount(text: str) -> float | int | None:
    """Returns how much to read: a share of all (a float up to 1, of `5%`), bytes (of `20GiB`), or None for `all`.
    Raises UsageError."""
    if text.strip().lower() == "all":
        return None
    if text.strip().endswith("%"):
        with suppress(ValueError):
            share = float(text.strip()[:-1]) / 100
            if 0 < share <= 1:
                return share
        raise UsageError(f"read={text!r} is not a share of all", subject="read", hint="--read 5%, --read 20GiB, or all")
    return parse_bytes(text, "read")


class Pace:
    """How much one verification reads, until when, and how fast. May be asked by several threads.

    nbytes: the most bytes of data files; None: all. seconds: from now on; None: as long as it takes. rate: bytes per
    second at most.
    """

    def __init__(
        self,
        nbytes: int | None = None,
        *,
        seconds: float | None = None,
        rate: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._left = nbytes
        self._clock = clock or SystemClock()
        self._until = None if seconds is None else self._clock.monotonic() + seconds
        self._rate = rate
        self._bucket = TokenBucket()

    @property
    def over(self) -> bool:
        """Whether nothing more is to be read."""
        return (self._left is not None and self._left <= 0) or (
            self._until is not None and self._clock.monotonic() >= self._until
        )

    def take(self, nbytes: int) -> bool:
        """Returns whether a range may be read, and counts it. The last one may reach beyond what was asked for, so that
        as many verifications as are needed for all of it do read all of it."""
        if self.over:
            return False
        if self._left is not None:
            self._left -= nbytes
        return True

    def wait(self, nbytes: int) -> bool:
        """Waits until so many bytes may be read. Returns False where time is over."""
        if self._until is not None and self._clock.monotonic() >= self._until:
            return False
        if self._rate is not None:
            self._bucket.take(nbytes, self._rate, self._clock)
        return True


@dataclass
class Cycle:
    """What has been read of one checkpoint.

    begun: seconds since 1970. after: the number of its newest note about damage when the cycle began.
    read: how far each data file has been read, in bytes, by place and name. bytes: in all.
    """

    save_id: str
    begun: float
    after: int
    read: dict[str, int] = field(default_factory=dict)
    bytes: int = 0


@dataclass
class ReadingState:
    """What this user has read of one repository on this machine.

    under_way: cycles that have not ended. done: when the last cycle of a checkpoint ended, in seconds since 1970, with
    its save id. passes: when each verification began that was cut off, by what it is of: a run, or everything ("").
    """

    repository: str
    under_way: dict[str, Cycle] = field(default_factory=dict)
    done: dict[str, tuple[str, float]] = field(default_factory=dict)
    passes: dict[str, float] = field(default_factory=dict)
    _saved: float = field(default_factory=time.monotonic)

    @staticmethod
    def path_of(repository: str) -> Path:
        """Returns the file of a repository, by its id."""
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return Path(state) / "tenuto" / "verify" / f"{repository}.json"

    @classmethod
    def load(cls, repository: str) -> ReadingState:
        """Returns what the file says; nothing where it is missing or damaged, which costs reading again."""
        try:
            with cls.path_of(repository).open("rb") as file:
                found = json.loads(file.read(_LIMIT))
            under_way = {str(key): _cycle(value) for key, value in found["under_way"].items()}
            done = {str(key): (str(value[0]), float(value[1])) for key, value in found["done"].items()}
            passes = {str(key): float(value) for key, value in found["passes"].items()}
            return cls(repository, under_way, done, passes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            return cls(repository)

    def save(self, *, at_most_every: float = 0.0) -> None:
        """Writes the file, unless it was written a moment ago. Where that fails, the next verification reads again."""
        if time.monotonic() - self._saved < at_most_every:
            return
        self._saved = time.monotonic()
        path = self.path_of(self.repository)
        body = {
            "under_way": {key: asdict(cycle) for key, cycle in self.under_way.items()},
            "done": self.done,
            "passes": self.passes,
        }
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with suppress(OSError):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_text(json.dumps(body))
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def keep_only(self, ids: set[str]) -> None:
        """Forgets checkpoints that are there no more."""
        self.under_way = {key: cycle for key, cycle in self.under_way.items() if key in ids}
        self.done = {key: when for key, when in self.done.items() if key in ids}

    def cycle(self, id: CheckpointId, save_id: str, noted: list[Note]) -> Cycle:
        """Returns the checkpoint's cycle that is under way, or begins one. Damage that was noted since ends a cycle:
        what was read before says nothing of what was repaired."""
        found = self.under_way.get(str(id))
        if found is None or found.save_id != save_id or self.outdated(id, noted):
            found = self.under_way[str(id)] = Cycle(save_id, time.time(), _last_damage(noted))
        return found

    def outdated(self, id: CheckpointId, noted: list[Note]) -> bool:
        """Returns whether damage was noted since the checkpoint's cycle began; then the cycle is over."""
        found = self.under_way.get(str(id))
        if found is None or found.after == _last_damage(noted):
            return False
        del self.under_way[str(id)]
        return True

    def end(self, id: CheckpointId) -> None:
        """Ends the checkpoint's cycle: all of it was read, or damage was found."""
        found = self.under_way.pop(str(id), None)
        if found is not None:
            self.done[str(id)] = found.save_id, time.time()

    def last_read(self, id: CheckpointId, manifest: Manifest | None, noted: list[Note]) -> float:
        """Returns since when nobody knows whether a checkpoint is whole, in seconds since 1970: when it was verified
        last, here or by a note, or else when it was saved. A time to come, by a clock that is ahead, counts as none."""
        found = [seconds_of(note.created) or 0.0 for note in noted if note.kind in ("verified", "suspect")]
        if manifest is not None:
            found.append(seconds_of(manifest.created) or 0.0)
            done = self.done.get(str(id))
            if done is not None and done[0] == manifest.save_id:
                found.append(done[1])
        now = time.time()
        return max((when for when in found if when <= now + _AHEAD_S), default=0.0)


def _last_damage(noted: list[Note]) -> int:
    return max((note.number for note in noted if note.kind == "suspect"), default=0)


def _cycle(found: Any) -> Cycle:
    read = {str(key): int(value) for key, value in found["read"].items()}
    return Cycle(str(found["save_id"]), float(found["begun"]), int(found["after"]), read, int(found["bytes"]))


Kept = Callable[[], None]


@dataclass
class PartRead:
    """One checkpoint's share of a verification in parts: `pace` says how much, `cycle` what has been read, which `kept`
    stores now and then. `complete`: whether every byte of it has been read by now."""

    pace: Pace
    cycle: Cycle
    kept: Kept = lambda: None
    complete: bool = True

    def begin(self, place: str) -> int:
        return self.cycle.read.get(place, 0)

    def read(self, place: str, upto: int, nbytes: int) -> None:
        self.cycle.read[place] = upto
        self.cycle.bytes += nbytes
        self.kept()
