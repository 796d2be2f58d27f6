"""The rows of a checkpoint as a tier that has it in an encoding of its own gives them back: a source of chunks for the
repair of places that store it in another way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tenuto.engine.read.lazy_reader import LazyReader
from tenuto.errors import TenutoError
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, PackEntry
from tenuto.repo.encoded_places import stand_ins
from tenuto.repo.repository import Repo
from tenuto.sharding.slices import Region
from tenuto.store.base import BaseReader
from tenuto.store.contract import Reader
from tenuto.store.wrappers.delegating import DelegatingStore

_FILE: Final = "rank-{:05d}.decoded"
"""The name of an object that no store has."""


@dataclass(eq=False)
class DecodedRows(DelegatingStore):
    """A place that has, beside its objects, one with the rows of an index, decoded, one after the other."""

    repo: Repo
    index: Index

    def open(self, name: str) -> Reader:
        if name != self.index.packs[0].object_name(self.id):
            return super().open(name)
        return _RowsReader(name, self.repo, self.id, self.index)

    @property
    def id(self) -> CheckpointId:
        assert self.index.packs[0].at is not None
        return self.index.packs[0].at


def decoded_rows(repo: Repo, id: CheckpointId) -> Iterator[DecodedRows]:
    """Yields a checkpoint's rows as each such tier has them, rank by rank, as an index of chunks that are stored as
    they are. What cannot be read is passed over, and so is what is sealed: its digests say nothing of the content."""
    for there in stand_ins(repo, id):
        try:
            manifest = there.manifest(id)
            for rank in range(len(manifest.indexes)):
                index = there.index(manifest, rank)
                if index.sealed is None:
                    ends = np.cumsum(index.length)
                    whole = PackEntry(_FILE.format(rank), int(index.length.sum()), 0, b"", at=id)
                    plain = replace(
                        index, packs=(whole,), pack=np.zeros_like(index.pack), offset=ends - index.length, stored=None
                    )
                    yield DecodedRows(there.store, there, plain)
        except TenutoError:
            continue


class _RowsReader(BaseReader):
    def __init__(self, name: str, repo: Repo, id: CheckpointId, index: Index) -> None:
        super().__init__(name, index.packs[0].length)
        self._index = index
        self._rows = LazyReader(repo, id, repo.table(repo.manifest(id), index.rank))

    def fetch(self, offset: int, buffer: memoryview) -> None:
        starts, length, out = self._index.offset, self._index.length, np.frombuffer(buffer, np.uint8)
        row, done = int(np.searchsorted(starts, offset, side="right")) - 1, 0
        while done < len(out):
            begin = offset + done - int(starts[row])
            count = min(int(length[row]) - begin, len(out) - done)
            if count > 0:
                part = Region(begin, (count,), (1,), (False,), (count,))
                self._rows.read(row, self._index.specs[row].path, part, 1, out[done : done + count])
                done += count
            row += 1

    def close(self) -> None:
        self._rows.close()
