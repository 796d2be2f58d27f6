"""Looking at a checkpoint ahead of its restore: every byte is verified as in the restore, and no target is touched.

What is peeked at decides how a trainer is built, long before the restore fills it: a checkpoint that turned out damaged
only then could no longer be replaced by the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tenuto.engine.read.choose import CheckpointLeaves
from tenuto.engine.read.leaf_reader import Staged, read_leaves
from tenuto.engine.read.sharded_reader import ShardedReader
from tenuto.events import Emitter
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Manifest
from tenuto.repo.repository import Repo
from tenuto.state.contract import LateRead, Prepared, Sink

BATCH_BYTES: Final = 256 << 20
"""Bytes of leaves that are in memory at once; a larger leaf is read by itself."""

Wants = list[tuple[int, Sink]]


def peeking(repo: Repo, manifest: Manifest, leaves: CheckpointLeaves, *, rank: int, of: int, verify: bool) -> Prepared:
    """Plans a restore that fills nothing. `verify`: this rank's share of the leaves is read and verified, as part of
    the vote on the checkpoint."""

    def check() -> None:
        for wants in _batches(leaves.specs, rank, of):
            read(wants)

    if not verify:
        return Prepared([], lambda: None)
    read = _reader(repo, manifest, rank, of)
    return Prepared([], lambda: None, other_rank=LateRead(dict, check))


def _reader(repo: Repo, manifest: Manifest, rank: int, of: int) -> Callable[[Wants], int]:
    own = rank if of == len(manifest.indexes) else None
    if manifest.boxes is None and own is not None:
        index = repo.index(manifest)
        return lambda wants: read_leaves(repo, manifest, index, wants, phase="peek")
    reader = ShardedReader(repo, manifest, own, Emitter())
    return lambda wants: reader.read(Prepared(wants, lambda: None))


def _batches(specs: Sequence[LeafSpec], rank: int, of: int) -> Iterator[Wants]:
    wants: Wants = []
    nbytes = 0
    for number in range(len(specs)):
        spec = specs[number]
        if not spec.private and number % of != rank:
            continue
        if wants and nbytes + spec.nbytes > BATCH_BYTES:
            yield wants
            wants, nbytes = [], 0
        wants.append((number, Staged(spec.nbytes)))
        nbytes += spec.nbytes
    if wants:
        yield wants
