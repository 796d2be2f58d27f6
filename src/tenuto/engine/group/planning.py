"""The plan for a structure that is new: what the ranks say of it, and what each is told.

Every rank says which boxes it holds, and the digest of its tree. Thousands of ranks nearly always have one and the same
tree, the coordinator's own; of further ones the coordinator asks one rank each. What it announces is the same few words
for all; who writes what, each rank reads for itself alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tenuto.crashpoints import crashpoint
from tenuto.engine.group.rank_layout import (
    PLACEMENTS,
    RankLayout,
    box_of,
    describe,
    leaf_numbers,
    read_layout,
    shared_rows,
    tree_leaves,
)
from tenuto.engine.group.replica_check import ReplicaGroups, compared_rows, replica_groups
from tenuto.engine.group.rounds import RankMessage, SaveRounds, WaitPoints, refusal
from tenuto.engine.save.handle import Save
from tenuto.errors import CorruptionError, RanksDisagree, ShardMismatch
from tenuto.model import canonical_json
from tenuto.model.leaf import Box, LeafSpec
from tenuto.model.records import Json
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.round import Round
from tenuto.repo.format.columns import Kind, decode_columns, encode_columns, narrowest
from tenuto.repo.format.shard_table import BoxTable
from tenuto.sharding.coverage import check_coverage
from tenuto.sharding.holdings import Column, Flags, Holdings, begins, distinct_boxes, gather, rising
from tenuto.sharding.merge_trees import Union, unite
from tenuto.sharding.write_plan import Assignment, Strategy, assign, layers, written
from tenuto.state.contract import Flattened

# --------------------------------------------------------------------------------------------------
# Who writes what: planned by the coordinator for all ranks, and each rank's part of it applied to its own state.

PIECE_BYTES: Final = 16 << 20
"""By strategy "size" no part of a tensor is larger."""
_WHAT: Final = "a plan"
_KINDS: Final[tuple[Kind, ...]] = (
    ("row", "U64", "<u8"),
    ("offsets", "U64", "<u8"),
    ("shape", "U64", "<u8"),
    ("numbers", "U64", "<u8"),
    ("compare", "U64", "<u8"),
)


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """What the coordinator keeps of a planned structure. `numbers[rank]`: the leaves' in the tree of all, by those of
    the rank's own. `undeclared`: for each line of `held` whether nothing but its being there says that it is the same
    on the ranks that hold it too. `told`: what is announced to all."""

    told: Mapping[str, Any]
    numbers: Sequence[Column]
    table: BoxTable
    held: Holdings
    replicas: ReplicaGroups
    undeclared: Flags

    def compared(self, everything: bool) -> Column:
        """The lines of `held` that are digested at a save."""
        return np.flatnonzero(self.replicas.group >= 0 if everything else self.undeclared)


def plan_group(
    said: Sequence[RankLayout], trees: Mapping[str, Json], *, strategy: Strategy = "balanced", chunk_bytes: int
) -> tuple[GroupPlan, list[bytes]]:
    """The plan for these ranks, and what each is told of it for itself; `trees` by the digests that ranks have said.
    ShardMismatch, naming leaf and ranks, where they disagree, or do not hold every element of every leaf."""
    digests = [one.digest for one in said]
    union = unite([trees[digest] for digest in digests], digests)
    rows = [
        one.rows if numbers is None else replace(one.rows, leaf=numbers[one.rows.leaf])
        for one, numbers in zip(said, _renumbered(union), strict=True)
    ]
    held = gather(rows, leaves=len(union.paths), paths=union.paths)
    found = distinct_boxes(held)
    layer = layers(union.paths) if strategy == "layer" else None
    size = PIECE_BYTES if strategy == "size" else None
    made = assign(
        held, world_size=len(said), strategy=strategy, layer=layer, size=size, chunk_bytes=chunk_bytes, found=found
    )
    boxes = written(held, made)
    check_coverage(boxes)
    replicas = replica_groups(held, found)
    undeclared = np.concatenate([one.rows.placement for one in said]) == PLACEMENTS.index("whole")
    told = {"axes": held.whole.shape[1], "fingerprint": _fingerprint(said, strategy), "leaves": len(union.paths)}
    table = _table(held, boxes, said)
    plan = GroupPlan(told, union.numbers, table, held, replicas, undeclared & (replicas.group >= 0))
    return plan, _shares(held, made, replicas, _renumbered(union))


def _renumbered(union: Union) -> list[Column | None]:
    """By rank the numbers of its leaves in the tree of all; None where they are those of its own tree."""
    known: dict[int, Column | None] = {}
    for one in union.numbers:
        if id(one) not in known:
            known[id(one)] = None if np.array_equal(one, np.arange(len(one))) else one
    return [known[id(one)] for one in union.numbers]


def _fingerprint(said: Sequence[RankLayout], strategy: str) -> str:
    told = hashlib.sha256(strategy.encode())
    for one in said:
        told.update(f" {one.fingerprint}".encode())
    return told.hexdigest()[:32]


def _shares(held: Holdings, made: Assignment, replicas: ReplicaGroups, numbers: Sequence[Column | None]) -> list[bytes]:
    """What each rank is told. Columns are as narrow as all ranks' allow: so all have one form."""
    ranks = np.arange(len(numbers) + 1)
    lines, rows = (np.searchsorted(column, ranks.astype(column.dtype)).tolist() for column in (made.rank, held.rank))
    row, offsets, shape = held.row[made.holding], made.offsets, made.shape
    compare, nothing, highest = replicas.set + 1, np.zeros(0, np.int64), np.array([held.leaves])
    every = {"row": row, "offsets": offsets, "shape": shape, "numbers": highest, "compare": compare}
    kinds, found = narrowest(every, _KINDS), []
    for rank, own in enumerate(numbers):
        mine = slice(lines[rank], lines[rank + 1])
        columns = {
            "row": row[mine],
            "offsets": offsets[mine].reshape(-1),
            "shape": shape[mine].reshape(-1),
            "numbers": nothing if own is None else own,
            "compare": compare[rows[rank] : rows[rank + 1]],
        }
        found.append(encode_columns(columns, kinds))
    return found


def _table(held: Holdings, boxes: Holdings, said: Sequence[RankLayout]) -> BoxTable:
    """What is written, by leaf: row i of a rank's index is line i of what it writes."""
    order = rising(boxes.leaf)  # ranks and rows stay in order
    ndim = held.ndim[boxes.leaf[order]]
    axis = np.arange(held.whole.shape[1])
    inside, of_leaf = axis < ndim[:, None], axis < held.ndim[:, None]
    names = sorted({name for one in said for name in one.rows.dtypes})
    code = np.zeros(held.leaves, np.int64)
    places = [np.array([names.index(name) for name in one.rows.dtypes], np.int64) for one in said]
    codes = [place[one.rows.dtype] if len(place) else one.rows.dtype for place, one in zip(places, said, strict=True)]
    code[held.leaf] = np.concatenate(codes) if codes else code
    return BoxTable(
        leaf=boxes.leaf[order],
        rank=boxes.rank[order].astype(np.int64),
        row=boxes.row[order],
        origin=boxes.offsets[order][inside],
        shape=boxes.shape[order][inside],
        bounds=begins(ndim),
        dtypes=names,
        code=code,
        whole=held.whole[of_leaf],
        ends=begins(held.ndim),
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is written of a row of the rank's own: all of it, or a box cut out."""

    row: int
    spec: LeafSpec
    cut: tuple[slice, ...] | None


class WriteAssignment:
    """This rank's part of a plan, for one structure of its own state."""

    def __init__(self, head: Mapping[str, Any], data: bytes, flattened: Flattened, rank: int) -> None:
        """`head`: what is announced to all, `data`: to this rank. CorruptionError for what is no plan of this
        structure."""
        name = f"the plan for rank {rank}"
        columns = decode_columns(data, _KINDS, narrow=True, name=name, what=_WHAT)
        try:
            axes, leaves = int(head["axes"]), int(head["leaves"])
            self.fingerprint = str(head["fingerprint"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{name} is none: {error}", subject=name) from None
        shared = shared_rows(flattened)
        rows, numbers = columns["row"].tolist(), columns["numbers"].astype(np.int64)
        compare = columns["compare"].astype(np.int64)
        if not len(numbers):
            numbers = np.arange(tree_leaves(flattened))
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
        self._specs = (*(piece.spec for piece in self._pieces), *(flattened.specs[row] for row in self._private))
        self._leaf = (*numbers[own[rows]].tolist(), *range(leaves, leaves + len(self._private)))
        self.always, self.sometimes = compared_rows(flattened, numbers[own[:shared]], compare)
        self._fingerprint = f"{self.fingerprint} {rank} {flattened.fingerprint}"

    def of(self, flattened: Flattened) -> Flattened:
        """What this rank writes of its state: its pieces of shared leaves, then what is its own."""
        sources, device = flattened.sources, flattened.device
        found = [_taken(sources[piece.row], piece) for piece in self._pieces]
        return Flattened(
            tree=flattened.tree,
            private=flattened.private,
            specs=self._specs,
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
    if isinstance(source, bytes):
        source = np.frombuffer(source, np.uint8)  # the leaf of long bytes: a cut has to be of its items
    # A local tensor may lack leading dimensions of length 1 that its leaf has.
    return source[piece.cut[len(piece.cut) - len(source.shape) :]]


NEW, TREES, TREE, PLAN = "new", "trees", "tree", "plan"
PLANNING: Final = "planning who writes what"


class GroupPlanner:
    """`plan`: on the coordinator, of the structure that was planned last."""

    def __init__(self, agreement: Agreement, rounds: SaveRounds, strategy: Strategy, chunk_bytes: int) -> None:
        self._agreement = agreement
        self._rounds = rounds
        self._strategy: Strategy = strategy
        self._chunk_bytes = chunk_bytes
        self._said: list[RankLayout] = []
        self.plan: GroupPlan | None = None

    def take(self, round: Round, flattened: Flattened, save: Save) -> WaitPoints[WriteAssignment]:
        """This rank's part of the plan. Raises RankFailed, RanksMissing, RanksDisagree and ShardMismatch."""
        spelled = canonical_json.dumps(flattened.tree)
        with round:
            round.send(RankMessage(NEW, {"step": save.step}, describe(flattened, spelled)).encode())
            crashpoint("structure told, plan not yet heard")
            yield
            if self._agreement.is_coordinator:
                self._learn(round, flattened, save)
            heard = self._rounds.received(round, save)
            answer = round.own_reply() if heard.kind == PLAN else b""
        if heard.kind == TREES:
            asked = self._agreement.rank in heard.head["ranks"]
            with self._agreement.round("save") as second:
                second.send(RankMessage(TREE, {"step": save.step}, spelled if asked else b"").encode())
                yield
                if self._agreement.is_coordinator:
                    self._learn_trees(second, flattened, save)
                heard = self._rounds.received(second, save)
                answer = second.own_reply()
        return WriteAssignment(heard.head, answer, flattened, self._agreement.rank)

    def _learn(self, round: Round, flattened: Flattened, save: Save) -> None:
        """On the coordinator: what all ranks hold; the plan, or whose trees are asked for."""
        posts = self._rounds.posts(round, save)
        if not self._rounds.alike(round, posts, NEW):
            return
        try:
            self._said = [read_layout(post.data, rank) for rank, post in enumerate(posts)]
        except ShardMismatch as error:
            round.broadcast(refusal(error, save.step).encode())
            return
        others = first_of_each([one.digest for one in self._said])[1:]
        if others:
            round.broadcast(RankMessage(TREES, {"ranks": others}, b"").encode())
        else:
            self._announce(round, save, {self._said[0].digest: flattened.tree})

    def _learn_trees(self, round: Round, flattened: Flattened, save: Save) -> None:
        posts = self._rounds.posts(round, save)
        if self._rounds.alike(round, posts, TREE):
            trees = {self._said[0].digest: flattened.tree}
            trees |= {one.digest: canonical_json.loads(post.data)
                      for one, post in zip(self._said, posts, strict=True) if post.data}  # fmt: skip
            self._announce(round, save, trees)

    def _announce(self, round: Round, save: Save, trees: dict[str, Json]) -> None:
        said, self._said = self._said, []
        try:
            plan, shares = plan_group(said, trees, strategy=self._strategy, chunk_bytes=self._chunk_bytes)
        except (RanksDisagree, ShardMismatch) as error:
            round.broadcast(refusal(error, save.step).encode())
            return
        self.plan = plan
        round.broadcast(RankMessage(PLAN, plan.told, b"").encode(), shares)


def first_of_each(marks: Sequence[str]) -> list[int]:
    """The lowest rank of each different mark, ascending."""
    found: dict[str, int] = {}
    for rank, mark in enumerate(marks):
        found.setdefault(mark, rank)
    return list(found.values())
