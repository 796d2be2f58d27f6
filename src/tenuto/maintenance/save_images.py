"""Saves what lies in images in memory to a store, as the trainings that sealed them would have saved it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.memory_tier.image_store import Image
from tenuto.engine.memory_tier.matched_image import leaf_shapes
from tenuto.engine.read.leaf_reader import read_leaves
from tenuto.engine.save.commit_protocol import CommitProtocol, SoloCommit
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.errors import RankFailed
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, Manifest
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.contract import KVStore
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks
from tenuto.record import record
from tenuto.repo.format.leaf_table import leaf_forms
from tenuto.repo.ownership.claim import Attempt, joined
from tenuto.repo.repository import Repo
from tenuto.state.contract import Flattened
from tenuto.state.numpy_arrays import HOST, array_dtype
from tenuto.state.position.rng import marks
from tenuto.state.restore.match import match_state

DEADLINE_S: Final = 600.0
"""How long one rank's part may take longer than another's."""


@record
class RankPart:
    """What one rank adds to a checkpoint: its state, and what the manifest says beside it."""

    flattened: Flattened
    about: ManifestDetails
    step: int


def part_of(image: Image) -> RankPart:
    """Returns what the rank that sealed this image would have saved. Its bytes stay where they are. Raises
    CorruptionError where the state of its random generators is damaged."""
    manifest = image.manifest()
    index = image.repo.index(manifest, image.footer.rank)
    about = ManifestDetails(
        parent=manifest.parent,
        metrics=manifest.metrics,
        progress=manifest.progress,
        environment=manifest.environment,
        certificate=manifest.certificate,
        marks=marks_of(image, manifest, index) if image.footer.ranks > 1 else {},
    )
    return RankPart(_flattened(image, manifest, index), about, manifest.id.step)


def save_images(repo: Repo, attempt: Attempt, images: Sequence[Image]) -> CheckpointId:
    """Saves the state whose parts `images` (by rank) are, as the one checkpoint that these processes would have
    saved."""
    parts = {rank: part_of(image) for rank, image in enumerate(images)}
    return save_parts(repo, attempt, parts, len(images), InProcessKVStore(), deadline_s=DEADLINE_S)


def save_parts(
    repo: Repo, attempt: Attempt, parts: Mapping[int, RankPart], ranks: int, shared: KVStore, *, deadline_s: float
) -> CheckpointId:
    """Saves this process's parts (by rank) of the state of `ranks` ranks, each from a thread of its own; the other
    processes save theirs at the same time. `shared`: the key-value store of all. Raises what the first rank raises that
    another one's trouble does not explain."""
    if ranks == 1:
        return _save_part(repo, attempt, parts[0], SoloCommit(repo))
    saved: dict[int, CheckpointId] = {}
    failed: dict[int, BaseException] = {}

    def one(rank: int) -> None:
        try:
            facts = {"images": attempt.id}
            with Agreement.open(ThreadRanks(rank, ranks, shared), facts, deadline_s) as agreement:
                own = attempt if rank == min(parts) else joined(repo, attempt.record)
                protocol = GroupCommit(repo, agreement, deadline_s=deadline_s)
                saved[rank] = _save_part(repo, own, parts[rank], protocol)
        except BaseException as error:  # noqa: BLE001 - a thread's exception would reach nobody; raised below
            failed[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), name=f"tenuto-image-{rank}") for rank in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise min(failed.items(), key=lambda one: (isinstance(one[1], RankFailed), one[0]))[1]
    return saved[min(saved)]


def _save_part(repo: Repo, attempt: Attempt, part: RankPart, protocol: CommitProtocol) -> CheckpointId:
    """Saves what one rank has as its training would have saved it: sealed, where the repository is."""
    saver = Saver(repo, attempt.run, lasting=False, protocol=protocol)
    saver.attempt = attempt
    try:
        save = saver.save(part.flattened, part.step, wait=True, about=part.about)
        if save.error is not None:
            raise save.error
        return save.id
    finally:
        saver.close()


def marks_of(image: Image, manifest: Manifest, index: Index) -> dict[str, str]:
    """Returns the marks (`rng.marks`) of the random generators of the rank that sealed an image. CorruptionError."""
    found: dict[str, Any] = {"random": {}}
    specs = leaf_shapes(manifest.tree, index)
    prepared = match_state(manifest.tree, index.private, specs, {}, private_into=found)
    leaves = range(len(index.specs)) if index.leaf is None else index.leaf.tolist()
    rows = {leaf: row for row, leaf in enumerate(leaves) if leaf >= specs.shared}
    read_leaves(image.repo, manifest, index, [(rows[leaf], sink) for leaf, sink in prepared.wants])
    prepared.apply()
    return marks(found["random"])


def _flattened(image: Image, manifest: Manifest, index: Index) -> Flattened:
    """Returns an image's leaves as they were flattened, with their bytes in place."""
    views = []
    for pack in index.packs:
        with image.repo.store.open(f"{manifest.id.directory}/{pack.name}") as reader:
            view = reader.view()
            assert view is not None
            views.append(view)
    declared = leaf_forms(manifest.tree)
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
    """Returns the spec with its placement, which an index does not have: the tree says which leaves were declared."""
    return replace(spec, placement="per_rank" if spec.private else "box" if declared else "whole")


def _array(data: memoryview, spec: LeafSpec) -> np.ndarray[Any, Any]:
    kind = array_dtype(spec.dtype)
    return np.ndarray(spec.shape, kind, data) if spec.nbytes else np.empty(spec.shape, kind)
