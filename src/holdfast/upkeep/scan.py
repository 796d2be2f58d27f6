"""Reads every byte of a checkpoint's packs and compares each chunk with its digest, several pieces at once."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from holdfast.codec.digest import DIGEST_BYTES, digest
from holdfast.engine.pieces import Piece, halves, pieces
from holdfast.errors import CorruptionError, StoreError
from holdfast.model.checkpoint import Index
from holdfast.model.names import CheckpointId
from holdfast.store.contract import Reader, Store
from holdfast.upkeep.findings import Finding

PAGE = 4096


class _Buffers(threading.local):
    """One page-aligned buffer for each reading thread, so that a reader may go past the page cache."""

    buffer: memoryview | None = None

    def of(self, nbytes: int) -> memoryview:
        if self.buffer is None or len(self.buffer) < nbytes:
            self.buffer = memoryview(mmap.mmap(-1, -(-nbytes // PAGE) * PAGE))
        return self.buffer[:nbytes]


class Scan:
    """One checkpoint's packs against one index.

    `on_bytes(n)` is called after each piece, from any thread. `run` returns one finding for each damaged leaf.
    """

    def __init__(self, store: Store, id: CheckpointId, index: Index, *, on_bytes: Callable[[int], None]) -> None:
        self._store = store
        self._id = id
        self._index = index
        self._on_bytes = on_bytes
        self._expected = np.ascontiguousarray(index.digests).tobytes()
        self._buffers = _Buffers()
        self._readers: dict[int, Reader] = {}

    def run(self, usable: set[int], threads: int) -> list[Finding]:
        """Scans the packs numbered in `usable` (present, and as long as they should be)."""
        found: list[Finding] = []
        try:
            for number in sorted(usable):
                try:
                    self._readers[number] = self._store.open(self._name(number))
                except StoreError as error:
                    found.append(
                        Finding(self._id, "error", f"cannot be opened: {error.message}", object=self._name(number))
                    )
            todo = [piece for piece in pieces(self._index) if piece.pack in self._readers]
            if len(todo) <= 1:
                bad = [fault for piece in todo for fault in self._piece(piece)]
            else:
                with ThreadPoolExecutor(max(1, threads), thread_name_prefix="holdfast-verify") as pool:
                    bad = [fault for faults in pool.map(self._piece, todo) for fault in faults]
        finally:
            for reader in self._readers.values():
                reader.close()
        return [*found, *self._by_leaf(bad)]

    def _name(self, number: int) -> str:
        return f"{self._id.directory}/{self._index.packs[number].name}"

    def _piece(self, piece: Piece) -> list[tuple[int, int, int, str]]:
        """The damaged chunks of a piece: leaf, pack, offset, and what is wrong."""
        reader = self._readers[piece.pack]
        low, high = piece.start, piece.stop
        if reader.alignment > 1:
            low, high = low // PAGE * PAGE, -(-high // PAGE) * PAGE
        view = self._buffers.of(high - low)
        try:
            reader.read_into(low, view)
        except (CorruptionError, StoreError) as error:
            if len(piece.row) > 1:
                # Somewhere in it: halves find the chunk that cannot be read, and check the others.
                return [fault for half in halves(piece) for fault in self._piece(half)]
            return [(int(piece.leaf[0]), piece.pack, piece.start, f"cannot be read: {error.message}")]
        bad = []
        expected = self._expected
        rows = zip(piece.begin.tolist(), piece.end.tolist(), piece.row.tolist(), strict=True)
        for place, (begin, end, row) in enumerate(rows):
            if digest(view[begin - low : end - low]) != expected[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]:
                bad.append((int(piece.leaf[place]), piece.pack, begin, f"{end - begin} bytes are not what was saved"))
        self._on_bytes(piece.stop - piece.start)
        return bad

    def _by_leaf(self, bad: list[tuple[int, int, int, str]]) -> list[Finding]:
        """One finding a leaf, at its first damaged chunk: a lost disk must not print a million lines."""
        first: dict[int, tuple[int, int, str]] = {}
        count: dict[int, int] = {}
        for leaf, pack, offset, message in bad:
            count[leaf] = count.get(leaf, 0) + 1
            if leaf not in first or offset < first[leaf][1]:
                first[leaf] = (pack, offset, message)
        return [
            Finding(
                self._id,
                "error",
                message if count[leaf] == 1 else f"{message} (and {count[leaf] - 1} more chunks of this leaf)",
                leaf=self._index.specs[leaf].path,
                object=self._name(pack),
                offset=offset,
            )
            for leaf, (pack, offset, message) in sorted(first.items())
        ]
