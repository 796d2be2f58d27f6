"""What the processes of a job are, and the board on which they write to each other.

A board is the only thing that a backend supplies. Everything that the ranks agree on is built on it, once, in
`agreement`; `tenuto.testing.ranks_suite` says as tests what a board has to keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

TIMEOUT_S: Final = 600.0
"""How long ranks wait by default for one that is alive: to build its Checkpointer, to come to the step that all save
at, to put its part."""


@runtime_checkable
class Ranks(Protocol):
    """The processes that save and restore one training state together."""

    @property
    def rank(self) -> int:
        """This process, 0 to `world_size` - 1."""
        ...

    @property
    def world_size(self) -> int: ...

    @property
    def is_coordinator(self) -> bool:
        """Whether this process chooses what is restored, and commits."""
        ...

    def kv_store(self) -> KVStore:
        """The board of these ranks: the same place for all of them. Raises RankStoreLost if it cannot be reached."""
        ...


@runtime_checkable
class KVStore(Protocol):
    """Keys and values that all ranks see. May be used by several threads at once.

    Keys are segments of `[A-Za-z0-9._-]`, none beginning with a dot, parted by `/`; no key is the beginning of
    another's segments. Values are bytes of any length. What one rank has put, each other rank sees whole or not at all.
    Every method raises RankStoreLost after `timeout` seconds at the latest. What timed out may still happen later.
    """

    @property
    def name(self) -> str:
        """The place, in words, for messages."""
        ...

    @property
    def holder(self) -> int | None:
        """The rank whose process serves the board, if one does: the board dies with it."""
        ...

    @property
    def longest_pause_s(self) -> float:
        """How long who waits for a key may pause between two looks."""
        ...

    def put(self, key: str, value: bytes, *, timeout: float) -> None:
        """Puts `value`, in place of what was there."""
        ...

    def put_if_absent(self, key: str, value: bytes, *, timeout: float) -> bytes:
        """Puts `value` if nothing is there, in one indivisible step. Returns what is there afterwards."""
        ...

    def get(self, key: str, *, timeout: float) -> bytes | None:
        """What is there now; None if nothing is. Never waits for the key."""
        ...

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes | None]:
        """`get` of each, in as few round trips as the place allows."""
        ...

    def delete(self, keys: Sequence[str], *, timeout: float) -> None:
        """Removes them; those that are not there are no error."""
        ...

    def close(self) -> None:
        """Gives threads and connections back. Waits for nobody; who uses the board again takes others."""
        ...


@dataclass(frozen=True, slots=True)
class VoteResult:
    """How a vote ended: the same on all ranks. `reasons` are those of the ranks that are against, by rank."""

    reasons: Mapping[int, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all ranks are for it."""
        return not self.reasons

    def __bool__(self) -> bool:
        return self.ok
