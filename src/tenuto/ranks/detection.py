"""Finds the ranks of this process: those passed by the user, those of torch.distributed, or this process alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tenuto.errors import RanksNotSupported
from tenuto.ranks.contract import KVStore, Ranks
from tenuto.ranks.kv.in_process import InProcessKVStore
from tenuto.ranks.kv.torch_store import initialised
from tenuto.record import record


@record
class Solo:
    """A group of one. `ranks=tenuto.Solo()` lets one process of a job work alone, such as to inspect a checkpoint."""

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
    """Returns the ranks of this job: `given`, else torch.distributed's initialised default process group, else this
    process.

    Reads only memory and environment, and imports no torch. Raises RanksNotSupported if WORLD_SIZE or JAX gives several
    processes that have no way to meet.
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
    count = _jax_processes(sys.modules if modules is None else modules)
    if count > 1:
        raise RanksNotSupported(
            f"this job has {count} processes of JAX, and nothing says where they meet to save together",
            subject=f"{count} processes",
            hint="ranks=tenuto.SharedFiles(directory, rank=jax.process_index(), world_size=jax.process_count()), in a "
            "directory that all of them see",
        )
    return Solo()


def _jax_processes(modules: Mapping[str, ModuleType]) -> int:
    """Returns how many processes `jax.distributed.initialize` has brought together; 1 without it."""
    jax: Any = modules.get("jax")
    distributed = getattr(jax, "distributed", None)
    return int(jax.process_count()) if distributed is not None and distributed.is_initialized() else 1
