"""P11: planning who writes what for a million shards over 1,000 to 16,000 ranks.

    python benchmarks/p11_planning.py

A first plan is all that the coordinator does when a structure is new: what the ranks have posted is decoded, put
together and checked, every distinct box is given to one rank, it is proved that every item is written exactly once, and
what each rank is told of it is encoded. (`make scale-campaign` has the rest of a save, and bytes.) Tensors are
4096 x 1024, in three layouts: rows over all ranks; rows and columns over a mesh with 8 columns; the same with every box
on two ranks. A cached plan is what one of 1,000 ranks does with it at a later save of the same 1,000 leaves, by the
code of a save and with nobody answering: it knows the structure again, takes its part of the plan and lays it out.
Looking through the state, which comes before that, is timed beside; both are means of some saves. Growth is the slope
of a least-squares line through the logarithms of sizes and times, over five sizes, for the leaves (at 1,000 ranks) and
for the ranks. Planning a restore onto half as many ranks is timed beside.

Every plan that is timed is looked at: its bytes are those of the state, and the largest share is told.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from harness import Contender, Result, arguments, compare, median_interval, note, report, workplace

import tenuto
from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.group.planning import GroupPlan, RankLayout, WriteAssignment, encode_layout, plan_group, read_layout
from tenuto.engine.save.handle import Save
from tenuto.engine.staging.plan import SavePlan, StagingBuffer
from tenuto.engine.staging.pool import BudgetedArena
from tenuto.events import Emitter
from tenuto.model.ids import CheckpointId
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.cleanup import StaleRounds
from tenuto.ranks.contract import Settings
from tenuto.ranks.kv.in_process import InProcessKVStore
from tenuto.ranks.session import Session
from tenuto.repo.format.shard_table import saved_boxes
from tenuto.repo.repository import Repo
from tenuto.sharding.coverage import check_coverage
from tenuto.sharding.holdings import Holdings, Shards, gather
from tenuto.sharding.reshard import reshard
from tenuto.sharding.write_plan import CHUNK_BYTES, Assignment, assign, written
from tenuto.state.contract import Flattened
from tenuto.state.encode.flattener import Flattener
from tenuto.store.memory import MemoryStore

WHOLE = (4096, 1024)
ITEM_BYTES = 4
ENTRIES = 1_000_000
RANKS = (1000, 2000, 4000, 8000, 16_000)
LEAVES = (62, 125, 250, 500, 1000)
FIRST_MS = 5000.0
CACHED_MS = 1.0
SAVES = 20
"""Of a known structure, in a round."""
RUN = "main"
EXPONENT = 1.05
JUDGED = "rows and columns"


@dataclass(frozen=True)
class Mesh:
    name: str
    columns: int
    copies: int

    def said(self, ranks: int, leaves: int) -> list[Shards]:
        """What each rank says of itself, which it works out beside all others and is not timed."""
        rows = ranks // self.columns // self.copies
        down, across = (
            np.arange(count + 1) * length // count for count, length in zip((rows, self.columns), WHOLE, strict=True)
        )
        leaf, zero = np.arange(leaves), np.zeros(leaves, np.int64)
        whole, ndim = np.tile(np.array([WHOLE]), (leaves, 1)), np.full(leaves, 2)
        found = []
        for rank in range(ranks):
            row, column = rank // self.columns % rows, rank % self.columns
            offsets = np.array([[down[row], across[column]]])
            shape = np.array([[down[row + 1], across[column + 1]]]) - offsets
            some = (np.tile(offsets, (leaves, 1)), np.tile(shape, (leaves, 1)), whole, ndim, zero, zero)
            found.append(Shards(leaf, *some, dtypes=["float32"], sizes=[ITEM_BYTES]))
        return found


MESHES = (Mesh("rows", 1, 1), Mesh(JUDGED, 8, 1), Mesh("rows and columns, twice", 8, 2))


def posted(said: Sequence[Shards], leaves: int) -> tuple[list[bytes], dict[str, Any]]:
    """What the ranks post, and the tree that all of them have, by its digest."""
    nodes = [[f"layers.{leaf}.weight", {"!": "leaf", "n": leaf, "as": "torch"}] for leaf in range(leaves)]
    posts = [encode_layout(RankLayout(f"{rank:032x}", "tree", rows)) for rank, rows in enumerate(said)]
    return posts, {"tree": {"!": "dict", "i": nodes}}


def first_plan(posts: Sequence[bytes], trees: Mapping[str, Any]) -> tuple[GroupPlan, list[bytes]]:
    said = [read_layout(post, rank) for rank, post in enumerate(posts)]
    return plan_group(said, trees, chunk_bytes=CHUNK_BYTES)


def plan(said: Sequence[Shards], leaves: int) -> tuple[Holdings, Assignment, Holdings]:
    held = gather(said, leaves=leaves)
    made = assign(held, world_size=len(said))
    boxes = written(held, made)
    check_coverage(boxes)
    return held, made, boxes


class Sizes:
    """One contender for each size of each layout."""

    def __init__(self) -> None:
        self.contenders: list[Contender] = []
        self.shares: dict[str, float] = {}
        self.entries: dict[str, int] = {}

    def add(self, mesh: Mesh, ranks: int, leaves: int) -> str:
        name = f"first plan, {mesh.name}: {leaves} leaves, {ranks} ranks"
        if name in self.entries:
            return name
        posts, trees = posted(mesh.said(ranks, leaves), leaves)

        def measure() -> float:
            begun = time.perf_counter()
            made, told = first_plan(posts, trees)
            seconds = time.perf_counter() - begun
            boxes = saved_boxes(made.table, made.held.paths)
            nbytes = boxes.nbytes()
            assert len(told) == ranks and int(nbytes.sum()) == leaves * int(np.prod(WHOLE)) * ITEM_BYTES
            loads = np.zeros(ranks, np.int64)
            np.add.at(loads, boxes.rank, nbytes)
            self.shares[name] = round(float(loads.max() / loads.mean()), 3)
            return seconds

        self.contenders.append(Contender(name, measure))
        self.entries[name] = ranks * leaves
        return name


class Known:
    """One rank of a job whose structure is planned: it saves the same state again and again."""

    def __init__(self, mesh: Mesh, ranks: int, leaves: int) -> None:
        rank, said = ranks // 2, mesh.said(ranks, leaves)
        plan, shares = first_plan(*posted(said, leaves))
        self._flattener = Flattener(state_of(said[rank]))
        flattened = self.look()
        session = Session("f" * 32, rank, ranks, InProcessKVStore(), Settings())
        repo = Repo.create_or_open(MemoryStore("p11"))
        self._commit = GroupCommit(repo, Agreement(session, StaleRounds(session)))
        self._commit._share = WriteAssignment(plan.head, shares[rank], flattened, rank)
        holder = BudgetedArena(repo.id, RUN, rank, budget=None, lasting=False)
        self._buffer = StagingBuffer(holder, CHUNK_BYTES, Emitter(), rank=rank)
        self._step = 0
        self._made, rows = self.take(), saved_boxes(plan.table, plan.held.paths).rank == rank
        assert len(self._made.rows) == int(rows.sum()) == leaves

    def look(self) -> Flattened:
        """Through the state, for what has changed."""
        return self._flattener.flatten()

    def take(self) -> SavePlan:
        return self._taken(self.look())[0]

    def _taken(self, flattened: Flattened) -> tuple[SavePlan, float]:
        """What is saved of it, and how long that took to know."""
        self._step += 1
        save = Save(CheckpointId(RUN, 1, self._step), "")
        begun = time.perf_counter()
        found = self._buffer.prepare(self._commit.take(flattened, save))
        seconds = time.perf_counter() - begun
        self._commit._saves.pop(save.save_id).round.end()  # nobody writes it
        return found, seconds

    def looking(self) -> float:
        begun = time.perf_counter()
        for _ in range(SAVES):
            self.look()
        seconds = time.perf_counter() - begun
        assert self._flattener.full_walks == 1
        return seconds / SAVES

    def taking(self) -> float:
        flattened, spent = self.look(), 0.0
        for _ in range(SAVES):
            found, seconds = self._taken(flattened)
            assert found is self._made, "planned anew"
            spent += seconds
        return spent / SAVES


def state_of(held: Shards) -> dict[str, Any]:
    """The state of a rank that holds this."""
    boxes = zip(held.leaf.tolist(), held.shape.tolist(), held.offsets.tolist(), strict=True)
    return {
        f"layers.{leaf}.weight": tenuto.shard(torch.zeros(shape), whole=WHOLE, offsets=tuple(offsets))
        for leaf, shape, offsets in boxes
    }


def cached(mesh: Mesh, ranks: int, leaves: int) -> list[Contender]:
    """What a rank does at a save of a structure that is known: with the plan, and before that."""
    known = Known(mesh, ranks, leaves)
    return [
        Contender(f"cached plan of one rank, {mesh.name}", known.taking),
        Contender(f"look through the state of one rank, {mesh.name}", known.looking),
    ]


def restoring(mesh: Mesh, ranks: int, leaves: int) -> Contender:
    """From `ranks` to half as many."""
    _, _, saved = plan(mesh.said(ranks, leaves), leaves)
    wanted = gather(mesh.said(ranks // 2, leaves), leaves=leaves)

    def measure() -> float:
        begun = time.perf_counter()
        found = reshard(saved, wanted)
        seconds = time.perf_counter() - begun
        assert int(np.prod(found.shape, axis=1).sum()) * ITEM_BYTES == int(wanted.nbytes().sum())
        return seconds

    return Contender(f"plan of a restore onto half the ranks, {mesh.name}", measure)


def exponent(result: Result, names: Sequence[str], sizes: Sequence[int]) -> tuple[float, float, float]:
    """The slope of each round's own line: median and its interval."""
    seconds = np.array([result.seconds[name] for name in names])
    slopes = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
    return median_interval(slopes.tolist())


def milliseconds(result: Result, name: str) -> tuple[float, float, float]:
    return median_interval([one * 1e3 for one in result.seconds[name]])


def main() -> None:
    options = arguments(
        __doc__ or "", leaves=LEAVES[-1], gib=LEAVES[-1] * np.prod(WHOLE) * ITEM_BYTES / 2**30, rounds=7
    )
    sizes = Sizes()
    full = [sizes.add(mesh, ranks, ENTRIES // ranks) for mesh in MESHES for ranks in (RANKS[0], RANKS[2], RANKS[-1])]
    judged = next(mesh for mesh in MESHES if mesh.name == JUDGED)
    in_leaves = [sizes.add(judged, RANKS[0], leaves) for leaves in LEAVES]
    in_ranks = [sizes.add(judged, ranks, LEAVES[0]) for ranks in RANKS]
    known = cached(judged, RANKS[0], ENTRIES // RANKS[0])
    with workplace(options) as place:
        contenders = [*sizes.contenders, *known, restoring(judged, RANKS[-1], ENTRIES // RANKS[-1])]
        seconds = compare(contenders, rounds=options.rounds, own=full[0], note=note)
        result = Result("p11_planning", seconds, int(options.gib * 2**30))
        result.facts = {"shard entries": sizes.entries, "largest share over the mean": sizes.shares}
        for name in full:
            result.judge_value(f"{name} <= 5 s", milliseconds(result, name), at_most=FIRST_MS, unit="ms")
        name = known[0].name
        result.judge_value(f"{name} <= 1 ms", milliseconds(result, name), at_most=CACHED_MS, unit="ms")
        for what, names, counts in (("leaves", in_leaves, LEAVES), ("ranks", in_ranks, RANKS)):
            found = exponent(result, names, counts)
            result.judge_value(f"growth of the first plan in {what} <= {EXPONENT}", found, at_most=EXPONENT)
        report(result, options, place)


if __name__ == "__main__":
    main()
