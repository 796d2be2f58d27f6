"""One rank's access to the disk and to the key-value store that all ranks share.

The scheduler decides before every call which rank acts; when the rank's life ends, so do its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from campaigns.rank_crashes.scheduler import Scheduler
from tenuto.ranks.kv.in_process import InProcessKVStore
from tenuto.store.local.syscalls import FileSystem
from tenuto.testing.layers import Killed, Layer, Mortal

R = TypeVar("R")


@dataclass
class Life:
    """Of a rank, or of a whole job: it ends after so many of what changes the disk or the board."""

    left: int | None = None
    spent: int = 0
    over: bool = False

    def spend(self) -> None:
        self.spent += 1
        if self.left is not None and self.spent > self.left:
            self.over = True


class Seat(Layer):
    """One rank's place at the disk: its turn comes before every call, and with its life its calls end."""

    def __init__(self, inner: FileSystem, scheduler: Scheduler, actor: int, lives: Sequence[Life]) -> None:
        super().__init__(inner)
        self.scheduler, self.actor, self.lives = scheduler, actor, lives

    def around(self, call: str, path: str, act: Callable[[], R]) -> R:
        self.point(counts=call in Mortal.CHANGING)
        return act()

    def point(self, *, counts: bool) -> None:
        self.living()
        self.scheduler.point(self.actor)
        for life in self.lives if counts else ():
            life.spend()
        self.living()

    def living(self) -> None:
        if any(life.over for life in self.lives):
            raise Killed


class ScheduledKVStore(InProcessKVStore):
    """One rank's place at the board that all share."""

    longest_pause_s = 1.0  # type: ignore[misc]

    def __init__(self, shared: InProcessKVStore, seat: Seat) -> None:
        super().__init__()
        self._values, self._lock = shared._values, shared._lock
        self._seat = seat
        self.name = "the board"

    def put(self, key: str, value: bytes, *, timeout: float) -> None:
        self._posts()
        super().put(key, value, timeout=timeout)

    def put_if_absent(self, key: str, value: bytes, *, timeout: float) -> bytes:
        self._posts()
        return super().put_if_absent(key, value, timeout=timeout)

    def get(self, key: str, *, timeout: float) -> bytes | None:
        self._seat.point(counts=False)
        return super().get(key, timeout=timeout)

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes | None]:
        self._seat.point(counts=False)
        return super().get_many(keys, timeout=timeout)

    def _posts(self) -> None:
        self._seat.point(counts=True)
        self._seat.scheduler.posted()
