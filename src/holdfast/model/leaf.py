"""A leaf: one tensor-like entry of the training state; and a row: the part of it that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Literal

from holdfast.model.dtypes import dtype

Placement = Literal["whole", "replicated", "box", "per_rank"]
"""How a leaf relates to the ranks. whole: nothing declares it, and it is taken to be the same on all. replicated:
declared to be the same on all that hold it. box: a rank holds its part of a global tensor. per_rank: private."""


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What a row is, without its bytes: path, dtype name and shape (row-major) of the bytes. `private` rows belong to
    one rank.

    `whole` is the leaf's global shape and `offsets` where in it this row begins; both None where the row is the whole
    leaf. `placement` says how it got here; it is no part of what the row is, so rows that differ in it alone are equal.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    private: bool = False
    offsets: tuple[int, ...] | None = None
    whole: tuple[int, ...] | None = None
    placement: Placement = field(default="whole", compare=False, kw_only=True)

    @property
    def nbytes(self) -> int:
        return dtype(self.dtype).size * prod(self.shape)

    @property
    def itemsize(self) -> int:
        return dtype(self.dtype).size

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """The shape of the whole leaf."""
        return self.shape if self.whole is None else self.whole
