"""The shared leaves of a checkpoint of several ranks, and which rank has which part of each.

A safetensors file of one-dimensional columns: dtype and full shape of each leaf, and one row for each row of a rank's
index that belongs to a leaf of the manifest's tree. A reader with another layout opens it first, and then only the
indexes it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from itertools import pairwise
from typing import Any, Final

import numpy as np

from tenuto.codec.digest import digest
from tenuto.errors import CorruptionError
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import dtype
from tenuto.model.records import Manifest
from tenuto.record import record
from tenuto.repo.format.columns import decode_columns, decode_json, encode_columns, encode_json
from tenuto.repo.format.index import MAX_DIMENSIONS, Table, lengths, read_dtypes
from tenuto.repo.format.object_names import BOXES
from tenuto.repo.format.objects import FORMAT, Fields, check_format, check_repository
from tenuto.sharding.holdings import Column, Holdings, spread

Array = np.ndarray[Any, Any]

COLUMNS: Final = (
    ("leaf", "U64", "<u8"),
    ("origin", "U64", "<u8"),
    ("shape", "U64", "<u8"),
    ("shape.ends", "U64", "<u8"),
    ("whole", "U64", "<u8"),
    ("whole.ends", "U64", "<u8"),
    ("rank", "U32", "<u4"),
    ("row", "U32", "<u4"),
    ("dtype", "U16", "<u2"),
    ("head", "U8", "|u1"),
)
_LIMIT: Final = 2**62


@record(eq=False)
class BoxTable:
    """The parts of all leaves. Row i: row `row[i]` of the index of rank `rank[i]` is the part of leaf `leaf[i]` with
    the origin `origin[bounds[i]:bounds[i + 1]]` and the shape `shape[bounds[i]:bounds[i + 1]]`. Leaf k has the dtype
    `dtypes[code[k]]` and the shape `whole[ends[k]:ends[k + 1]]`.

    All int64. `leaf` (ascending), `rank`, `row`: [n]; `bounds`: [n + 1]; `code`: [leaves]; `ends`: [leaves + 1].
    """

    leaf: Array
    rank: Array
    row: Array
    origin: Array
    shape: Array
    bounds: Array
    dtypes: Sequence[str]
    code: Array
    whole: Array
    ends: Array
    _by_rank: list[tuple[Array, Array]] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return len(self.leaf)

    @property
    def leaves(self) -> int:
        return len(self.code)

    def forms(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns dtype and full shape of each leaf."""
        whole, ends = self.whole.tolist(), self.ends.tolist()
        shapes = (tuple(whole[begin:end]) for begin, end in pairwise(ends))
        return [(self.dtypes[code], shape) for code, shape in zip(self.code.tolist(), shapes, strict=True)]

    def of_ranks(self) -> list[int]:
        """Returns the ranks that have any part, ascending."""
        found: list[int] = np.unique(self.rank).tolist()
        return found

    def of_rank(self, rank: int) -> Array:
        """Returns the parts of one rank, by row of its index. The order is computed once for all ranks."""
        if not self._by_rank:
            by_rank = np.lexsort((self.row, self.rank))
            self._by_rank[:] = [(by_rank, self.rank[by_rank])]
        order, ranks = self._by_rank[0]
        begin, end = np.searchsorted(ranks, (rank, rank + 1)).tolist()
        found: Array = order[begin:end]
        return found


def encode_boxes(table: BoxTable, id: CheckpointId, save_id: str, repository: str) -> bytes:
    head = {
        "dtypes": list(table.dtypes),
        "format": FORMAT,
        "kind": "boxes",
        "path": f"{id.directory}/{BOXES}",
        "repository": repository,
        "save_id": save_id,
    }
    return encode_columns({**_numbers(table), "head": encode_json(head)}, COLUMNS, save_id=save_id, narrow=True)


def table_parts(table: BoxTable) -> list[bytes]:
    """Returns what the content digest covers of a table, whichever checkpoint it belongs to: its dtypes, and the
    XXH3-128 of each column in the order of COLUMNS, as little-endian unsigned 64-bit numbers."""
    numbers = _numbers(table)
    columns = [numbers[name] for name, _, _ in COLUMNS if name in numbers]
    return [
        canonical_json.dumps(list(table.dtypes)),
        *(digest(np.ascontiguousarray(column, dtype="<u8").view(np.uint8)) for column in columns),
    ]


def _numbers(table: BoxTable) -> dict[str, Array]:
    return {
        "leaf": table.leaf,
        "origin": table.origin,
        "shape": table.shape,
        "shape.ends": table.bounds[1:],
        "whole": table.whole,
        "whole.ends": table.ends[1:],
        "rank": table.rank,
        "row": table.row,
        "dtype": table.code,
    }


def decode_boxes(data: bytes, *, id: CheckpointId, save_id: str, ranks: int, leaves: int, repository: str) -> BoxTable:
    """Decodes the table in `data`, whose digest is checked, for at most `ranks` ranks and `leaves` leaves. Raises
    CorruptionError for any other number in it."""
    name = f"{id.directory}/{BOXES}"
    columns = decode_columns(data, COLUMNS, narrow=True, name=name, what="a table of parts")
    values = decode_json(columns, "head", name)
    if not isinstance(values, dict):
        raise CorruptionError(f"{name}: the column 'head' is not an object", subject=name)
    head = Fields(values, name)
    check_format(head)
    if (head.text("kind"), head.text("path"), head.hex("save_id", 32)) != ("boxes", name, save_id):
        raise head.refuse("is not the table of this checkpoint")
    check_repository(head, repository)
    found = {column: _bounded(columns[column], head) for column, _, _ in COLUMNS[:-1]}
    count = len(found["leaf"])
    if any(len(found[column]) != count for column in ("rank", "row", "shape.ends")):
        raise head.refuse("has columns of different lengths")
    if len(found["dtype"]) != leaves or len(found["whole.ends"]) != leaves:
        raise head.refuse(f"is not about the {leaves} leaves of the manifest's tree")
    bounds, ends = _divided(found, "shape", head), _divided(found, "whole", head)
    if (np.diff(found["leaf"]) < 0).any() or (count and int(found["leaf"][-1]) >= leaves):
        raise head.refuse(f"the leaves are not in order, or beyond the {leaves} that there are")
    if count and int(found["rank"].max()) >= ranks:
        raise head.refuse(f"names a rank beyond the {ranks} that there are")
    dtypes, sizes = read_dtypes(head)
    if leaves and int(found["dtype"].max()) >= len(dtypes):
        raise head.refuse("a leaf has a dtype that is not listed")
    lengths(found["whole"], ends, sizes[found["dtype"]], head)
    table = BoxTable(
        found["leaf"],
        found["rank"],
        found["row"],
        found["origin"],
        found["shape"],
        bounds,
        dtypes,
        found["dtype"],
        found["whole"],
        ends,
    )
    _check_inside(table, head)
    return table


def _divided(found: dict[str, Array], column: str, head: Fields) -> Array:
    """Returns the bounds of a ragged column, checked to divide it."""
    bounds = np.concatenate([np.zeros(1, np.int64), found[f"{column}.ends"]])
    dimensions = np.diff(bounds)
    if (dimensions < 0).any() or (dimensions > MAX_DIMENSIONS).any() or int(bounds[-1]) != len(found[column]):
        raise head.refuse(f"the column '{column}.ends' does not divide the dimensions that there are")
    return bounds


def _check_inside(table: BoxTable, head: Fields) -> None:
    """Checks that each part is inside its leaf."""
    if len(table.origin) != len(table.shape):
        raise head.refuse("has more or fewer offsets than dimensions")
    ndim, begins = np.diff(table.bounds), table.ends[:-1][table.leaf]
    if not np.array_equal(ndim, np.diff(table.ends)[table.leaf]):
        raise head.refuse("a part has not as many dimensions as its leaf")
    axis = np.arange(len(table.shape)) - np.repeat(table.bounds[:-1], ndim)
    if (table.origin + table.shape > table.whole[np.repeat(begins, ndim) + axis]).any():
        raise head.refuse("a part reaches beyond its leaf")


def _bounded(column: Array, head: Fields) -> Array:
    if column.size and int(column.max()) >= _LIMIT:
        raise head.refuse("has a number beyond 2^62")
    return column.astype(np.int64)


# -- parts as Holdings


def check_sizes(table: BoxTable, manifest: Manifest, paths: Sequence[str]) -> None:
    """Raises CorruptionError if the parts of a leaf do not have as many items as the leaf, or exceed the bytes of all
    packs: memory is allocated by the sizes of leaves before any part is verified."""
    name = f"{manifest.id.directory}/{BOXES}"
    items, whole = _volumes(table.shape, table.bounds), _volumes(table.whole, table.ends)
    size = sizes(table)
    if float((items * size[table.leaf]).sum()) > manifest.bytes or float((whole * size).sum()) > manifest.bytes:
        raise CorruptionError(f"{name} describes more than the {manifest.bytes} bytes that were saved", subject=name)
    found = np.bincount(table.leaf, items, table.leaves) if len(table) else np.zeros(table.leaves)
    if not np.array_equal(found, whole):
        path = paths[int(np.argmax(found != whole))]
        raise CorruptionError(f"{name} does not have every element of every leaf once: {path}", subject=path)


def _volumes(flat: Column, bounds: Column) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the number of items per row of a ragged column of lengths; floats, exact up to 2^53."""
    found: np.ndarray[Any, np.dtype[np.float64]] = spread(flat, bounds, int(np.diff(bounds).max(initial=1)), 1).astype(
        np.float64
    )
    volumes: np.ndarray[Any, np.dtype[np.float64]] = found.prod(axis=1)
    return volumes


def table_of(index: Table) -> BoxTable:
    """Returns the table of a single rank's save: every row is a full leaf."""
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
    """Returns the rows of all ranks, by rank and row."""
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
    """Returns the largest number of dimensions of a leaf, at least 1: a scalar has one item along one axis."""
    return max(int(np.diff(table.ends).max(initial=1)), 1)


def sizes(table: BoxTable) -> Column:
    """Returns the bytes per item, by leaf."""
    sizes = np.array([dtype(name).size for name in table.dtypes], np.int64)
    return sizes[table.code] if len(table.code) else np.zeros(0, np.int64)


# -- agreement of the table with a rank's index


def check_rank(boxes: BoxTable, table: Table, name: str) -> None:
    """Raises CorruptionError, naming the first differing row, unless the table of parts (called `name`) has each shared
    row of the rank's index once, as the same box of the same leaf and dtype."""
    there = boxes.of_rank(table.rank)
    if not np.array_equal(boxes.row[there], np.arange(table.shared)):
        message = f"{name} does not have each of the {table.shared} rows of {table.name} once"
        raise CorruptionError(message, subject=name)
    leaf = np.arange(table.shared) if table.leaf is None else table.leaf[: table.shared]
    dims, bounds = table.dims, table.bounds[: table.shared + 1]
    origin = np.zeros_like(dims) if table.origin is None else table.origin
    whole = dims if table.whole is None else table.whole
    row_leaf = boxes.leaf[there]
    differs = row_leaf != leaf
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
    """Returns which rows of a ragged column differ from the rows `places` of another."""
    count = np.diff(bounds)
    differs: Array = count != np.diff(ends)[places]
    for axis in range(int(count.max(initial=0))):
        rows = np.flatnonzero((count > axis) & ~differs)
        differs[rows] = one[bounds[rows] + axis] != other[ends[places[rows]] + axis]
    return differs
