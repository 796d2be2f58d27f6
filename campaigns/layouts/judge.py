"""What one process makes of a checkpoint of many: every tensor as a whole, compared with what was meant."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from campaigns.layouts.states import PLAIN, Pair, full_tensors
from campaigns.layouts.trainings import of_one_process
from campaigns.layouts.truth import differences, digest
from tenuto.api.open import open as open_checkpoint
from tenuto.api.save_load import load
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.state.tree import leaf_paths
from tenuto.store.contract import Where


def judge(pair: Pair, where: Where, step: int) -> list[str]:
    """What is wrong with the checkpoint as one process sees it."""
    truth = full_tensors(pair)
    return [*_opened(truth, where, step), *_loaded(pair, truth, where, step)]


def _opened(truth: Mapping[str, Any], where: Where, step: int) -> list[str]:
    """Leaf by leaf, without restoring anything."""
    with open_checkpoint(where, step=step) as opened:
        found = {path: opened[path].torch() for path in opened if not opened[path].private}
    told = [f"opened: {one}" for one in differences(found, truth)]
    if not told and digest(found) != digest(truth):
        told.append("opened: another digest")
    return told


def _loaded(pair: Pair, truth: Mapping[str, Any], where: Where, step: int) -> list[str]:
    """Restored whole: into nothing, or into a training of one process."""
    if pair.trained is None:
        state = load(where, step=step).state
        found = {f"t/{name}": value for name, value in state["t"].items()}
    else:
        training = of_one_process(pair.trained, pair.other, fresh=pair.fresh)
        state = {**training.state(), "plain": {}}
        load(where, state, step=step)
        found = training.read()
    told = [] if state["plain"] == PLAIN else [f"loaded: plain values are {state['plain']}"]
    return told + [f"loaded: {one}" for one in differences(found, truth)]


def line_of(repo: Repo, id: CheckpointId, *, ordered: bool) -> str:
    """The digest of what two saves of one state in one layout have in common: the boxes, and their bytes; where they
    tell the leaves in one order, also who has written which, and in which row."""
    found, manifest = [], repo.manifest(id)
    for rank in range(len(manifest.indexes)):
        index = repo.index(manifest, rank)
        ends = index.chunk_start.tolist()
        for row, spec in enumerate(index.specs):
            if not spec.private:
                digests = index.digests[ends[row] : ends[row + 1]].tobytes()
                who = (rank, row) if ordered else ()
                found.append(repr((spec.path, spec.dtype, spec.shape, spec.offsets, spec.whole, digests, who)))
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


def same_line(repo: Repo, one: CheckpointId, other: CheckpointId) -> bool:
    """Whether two checkpoints of one state in one layout are alike. An optimizer has its parameters' state in the order
    of the checkpoint it came from, and which of several replicas writes what goes by the order: so who has written what
    is compared where the order is the same."""
    orders = [leaf_paths(repo.manifest(id).tree) for id in (one, other)]
    ordered = orders[0] == orders[1]
    return line_of(repo, one, ordered=ordered) == line_of(repo, other, ordered=ordered)
