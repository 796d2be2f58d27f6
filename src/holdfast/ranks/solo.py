"""One process by itself."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.ranks.contract import Board
from holdfast.ranks.memory import MemoryBoard


@dataclass(frozen=True, slots=True)
class Solo:
    """The only rank there is. `ranks=holdfast.Solo()`: what one process of a job does by itself, such as looking into
    a checkpoint on one rank alone."""

    rank: int = 0
    world_size: int = 1
    is_coordinator: bool = True

    def board(self) -> Board:
        return MemoryBoard()
