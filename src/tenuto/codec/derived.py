"""Chunks that follow from other chunks: what training makes again from its master weights at every step.

A bf16 copy of fp32 masters is their rounding. Any codec that takes a base stores it as the difference to that rounding,
in a few bytes: so nothing has to be proved at a save, and a copy that is not quite the rounding costs what differs.
"""

from __future__ import annotations

from typing import Final

import numpy as np

ROUNDED: Final = {"bfloat16": 2, "float16": 2}
"""The dtypes to which float32 can be rounded, and the bytes of their items. Indexes have their places in this order."""
MASTER: Final = "float32"
"""The dtype of what is rounded."""


def rounded(master: memoryview, dtype: str) -> bytes:
    """Returns float32 numbers rounded to nearest, ties to even, as items of `dtype`: half as many bytes.

    A base has to be the same on every machine. So this is IEEE 754's rounding, as torch's and jax's is, except that all
    NaNs become one: theirs differ with the processor.
    """
    numbers = np.frombuffer(master, "<f4")
    if dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            half = numbers.astype("<f2")
        return _without_payload(half.view("<u2"), numbers.view("<u4"), 0x7E00).tobytes()
    if dtype != "bfloat16":
        raise ValueError(f"float32 is not rounded to {dtype}")
    words = numbers.view("<u4")
    kept = words >> 16
    kept &= 1
    kept += 0x7FFF
    kept += words  # wraps for NaNs alone, which are replaced
    kept >>= 16
    return _without_payload(kept.astype("<u2"), words, 0x7FC0).tobytes()


def _without_payload(
    items: np.ndarray[tuple[int], np.dtype[np.uint16]], words: np.ndarray[tuple[int], np.dtype[np.uint32]], nan: int
) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Puts `nan` where `words` are NaN."""
    odd = (words & 0x7FFFFFFF) > 0x7F800000
    if odd.any():
        items[odd] = nan
    return items
