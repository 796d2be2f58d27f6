"""The columns that plans are made of, and the few sums over them that every plan needs."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Column = np.ndarray[Any, np.dtype[np.int64]]
"""int64 [n]"""
Matrix = np.ndarray[Any, np.dtype[np.int64]]
"""int64 [n, d]: one line for each box, one column for each axis."""
Ranks = np.ndarray[Any, np.dtype[np.int32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

LIMIT: Final = 1 << 62
"""Items that can be counted: every number of a plan is below this, so that no sum of two of them overflows."""


def volumes(shape: Matrix) -> Column:
    """Items in each box."""
    found = np.ones(len(shape), np.int64)
    for axis in range(shape.shape[1]):
        found *= shape[:, axis]
    return found


def dot(one: Matrix, other: Matrix) -> Column:
    """The sum of products along the axes. Axis by axis, as everything here: of lines this short numpy's own reductions
    take several times as long."""
    found = np.zeros(len(one), np.int64)
    for axis in range(one.shape[1]):
        found += one[:, axis] * other[:, axis]
    return found


def every(flags: np.ndarray[Any, np.dtype[np.bool_]]) -> Flags:
    """Which lines are true along all axes."""
    found = np.ones(len(flags), bool)
    for axis in range(flags.shape[1]):
        found &= flags[:, axis]
    return found


def begins(lengths: Column) -> Column:
    """Where each part begins when they lie one after the other, and where the last one ends: int64 [n + 1]."""
    found = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


def paces(shape: Matrix) -> Matrix:
    """How many items apart two neighbours along each axis lie, row-major."""
    found = np.ones_like(shape)
    for axis in range(shape.shape[1] - 2, -1, -1):
        found[:, axis] = found[:, axis + 1] * shape[:, axis + 1]
    return found


def lines_of(rank: Ranks, one: int) -> slice:
    """Where in a column of ranks, which rises, one rank's lines are."""
    # Asked in the column's own type: else all of it would be converted for each question.
    return slice(*np.searchsorted(rank, np.array((one, one + 1), rank.dtype)).tolist())


def rising(key: Column) -> Column:
    """The order in which numbers from 0 on rise; equal ones stay in theirs."""
    bits = len(key).bit_length()
    if int(key.max(initial=0)).bit_length() + bits > 62:
        return np.argsort(key, kind="stable")
    # Numbers with their places in the last bits: a plain sort, several times as fast as one that carries an index.
    marks = (key << bits) | np.arange(len(key))
    marks.sort()
    marks &= (1 << bits) - 1
    return marks


def renumbered(code: Column, size: int) -> Column:
    """Numbers below `size`, numbered anew without gaps, in the same order."""
    if not len(code):
        return code
    if size > 8 * len(code) + 1024:
        found: Column = np.unique(code, return_inverse=True)[1].astype(np.int64, copy=False)
        return found
    seen = np.zeros(size, np.int64)
    seen[code] = 1
    return (np.cumsum(seen) - 1)[code]
