"""Plans who writes what of a new structure: each rank describes its state, and the coordinator plans for all.

Every rank sends which boxes it holds, and the digest of its tree. Thousands of ranks nearly always have the same tree,
the coordinator's own; for each further one the coordinator asks one rank. It broadcasts the same few words to all; who
writes what lies under a key of each rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tenuto.crashpoints import crashpoint
from tenuto.engine.group.replica_check import ReplicaGroups, compared_rows, replica_groups
from tenuto.engine.group.rounds import RankMessage, SaveRounds, WaitPoints, refusal
from tenuto.engine.save.handle import Save
from tenuto.errors import CorruptionError, RanksDisagree, ShardMismatch
from tenuto.model import canonical_json
from tenuto.model.leaf import Box, LeafSpec, dtype
from tenuto.model.records import Json
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.round import Round
from tenuto.record import record
from tenuto.repo.format.columns import Kind, decode_columns, decode_json, encode_columns, encode_json, narrowest
from tenuto.repo.format.shard_table import BoxTable
from tenuto.sharding.coverage import check_coverage
from tenuto.sharding.holdings import Column, Flags, Holdings, Shards, begins, distinct_boxes, gather, rising, shards
from tenuto.sharding.merge_trees import Union, unite
from tenuto.sharding.write_plan import Assignment, Strategy, assign, layers, written
from tenuto.state.contract import Flattened

# --------------------------------------------------------------------------------------------------
# The description of one rank's state: which boxes of which leaves it holds.

PLACEMENTS: Final = ("whole", "replicated", "box")
"""Of shared rows, in the order of their codes."""
_LAYOUT_KINDS: Final[tuple[Kind, ...]] = (
    ("leaf", "U64", "<u8"),
    ("ndim", "U64", "<u8"),
    ("offsets", "U64", "<u8"),
    ("shape", "U64", "<u8"),
    ("whole", "U64", "<u8"),
    ("dtype", "U16", "<u2"),
    ("placement", "U8", "|u1"),
    ("head", "U8", "|u1"),
)


@record(eq=False)
class RankLayout:
    """`digest`: of the rank's tree, with the plain values of the moment: equal for ranks whose trees are equal."""

    fingerprint: str
    digest: str
    rows: Shards


def shared_rows(flattened: Flattened) -> int:
    """Returns how many rows belong to leaves of the shared tree; they come first."""
    specs = flattened.specs
    return next((row for row, spec in enumerate(specs) if spec.private), len(specs))


def leaf_numbers(flattened: Flattened) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the number of each row's leaf."""
    count = len(flattened.specs)
    return np.arange(count) if flattened.leaf is None else np.asarray(flattened.leaf, np.int64)


def tree_leaves(flattened: Flattened) -> int:
    """Returns how many leaves the shared tree names."""
    return shared_rows(flattened) if flattened.shared is None else flattened.shared


def describe(flattened: Flattened, spelled: bytes) -> bytes:
    """Encodes all but the tree, of which `spelled` is the text: ranks with the same tree need not all send it."""
    specs = flattened.specs[: shared_rows(flattened)]
    found = shards(
        leaf_numbers(flattened)[: len(specs)].tolist(),
        [spec.box for spec in specs],
        [spec.leaf_shape for spec in specs],
        [(spec.dtype, spec.itemsize) for spec in specs],
        [PLACEMENTS.index(spec.placement) for spec in specs],
    )
    return encode_layout(RankLayout(flattened.fingerprint, hashlib.sha256(spelled).hexdigest(), found))


def encode_layout(layout: RankLayout) -> bytes:
    rows = layout.rows
    head = {
        "axes": rows.whole.shape[1],
        "digest": layout.digest,
        "dtypes": list(rows.dtypes),
        "fingerprint": layout.fingerprint,
    }
    columns = {
        "leaf": rows.leaf,
        "ndim": rows.ndim,
        "offsets": rows.offsets.reshape(-1),
        "shape": rows.shape.reshape(-1),
        "whole": rows.whole.reshape(-1),
        "dtype": rows.dtype,
        "placement": rows.placement,
        "head": encode_json(head),
    }
    return encode_columns(columns, _LAYOUT_KINDS, narrow=True)


def read_layout(data: bytes, rank: int) -> RankLayout:
    """Decodes what a rank sent. Raises CorruptionError for what no rank of this version sends."""
    name = f"rank {rank}"
    columns = decode_columns(data, _LAYOUT_KINDS, narrow=True, name=name, what="what a rank says of its state")
    head = decode_json(columns, "head", name)
    try:
        axes, dtypes = int(head["axes"]), [str(one) for one in head["dtypes"]]
        sizes = [dtype(one).size for one in dtypes]
        numbers = {name: columns[name].astype(np.int64) for name, _, _ in _LAYOUT_KINDS[:-1]}
        rows = Shards(
            leaf=numbers["leaf"],
            offsets=numbers["offsets"].reshape(-1, axes),
            shape=numbers["shape"].reshape(-1, axes),
            whole=numbers["whole"].reshape(-1, axes),
            ndim=numbers["ndim"],
            dtype=numbers["dtype"],
            placement=numbers["placement"],
            dtypes=dtypes,
            sizes=sizes,
        )
        return RankLayout(str(head["fingerprint"]), str(head["digest"]), rows)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{name} says what this version does not understand: {error}", subject=name) from None


# --------------------------------------------------------------------------------------------------
# The plan, by the coordinator for all ranks, and each rank's part of it applied to its own state.

PIECE_BYTES: Final = 16 << 20
"""The largest part of a tensor by strategy "size"."""
_KINDS: Final[tuple[Kind, ...]] = (
    ("row", "U64", "<u8"),
    ("offsets", "U64", "<u8"),
    ("shape", "U64", "<u8"),
    ("numbers", "U64", "<u8"),
    ("compare", "U64", "<u8"),
)
_IN_HOME: Final[tuple[Kind, ...]] = (("in_home", "U64", "<u8"),)
"""Of plans where some rank writes for the home."""


@record(eq=False)
class GroupPlan:
    """A planned structure, on the coordinator.

    head: what is broadcast to all ranks.
    numbers: by rank, the number in the united tree of each leaf of the rank's own tree.
    undeclared: for each line of `held`, whether other ranks hold the same without having declared it as replicated.
    """

    head: Mapping[str, Any]
    numbers: Sequence[Column]
    table: BoxTable
    held: Holdings
    replicas: ReplicaGroups
    undeclared: Flags

    def compared(self, everything: bool) -> Column:
        """Returns the lines of `held` that are digested at a save."""
        return np.flatnonzero(self.replicas.group >= 0 if everything else self.undeclared)


def plan_group(
    layouts: Sequence[RankLayout],
    trees: Mapping[str, Json],
    *,
    strategy: Strategy = "balanced",
    chunk_bytes: int,
    nodes: Column | None = None,
) -> tuple[GroupPlan, list[bytes]]:
    """Returns the plan for these ranks, and each rank's own part of it, encoded.

    trees: by digest, those of all ranks.
    nodes: as `assign` takes them.

    Raises ShardMismatch, naming leaf and ranks, where they disagree, or do not hold every element of every leaf.
    """
    digests = [one.digest for one in layouts]
    union = unite([trees[digest] for digest in digests], digests)
    rows = [
        one.rows if numbers is None else replace(one.rows, leaf=numbers[one.rows.leaf])
        for one, numbers in zip(layouts, _renumbered(union), strict=True)
    ]
    held = gather(rows, leaves=len(union.paths), paths=union.paths)
    found = distinct_boxes(held)
    layer = layers(union.paths) if strategy == "layer" else None
    size = PIECE_BYTES if strategy == "size" else None
    made = assign(
        held,
        world_size=len(layouts),
        strategy=strategy,
        layer=layer,
        size=size,
        chunk_bytes=chunk_bytes,
        nodes=nodes,
        found=found,
    )
    boxes = written(held, made)
    check_coverage(boxes)
    replicas = replica_groups(held, found)
    undeclared = np.concatenate([one.rows.placement for one in layouts]) == PLACEMENTS.index("whole")
    head = {"axes": held.whole.shape[1], "fingerprint": _fingerprint(layouts, strategy), "leaves": len(union.paths)}
    table = _table(held, boxes, layouts)
    plan = GroupPlan(head, union.numbers, table, held, replicas, undeclared & (replicas.group >= 0))
    return plan, _shares(held, made, replicas, _renumbered(union))


def _renumbered(union: Union) -> list[Column | None]:
    """Returns, by rank, the numbers of its leaves in the united tree; None where they are those of its own tree."""
    known: dict[int, Column | None] = {}
    for one in union.numbers:
        if id(one) not in known:
            known[id(one)] = None if np.array_equal(one, np.arange(len(one))) else one
    return [known[id(one)] for one in union.numbers]


def _fingerprint(layouts: Sequence[RankLayout], strategy: str) -> str:
    hashed = hashlib.sha256(strategy.encode())
    for one in layouts:
        hashed.update(f" {one.fingerprint}".encode())
    return hashed.hexdigest()[:32]


def _shares(held: Holdings, made: Assignment, replicas: ReplicaGroups, numbers: Sequence[Column | None]) -> list[bytes]:
    """Encodes each rank's part. Columns are as narrow as those of all ranks allow, so that all have one form."""
    ranks = np.arange(len(numbers) + 1)
    lines, rows = (np.searchsorted(column, ranks.astype(column.dtype)).tolist() for column in (made.rank, held.rank))
    row, offsets, shape = held.row[made.holding], made.offsets, made.shape
    compare, nothing, highest = replicas.set + 1, np.zeros(0, np.int64), np.array([held.leaves])
    every = {"row": row, "offsets": offsets, "shape": shape, "numbers": highest, "compare": compare}
    in_home = bool(made.in_home.any())
    if in_home:
        every["in_home"] = np.diff(lines).max(keepdims=True)
    kinds, found = narrowest(every, (*_IN_HOME, *_KINDS) if in_home else _KINDS), []
    for rank, own in enumerate(numbers):
        mine = slice(lines[rank], lines[rank + 1])
        columns = {
            "row": row[mine],
            "offsets": offsets[mine].reshape(-1),
            "shape": shape[mine].reshape(-1),
            "numbers": nothing if own is None else own,
            "compare": compare[rows[rank] : rows[rank + 1]],
        }
        if in_home:
            columns["in_home"] = np.flatnonzero(made.in_home[mine])
        found.append(encode_columns(columns, kinds))
    return found


def _table(held: Holdings, boxes: Holdings, layouts: Sequence[RankLayout]) -> BoxTable:
    """Returns what is written, by leaf: row i of a rank's index is line i of what it writes."""
    order = rising(boxes.leaf)  # ranks and rows stay in order
    ndim = held.ndim[boxes.leaf[order]]
    axis = np.arange(held.whole.shape[1])
    inside, of_leaf = axis < ndim[:, None], axis < held.ndim[:, None]
    names = sorted({name for one in layouts for name in one.rows.dtypes})
    code = np.zeros(held.leaves, np.int64)
    places = [np.array([names.index(name) for name in one.rows.dtypes], np.int64) for one in layouts]
    codes = [
        place[one.rows.dtype] if len(place) else one.rows.dtype for place, one in zip(places, layouts, strict=True)
    ]
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


@record
class _Piece:
    """The part of one of the rank's own rows that it writes: all of it (`cut` is None), or a box."""

    row: int
    spec: LeafSpec
    cut: tuple[slice, ...] | None


class WriteAssignment:
    """This rank's part of a plan, for one structure of its own state."""

    def __init__(self, head: Mapping[str, Any], data: bytes, flattened: Flattened, rank: int) -> None:
        """`head`: what was broadcast to all ranks; `data`: to this one. Raises CorruptionError for what is no plan of
        this structure."""
        name = f"the plan for rank {rank}"
        columns = decode_columns(data, _KINDS, more=_IN_HOME, narrow=True, name=name, what="a plan")
        try:
            axes, leaves = int(head["axes"]), int(head["leaves"])
            self.fingerprint = str(head["fingerprint"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{name} is not a plan: {error}", subject=name) from None
        shared = shared_rows(flattened)
        rows, numbers = columns["row"].tolist(), columns["numbers"].astype(np.int64)
        compare = columns["compare"].astype(np.int64)
        in_home = columns.get("in_home", compare[:0]).tolist()
        if not len(numbers):
            numbers = np.arange(tree_leaves(flattened))
        if (
            len(numbers) != tree_leaves(flattened)
            or max(rows, default=-1) >= shared
            or len(compare) != shared
            or max(in_home, default=-1) >= len(rows)
        ):
            raise CorruptionError(f"{name} is for another structure", subject=name)
        self._in_home = frozenset(in_home)
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
        """Returns what this rank writes of its state: its pieces of shared leaves, then its private leaves."""
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
            in_home=self._in_home,
        )


def _piece(row: int, spec: LeafSpec, offsets: list[int], shape: list[int]) -> _Piece:
    axes, own = len(spec.leaf_shape), spec.box
    box = Box(tuple(offsets[:axes]), tuple(shape[:axes]))
    if box == own:
        return _Piece(row, spec, None)
    begins = [begin - first for begin, first in zip(box.offsets, own.offsets, strict=True)]
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
    def __init__(
        self,
        agreement: Agreement,
        rounds: SaveRounds,
        strategy: Strategy,
        chunk_bytes: int,
        nodes: Column | None = None,
    ) -> None:
        """`nodes`: as `assign` takes them; the coordinator's count."""
        self._agreement = agreement
        self._rounds = rounds
        self._strategy: Strategy = strategy
        self._chunk_bytes = chunk_bytes
        self._nodes = nodes
        self._layouts: list[RankLayout] = []
        self.plan: GroupPlan | None = None
        """Of the structure that was planned last, on the coordinator."""

    def take(self, round: Round, flattened: Flattened, save: Save) -> WaitPoints[WriteAssignment]:
        """Returns this rank's part of the plan. Raises RankFailed, RanksMissing, RanksDisagree and ShardMismatch."""
        spelled = canonical_json.dumps(flattened.tree)
        with round:
            round.send(RankMessage(NEW, {"step": save.step}, describe(flattened, spelled)).encode())
            crashpoint("structure told, plan not yet heard")
            yield
            if self._agreement.is_coordinator:
                self._receive_layouts(round, flattened, save)
            message = self._rounds.received(round, save)
            answer = round.own_reply() if message.kind == PLAN else b""
        if message.kind == TREES:
            asked = self._agreement.rank in message.head["ranks"]
            with self._agreement.round("save") as second:
                second.send(RankMessage(TREE, {"step": save.step}, spelled if asked else b"").encode())
                yield
                if self._agreement.is_coordinator:
                    self._receive_trees(second, flattened, save)
                message = self._rounds.received(second, save)
                answer = second.own_reply()
        return WriteAssignment(message.head, answer, flattened, self._agreement.rank)

    def _receive_layouts(self, round: Round, flattened: Flattened, save: Save) -> None:
        """Reads, on the coordinator, what all ranks hold; broadcasts the plan, or which ranks must send their trees."""
        posts = self._rounds.posts(round, save)
        if not self._rounds.alike(round, posts, NEW):
            return
        try:
            self._layouts = [read_layout(post.data, rank) for rank, post in enumerate(posts)]
        except ShardMismatch as error:
            round.broadcast(refusal(error, save.step).encode())
            return
        others = first_of_each([one.digest for one in self._layouts])[1:]
        if others:
            round.broadcast(RankMessage(TREES, {"ranks": others}, b"").encode())
        else:
            self._broadcast_plan(round, save, {self._layouts[0].digest: flattened.tree})

    def _receive_trees(self, round: Round, flattened: Flattened, save: Save) -> None:
        posts = self._rounds.posts(round, save)
        if self._rounds.alike(round, posts, TREE):
            trees = {self._layouts[0].digest: flattened.tree}
            trees |= {one.digest: canonical_json.loads(post.data)
                      for one, post in zip(self._layouts, posts, strict=True) if post.data}  # fmt: skip
            self._broadcast_plan(round, save, trees)

    def _broadcast_plan(self, round: Round, save: Save, trees: dict[str, Json]) -> None:
        layouts, self._layouts = self._layouts, []
        try:
            plan, shares = plan_group(
                layouts, trees, strategy=self._strategy, chunk_bytes=self._chunk_bytes, nodes=self._nodes
            )
        except (RanksDisagree, ShardMismatch) as error:
            round.broadcast(refusal(error, save.step).encode())
            return
        self.plan = plan
        round.broadcast(RankMessage(PLAN, plan.head, b"").encode(), shares)


def first_of_each(marks: Sequence[str]) -> list[int]:
    """Returns the lowest rank of each different mark, ascending."""
    found: dict[str, int] = {}
    for rank, mark in enumerate(marks):
        found.setdefault(mark, rank)
    return list(found.values())
