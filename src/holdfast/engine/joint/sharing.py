"""Who writes what: planned by the coordinator for all ranks, and each rank's part of it applied to its own state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from holdfast.engine.joint.replicas import replica_groups
from holdfast.engine.joint.structure import PLACEMENTS, Said, box_of, leaf_numbers, shared_rows, tree_leaves
from holdfast.errors import CorruptionError
from holdfast.model.box import Box
from holdfast.model.leaf import LeafSpec
from holdfast.plan.assign import Assignment, Strategy, assign, layers, written
from holdfast.plan.columns import Column, Flags
from holdfast.plan.coverage import check_coverage
from holdfast.plan.holdings import Holdings, gather
from holdfast.plan.union import unite
from holdfast.repo.boxes import BoxTable
from holdfast.repo.columns import Kind, decode_columns, decode_json, encode_columns, encode_json
from holdfast.state.contract import Flattened

_WHAT: Final = "a plan"
_KINDS: Final[tuple[Kind, ...]] = (
    ("row", "U64", "<u8"),
    ("offsets", "U64", "<u8"),
    ("shape", "U64", "<u8"),
    ("numbers", "U64", "<u8"),
    ("compare", "U8", "|u1"),
    ("head", "U8", "|u1"),
)


@dataclass(frozen=True, slots=True, eq=False)
class JointPlan:
    """What the coordinator keeps of a planned structure. `numbers[rank]`: the leaves' in the tree of all, by those of
    the rank's own. `replicas`: for each line of `held` the number of what other ranks hold too, or -1; `undeclared`:
    whether nothing but its being there says that it is the same on them. `shares[rank]`: what the rank is told."""

    fingerprint: str
    numbers: Sequence[Column]
    table: BoxTable
    held: Holdings
    replicas: Column
    undeclared: Flags
    shares: Sequence[bytes]

    def compared(self, everything: bool) -> Column:
        """The lines of `held` that are digested at a save."""
        return np.flatnonzero(self.replicas >= 0 if everything else self.undeclared)


def plan_together(said: Sequence[Said], *, strategy: Strategy = "balanced", chunk_bytes: int) -> JointPlan:
    """The plan for these ranks. ShardMismatch, naming leaf and ranks, where they disagree, or do not hold every element
    of every leaf."""
    union = unite([one.tree for one in said], [one.digest for one in said])
    rows = [replace(one.rows, leaf=numbers[one.rows.leaf]) for one, numbers in zip(said, union.numbers, strict=True)]
    held = gather(rows, leaves=len(union.paths), paths=union.paths)
    layer = layers(union.paths) if strategy == "layer" else None
    found = assign(held, world_size=len(said), strategy=strategy, layer=layer, chunk_bytes=chunk_bytes)
    check_coverage(written(held, found))
    fingerprint = _fingerprint(said, strategy)
    replicas = replica_groups(held)
    head = {"axes": held.whole.shape[1], "fingerprint": fingerprint, "leaves": len(union.paths)}
    shares = [_share(rank, held, found, replicas, {"numbers": union.numbers[rank], "head": encode_json(head)})
              for rank in range(len(said))]  # fmt: skip
    undeclared = np.concatenate([one.rows.placement for one in said]) == PLACEMENTS.index("whole")
    table = _table(held, found, said)
    return JointPlan(fingerprint, union.numbers, table, held, replicas, undeclared & (replicas >= 0), shares)


def _fingerprint(said: Sequence[Said], strategy: str) -> str:
    told = hashlib.sha256(strategy.encode())
    for one in said:
        told.update(f" {one.fingerprint}".encode())
    return told.hexdigest()[:32]


def _share(rank: int, held: Holdings, found: Assignment, replicas: Column, told: dict[str, Any]) -> bytes:
    lines = found.of(rank)
    columns = {
        **told,
        "row": held.row[found.holding[lines]],
        "offsets": found.offsets[lines].reshape(-1),
        "shape": found.shape[lines].reshape(-1),
        "compare": replicas[held.of(rank)] >= 0,
    }
    return encode_columns(columns, _KINDS)


def _table(held: Holdings, found: Assignment, said: Sequence[Said]) -> BoxTable:
    """What is written, by leaf: row i of a rank's index is line i of what it writes."""
    leaf = held.leaf[found.holding]
    first = np.searchsorted(found.rank, np.arange(len(said)))
    row = np.arange(len(found)) - first[found.rank]
    order = np.lexsort((row, found.rank, leaf))
    ndim = held.ndim[leaf[order]]
    axis = np.arange(held.whole.shape[1])
    inside, of_leaf = axis < ndim[:, None], axis < held.ndim[:, None]
    names = sorted({name for one in said for name in one.rows.dtypes})
    code = np.zeros(held.leaves, np.int64)
    places = [np.array([names.index(name) for name in one.rows.dtypes], np.int64) for one in said]
    codes = [place[one.rows.dtype] if len(place) else one.rows.dtype for place, one in zip(places, said, strict=True)]
    code[held.leaf] = np.concatenate(codes) if codes else code
    return BoxTable(
        leaf=leaf[order],
        rank=found.rank[order].astype(np.int64),
        row=row[order],
        origin=found.offsets[order][inside],
        shape=found.shape[order][inside],
        bounds=np.concatenate([np.zeros(1, np.int64), np.cumsum(ndim)]),
        dtypes=names,
        code=code,
        whole=held.whole[of_leaf],
        ends=np.concatenate([np.zeros(1, np.int64), np.cumsum(held.ndim)]),
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is written of a row of the rank's own: all of it, or a box cut out."""

    row: int
    spec: LeafSpec
    cut: tuple[slice, ...] | None


class Share:
    """This rank's part of a plan, for one structure of its own state."""

    def __init__(self, data: bytes, flattened: Flattened, rank: int) -> None:
        """CorruptionError for what is no plan of this structure."""
        name = f"the plan for rank {rank}"
        columns = decode_columns(data, _KINDS, name=name, what=_WHAT)
        head = decode_json(columns, "head", name)
        try:
            axes, leaves = int(head["axes"]), int(head["leaves"])
            self.fingerprint = str(head["fingerprint"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{name} is none: {error}", subject=name) from None
        shared = shared_rows(flattened)
        rows, numbers = columns["row"].tolist(), columns["numbers"].astype(np.int64)
        compare = columns["compare"].tolist()
        if len(numbers) != tree_leaves(flattened) or max(rows, default=-1) >= shared or len(compare) != shared:
            raise CorruptionError(f"{name} is for another structure", subject=name)
        self.own = flattened.fingerprint
        self.leaves = leaves
        self.numbers = numbers
        own = leaf_numbers(flattened)
        pieces = zip(
            rows,
            columns["offsets"].astype(np.int64).reshape(-1, axes).tolist(),
            columns["shape"].astype(np.int64).reshape(-1, axes).tolist(),
            strict=True,
        )
        self._pieces = [_piece(row, flattened.specs[row], offsets, shape) for row, offsets, shape in pieces]
        self._private = range(shared, len(flattened.specs))
        self._leaf = (*numbers[own[rows]].tolist(), *range(leaves, leaves + len(self._private)))
        self.always, self.sometimes = _compared(flattened, compare)
        self._fingerprint = f"{self.fingerprint} {rank} {flattened.fingerprint}"

    def of(self, flattened: Flattened) -> Flattened:
        """What this rank writes of its state: its pieces of shared leaves, then what is its own."""
        sources, device = flattened.sources, flattened.device
        found = [_taken(sources[piece.row], piece) for piece in self._pieces]
        return Flattened(
            tree=flattened.tree,
            private=flattened.private,
            specs=(*(piece.spec for piece in self._pieces), *(flattened.specs[row] for row in self._private)),
            sources=[*found, *(sources[row] for row in self._private)],
            devices=flattened.devices,
            device=[*(device[piece.row] for piece in self._pieces), *(device[row] for row in self._private)],
            fingerprint=self._fingerprint,
            reports=flattened.reports,
            leaf=self._leaf,
            shared=self.leaves,
        )


def _piece(row: int, spec: LeafSpec, offsets: list[int], shape: list[int]) -> _Piece:
    axes, held = len(spec.leaf_shape), box_of(spec)
    box = Box(tuple(offsets[:axes]), tuple(shape[:axes]))
    if box == held:
        return _Piece(row, spec, None)
    begins = [begin - first for begin, first in zip(box.offsets, held.offsets, strict=True)]
    cut = tuple(slice(begin, begin + length) for begin, length in zip(begins, box.shape, strict=True))
    made = replace(spec, shape=box.shape, offsets=box.offsets, whole=spec.leaf_shape)
    return _Piece(row, made, cut)


def _taken(source: Any, piece: _Piece) -> Any:
    if piece.cut is None:
        return source
    # A local tensor may lack leading dimensions of length 1 that its leaf has.
    return source[piece.cut[len(piece.cut) - len(source.shape) :]]


def _compared(flattened: Flattened, several: Sequence[int]) -> tuple[list[int], list[int]]:
    """The rows whose replicas are compared at each save, for nothing has declared them to be equal; and now and
    then."""
    rows = [row for row, one in enumerate(several) if one]
    undeclared = [row for row in rows if flattened.specs[row].placement == "whole"]
    return undeclared, rows
