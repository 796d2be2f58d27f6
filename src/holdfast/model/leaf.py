"""A leaf: one tensor-like entry of the training state."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from holdfast.model.dtypes import dtype


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What a leaf is, without its bytes: path, dtype name and shape (row-major). `private` leaves belong to one
    rank."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    private: bool = False

    @property
    def nbytes(self) -> int:
        return dtype(self.dtype).size * prod(self.shape)

    @property
    def itemsize(self) -> int:
        return dtype(self.dtype).size
