"""The references: one memcpy by torch, and the raw loops that `holdfast bench` measures places with."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from holdfast.api.bench.raw import MIB, aligned, fastest_piece, read, write

__all__ = ["MIB", "Memcpy", "aligned", "fastest_piece", "read", "write"]


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
