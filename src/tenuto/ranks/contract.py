"""The contract of a backend (the processes of a job and the key-value store they share), and the times of ranks.

A backend supplies only the store. `agreement` builds everything else on it, once. `tenuto.testing.ranks_suite` states
as tests what a store must guarantee.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Final, Protocol, runtime_checkable

from tenuto.concurrency.deadlines import Clock
from tenuto.record import record

TIMEOUT_S: Final = 600.0
"""How long ranks wait by default for one that is alive: to build its Checkpointer, to come to the step that all save
at, to put its part."""
SILENCE_S: Final = 15.0
"""How long by default a rank on another host, or the place where the ranks meet, may give no sign of life, and how long
a rank may be stopped, before it counts as lost."""


@runtime_checkable
class Ranks(Protocol):
    """The processes that save and restore one training state together."""

    @property
    def rank(self) -> int:
        """The number of this process, 0 to `world_size` - 1."""
        ...

    @property
    def world_size(self) -> int: ...

    @property
    def is_coordinator(self) -> bool:
        """Whether this process chooses what to restore, and commits."""
        ...

    def kv_store(self) -> KVStore:
        """Returns the key-value store of these ranks, the same for all. Raises RankStoreLost if it is out of reach."""
        ...


@runtime_checkable
class KVStore(Protocol):
    """Keys and values that all ranks see. Safe to use from several threads.

    Keys are segments of `[A-Za-z0-9._-]`, none with a leading dot, joined by `/`; no key is a prefix path of another.
    Values are bytes of any length. Other ranks see a value that was put completely or not at all. Every method raises
    RankStoreLost after `timeout` seconds at the latest; a call that timed out may still take effect later.
    """

    @property
    def name(self) -> str:
        """The place in words, for messages."""
        ...

    @property
    def host_rank(self) -> int | None:
        """The rank whose process serves the store, if one does: the store dies with it."""
        ...

    @property
    def longest_pause_s(self) -> float:
        """The longest pause between two polls of a rank that waits for a key. Seconds."""
        ...

    def put(self, key: str, value: bytes, *, timeout: float) -> None:
        """Puts `value`, replacing what is there."""
        ...

    def put_if_absent(self, key: str, value: bytes, *, timeout: float) -> bytes:
        """Puts `value` if the key is absent, atomically. Returns the value that is there afterwards."""
        ...

    def get(self, key: str, *, timeout: float) -> bytes | None:
        """Returns the current value, None if absent. Never waits for the key."""
        ...

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes | None]:
        """Returns `get` of each key, in as few round trips as possible."""
        ...

    def delete(self, keys: Sequence[str], *, timeout: float) -> None:
        """Deletes the keys; absent ones are no error."""
        ...

    def close(self) -> None:
        """Releases threads and connections without waiting. A later call opens new ones."""
        ...


@record
class VoteResult:
    """The result of a vote, equal on all ranks. `reasons`: of the ranks that are against, by rank."""

    reasons: Mapping[int, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all ranks are in favour."""
        return not self.reasons

    def __bool__(self) -> bool:
        return self.ok


# --------------------------------------------------------------------------------------------------
# Times: each rank has its own monotonic clock, which is never compared with another's.


@record
class Deadline:
    """A point in time that several waits may share. It keeps running while this process is stopped."""

    seconds: float
    clock: Clock = field(default_factory=Clock)
    at: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", self.clock.now() + self.seconds)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at - self.clock.now())

    @property
    def passed(self) -> bool:
        return self.clock.now() >= self.at


@record
class Settings:
    """The intervals and limits of heartbeats, requests and the handshake. Seconds."""

    beat_s: float = 1.0
    dead_after_s: float = SILENCE_S
    """A rank without a heartbeat for so long is lost, unless its process runs on this host: then it is only slow. So is
    the key-value store once it has answered nobody for so long."""
    answer_s: float = 10.0
    """The limit for one request to the key-value store."""
    probe_s: float = 2.0
    """The interval at which present ranks check their facts while others are still to come."""
    clock: Clock = field(default_factory=Clock)

    def deadline(self, seconds: float) -> Deadline:
        return Deadline(seconds, self.clock)
