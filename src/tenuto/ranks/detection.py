"""Which ranks this process is one of: by what was passed, by torch.distributed, or alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from tenuto.errors import RanksNotSupported
from tenuto.ranks.contract import KVStore, Ranks
from tenuto.ranks.kv.in_process import InProcessKVStore
from tenuto.ranks.kv.torch_store import initialised

# --------------------------------------------------------------------------------------------------
# One process by itself.


@dataclass(frozen=True, slots=True)
class Solo:
    """The only rank there is. `ranks=tenuto.Solo()`: what one process of a job does by itself, such as looking into
    a checkpoint on one rank alone."""

    rank: int = 0
    world_size: int = 1
    is_coordinator: bool = True

    def kv_store(self) -> KVStore:
        return InProcessKVStore()


def find_ranks(
    given: Ranks | None = None,
    environment: Mapping[str, str] | None = None,
    modules: Mapping[str, ModuleType] | None = None,
) -> Ranks:
    """The ranks of this job: `given`, if it is; else those of torch.distributed's default process group, if it is
    initialised; else this process alone. Reads no more than memory and environment, and imports no torch.

    Raises RanksNotSupported if WORLD_SIZE tells of several processes and nothing tells how they meet.
    """
    if given is not None:
        return given
    found = initialised(modules)
    if found is not None:
        return found if found.world_size > 1 else Solo()
    text = (os.environ if environment is None else environment).get("WORLD_SIZE", "").strip()
    if text.isdecimal() and int(text) > 1:
        raise RanksNotSupported(
            f"this job has {text} processes (WORLD_SIZE={text}), and torch.distributed is not initialised: they cannot "
            f"meet",
            subject=f"WORLD_SIZE={text}",
            hint="call torch.distributed.init_process_group first, or pass "
            "ranks=tenuto.SharedFiles(directory, rank=, world_size=)",
        )
    return Solo()
