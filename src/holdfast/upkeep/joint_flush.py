"""What several ranks have kept in memory, written as the one checkpoint that they would have saved together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from holdfast.engine.images import Image
from holdfast.engine.job import About
from holdfast.engine.joint.party import Together
from holdfast.engine.save import Saver
from holdfast.errors import RankFailed
from holdfast.model.checkpoint import Index, Manifest
from holdfast.model.leaf import LeafSpec
from holdfast.model.names import CheckpointId
from holdfast.ranks.agreement import Agreement
from holdfast.ranks.memory import MemoryBoard, ThreadRanks
from holdfast.repo.attempts import Attempt, joined
from holdfast.repo.repository import Repo
from holdfast.state.arrays import HOST, array_dtype
from holdfast.state.contract import Flattened
from holdfast.state.wholes import told_forms

DEADLINE_S: Final = 600.0
"""How long one rank's part may take longer than another's."""


def write_together(repo: Repo, attempt: Attempt, images: Sequence[Image]) -> CheckpointId:
    """Saves the state whose parts `images` (by rank) are, each rank as a thread of its own. Raises what the first rank
    raises that another one's trouble does not explain."""
    board, count = MemoryBoard(), len(images)
    saved: dict[int, CheckpointId] = {}
    failed: dict[int, BaseException] = {}

    def one(rank: int) -> None:
        try:
            facts = {"flush": attempt.id}
            with Agreement.open(ThreadRanks(rank, count, board), facts, DEADLINE_S) as agreement:
                own = attempt if rank == 0 else joined(repo, attempt.record)
                saved[rank] = _save(repo, own, images[rank], agreement)
        except BaseException as error:  # noqa: BLE001 - a thread's exception would reach nobody; raised below
            failed[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), name=f"holdfast-flush-{rank}") for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise min(failed.items(), key=lambda one: (isinstance(one[1], RankFailed), one[0]))[1]
    return saved[0]


def _save(repo: Repo, attempt: Attempt, image: Image, agreement: Agreement) -> CheckpointId:
    manifest = image.manifest()
    flattened = flattened_of(image, manifest, image.repo.index(manifest, image.footer.rank))
    saver = Saver(repo, attempt.run, lasting=False, party=Together(repo, agreement, deadline_s=DEADLINE_S))
    saver.attempt = attempt
    try:
        about = About(
            parent=manifest.parent,
            metrics=manifest.metrics,
            progress=manifest.progress,
            environment=manifest.environment,
            certificate=manifest.certificate,
        )
        save = saver.save(flattened, manifest.id.step, wait=True, about=about)
        if save.error is not None:
            raise save.error
        return save.id
    finally:
        saver.close()


def flattened_of(image: Image, manifest: Manifest, index: Index) -> Flattened:
    """An image's leaves as what they were flattened to, their bytes where they lie."""
    views = []
    for pack in index.packs:
        with image.repo.store.open(f"{manifest.id.directory}/{pack.name}") as reader:
            view = reader.view()
            assert view is not None
            views.append(view)
    declared = told_forms(manifest.tree)
    leaf = range(len(index.specs)) if index.leaf is None else index.leaf.tolist()
    places = zip(index.pack.tolist(), index.offset.tolist(), index.length.tolist(), index.specs, strict=True)
    sources = [_array(views[pack][offset : offset + length], spec) for pack, offset, length, spec in places]
    return Flattened(
        tree=manifest.tree,
        private=index.private,
        specs=tuple(_placed(spec, number in declared) for number, spec in zip(leaf, index.specs, strict=True)),
        sources=sources,
        devices=(HOST,),
        device=[0] * len(sources),
        fingerprint=f"{image.footer.save_id} {image.footer.rank}",
        leaf=None if index.leaf is None else leaf,
        shared=index.tree_leaves,
    )


def _placed(spec: LeafSpec, declared: bool) -> LeafSpec:
    """An index does not say of a row how it got there; the tree says which leaves somebody has declared."""
    return replace(spec, placement="per_rank" if spec.private else "box" if declared else "whole")


def _array(data: memoryview, spec: LeafSpec) -> np.ndarray[Any, Any]:
    kind = array_dtype(spec.dtype)
    return np.ndarray(spec.shape, kind, data) if spec.nbytes else np.empty(spec.shape, kind)
