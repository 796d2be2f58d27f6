"""The proof that every item of every leaf is written exactly once."""

from __future__ import annotations

import numpy as np

from holdfast.errors import ShardMismatch
from holdfast.plan.columns import Flags, every
from holdfast.plan.holdings import Holdings, check
from holdfast.plan.naming import item_name, leaf_name, rank_names
from holdfast.plan.tiling import Fault, first_fault


def check_coverage(boxes: Holdings) -> None:
    """Raises ShardMismatch, naming the leaf, the first item that is missing or there twice, and the ranks, unless every
    item of every leaf is in exactly one box. A leaf without items must have a box as well, which says that it exists.

    For boxes as they are written (`written`), or as a checkpoint names them; replicas are taken out by `assign`.
    """
    check(boxes)
    there = np.zeros(boxes.leaves, bool)
    there[boxes.leaf] = True
    if not there.all():
        path = leaf_name(boxes.paths, int(np.argmin(there)))
        raise ShardMismatch(
            f"{path}: no rank holds any of it",
            subject=path,
            hint="keep the tensor on one rank at least, or leave the entry out of the state on every rank",
        )
    fault = first_fault(boxes.leaf, boxes.offsets, boxes.shape, boxes.whole)
    if fault is not None:
        raise _error(boxes, fault)


def _error(boxes: Holdings, fault: Fault) -> ShardMismatch:
    path = leaf_name(boxes.paths, fault.group)
    axes = int(boxes.ndim[fault.group])
    item, whole = item_name(fault.place[:axes]), boxes.whole[fault.group, :axes].tolist()
    of_leaf = boxes.leaf == fault.group
    if not fault.times:
        others = rank_names(boxes.rank[of_leaf].tolist())
        return ShardMismatch(
            f"{path}: {item} of shape {whole} is missing; other parts are on {others}",
            subject=path,
            hint="every part of a sharded tensor must be in the state of one rank at least",
        )
    holders = np.flatnonzero(of_leaf & _holds(boxes, fault))
    seen = [f"rank {boxes.rank[at]} {boxes.box(int(at))}" for at in holders[:2]]
    return ShardMismatch(
        f"{path}: {item} of shape {whole} is there {fault.times} times, in boxes that are not the same: "
        f"{' and '.join(seen)}",
        subject=path,
        hint="replicas hold equal boxes, whose bytes can be compared; shards of one tensor do not overlap",
    )


def _holds(boxes: Holdings, fault: Fault) -> Flags:
    """Which boxes hold the item."""
    place = np.array(fault.place, np.int64)
    return every((boxes.offsets <= place) & (place < boxes.offsets + boxes.shape))
