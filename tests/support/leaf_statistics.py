"""Statistics of all values of a leaf, put together of those of its blocks, as tests compare them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tenuto.codec.statistics import BLOCK_BYTES, Block, examiner_of
from tenuto.model.leaf import dtype as dtype_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class LeafStatistics:
    """Statistics of the values of one leaf, or of a part of it.

    count: the elements. nonfinite: how many of them are NaN or infinite (of complex ones: either part), and nan, how
    many are NaN. norm: the root of the sum of squares; min, max: the extremes, None of complex elements and where
    nothing is finite. These three are of the finite values among `sampled` elements; where those are fewer than
    `count`, norm is scaled up to all of them. It is exact to about six digits.
    """

    count: int = 0
    nonfinite: int = 0
    nan: int = 0
    norm: float = 0.0
    min: float | None = None
    max: float | None = None
    sampled: int = 0


def statistics(data: bytes | memoryview | Array, dtype: str) -> LeafStatistics | None:
    """Returns the statistics of row-major bytes of the dtype with this name; None for types without numbers, such as
    text, dates and fields of bits."""
    view = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1).view(np.uint8)
    examine = examiner_of(dtype)
    if examine is None:
        return None
    step = BLOCK_BYTES // dtype_of(dtype).size * dtype_of(dtype).size
    found = summed([examine(view[at : at + step], True) for at in range(0, len(view), step)])
    count = len(view) // dtype_of(dtype).size
    return of_block(found, count, count)


def of_block(found: Block, count: int, sampled: int) -> LeafStatistics:
    """Returns the statistics of `count` elements, of which `sampled` have been looked at for norm and extremes."""
    norm = math.sqrt(found.square * (count / sampled)) if sampled else 0.0
    extremes = found.low <= found.high
    low, high = (float(found.low), float(found.high)) if extremes else (None, None)
    return LeafStatistics(count, found.nonfinite, found.nan, norm, low, high, sampled)


def summed(blocks: Sequence[Block]) -> Block:
    nonfinite, nan, square, low, high = zip(*blocks, strict=True) if blocks else ((0,), (0,), (0.0,), (), ())
    return Block(sum(nonfinite), sum(nan), sum(square), min(low, default=math.inf), max(high, default=-math.inf))
