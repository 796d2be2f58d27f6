"""What the engine asks of the ranks of a job."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


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
