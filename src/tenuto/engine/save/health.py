"""What a save finds of the values that it writes: statistics of each leaf, and which have become NaN or infinite.

Each block is looked at right after it was digested, while the processor still has it. Whether anything is not finite is
found of every block. Norm and extremes take longer: of them only as many blocks are looked at as a share of the save's
time allows, and first those of leaves that the save before has left out, so that each leaf is at least in every second
save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tenuto.codec.chunk_map import chunk_sizes
from tenuto.codec.statistics import BLOCK_BYTES, examiner_of, floats_of, many
from tenuto.codec.statistics import kind_of as kind_of_numbers
from tenuto.errors import CheckpointNotFound, CorruptionError, StoreError
from tenuto.model.health import SHOWN, Health
from tenuto.model.leaf import dtype, lineage
from tenuto.repo.format.leaf_statistics import RowStatistics, decode
from tenuto.state.tree import kind_of, walk

if TYPE_CHECKING:
    from tenuto.engine.save.job import Job
    from tenuto.engine.staging.plan import SavePlan
    from tenuto.model.ids import CheckpointId
    from tenuto.model.records import Index
    from tenuto.repo.repository import Repo

Array = np.ndarray[Any, Any]
SHARE: Final = 0.25
"""The part of a save's time, since its first chunk, that norms and extremes may take."""
WAITED_SHARE: Final = 0.05
"""The same of a save that training waits for."""
FREE_BYTES: Final = 4 << 20
"""Bytes of a save that are looked at in full, whatever the time."""
SHORT_BYTES: Final = 8 << 10
"""Leaves up to this length are looked at several at once."""
RANKS: Final = 16
"""The most ranks of a parent whose indexes are read to find what was not finite before."""


class _Leaves:
    """What is the same at every save of one structure. `leaf`: of each chunk, in the order of the image; `names` of
    dtypes, `elements` and whether a leaf is `short`: by leaf."""

    def __init__(self, plan: SavePlan) -> None:
        chunks, rows, length = plan.chunks, plan.rows, plan.layout.length
        self.fingerprint = plan.fingerprint
        self.leaf = np.searchsorted(chunks.start, chunks.row, side="right") - 1
        self.names = [rows.dtypes[code] for code in rows.code.tolist()]
        self.short = (length <= min(SHORT_BYTES, plan.chunk_bytes)).tolist()
        sizes = np.array([dtype(name).size for name in rows.dtypes], np.int64)[rows.code] if len(rows) else length
        self.elements = length // np.maximum(sizes, 1)
        kinds = {name: kind_of_numbers(name) for name in rows.dtypes}
        self.floating = np.array([kinds[name] in ("float", "complex") for name in self.names], np.bool_)


class StateStatistics:
    """Statistics of the leaves of one image, as it is digested. Columns are by leaf, in the order of the index.

    leaves: called in the thread that digests, so that training does not wait for it. It refers to no save, whose image
        would otherwise stay in a cycle of references.
    due: which leaves the save before has not looked at in full.
    share: of the time, as SHARE.
    """

    batch_bytes = BLOCK_BYTES

    def __init__(self, plan: SavePlan, leaves: Callable[[SavePlan], _Leaves], due: Array | None, share: float) -> None:
        self._plan = plan
        self._leaves_of = leaves
        self._due = due
        self._share = share
        self._began: float | None = None
        self._spent = 0.0

    def begin(self) -> None:
        """Takes memory for the columns. May be called again."""
        if self._began is not None:
            return
        self._began = time.perf_counter()
        self.leaves = self._leaves_of(self._plan)
        count = len(self.leaves.names)
        self._image = np.frombuffer(self._plan.arena.buffer.data, np.uint8)
        if self._due is None:
            self._due = np.zeros(count, np.bool_)
        self.elements = self.leaves.elements
        self.nonfinite, self.nan, self.sampled = (np.zeros(count, np.int64) for _ in range(3))
        self.square = np.zeros(count)
        self.low, self.high = np.full(count, math.inf), np.full(count, -math.inf)

    def examine(self, first: int, stop: int) -> None:
        """Looks at chunks `first..stop-1` of the image."""
        self.begin()
        began = time.perf_counter()
        assert self._began is not None and self._due is not None, "begun"
        chunks, names, is_short = self._plan.chunks, self.leaves.names, self.leaves.short
        begins, ends, leaves = (column[first:stop].tolist() for column in (chunks.begin, chunks.end, self.leaves.leaf))
        allowed = ends[-1] <= FREE_BYTES or self._spent < self._share * (began - self._began)
        short: dict[str, list[tuple[int, int, int]]] = {}
        at, count = 0, len(leaves)
        while at < count:
            leaf, begin = leaves[at], begins[at]
            name = names[leaf]
            if is_short[leaf]:
                if kind_of_numbers(name) is not None:
                    short.setdefault(name, []).append((leaf, begin, ends[at]))
                at += 1
                continue
            while at + 1 < count and leaves[at + 1] == leaf:
                at += 1
            self._block(leaf, name, begin, ends[at], full=allowed or bool(self._due[leaf]))
            at += 1
        for name, found in short.items():
            self._many(name, found, allowed=allowed)
        self._spent += time.perf_counter() - began

    def _block(self, leaf: int, name: str, begin: int, end: int, *, full: bool) -> None:
        examine = examiner_of(name)
        if examine is None:
            return
        size = dtype(name).size
        # Where an item is no divisor of a chunk, one lies on the border of two blocks: it is in neither's statistics.
        begin += -(begin - int(self._plan.layout.start[leaf])) % size
        data = self._image[begin : begin + (end - begin) // size * size]
        if not len(data):
            return
        found = examine(data, full)
        self.nonfinite[leaf] += found.nonfinite
        self.nan[leaf] += found.nan
        if full:
            self.sampled[leaf] += len(data) // size
            self.square[leaf] += found.square
            self.low[leaf] = min(self.low[leaf], found.low)
            self.high[leaf] = max(self.high[leaf], found.high)

    def _many(self, name: str, found: list[tuple[int, int, int]], *, allowed: bool) -> None:
        """Looks at short leaves, each one chunk. Those of one type lie mostly beside each other."""
        assert self._due is not None, "begun"
        numbers, begins, ends = (list(column) for column in zip(*found, strict=True))
        leaves = np.array(numbers, np.int64)
        full = allowed or bool(self._due[leaves].any())
        if ends[-1] - begins[0] == int(self._plan.layout.length[leaves].sum()):
            data = self._image[begins[0] : ends[-1]]
        else:
            data = np.concatenate([self._image[begin:end] for begin, end in zip(begins, ends, strict=True)])
        values = floats_of(data, name)
        per_leaf = self.elements[leaves] * (len(values) // max(int(self.elements[leaves].sum()), 1))
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(per_leaf)[:-1]])
        columns = (self.nonfinite, self.nan, self.square, self.low, self.high)
        for column, values_of in zip(columns, many(values, starts, full=full), strict=False):
            column[leaves] = values_of
        if full:
            self.sampled[leaves] = self.elements[leaves]

    def norm(self) -> Array:
        """Returns each leaf's norm, scaled up to all its elements. float64."""
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.where(self.sampled > 0, self.elements / np.maximum(self.sampled, 1), 0.0)
        found: Array = np.sqrt(self.square * scale)
        return found


@dataclass(slots=True)
class _Before:
    """What is known of the save before: digests of its chunks, and which leaves were not finite."""

    fingerprint: str = ""
    digests: Array | None = None
    due: Array | None = None
    usual: frozenset[str] = frozenset()
    """Leaves that were not finite when training began, and have been so since."""
    known: frozenset[str] | None = None
    """Leaves of which it is known whether they were finite; None: all."""
    id: CheckpointId | None = None


@dataclass(slots=True)
class HealthWatch:
    """Looks at the values of the saves of one run. Used by one writing thread after the other."""

    repo: Repo
    rank: int = 0
    _before: _Before | None = None
    _looks: dict[str, StateStatistics] = field(default_factory=dict)
    """By save id: of saves under way."""
    _next: _Before | None = None
    _leaves: _Leaves | None = None

    def watch(self, job: Job) -> None:
        """Looks at the image of this save as it is digested. Called before its first chunk is."""
        before = self._before
        due = before.due if before is not None and before.fingerprint == job.plan.fingerprint else None
        share = SHARE if job.digest_while_writing else WAITED_SHARE
        job.digester.observer = self._looks[job.save.save_id] = StateStatistics(job.plan, self._leaves_of, due, share)

    def _leaves_of(self, plan: SavePlan) -> _Leaves:
        if self._leaves is None or self._leaves.fingerprint != plan.fingerprint:
            self._leaves = _Leaves(plan)
        return self._leaves

    def concluded(self, job: Job, index: Index, parent: CheckpointId | None) -> tuple[Index, Health]:
        """Returns the index with the statistics of its rows, and the health of what it describes, once all of the image
        is digested. `parent`: the attempt's, for the first save of it."""
        look = self._looks[job.save.save_id]
        look.begin()  # of a state without bytes nothing was looked at
        paths = [spec.path for spec in index.specs] if look.nonfinite.any() else []
        wrong = {paths[row]: row for row in np.flatnonzero(look.nonfinite).tolist()}
        usual = self._usual(wrong, look, job, parent) if wrong else frozenset()
        bad = [path for path in wrong if path not in usual]
        digests = job.digester.digests()
        changed, fraction = self._changed(job, digests)
        norms = look.norm()
        with np.errstate(over="ignore"):
            rows = RowStatistics(
                norm=np.where(look.sampled > 0, norms, math.nan).astype(np.float32),
                min=np.where(look.low <= look.high, look.low, math.nan).astype(np.float32),
                max=np.where(look.low <= look.high, look.high, math.nan).astype(np.float32),
                changed=np.asarray(changed, np.float32),
                sampled=(look.sampled / np.maximum(look.elements, 1)).astype(np.float32),
                nonfinite={
                    row: (int(look.nonfinite[row]), int(look.nan[row]), path in usual) for path, row in wrong.items()
                },
            )
            norm = float(np.sqrt(np.square(norms[look.leaves.floating]).sum()))
        health = Health(len(bad), tuple(bad[:SHOWN]), int(look.nonfinite.sum()), norm, fraction)
        due = (look.sampled == 0) & (look.elements > 0)
        self._next = _Before(job.plan.fingerprint, digests, due, usual, id=job.save.id)
        if index.sealed is not None:  # whoever has no key learns nothing of single tensors
            return index, health
        return replace(index, statistics=rows.encoded()), health

    def committed(self, job: Job) -> None:
        """Makes this save the one before the next."""
        self._before, self._next = self._next, None
        self._looks.pop(job.save.save_id, None)

    def ended(self, save_id: str) -> None:
        """Forgets a save that is over, well or not."""
        self._looks.pop(save_id, None)

    def _changed(self, job: Job, digests: Array) -> tuple[Array, float | None]:
        """Returns which fraction of each leaf, and of all, is not as in the save before, by the digests of chunks."""
        plan, before = job.plan, self._before
        count = len(plan.layout.length)
        if before is None or before.digests is None or before.fingerprint != plan.fingerprint:
            return np.full(count, math.nan), None
        sizes = chunk_sizes(plan.layout.length, plan.chunk_bytes)
        moved = np.concatenate([[0], np.cumsum(sizes * (digests != before.digests).any(axis=1))])
        of_leaf = moved[plan.chunks.start[1:]] - moved[plan.chunks.start[:-1]]
        total = int(plan.layout.length.sum())
        return of_leaf / np.maximum(plan.layout.length, 1), int(moved[-1]) / total if total else 0.0

    def _usual(
        self, wrong: dict[str, int], look: StateStatistics, job: Job, parent: CheckpointId | None
    ) -> frozenset[str]:
        """Returns which leaves that are not finite have always been so: masks, and buffers that nothing fills."""
        before = self._before
        if before is None:
            before = self._of(parent)
        elif before.fingerprint != job.plan.fingerprint and not wrong.keys() <= before.usual:
            before = self._of(before.id) or before  # new leaves, or those that another rank has written
        if before is None:
            return self._usual_at_first(list(wrong), wrong, look, job)
        unknown = [] if before.known is None else [path for path in wrong if path not in before.known]
        usual = frozenset(path for path in wrong if path in before.usual)
        return usual | (self._usual_at_first(unknown, wrong, look, job) if unknown else frozenset())

    @staticmethod
    def _usual_at_first(paths: list[str], wrong: dict[str, int], look: StateStatistics, job: Job) -> frozenset[str]:
        """Returns which of `paths` are no sign of trouble where nothing is known of the time before: what has only
        infinities and is no parameter, and buffers of modules."""
        trees = [tree for tree in (job.flattened.tree, job.flattened.private) if tree is not None]
        nodes = {path: node for tree in trees for path, node in walk(tree)}
        modules = {path for path, node in nodes.items() if kind_of(node) == "module"}
        found = set()
        for path in paths:
            node, row = nodes.get(path, {}), wrong[path]
            if node.get("param") or node.get("grad"):
                continue
            if not look.nan[row] or any(above in modules for above in lineage(path)):
                found.add(path)
        return frozenset(found)

    def _of(self, id: CheckpointId | None) -> _Before | None:
        """Returns what a committed checkpoint says; None where there is none, or it says nothing."""
        if id is None:
            return None
        usual: set[str] = set()
        try:
            manifest = self.repo.manifest(id)
            if manifest.health is None:
                return None
            known = set(manifest.health.paths)
            ranks = range(len(manifest.indexes)) if len(manifest.indexes) <= RANKS else [self.rank]
            for rank in ranks:
                index = self.repo.index(manifest, rank)
                found = decode(index.statistics, len(index.specs), name=f"the index of {id}")
                if found is not None:  # else it is sealed
                    known.update(spec.path for spec in index.specs)
                    usual.update(index.specs[row].path for row, (_, _, always) in found.nonfinite.items() if always)
        except (CheckpointNotFound, CorruptionError, StoreError):
            return None  # the save does not fail for it: what is not known counts as in a first save
        return _Before(usual=frozenset(usual), known=frozenset(known))
