"""What a save may name instead of writing it: the chunks of the run's checkpoint before it, and where those lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any, Final

import numpy as np

from tenuto.codec.chunk_map import ChunkMap, chunk_counts, chunk_sizes
from tenuto.engine.staging.plan import SavePlan
from tenuto.errors import CheckpointNotFound, CorruptionError, StoreError
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, PackEntry, StoredChunks
from tenuto.record import record
from tenuto.repo.format.index import ShapeRows
from tenuto.repo.format.stored_chunks import RAW
from tenuto.repo.repository import Repo

Column = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

SPARSE: Final = 0.25
"""A pack of which no more than this part is still needed is not named any more: what is needed of it is written again,
so that the rest can go."""


@record(eq=False)
class Baseline:
    """The chunks of one checkpoint, and of what they are decoded from.

    - `stored`: as in an index; the first `len(content)` are those of its rows, in their order.
    - `packs`: each says in which checkpoint's directory it lies.
    - `content`: uint8 [n, 16], digests of what the chunks of its rows hold.
    - `depth`: int64, from how many others each chunk is decoded, one upon the other.
    - `usable`: bool, whether a chunk may be named.
    - `again`: bool, whether a chunk that is decoded from the rounding of others may be named where those are.
    - `rows`: returns the forms of its leaves in the order of the index.
    - `chunk_bytes`: the length of its chunks.
    - `sealed`: the number of the key under which it is sealed; None where it is not.
    - `fingerprint`: of the structure of its state; empty where that is not known.
    """

    id: CheckpointId
    stored: StoredChunks
    packs: tuple[PackEntry, ...]
    content: np.ndarray[Any, np.dtype[np.uint8]]
    depth: Column
    usable: Flags
    again: Flags
    rows: Callable[[], list[tuple[Any, ...]]]
    chunk_bytes: int
    fingerprint: str = ""
    sealed: int | None = None
    _places: list[dict[tuple[bytes, int], int]] = field(default_factory=list)
    """By content, one dictionary, once something was looked for."""

    @property
    def homes(self) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints in whose directories its packs lie."""
        return tuple(sorted({pack.at for pack in self.packs if pack.at is not None}))

    def without(self, gone: Sequence[bool]) -> Baseline:
        """Returns it without the chunks that rest on packs that are `gone`."""
        stays = ~_resting_on(self.stored, _within(self.stored, np.array(gone, np.bool_)))
        return replace(self, usable=self.usable & stays, again=self.again & stays, _places=[])

    def entries_for(self, plan: SavePlan, keys: Callable[[], list[tuple[Any, ...]]]) -> Column:
        """Returns for each chunk of a save of this structure the chunk at the same place, or -1. `keys`: returns the
        forms of its leaves in the order of the index; asked only where the structures differ."""
        if self.chunk_bytes == plan.chunk_bytes and self.fingerprint == plan.fingerprint:
            return np.arange(plan.chunks.total, dtype=np.int64)
        start = plan.chunks.start
        total = int(start[-1])
        if self.chunk_bytes != plan.chunk_bytes:
            return np.full(total, -1, np.int64)
        if (rows := self.rows()) == (wanted := keys()):
            return np.arange(total, dtype=np.int64)
        found = np.full(total, -1, np.int64)
        counts = chunk_counts(np.array([key[0] for key in rows], np.int64), plan.chunk_bytes)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        known = {key: number for number, key in enumerate(rows)}
        for leaf, key in enumerate(wanted):
            before = known.get(key)
            if before is not None:
                found[int(start[leaf]) : int(start[leaf + 1])] = np.arange(int(starts[before]), int(starts[before + 1]))
        return found

    def find(self, content: bytes, raw: int) -> int | None:
        """Returns a chunk with this content, wherever it is."""
        if not self._places:
            names, known = self.content.tobytes(), {}
            for number in np.flatnonzero(self.usable[: len(self.content)])[::-1].tolist():
                known[names[number * 16 : number * 16 + 16], int(self.stored.raw[number])] = number
            self._places.append(known)
        return self._places[0].get((content, raw))


def keys_of(index_rows: ShapeRows, paths: Sequence[str], length: Column) -> list[tuple[Any, ...]]:
    """Returns what a leaf has to have in common with one of another save to be compared with it chunk by chunk: length,
    path, dtype, shape and place in its leaf."""
    ends = index_rows.ends.tolist()
    dims = index_rows.dims.tolist()
    origin = None if index_rows.origin is None else index_rows.origin.tolist()
    codes, names, found, begin = index_rows.code.tolist(), index_rows.dtypes, [], 0
    for number, end in enumerate(ends):
        at = () if origin is None else tuple(origin[begin:end])
        found.append((int(length[number]), paths[number], names[codes[number]], tuple(dims[begin:end]), at))
        begin = end
    return found


def baseline_of(repo: Repo, id: CheckpointId, rank: int) -> Baseline | None:
    """Returns the baseline that a committed checkpoint is; None where it cannot be read, or has no such rank."""
    try:
        manifest = repo.manifest(id)
        if rank >= len(manifest.indexes):
            return None
        return baseline_in(repo.index(manifest, rank), id)
    except (CheckpointNotFound, CorruptionError, StoreError):
        return None  # nothing is lost: the next save writes everything


def baseline_in(index: Index, id: CheckpointId, *, fingerprint: str = "") -> Baseline:
    """Returns the baseline that the checkpoint with this index is."""
    specs, length = index.specs, index.length

    def rows() -> list[tuple[Any, ...]]:
        return keys_of(ShapeRows.of(specs), [spec.path for spec in specs], length)

    packs = tuple(replace(pack, at=pack.at or id) for pack in index.packs)
    stored = index.stored
    if stored is None:
        chunks = ChunkMap.of(index).chunks()
        nothing = np.zeros(len(chunks), np.int64)
        stored = StoredChunks(
            (RAW,), chunks.pack, chunks.offset, chunks.stored, chunks.size, nothing, nothing - 1, index.digests
        )
    usable = ~_resting_on(stored, _within(stored, _sparse(stored, packs)))
    rounded = np.zeros(len(stored), np.bool_) if stored.rounded is None else stored.rounded > 0
    return Baseline(
        id,
        stored,
        packs,
        np.ascontiguousarray(index.digests),
        _depth(stored),
        usable & ~_resting_on(stored, rounded),
        usable & rounded,
        rows,
        index.chunk_bytes,
        fingerprint,
        index.sealed,
    )


def _depth(stored: StoredChunks) -> Column:
    depth = np.zeros(len(stored), np.int64)
    reached = np.flatnonzero(stored.base >= 0)
    below = stored.base[reached]
    while len(reached):
        depth[reached] += 1
        going = stored.base[below] >= 0
        reached, below = reached[going], stored.base[below[going]]
    return depth


def _sparse(stored: StoredChunks, packs: Sequence[PackEntry]) -> Flags:
    """Returns which packs are mostly not needed."""
    places = np.unique(np.stack([stored.pack, stored.offset, stored.stored], 1), axis=0)
    needed = np.bincount(places[:, 0], weights=places[:, 2], minlength=len(packs))
    whole = np.array([pack.length - pack.header_length for pack in packs], np.float64)
    return np.asarray(needed <= SPARSE * whole, np.bool_)


def _within(stored: StoredChunks, packs: Flags) -> Flags:
    """Returns which chunks lie in these packs."""
    found: Flags = packs[stored.pack] if len(packs) else np.zeros(len(stored), np.bool_)
    return found


def _resting_on(stored: StoredChunks, chunks: Flags) -> Flags:
    """Returns which chunks are these, or are decoded from one of them."""
    found, below = chunks, stored.base
    while True:
        grown = found | ((below >= 0) & found[below])
        if np.array_equal(grown, found):
            return found
        found = grown


def sizes_of(plan: SavePlan) -> Column:
    """Returns the length of each chunk of a save of this structure, in the order of the index."""
    return chunk_sizes(plan.layout.length, plan.chunk_bytes)
