"""One process. A job of several is refused where only one can act, by what gives it away."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from holdfast.errors import RanksNotSupported
from holdfast.ranks.contract import Board, Ranks
from holdfast.ranks.memory import MemoryBoard


@dataclass(frozen=True, slots=True)
class Solo:
    """The only rank there is."""

    rank: int = 0
    world_size: int = 1
    is_coordinator: bool = True

    def board(self) -> Board:
        return MemoryBoard()


def solo(environment: Mapping[str, str] | None = None, modules: Mapping[str, ModuleType] | None = None) -> Ranks:
    """This process as the only one. Raises RanksNotSupported if WORLD_SIZE is above 1 or torch.distributed runs a group
    of more than one process. torch is asked only if something else has imported it."""
    environment = os.environ if environment is None else environment
    modules = sys.modules if modules is None else modules
    size, source = _world_size(environment, modules)
    if size > 1:
        raise RanksNotSupported(
            f"this job has {size} processes ({source}); a single save is made by one process",
            subject=source,
            hint="holdfast.Checkpointer(…).save() saves from all of them together",
        )
    return Solo()


def _world_size(environment: Mapping[str, str], modules: Mapping[str, ModuleType]) -> tuple[int, str]:
    distributed = modules.get("torch.distributed")
    # A half-imported module has no such functions yet, and a build without distributed support never has.
    if distributed is not None and getattr(distributed, "is_available", bool)() and distributed.is_initialized():
        return int(distributed.get_world_size()), "torch.distributed is initialised"
    text = environment.get("WORLD_SIZE", "").strip()
    return (int(text), f"WORLD_SIZE={text}") if text.isdecimal() else (1, "")
