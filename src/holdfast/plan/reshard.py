"""From one layout to another: for every box that a rank wants, the parts of saved boxes that make it up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.errors import ShardMismatch
from holdfast.plan.columns import Column, Flags, Matrix, every
from holdfast.plan.holdings import Holdings, check
from holdfast.plan.meeting import Boxes, meet
from holdfast.plan.naming import item_name, leaf_name
from holdfast.plan.tiling import Fault, first_fault


@dataclass(frozen=True, slots=True, eq=False)
class Reshard:
    """Line i: the items that line `wanted[i]` of the wanted Holdings takes from line `saved[i]` of the saved ones, a
    box of `shape[i]` that begins at `saved_offsets[i]` of the saved box and at `wanted_offsets[i]` of the wanted one.

    In order of `wanted`, then `saved`. Every item of every wanted box is in exactly one line.
    """

    wanted: Column
    saved: Column
    wanted_offsets: Matrix
    saved_offsets: Matrix
    shape: Matrix

    def __len__(self) -> int:
        return len(self.wanted)


def reshard(saved: Holdings, wanted: Holdings) -> Reshard:
    """What every wanted box takes from which saved one; leaves are numbered alike in both.

    Wanted boxes may overlap, and may be only one rank's. ShardMismatch, naming the leaf, where it has another whole
    shape or bytes an item in the checkpoint, and where an item is missing there or is there twice.
    """
    check(saved)
    check(wanted)
    lines, others, groups = _of_same_leaves(saved, wanted)
    axes = max(saved.whole.shape[1], wanted.whole.shape[1])
    have = Boxes(groups[saved.leaf[lines]], _wide(saved.offsets[lines], axes, 0), _wide(saved.shape[lines], axes, 1))
    want = Boxes(
        groups[wanted.leaf[others]], _wide(wanted.offsets[others], axes, 0), _wide(wanted.shape[others], axes, 1)
    )
    extent = _wide(wanted.whole[np.flatnonzero(groups >= 0)], axes, 1)
    who, which = meet(have, want, extent)
    low = np.maximum(have.offsets[which], want.offsets[who])
    high = np.minimum(have.offsets[which] + have.shape[which], want.offsets[who] + want.shape[who])
    inside = low - want.offsets[who]
    fault = first_fault(who, inside, high - low, want.shape)
    if fault is not None:
        raise _error(wanted, int(others[fault.group]), fault)
    return Reshard(others[who], lines[which], inside, low - have.offsets[which], high - low)


def _of_same_leaves(saved: Holdings, wanted: Holdings) -> tuple[Column, Column, Column]:
    """The lines with items of both sides whose leaves are wanted; and by leaf its number among these, or -1."""
    others = np.flatnonzero(every(wanted.shape > 0))
    asked = np.zeros(wanted.leaves, bool)
    asked[wanted.leaf] = True
    _check_leaves(saved, wanted, asked)
    asked = np.zeros(wanted.leaves, bool)
    asked[wanted.leaf[others]] = True
    groups = np.where(asked, np.cumsum(asked) - 1, -1)
    known = saved.leaf < wanted.leaves
    known[known] = asked[saved.leaf[known]]
    return np.flatnonzero(known & every(saved.shape > 0)), others, groups


def _check_leaves(saved: Holdings, wanted: Holdings, asked: Flags) -> None:
    """That what is wanted of the checkpoint is in it, and the same there."""
    leaves = np.flatnonzero(asked)
    missing = leaves[leaves >= saved.leaves]
    if len(missing):
        path = leaf_name(wanted.paths, int(missing[0]))
        raise ShardMismatch(
            f"{path}: the checkpoint has no such leaf",
            subject=path,
            hint="`holdfast show WHERE` lists the leaves that it has",
        )
    axes = max(saved.whole.shape[1], wanted.whole.shape[1])
    here, there = _wide(wanted.whole[leaves], axes, 1), _wide(saved.whole[leaves], axes, 1)
    differs = (here != there).any(axis=1) | (wanted.ndim[leaves] != saved.ndim[leaves])
    if differs.any():
        leaf = int(leaves[np.argmax(differs)])
        path = leaf_name(wanted.paths, leaf)
        was, now = (tuple(one.whole[leaf, : one.ndim[leaf]].tolist()) for one in (saved, wanted))
        raise ShardMismatch(f"{path}: of shape {was} in the checkpoint, and of {now} here", subject=path)
    size = np.full(max(saved.leaves, wanted.leaves), -1, np.int64)
    size[saved.leaf] = saved.itemsize
    other = (size[wanted.leaf] >= 0) & (size[wanted.leaf] != wanted.itemsize)
    if other.any():
        at = int(np.argmax(other))
        path, was, now = wanted.path(at), size[wanted.leaf[at]], wanted.itemsize[at]
        raise ShardMismatch(f"{path}: items of {was} bytes in the checkpoint, and of {now} here", subject=path)


def _wide(lines: Matrix, axes: int, fill: int) -> Matrix:
    """With as many columns of padding as the other side has."""
    return np.pad(lines, ((0, 0), (0, axes - lines.shape[1])), constant_values=fill)


def _error(wanted: Holdings, at: int, fault: Fault) -> ShardMismatch:
    path, box = wanted.path(at), wanted.box(at)
    place = [one + offset for one, offset in zip(fault.place, box.offsets, strict=False)]
    said = "is not in the checkpoint" if not fault.times else f"is {fault.times} times in the checkpoint"
    return ShardMismatch(
        f"{path}: {item_name(place)} {said}; rank {wanted.rank[at]} wants {box}",
        subject=path,
        hint="`holdfast verify WHERE` names all that is damaged",
    )
