"""Tables of parts as Holdings: which rank has written which box of which leaf."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from holdfast.errors import CorruptionError
from holdfast.model.checkpoint import Manifest
from holdfast.model.dtypes import dtype
from holdfast.plan.columns import Column
from holdfast.plan.holdings import Holdings
from holdfast.repo.boxes import BoxTable
from holdfast.repo.index import Table
from holdfast.repo.layout import BOXES


def check_sizes(table: BoxTable, manifest: Manifest, paths: Sequence[str]) -> None:
    """CorruptionError where the parts of a leaf are not as many items as the leaf, or are more bytes than all packs:
    memory is taken by the sizes of leaves, before any of these are proved."""
    name = f"{manifest.id.directory}/{BOXES}"
    items, whole = _volumes(table.shape, table.bounds), _volumes(table.whole, table.ends)
    size = sizes(table)
    if float((items * size[table.leaf]).sum()) > manifest.bytes or float((whole * size).sum()) > manifest.bytes:
        raise CorruptionError(f"{name} tells of more than the {manifest.bytes} bytes that were saved", subject=name)
    found = np.bincount(table.leaf, items, table.leaves) if len(table) else np.zeros(table.leaves)
    if not np.array_equal(found, whole):
        path = paths[int(np.argmax(found != whole))]
        raise CorruptionError(f"{name} does not have every element of every leaf once: {path}", subject=path)


def _volumes(flat: Column, bounds: Column) -> np.ndarray[Any, np.dtype[np.float64]]:
    """How many items each row of a ragged column of lengths has; floats, which are exact up to 2^53."""
    found: np.ndarray[Any, np.dtype[np.float64]] = spread(flat, bounds, int(np.diff(bounds).max(initial=1)), 1).astype(
        np.float64
    )
    volumes: np.ndarray[Any, np.dtype[np.float64]] = found.prod(axis=1)
    return volumes


def table_of(index: Table) -> BoxTable:
    """What one rank has saved alone: every row is a whole leaf."""
    stop = int(index.bounds[index.shared])
    count, dims, bounds = index.shared, index.dims[:stop], index.bounds[: index.shared + 1]
    return BoxTable(
        leaf=np.arange(count),
        rank=np.zeros(count, np.int64),
        row=np.arange(count),
        origin=np.zeros(stop, np.int64),
        shape=dims,
        bounds=bounds,
        dtypes=index.names,
        code=index.code[:count].astype(np.int64),
        whole=dims,
        ends=bounds,
    )


def saved_boxes(table: BoxTable, paths: Sequence[str]) -> Holdings:
    """The rows of all ranks, by rank and row."""
    axes = axes_of(table)
    order = np.lexsort((table.row, table.rank))
    return Holdings(
        leaf=table.leaf[order],
        rank=table.rank[order].astype(np.int32),
        row=table.row[order],
        offsets=spread(table.origin, table.bounds, axes, 0)[order],
        shape=spread(table.shape, table.bounds, axes, 1)[order],
        itemsize=sizes(table)[table.leaf][order],
        whole=spread(table.whole, table.ends, axes, 1),
        ndim=np.diff(table.ends),
        paths=paths,
    )


def axes_of(table: BoxTable) -> int:
    """The largest number of dimensions of a leaf; one that has none has one item along one axis."""
    return max(int(np.diff(table.ends).max(initial=1)), 1)


def spread(flat: Column, bounds: Column, axes: int, fill: int) -> Any:
    """A ragged column as a matrix, padded behind."""
    count = np.diff(bounds)
    found = np.full((len(count), axes), fill, np.int64)
    found[np.arange(axes) < count[:, None]] = flat
    return found


def sizes(table: BoxTable) -> Column:
    """Bytes of an item, by leaf."""
    sizes = np.array([dtype(name).size for name in table.dtypes], np.int64)
    return sizes[table.code] if len(table.code) else np.zeros(0, np.int64)


def padded(lines: Sequence[tuple[int, ...]], axes: int, fill: int) -> Any:
    flat = np.array([place for line in lines for place in line], np.int64)
    return spread(flat, np.array([0, *accumulate(map(len, lines))], np.int64), axes, fill)
