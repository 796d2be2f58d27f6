"""Values over steps: which of them stand out, and how many are enough to draw."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Places = np.ndarray[Any, np.dtype[np.int64]]

NEIGHBOURS: Final = 5
"""On either side of a value, so many are compared with it."""
SPIKE: Final = 8.0
"""A spike is so many times further from the medians of its neighbours than values usually are from that of those before
(1.4826 times the median distance: one standard deviation of normal noise)."""
LEAST: Final = 0.05
"""A spike is at least this share of the range that the middle nine tenths of all values span."""


def spikes(values: Numbers) -> Places:
    """Returns the places of finite values that stand out, in one direction, from those before and those after.

    A step to another level or a slope is no spike, nor is what is not finite. The first values have too few before
    them, and the last one has none behind it.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) < 2 * NEIGHBOURS + 1:
        return np.empty(0, np.int64)
    known = values[finite]
    with np.errstate(over="ignore", invalid="ignore"):
        medians = np.median(np.lib.stride_tricks.sliding_window_view(known, NEIGHBOURS), axis=1)
        before = known[NEIGHBOURS:] - medians[:-1]
        after = before.copy()
        after[: 1 - NEIGHBOURS - 1] = known[NEIGHBOURS:-NEIGHBOURS] - medians[NEIGHBOURS + 1 :]
        for place in range(len(known) - NEIGHBOURS, len(known) - 1):
            after[place - NEIGHBOURS] = known[place] - np.median(known[place + 1 :])
        low, high = np.quantile(known, (0.05, 0.95))
        far = max(SPIKE * 1.4826 * float(np.median(np.abs(before))), LEAST * float(high - low))
        found = (np.sign(before) == np.sign(after)) & (np.minimum(np.abs(before), np.abs(after)) > far)
    return np.asarray(finite[NEIGHBOURS:][found], np.int64)


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
