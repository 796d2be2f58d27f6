"""Chunks of an encoded index: fetched as they are stored, verified, and decoded, with what they are decoded from.

Chunks of one task mostly lie one after the other in one pack, and so do their bases in theirs: what a task needs is
read in few ranges, whatever it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from tenuto.codec.chunk_map import ChunkMap, Column
from tenuto.codec.derived import ROUNDED, rounded
from tenuto.codec.digest import digest
from tenuto.codec.registry import codec
from tenuto.engine.read.packs import OpenPack, damaged
from tenuto.errors import CorruptionError, Tampered
from tenuto.model.ids import CheckpointId
from tenuto.model.records import PackEntry
from tenuto.repo.format.stored_chunks import RAW
from tenuto.repo.keys import find_key
from tenuto.repo.repository import Repo
from tenuto.seal.cipher import Identity, PackKey, open_chunk
from tenuto.state.contract import Buffer

TASK_BYTES: Final = 4 << 20
"""Decoded bytes that one task delivers."""
_GAP_BYTES: Final = 64 << 10
_RANGE_BYTES: Final = 16 << 20

Opened = Mapping[int, OpenPack]
"""Open packs by their number in the index."""


class _Reading(NamedTuple):
    """What one task reads, by the numbers of chunks: their stored bytes, the memory to decode them into, and what has
    been decoded."""

    pieces: Mapping[int, Buffer]
    targets: Mapping[int, Buffer | None]
    known: dict[int, Buffer]
    opened: Opened


class ChunkDecoder:
    """Reads and decodes chunks of one index. May be used by several threads."""

    def __init__(
        self, repo: Repo, id: CheckpointId, chunks: ChunkMap, entries: Sequence[PackEntry], path: Callable[[int], str]
    ) -> None:
        """
        entries: the packs of the index.
        path: of a row, for errors.

        Raises KeyMissing for a sealed checkpoint if its repository's keys are not open.
        """
        assert chunks.stored is not None
        self._seals = {number: open_sealed(repo, id, entry) for number, entry in enumerate(entries) if entry.key}
        self._repo = repo
        self._map = chunks
        self._stored = chunks.stored
        self._codecs = [None if name == RAW else codec(name) for name in chunks.stored.codecs]
        self._path = path

    def packs(self, numbers: Column) -> list[int]:
        """Returns the packs that have to be open to read `numbers`."""
        found: list[int] = np.unique(self._stored.pack[self._stored.needed(numbers)]).tolist()
        return found

    def read(
        self,
        numbers: Sequence[int],
        rows: Sequence[int],
        opened: Opened,
        targets: Sequence[Buffer | None] | None = None,
    ) -> list[Buffer]:
        """Returns the content of these chunks, which is valid while the packs are open.

        rows: the row of each, for errors.
        targets: the memory that each may be decoded into; then that is returned, unless the chunk is stored as it is.

        Raises CorruptionError, which names the row's path, the pack and the offset.
        """
        row_of = dict(zip(numbers, rows, strict=True))
        pieces = self._fetch(np.asarray(numbers, np.int64), rows, opened)
        places = {} if targets is None else dict(zip(numbers, targets, strict=True))
        reading = _Reading(pieces, places, {}, opened)
        return [self._content(number, row_of[number], reading) for number in numbers]

    def _fetch(self, wanted: Column, rows: Sequence[int], opened: Opened) -> dict[int, Buffer]:
        """Returns the stored bytes of chunks and of all that they are decoded from, verified."""
        stored, numbers = self._stored, self._stored.needed(wanted)
        order = numbers[np.lexsort((stored.offset[numbers], stored.pack[numbers]))]
        pack, low = stored.pack[order], stored.offset[order]
        high = low + stored.stored[order]
        found: dict[int, Buffer] = {}
        first = 0
        while first < len(order):
            stop, begin, end = first + 1, int(low[first]), int(high[first])
            while (
                stop < len(order)
                and pack[stop] == pack[first]
                and int(low[stop]) <= end + _GAP_BYTES
                and int(high[stop]) - begin <= _RANGE_BYTES
            ):
                end = max(end, int(high[stop]))
                stop += 1
            source = opened[int(pack[first])]
            data = _bytes_of(source, begin, end)
            for at in range(first, stop):
                number = int(order[at])
                piece = data[int(low[at]) - begin : int(high[at]) - begin]
                if digest(piece.data) != stored.digests[number].tobytes():
                    row = next(row for one, row in zip(wanted, rows, strict=True) if number in stored.needed(one))
                    raise damaged(self._repo, self._path(row), source.name, len(piece), int(low[at]))
                found[number] = piece
            first = stop
        return found

    def _content(self, number: int, row: int, one: _Reading) -> Buffer:
        if number not in one.known:
            for below in self._stored.below(np.array([number])).tolist():
                self._content(below, row, one)  # no deeper than the longest chain
            one.known[number] = self._decoded(number, row, one)
        return one.known[number]

    def _base(self, number: int, known: Mapping[int, Buffer]) -> memoryview | None:
        """Returns the bytes that a chunk is decoded from beside its own."""
        stored, base = self._stored, int(self._stored.base[number])
        if base < 0:
            return None
        if stored.rounded is None or not stored.rounded[number]:
            return known[base].data
        nbytes = 2 * int(stored.raw[number])
        numbers = known[base] if len(known[base]) >= nbytes else np.concatenate([known[base], known[base + 1]])
        return memoryview(rounded(numbers[:nbytes].data, tuple(ROUNDED)[stored.rounded[number] - 1]))

    def _decoded(self, number: int, row: int, reading: _Reading) -> Buffer:
        stored, piece = self._stored, reading.pieces[number]
        one, seal = self._codecs[int(stored.codec[number])], self._seals.get(int(stored.pack[number]))
        if seal is not None:
            try:
                piece = np.frombuffer(open_chunk(seal, piece.data, int(stored.offset[number])), np.uint8)
            except Tampered as error:
                raise self._refused(number, row, reading.opened, Tampered) from error
        if one is None:
            return piece  # its digest is the content's, or the seal vouches for it
        out = reading.targets.get(number)
        if out is None:
            out = np.empty(int(stored.raw[number]), np.uint8)
        try:
            one.decode(piece.data, out.data, self._base(number, reading.known))
        except CorruptionError as error:
            raise self._refused(number, row, reading.opened) from error
        if number < len(self._map.digests) and self._named(out) != self._map.digest_of(number):
            raise self._refused(number, row, reading.opened)
        return out

    def _named(self, content: Buffer) -> bytes:
        """Returns the digest of a content as the index has it."""
        found = digest(content.data)
        if self._map.sealed is None or self._repo.keys is None:
            return found
        column = np.frombuffer(found, np.uint8).reshape(1, -1)
        return self._repo.keys.hide(column, self._map.sealed, self._repo.url).tobytes()

    def _refused(
        self, number: int, row: int, opened: Opened, kind: type[CorruptionError] = CorruptionError
    ) -> CorruptionError:
        """Returns the error for a chunk that does not decode to what was saved."""
        stored = self._stored
        name = opened[int(stored.pack[number])].name
        found = damaged(self._repo, self._path(row), name, int(stored.stored[number]), int(stored.offset[number]))
        return kind(found.message, subject=found.subject, hint=found.hint, object=found.object)


def open_sealed(repo: Repo, id: CheckpointId, entry: PackEntry) -> PackKey:
    """Returns the data key of a sealed pack that the index of `id` names. Raises KeyMissing, Tampered."""
    if repo.keys is None:
        repo.keys = find_key(repo)
    return repo.keys.open_pack(entry.key, Identity(repo.id, entry.save_id, entry.object_name(id)))


def _bytes_of(pack: OpenPack, begin: int, end: int) -> Buffer:
    if pack.view is not None:
        return pack.view[begin:end]
    out = np.empty(end - begin, np.uint8)
    pack.read_into(begin, out)
    return out
