"""What others do with the same state in the same place. Each returns the seconds that count."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

warnings.filterwarnings("ignore", module="torch.distributed")


def fsync_tree(root: Path) -> None:
    """Makes durable what a peer has written, its directories too: durability is part of what is compared."""
    paths = [root, root.parent] if root.is_file() else [*sorted(root.rglob("*")), root, root.parent]
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def torch_save(state: dict[str, Any], path: Path) -> float:
    begun = time.perf_counter()
    torch.save(state, path)
    fsync_tree(path)
    return time.perf_counter() - begun


def safetensors_save(tensors: dict[str, torch.Tensor], path: Path) -> float:
    begun = time.perf_counter()
    safetensors.torch.save_file(tensors, path)
    fsync_tree(path)
    return time.perf_counter() - begun


def dcp_save(state: dict[str, Any], path: Path) -> float:
    """dcp's own writer syncs its files; the directory is synced here. As all ranks, where there are several."""
    begun = time.perf_counter()
    dcp.save(state, checkpoint_id=str(path), no_dist=_alone())
    if _alone() or dist.get_rank() == 0:  # all have put their files: it ends by a collective
        fsync_tree(path)
    return time.perf_counter() - begun


def dcp_async_begin(
    state: dict[str, Any], path: Path, mode: str, group: dist.ProcessGroup | None = None
) -> Callable[[], object]:
    """Begins `async_save`; what it returns waits until all is written. `group`: in which ranks talk beside training."""
    kind = AsyncCheckpointerType.PROCESS if mode == "process" else AsyncCheckpointerType.THREAD
    pending = dcp.async_save(state, checkpoint_id=str(path), async_checkpointer_type=kind, process_group=group)
    return cast("Callable[[], object]", pending.result)  # a Future: no staging is left to the caller here


def dcp_async_stall(state: dict[str, Any], path: Path, mode: str, group: dist.ProcessGroup | None = None) -> float:
    """How long `async_save` holds the caller; what follows is waited for outside the figure."""
    begun = time.perf_counter()
    finish = dcp_async_begin(state, path, mode, group)
    stall = time.perf_counter() - begun
    finish()
    return stall


def torch_checkpointing_save(state: dict[str, Any], path: Path) -> float:
    """Its synchronous writer, which flushes nothing by itself: files and directories are synced here.

    Without its direct I/O, which is on by default and fails with EINVAL here: its buffers are not aligned.
    """
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(config)
    begun = time.perf_counter()
    manager.save(str(path / "saved"), state)
    fsync_tree(path)
    seconds = time.perf_counter() - begun
    manager.close()
    return seconds


def has_torch_checkpointing() -> bool:
    return find_spec("torch_checkpointing") is not None


def torch_load(state: dict[str, Any], path: Path) -> float:
    """The default: read everything, then copy into what exists."""
    begun = time.perf_counter()
    _copy(state["model"], torch.load(path, weights_only=True)["model"])
    return time.perf_counter() - begun


def torch_load_mmap(state: dict[str, Any], path: Path) -> float:
    begun = time.perf_counter()
    _copy(state["model"], torch.load(path, weights_only=True, mmap=True)["model"])
    return time.perf_counter() - begun


def safetensors_load(state: dict[str, Any], path: Path) -> float:
    begun = time.perf_counter()
    _copy(state["model"], safetensors.torch.load_file(path))
    return time.perf_counter() - begun


def dcp_load(state: dict[str, Any], path: Path) -> float:
    """In place, as dcp does. As all ranks, where there are several."""
    begun = time.perf_counter()
    dcp.load(state, checkpoint_id=str(path), no_dist=_alone())
    return time.perf_counter() - begun


def start_group() -> None:
    """dcp's asynchronous saves need a process group, also for one process."""
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _copy(into: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(source[name])
