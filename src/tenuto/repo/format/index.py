"""The bytes of an index: a safetensors file of one-dimensional columns, one row per leaf.

Reading trusts nothing. The manifest has length and digest, but a digest detects accidents, not a hostile writer; so
every count and offset is checked against the data before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from tenuto.codec.chunk_map import chunk_counts, chunk_sizes
from tenuto.concurrency.worker_threads import gc_paused
from tenuto.errors import CorruptionError, StateError
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec, dtype
from tenuto.model.records import Index, Json, PackEntry, StoredChunks
from tenuto.record import record
from tenuto.repo.format.columns import column_names, decode_columns, decode_json, encode_columns, encode_json
from tenuto.repo.format.leaf_table import LeafSpecs
from tenuto.repo.format.object_names import check_file, index_file
from tenuto.repo.format.objects import (
    ENCODED,
    FORMAT,
    MAX_CHUNK,
    ROUNDED,
    Fields,
    check_format,
    check_repository,
    checkpoint_json,
)
from tenuto.repo.format.stored_chunks import COLUMNS as CHUNKS
from tenuto.repo.format.stored_chunks import ROUNDED_COLUMN, decode_chunks, encode_chunks
from tenuto.state.tree import leaf_paths

# -- forms of leaves: dtypes, and lengths from shapes

Array = np.ndarray[Any, Any]

MAX_DTYPES: Final = 4096
MAX_DIMENSIONS: Final = 64
_LIMIT: Final = 2**62
"""The limit for the bytes of one checkpoint: the sum of two such numbers fits into 64 bits."""
_NUMPY_DTYPE: Final = re.compile(r"numpy:[<>|][a-zA-Z][0-9]{0,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?", re.ASCII)


def bounded(column: Array, head: Fields, what: str) -> Array:
    if column.size and int(column.max()) >= _LIMIT:
        raise head.refuse(f"{what} is beyond 2^62")
    return column.astype(np.int64)


def read_dtypes(head: Fields) -> tuple[list[str], Array]:
    """Returns the dtype names and their item sizes in bytes."""
    names = head.sequence("dtypes")
    if len(names) > MAX_DTYPES:
        raise head.refuse(f"lists {len(names)} dtypes")
    sizes = []
    for name in names:
        try:
            if not isinstance(name, str) or (name.startswith("numpy:") and not _NUMPY_DTYPE.fullmatch(name)):
                raise KeyError(name)
            sizes.append(dtype(name).size)
        except (KeyError, TypeError, ValueError, SyntaxError):
            raise head.refuse(f"has the dtype {str(name)[:80]!r}, which this version does not know") from None
    return names, np.array(sizes, dtype=np.int64)


def lengths(dims: Array, bounds: Array, itemsize: Array, head: Fields) -> Array:
    """Returns the bytes of each row, item size times dimensions, without overflow. int64 [n]."""
    ndim = np.diff(bounds)
    if ndim.size and int(ndim.max()) > MAX_DIMENSIONS:
        raise head.refuse(f"a leaf has more than {MAX_DIMENSIONS} dimensions")
    out = itemsize.astype(np.int64)
    about = itemsize.astype(np.float64)
    for axis in range(int(ndim.max()) if ndim.size else 0):
        rows = np.flatnonzero(ndim > axis)
        size = dims[bounds[rows] + axis]
        about[rows] *= size
        with np.errstate(over="ignore"):
            out[rows] *= size
    if (about >= float(_LIMIT)).any():
        raise head.refuse("the shape of a leaf gives more than 2^62 bytes")
    return out


# -- rows of leaves, the same at every save of one structure

Column = np.ndarray[Any, Any]


@record(eq=False)
class ShapeRows:
    """The dtypes and shapes of rows. Row i has the dtype `dtypes[code[i]]` and the dimensions of `dims` that end at
    `ends[i]`; the first `shared` rows are leaves of the manifest's tree, the others of the private one.

    - `code`: uint16 [n]
    - `ends`: int64 [n]
    - `dims`: uint64, of all rows
    - `origin`, `whole`: ragged like `dims`, the origin of each row in its leaf and the shape of the leaf; None if every
      row is a full leaf.
    """

    dtypes: list[str]
    code: Column
    dims: Column
    ends: Column
    shared: int
    origin: Column | None = None
    whole: Column | None = None

    def __len__(self) -> int:
        return len(self.code)

    @classmethod
    def of(cls, specs: Sequence[LeafSpec]) -> ShapeRows:
        """Returns the rows of these leaves, the shared ones first."""
        names = [spec.dtype for spec in specs]
        private = [spec.private for spec in specs]
        shared = private.index(True) if True in private else len(private)
        assert all(private[shared:]), "shared leaves come first"
        dtypes = sorted(set(names))
        codes = {name: code for code, name in enumerate(dtypes)}
        shapes = [spec.shape for spec in specs]
        parts = any(spec.whole is not None for spec in specs)
        return cls(
            dtypes,
            np.fromiter(map(codes.__getitem__, names), np.uint16, len(names)),
            _flat(shapes),
            np.cumsum(np.fromiter(map(len, shapes), np.int64, len(shapes))),
            shared,
            _flat([spec.offsets or (0,) * len(spec.shape) for spec in specs]) if parts else None,
            _flat([spec.shape if spec.whole is None else spec.whole for spec in specs]) if parts else None,
        )


def _flat(ragged: Sequence[tuple[int, ...]]) -> Column:
    return np.array(list(chain.from_iterable(ragged)), np.uint64)


MAX_INDEX: Final = 1 << 32
MAX_PACKS: Final = 100_000
COLUMNS: Final = (
    ("digests.ends", "U64", "<u8"),
    ("leaf", "U64", "<u8"),
    ("length", "U64", "<u8"),
    ("offset", "U64", "<u8"),
    ("shape", "U64", "<u8"),
    ("shape.ends", "U64", "<u8"),
    ("pack", "U32", "<u4"),
    ("dtype", "U16", "<u2"),
    ("digests", "U8", "|u1"),
    ("head", "U8", "|u1"),
    ("private", "U8", "|u1"),
)
"""Name, safetensors dtype, numpy dtype; widest first, so that each column is aligned for its items."""
PARTS: Final = (("origin", "U64", "<u8"), ("whole", "U64", "<u8"))
"""Ragged like `shape`, present only where a row may be part of its leaf: its origin, and the leaf's shape."""
_PLACES: Final = ("offset", "pack")
"""Columns that an encoded index lacks: its chunks have places of their own."""
ENCODED_COLUMNS: Final = (*CHUNKS[:4], *(kind for kind in COLUMNS if kind[0] not in _PLACES), *CHUNKS[4:])


def encode_index(index: Index, id: CheckpointId, repository: str, rows: ShapeRows | None = None) -> bytes:
    """Returns the bytes of an index of checkpoint `id` in this repository, without the paths of shared leaves, which
    the manifest's tree has.

    `rows`: those of `index.specs`, if already made.
    """
    if rows is None:
        rows = ShapeRows.of(index.specs)
    count = len(index.specs)
    assert len(rows) == count, "the rows of these very leaves"
    assert len(index.chunk_start) == count + 1
    assert len(index.digests) == int(index.chunk_start[-1])
    columns: dict[str, Array] = {
        "digests.ends": np.asarray(index.chunk_start)[1:],
        "leaf": np.arange(count) if index.leaf is None else index.leaf,
        "length": index.length,
        "offset": index.offset,
        "shape": rows.dims,
        "shape.ends": rows.ends,
        "pack": index.pack,
        "dtype": rows.code,
        "digests": np.ascontiguousarray(index.digests, dtype=np.uint8).reshape(-1),
        "head": encode_json(_head(index, id, repository, rows)),
        "private": encode_json(index.private),
    }
    kinds: tuple[tuple[str, str, str], ...] = COLUMNS
    if rows.origin is not None and rows.whole is not None:
        columns |= {"origin": rows.origin, "whole": rows.whole}
        kinds = (*PARTS, *COLUMNS)
    if index.stored is not None:
        columns |= encode_chunks(index.stored)
        kinds = (*CHUNKS, *(kind for kind in kinds if kind[0] not in _PLACES))
        kinds = kinds if index.stored.rounded is None else (*kinds, ROUNDED_COLUMN)
    # A process alone writes all columns at full width: the bytes of its files never change.
    narrow = index.tree_leaves is not None or index.stored is not None
    return encode_columns(columns, kinds, save_id=index.save_id, narrow=narrow)


def _format(encoded: bool, rounded: bool) -> int:
    return ROUNDED if rounded else ENCODED if encoded else FORMAT


def _head(index: Index, id: CheckpointId, repository: str, rows: ShapeRows) -> Json:
    return {
        **({} if index.tree_leaves is None else {"leaves": index.tree_leaves}),
        **({} if index.stored is None else {"codecs": list(index.stored.codecs)}),
        **({} if index.sealed is None else {"sealed": index.sealed}),
        **({} if index.statistics is None else {"statistics": index.statistics}),
        "chunk_bytes": index.chunk_bytes,
        "dtypes": rows.dtypes,
        "format": _format(index.stored is not None, index.stored is not None and index.stored.rounded is not None),
        "kind": "index",
        "packs": [
            {"digest": p.header_digest.hex(), "header": p.header_length, "length": p.length, "name": p.name}
            | ({"adopted": True} if p.adopted else {})
            | ({} if p.at is None else {"at": checkpoint_json(p.at)})
            | ({"key": p.key, "save_id": p.save_id} if p.key else {})
            for p in index.packs
        ],
        "path": f"{id.directory}/{index_file(index.rank)}",
        "rank": index.rank,
        "repository": repository,
        "save_id": index.save_id,
        "shared": rows.shared,
    }


@record
class Table:
    """An index without paths, which the trees have. Columns are those of `Index`.

    Row i has the dtype `names[code[i]]` and the shape `dims[bounds[i]:bounds[i + 1]]`; the first `shared` rows are the
    leaves of the manifest's tree by number, the others those of `private`.
    """

    rank: int
    save_id: str
    chunk_bytes: int
    packs: tuple[PackEntry, ...]
    names: list[str]
    code: Array
    dims: Array
    bounds: Array
    pack: Array
    offset: Array
    length: Array
    chunk_start: Array
    digests: Array
    private: Json
    shared: int
    name: str
    """The name of the index, for errors."""
    leaf: Array | None = None
    tree_leaves: int | None = None
    origin: Array | None = None
    whole: Array | None = None
    """Ragged like `dims`: the origin of each row in its leaf, and the leaf's shape. None: every row is a full leaf."""
    stored: StoredChunks | None = None
    sealed: int | None = None
    statistics: Json = None

    def __len__(self) -> int:
        return len(self.code)

    def spec(self, row: int, path: str) -> LeafSpec:
        """Returns the spec of a row of the leaf at `path`."""
        cut = slice(int(self.bounds[row]), int(self.bounds[row + 1]))
        shape = tuple(self.dims[cut].tolist())
        offsets = whole = None
        if self.origin is not None and self.whole is not None and tuple(self.whole[cut].tolist()) != shape:
            offsets, whole = tuple(self.origin[cut].tolist()), tuple(self.whole[cut].tolist())
        return LeafSpec(path, self.names[int(self.code[row])], shape, row >= self.shared, offsets, whole)

    def index(self, tree: Json, tree_paths: Sequence[str] | None = None) -> Index:
        """Returns the full index. Raises CorruptionError unless `tree` (the manifest's) names its shared leaves.

        `tree_paths`: the paths in the tree, if known.
        """
        head = Fields({}, self.name)
        paths = _paths(tree, "the manifest's tree", head) if tree_paths is None else list(tree_paths)
        named = self.shared if self.tree_leaves is None else self.tree_leaves
        if named != len(paths):
            raise head.refuse(f"has {named} shared leaves, the manifest's tree has {len(paths)}")
        paths += _paths(self.private, "the private tree", head)
        if len(set(paths)) != len(paths):
            raise head.refuse("has a private leaf under the path of another leaf")
        if len(paths) - named != len(self) - self.shared:
            raise head.refuse(f"has {len(self)} rows where there are {len(paths)} leaves")
        if self.leaf is not None:
            paths = [paths[number] for number in self.leaf.tolist()]
        return Index(
            rank=self.rank,
            save_id=self.save_id,
            chunk_bytes=self.chunk_bytes,
            packs=self.packs,
            specs=LeafSpecs(
                paths,
                names=self.names,
                code=self.code,
                dims=self.dims,
                bounds=self.bounds,
                shared=self.shared,
                trees=(tree, self.private),
                origin=self.origin,
                whole=self.whole,
            ),
            pack=self.pack,
            offset=self.offset,
            length=self.length,
            chunk_start=self.chunk_start,
            digests=self.digests,
            private=self.private,
            leaf=self.leaf,
            tree_leaves=self.tree_leaves,
            stored=self.stored,
            sealed=self.sealed,
            statistics=self.statistics,
        )


@gc_paused
def decode_index(data: bytes, *, id: CheckpointId, rank: int, tree: Json, repository: str) -> Index:
    """Decodes the index in `data`, whose digest is checked. `tree`: the manifest's, which names the shared leaves."""
    return decode_table(data, id=id, rank=rank, repository=repository).index(tree)


def decode_table(data: bytes, *, id: CheckpointId, rank: int, repository: str) -> Table:
    """Decodes the rows of the index in `data`, whose digest is checked. Checks every number."""
    name = f"{id.directory}/{index_file(rank)}"
    columns, head = _read(data, name, rank, repository)
    encoded = "chunk.pack" in columns
    packs = _packs(head, id)
    private = decode_json(columns, "private", name)
    shared = head.whole("shared")
    count = columns["leaf"].size
    for column in ("length", *(() if encoded else _PLACES), "dtype", "shape.ends", "digests.ends"):
        if columns[column].size != count:
            raise head.refuse(f"the column {column!r} has {columns[column].size} rows where there are {count} leaves")
    if shared > count:
        raise head.refuse(f"has {shared} shared leaves among {count}")
    leaf, tree_leaves = _leaves(columns["leaf"], shared, head)
    names, sizes = read_dtypes(head)
    dims, bounds, length = _rows(columns, head, sizes)
    origin, whole = _parts(columns, head, dims, int(bounds[shared]))
    chunk_bytes = head.whole("chunk_bytes", minimum=1, maximum=MAX_CHUNK)
    chunk_start, digests = _chunks(columns, head, length, chunk_bytes)
    stored = None
    if encoded:
        offset = pack = np.zeros(count, np.int64)
        sizes = chunk_sizes(length, chunk_bytes)
        row = np.repeat(np.arange(count), np.diff(chunk_start))
        dtypes = [names[code] for code in columns["dtype"].tolist()] if ROUNDED_COLUMN[0] in columns else ()
        stored = decode_chunks(columns, head, packs=packs, sizes=sizes, digests=digests, row=row, dtype=dtypes)
    else:
        offset = bounded(columns["offset"], head, "an offset")
        pack = columns["pack"].astype(np.int64)
        _check_rows(head, packs, pack, offset, length)
    return Table(
        rank=rank,
        save_id=head.hex("save_id", 32),
        chunk_bytes=chunk_bytes,
        packs=packs,
        names=names,
        code=columns["dtype"].astype(np.int64),
        dims=dims,
        bounds=bounds,
        pack=pack,
        offset=offset,
        length=length,
        chunk_start=chunk_start,
        digests=digests,
        private=private,
        shared=shared,
        name=name,
        leaf=leaf,
        tree_leaves=tree_leaves,
        origin=origin,
        whole=whole,
        stored=stored,
        sealed=head.whole("sealed") if "sealed" in head.values else None,
        statistics=head.values.get("statistics"),
    )


def decode_packs(data: bytes, *, id: CheckpointId, rank: int, repository: str) -> tuple[str, tuple[PackEntry, ...]]:
    """Returns the save id and the packs of the index in `data`, without its rows."""
    name = f"{id.directory}/{index_file(rank)}"
    _, head = _read(data, name, rank, repository)
    return head.hex("save_id", 32), _packs(head, id)


def _read(data: bytes, name: str, rank: int, repository: str) -> tuple[dict[str, Array], Fields]:
    """Returns the columns and the head."""
    there = column_names(data, name)
    encoded, rounded = "chunk.pack" in there, ROUNDED_COLUMN[0] in there
    kinds = (*(ENCODED_COLUMNS if encoded else COLUMNS), *((ROUNDED_COLUMN,) if rounded else ()))
    columns = decode_columns(data, kinds, more=PARTS, narrow=True, name=name, what="an index")
    head = _read_head(columns, name, rank, repository)
    if head.whole("format") != _format(encoded, rounded):
        raise head.refuse("has the columns of another format")
    if "leaves" not in head.values and not encoded:
        columns = decode_columns(data, COLUMNS, more=PARTS, name=name, what="an index of one process")
    return columns, head


def _read_head(columns: dict[str, Array], name: str, rank: int, repository: str) -> Fields:
    values = decode_json(columns, "head", name)
    if not isinstance(values, dict):
        raise CorruptionError(f"{name}: the column 'head' is not an object", subject=name)
    head = Fields(values, name)
    check_format(head)
    if head.text("kind") != "index" or head.text("path") != name or head.whole("rank") != rank:
        raise head.refuse("is not the index of this rank and checkpoint")
    check_repository(head, repository)
    return head


def _paths(tree: Json, what: str, head: Fields) -> list[str]:
    try:
        return list(leaf_paths(tree))
    except (CorruptionError, StateError, KeyError, TypeError, RecursionError) as error:
        raise head.refuse(f"{what} is not what a save writes: {error}") from None


def _packs(head: Fields, id: CheckpointId) -> tuple[PackEntry, ...]:
    rows = head.sequence("packs")
    if len(rows) > MAX_PACKS:
        raise head.refuse(f"names {len(rows)} data files")
    packs = []
    for row in rows:
        inner = head.inner(row, "a data file's entry")
        length = inner.whole("length", minimum=8)
        at = inner.checkpoint_of(inner.values["at"], "a data file's checkpoint") if "at" in inner.values else None
        if at == id:
            raise head.refuse("says of its own data file that it is another checkpoint's")
        packs.append(
            PackEntry(
                name=check_file(inner.text("name"), subject=head.name),
                length=length,
                header_length=inner.whole("header", minimum=8, maximum=length),
                header_digest=bytes.fromhex(inner.hex("digest", 32)),
                adopted=inner.values.get("adopted") is True,
                at=at,
                key=inner.text("key") if "key" in inner.values else "",
                save_id=inner.hex("save_id", 32) if "key" in inner.values else "",
            )
        )
    if len({(pack.at, pack.name) for pack in packs}) != len(packs):
        raise head.refuse("names a data file twice")
    return tuple(packs)


def _ends(columns: dict[str, Array], name: str, total: int, head: Fields) -> Array:
    """Returns a column of ends as int64 [n + 1], ascending from 0 to the number of values."""
    ends = bounded(columns[name], head, f"an end in {name!r}")
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    if (np.diff(bounds) < 0).any() or int(bounds[-1]) != total:
        raise head.refuse(f"the column {name!r} does not divide the {total} values that there are")
    return bounds


def _rows(columns: dict[str, Array], head: Fields, sizes: Array) -> tuple[Array, Array, Array]:
    """Returns every row's dimensions, their bounds, and its length in bytes from dtype and shape."""
    code = columns["dtype"]
    if code.size and int(code.max()) >= len(sizes):
        raise head.refuse("a row has a dtype that the index does not list")
    dims = bounded(columns["shape"], head, "a dimension")
    bounds = _ends(columns, "shape.ends", dims.size, head)
    length = bounded(columns["length"], head, "a length")
    expected = lengths(dims, bounds, sizes[code], head)
    if not np.array_equal(expected, length):
        row = int(np.flatnonzero(expected != length)[0])
        raise head.refuse(f"leaf {row} has {length[row]} bytes where dtype and shape give {expected[row]}")
    return dims, bounds, length


def _leaves(column: Array, shared: int, head: Fields) -> tuple[Array | None, int | None]:
    """Returns each row's leaf number and the number of leaves in the manifest's tree; None where row i is leaf i."""
    if "leaves" not in head.values:
        if not np.array_equal(column, np.arange(column.size)):
            raise head.refuse("the leaves are not in the order of the state")
        return None, None
    total = head.whole("leaves")
    leaf = bounded(column, head, "a leaf's number")
    if (np.diff(leaf[:shared]) < 0).any() or (shared and int(leaf[shared - 1]) >= total):
        raise head.refuse(f"the leaves are not in the order of the state, or beyond its {total}")
    if not np.array_equal(leaf[shared:], total + np.arange(column.size - shared)):
        raise head.refuse("the private leaves are not in the order of the private tree")
    return leaf, total


def _parts(columns: dict[str, Array], head: Fields, dims: Array, shared: int) -> tuple[Array | None, Array | None]:
    """Returns each row's origin in its leaf and the leaf's shape, ragged like `dims`. Only rows before `shared` may be
    parts."""
    if "origin" not in columns:
        return None, None
    origin, whole = bounded(columns["origin"], head, "an offset"), bounded(columns["whole"], head, "a dimension")
    if origin.size != dims.size or whole.size != dims.size:
        raise head.refuse("a row's place in its leaf does not have as many dimensions as the row")
    if (origin + dims > whole).any():
        raise head.refuse("a row reaches beyond its leaf")
    if origin[shared:].any() or not np.array_equal(whole[shared:], dims[shared:]):
        raise head.refuse("a private row is less than its leaf")
    return origin, whole


def _check_rows(head: Fields, packs: tuple[PackEntry, ...], pack: Array, offset: Array, length: Array) -> None:
    """Checks that the rows of each pack follow its header and each other without gap or overlap, to its last byte."""
    if pack.size and int(pack.max()) >= len(packs):
        raise head.refuse("a row lies in a data file that the index does not list")
    order = np.lexsort((length, offset, pack))
    pack, offset, length = pack[order], offset[order], length[order]
    starts = np.searchsorted(pack, np.arange(len(packs) + 1))
    for number, entry in enumerate(packs):
        rows = slice(int(starts[number]), int(starts[number + 1]))
        begins, ends = offset[rows], offset[rows] + length[rows]
        expected = np.concatenate([np.array([entry.header_length], dtype=np.int64), ends])
        if not np.array_equal(begins, expected[:-1]) or int(expected[-1]) != entry.length:
            raise head.refuse(f"the leaves in {entry.name} overlap, leave a hole or do not end where it ends")


def _chunks(columns: dict[str, Array], head: Fields, length: Array, chunk_bytes: int) -> tuple[Array, Array]:
    """Returns chunk_start and the digests, checked to be one per chunk of each leaf."""
    flat = columns["digests"]
    if flat.size % 16:
        raise head.refuse("the digests are not a multiple of 16 bytes")
    bounds = _ends(columns, "digests.ends", flat.size // 16, head)
    if not np.array_equal(np.diff(bounds), chunk_counts(length, chunk_bytes)):
        raise head.refuse("a leaf does not have one digest for each of its chunks")
    return bounds, flat.reshape(-1, 16)
