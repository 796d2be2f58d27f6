"""Whether the table of parts and a rank's index say the same of that rank's rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.errors import CorruptionError
from holdfast.repo.boxes import BoxTable
from holdfast.repo.index import Table

Array = np.ndarray[Any, Any]


def check_rank(boxes: BoxTable, table: Table, name: str) -> None:
    """CorruptionError, naming the first row that differs, unless the table of parts (called `name`) has each row of
    the rank's index that belongs to a shared leaf, once, as the same box of the same leaf and dtype."""
    there = boxes.of_rank(table.rank)
    if not np.array_equal(boxes.row[there], np.arange(table.shared)):
        message = f"{name} does not have each of the {table.shared} rows of {table.name} once"
        raise CorruptionError(message, subject=name)
    leaf = np.arange(table.shared) if table.leaf is None else table.leaf[: table.shared]
    dims, bounds = table.dims, table.bounds[: table.shared + 1]
    origin = np.zeros_like(dims) if table.origin is None else table.origin
    whole = dims if table.whole is None else table.whole
    held = boxes.leaf[there]
    differs = held != leaf
    known = np.where(differs, 0, leaf) if boxes.leaves else leaf
    if boxes.leaves:
        codes = np.array([_place(boxes.dtypes, dtype) for dtype in table.names], np.int64)
        differs |= boxes.code[known] != codes[table.code[: table.shared]]
        differs |= _ragged_differs(dims, bounds, boxes.shape, boxes.bounds, there)
        differs |= _ragged_differs(origin, bounds, boxes.origin, boxes.bounds, there)
        differs |= _ragged_differs(whole, bounds, boxes.whole, boxes.ends, known)
    if differs.any():
        row = int(np.argmax(differs))
        raise CorruptionError(f"{name} and {table.name} do not agree about row {row} of that index", subject=name)


def _place(names: Any, wanted: str) -> int:
    return names.index(wanted) if wanted in names else -1


def _ragged_differs(one: Array, bounds: Array, other: Array, ends: Array, places: Array) -> Array:
    """Which rows of a ragged column differ from the rows `places` of another."""
    count = np.diff(bounds)
    differs: Array = count != np.diff(ends)[places]
    for axis in range(int(count.max(initial=0))):
        rows = np.flatnonzero((count > axis) & ~differs)
        differs[rows] = one[bounds[rows] + axis] != other[ends[places[rows]] + axis]
    return differs
