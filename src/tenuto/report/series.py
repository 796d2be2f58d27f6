"""Values over steps: which of them stand out, and how many are enough to draw."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Places = np.ndarray[Any, np.dtype[np.int64]]

WINDOW: Final = 11
"""Neighbours, itself among them, with whose median a value is compared."""
SPIKE: Final = 8.0
"""A spike is so many times further from that median than values usually are (1.4826 times the median distance, which is
one standard deviation of normal noise), and from a value next to it than two such values usually are."""
LEAST: Final = 0.05
"""A spike is at least this share of the range that the middle nine tenths of all values span."""


def spikes(values: Numbers) -> Places:
    """Returns the places of finite values that stand out from their neighbours; of fewer than WINDOW there are none.

    A step from one level to another is no spike, nor is what is not finite.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) < WINDOW:
        return np.empty(0, np.int64)
    known = values[finite]
    padded = np.pad(known, WINDOW // 2, mode="reflect")
    with np.errstate(over="ignore", invalid="ignore"):
        distance = np.abs(known - np.median(np.lib.stride_tricks.sliding_window_view(padded, WINDOW), axis=1))
        jumps = np.abs(np.diff(known))
        jump = np.maximum(np.append(jumps, 0), np.insert(jumps, 0, 0))
        low, high = np.quantile(known, (0.05, 0.95))
        far = distance > max(SPIKE * 1.4826 * float(np.median(distance)), LEAST * float(high - low), 0.0)
        return np.asarray(finite[far & (jump > SPIKE * np.median(jumps))], np.int64)


def thinned(values: Numbers, most: int = 1000) -> Places:
    """Returns the places of about `most` values that draw the same line: of each stretch its first, lowest, highest and
    last one; all spikes; and of each sequence that is not finite both ends."""
    if len(values) <= most:
        return np.arange(len(values))
    finite = np.isfinite(values)
    edges = np.flatnonzero(np.diff(finite.astype(np.int8)))
    kept = {0, len(values) - 1, *edges.tolist(), *(edges + 1).tolist(), *spikes(values).tolist()}
    for stretch in np.array_split(np.flatnonzero(finite), max(most // 4, 1)):
        if len(stretch):
            part = values[stretch]
            kept |= {int(stretch[0]), int(stretch[-1]), int(stretch[part.argmin()]), int(stretch[part.argmax()])}
    return np.array(sorted(kept), np.int64)
