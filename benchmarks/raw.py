"""The references: one memcpy, and the raw loops that write and read the same bytes past the page cache."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

MIB = 1 << 20


def aligned(nbytes: int) -> np.ndarray:
    """Touched, page-aligned host memory."""
    memory = np.frombuffer(mmap.mmap(-1, -(-nbytes // 4096) * 4096), np.uint8)
    memory[::4096] = 1
    return memory


class Memcpy:
    """`copy_` of the same leaves into one warm contiguous buffer, with torch's default threads."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        flat = torch.ones(sum(one.numel() for one in tensors), dtype=tensors[0].dtype)
        self._places = list(flat.split([one.numel() for one in tensors]))

    def __call__(self) -> float:
        begun = time.perf_counter()
        for place, tensor in zip(self._places, self._tensors, strict=True):
            place.copy_(tensor)
        return time.perf_counter() - begun


def write(path: Path, data: np.ndarray, piece: int) -> float:
    """Seconds to write `data` to a fresh file by O_DIRECT in pieces of `piece` bytes, file and directory synced."""
    path.unlink(missing_ok=True)
    begun = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    for start in range(0, len(data), piece):
        part = data[start : start + piece]
        assert os.pwritev(descriptor, [part], start) == len(part)
    os.fsync(descriptor)
    os.close(descriptor)
    parent = os.open(path.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)
    return time.perf_counter() - begun


def read(path: Path, into: np.ndarray, piece: int) -> float:
    """Seconds to read the whole file by O_DIRECT into aligned memory of its size, in pieces of `piece` bytes."""
    begun = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    for start in range(0, len(into), piece):
        part = into[start : start + piece]
        assert os.preadv(descriptor, [part], start) == len(part)
    os.close(descriptor)
    return time.perf_counter() - begun


def fastest_piece(action: str, path: Path, data: np.ndarray, tries: int = 3) -> int:
    """The piece size with which the raw loop is fastest here: the reference must not be a slow one."""
    sizes = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    best = {size: float("inf") for size in sizes}
    for _ in range(tries):
        for size in sizes:
            best[size] = min(best[size], (write if action == "write" else read)(path, data, size))
    return min(best, key=lambda size: best[size])
