"""What checkpoints take: as they are restored, as they are stored, and what would be free without some of them.

From manifests and listings; of checkpoints that rest on packs of others, also from their indexes. Packs in the
directory of a checkpoint stay as long as anything names that in its `bases`, and go together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import field

import numpy as np

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.engine.read.chunk_reader import threads_for
from tenuto.errors import CorruptionError
from tenuto.maintenance.census import take_census
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.record import record
from tenuto.repo.format.index import Table
from tenuto.repo.repository import Repo


@record
class CheckpointUsage:
    """The bytes of one checkpoint.

    logical: of its state.
    stored: of the packs, indexes and notes in its own directory.
    shared: of the chunks that it has in packs of other checkpoints, as they are stored there; None where an index that
        says it cannot be read.
    unique: what removing it would free, of its own and of packs in the trash that nothing else rests on.
    """

    id: CheckpointId
    logical: int
    stored: int
    shared: int | None
    unique: int
    bases: tuple[CheckpointId, ...]


@record
class Usage:
    """checkpoints: in the order of runs, attempts and steps. needed: bytes of removed checkpoints on whose packs others
    rest. removed: of those that gc frees, or that it would if their grace were over. unfinished: of saves that are
    under way, or were cut off."""

    where: str
    checkpoints: tuple[CheckpointUsage, ...]
    needed: int
    removed: int
    unfinished: int
    sizes: Mapping[CheckpointId, int] = field(repr=False)
    resting: Mapping[CheckpointId, tuple[CheckpointId, ...]] = field(repr=False)
    """Of what stays: checkpoints and saves under way, each with what it rests on."""

    @property
    def logical(self) -> int:
        return sum(one.logical for one in self.checkpoints)

    @property
    def stored(self) -> int:
        """Returns the bytes of everything, also in the trash."""
        return sum(one.stored for one in self.checkpoints) + self.needed + self.removed + self.unfinished

    def freed_by(self, ids: Collection[CheckpointId]) -> int:
        """Returns what would come free without these checkpoints, when gc has emptied the trash."""
        stay = {id: bases for id, bases in self.resting.items() if id not in ids}
        gone = _live(self.resting) - _live(stay)
        return sum(self.sizes.get(id, 0) for id in gone)


def usage_of(repo: Repo) -> Usage:
    """Reads names, manifests, and the indexes of checkpoints that rest on others."""
    saves = {save.id: save for save in sorted(take_census(repo).saves.values(), key=lambda save: save.id)}
    sizes = {id: sum(entry.length for entry in save.own()) for id, save in saves.items()}
    committed = {id: save.manifest for id, save in saves.items() if save.state == "committed" and save.manifest}
    resting = {id: save.bases for id, save in saves.items() if save.state in ("committed", "damaged", "unfinished")}
    live = _live(resting)
    named = Counter(one for id, bases in resting.items() for one in (id, *bases))
    shared: dict[CheckpointId, int | None] = {}

    def add_shared(manifest: Manifest) -> None:
        shared[manifest.id] = _shared(repo, manifest)

    parallel_for(add_shared, [one for one in committed.values() if one.bases], threads_for(repo).read)
    checkpoints = tuple(
        CheckpointUsage(
            id,
            manifest.bytes,
            sizes[id],
            shared.get(id, 0),
            sum(sizes.get(one, 0) for one in (id, *manifest.bases) if named[one] == 1),
            manifest.bases,
        )
        for id, manifest in committed.items()
    )
    removed = {id: sizes[id] for id, save in saves.items() if save.state == "removed"}
    needed = sum(nbytes for id, nbytes in removed.items() if id in live)
    others = sum(sizes[id] for id, save in saves.items() if save.state in ("unfinished", "closed", "damaged"))
    return Usage(repo.url, checkpoints, needed, sum(removed.values()) - needed, others, sizes, resting)


def _live(resting: Mapping[CheckpointId, tuple[CheckpointId, ...]]) -> set[CheckpointId]:
    """Returns the directories whose packs stay."""
    return {one for id, bases in resting.items() for one in (id, *bases)}


def _shared(repo: Repo, manifest: Manifest) -> int | None:
    try:
        ranks = range(len(manifest.indexes))
        return sum(_in_others(repo.table(manifest, rank)) for rank in ranks)
    except CorruptionError:
        return None


def _in_others(table: Table) -> int:
    """Returns the stored bytes of the chunks that lie in packs of other checkpoints, each once."""
    stored = table.stored
    if stored is None:
        return 0
    others = np.array([pack.at is not None for pack in table.packs], np.bool_)[stored.pack]
    places = np.stack([stored.pack, stored.offset, stored.stored], 1)[others]
    return int(np.unique(places, axis=0)[:, 2].sum())
