"""The references: one memcpy by torch, and the raw loops that `tenuto bench` measures places with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tenuto.bench.raw import MIB, aligned, fastest_piece, read, write

__all__ = ["MIB", "Memcpy", "MemcpyOverWritten", "aligned", "fastest_piece", "read", "write"]


class Memcpy:
    """`copy_` of the same leaves into one warm contiguous buffer, with torch's default threads."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        flat = torch.ones(sum(one.numel() for one in tensors), dtype=tensors[0].dtype)
        self._places = list(flat.split([one.numel() for one in tensors]))

    def __call__(self) -> float:
        begun = time.perf_counter()
        for place, tensor in zip(self._places, self._tensors, strict=True):
            place.copy_(tensor.view(-1))
        return time.perf_counter() - begun


class MemcpyOverWritten:
    """The same into memory that a direct write to a file has just gone through: what a save's image is from its second
    time on. On some machines the first copy into such memory is slower, whoever makes it."""

    name = "memcpy over what was just written"

    def __init__(self, tensors: Sequence[torch.Tensor], path: Path) -> None:
        self._path = path
        self._image = aligned(sum(one.nbytes for one in tensors))
        self._tensors = list(tensors)
        sizes = [one.numel() for one in tensors]
        self._places = list(torch.frombuffer(self._image, dtype=tensors[0].dtype)[: sum(sizes)].split(sizes))

    def __call__(self) -> float:
        write(self._path, self._image, 64 * MIB)
        self._path.unlink()
        begun = time.perf_counter()
        for place, tensor in zip(self._places, self._tensors, strict=True):
            place.copy_(tensor.view(-1))
        return time.perf_counter() - begun
