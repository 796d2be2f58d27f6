"""Bugs of the kind that resharding has: each is seeded alone, and the campaign has to notice it.

All of them leave every digest right: what is read is what was written, and in the wrong place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from campaigns.simulated_processes import replacing
from tenuto.engine.read import choose
from tenuto.integrations.torch import meshes
from tenuto.sharding import coverage, merge_trees, reshard, slices, write_plan
from tenuto.state import declarations

Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Bug:
    """`processes`: whether it can only be seen where ranks are processes that have a group."""

    name: str
    breaks: str
    patch: Patch
    processes: bool = False


def _moved(column: str, step: int) -> Patch:
    """Of what is cut out, where it begins along its first axis is off by `step`, wherever that is still inside."""

    def patch() -> AbstractContextManager[Any]:
        whole = reshard.reshard

        def off(saved: Any, wanted: Any) -> Any:
            plan = whole(saved, wanted)
            which, holdings = (plan.saved, saved) if column == "saved_offsets" else (plan.wanted, wanted)
            offsets = getattr(plan, column).copy()
            fits = (offsets[:, 0] + step >= 0) & (
                offsets[:, 0] + step + plan.shape[:, 0] <= holdings.shape[which][:, 0]
            )
            offsets[fits, 0] += step
            return replace(plan, **{column: offsets})

        return replacing(whole, off)

    return patch


def _dimensions_swapped() -> AbstractContextManager[Any]:
    """Where both fit, a part of a matrix begins at (column, row)."""
    whole = reshard.reshard

    def swapped(saved: Any, wanted: Any) -> Any:
        plan = whole(saved, wanted)
        offsets = plan.saved_offsets.copy()
        if offsets.shape[1] > 1:
            turned = offsets[:, [1, 0, *range(2, offsets.shape[1])]]
            fits = (turned + plan.shape <= saved.shape[plan.saved][:, : offsets.shape[1]]).all(axis=1)
            offsets[fits] = turned[fits]
        return replace(plan, saved_offsets=offsets)

    return replacing(whole, swapped)


def _strides_transposed() -> AbstractContextManager[Any]:
    """The last two axes of a box are read in each other's order, where as many items are wanted of both."""
    whole = slices.box_region

    def transposed(shape: Sequence[int], offsets: Sequence[int], counts: Sequence[int]) -> Any:
        found = whole(tuple(shape), tuple(offsets), tuple(counts))
        if len(shape) < 2 or shape[-1] != shape[-2] or counts[-1] != counts[-2]:
            return found
        strides = (*found.strides[:-2], found.strides[-1], found.strides[-2])
        return replace(found, strides=strides)

    return replacing(whole, transposed)


def _pitch_of_the_part() -> AbstractContextManager[Any]:
    """The rows of a box are taken to be as far apart as they are where it goes, not as where it lies."""
    whole = slices.box_region

    def short(shape: Sequence[int], offsets: Sequence[int], counts: Sequence[int]) -> Any:
        if len(shape) < 2:
            return whole(tuple(shape), tuple(offsets), tuple(counts))
        found = whole(tuple(shape), tuple(offsets), tuple(counts))
        return replace(found, strides=whole(tuple(counts), (0,) * len(counts), tuple(counts)).strides)

    return replacing(whole, short)


@contextmanager
def _in_meshes(original: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """What is known of how tensors of one form are cut was found out without the bug, or with it."""
    meshes._known.clear()
    with replacing(original, replacement):
        yield
    meshes._known.clear()


def _strides_of_fsdp_ignored() -> AbstractContextManager[Any]:
    """A strided shard is taken for a plain one."""
    whole = meshes._cut

    def plain(spans: Any, ranks: int, at: int, pieces: int) -> Any:
        return whole(spans, ranks, at, 1)

    return _in_meshes(whole, plain)


def _mesh_read_from_right_to_left() -> AbstractContextManager[Any]:
    """Of two dimensions of a mesh that cut one of the tensor, the last one cuts first."""
    whole = meshes._ordered

    def turned(spec: Any, dim: int, along: list[int]) -> list[int]:
        return whole(spec, dim, along)[::-1]

    return _in_meshes(whole, turned)


def _chunks_rounded_down() -> AbstractContextManager[Any]:
    """Uneven parts as numpy cuts them, not as torch does."""

    def even(length: int, count: int, number: int) -> tuple[int, int]:
        sizes = [len(one) for one in np.array_split(np.empty(length), count)]
        return sum(sizes[:number]), sum(sizes[: number + 1])

    return _in_meshes(meshes._chunk, even)


def _fused_in_another_order() -> AbstractContextManager[Any]:
    """Parameters that are fused into one tensor are taken to lie in it from the last to the first."""
    whole = declarations.fused_along

    def turned(local: Any, sizes: Any, dim: int, rank: int, of: int) -> Any:
        return whole(local, sizes if sizes is None else tuple(sizes)[::-1], dim, rank, of)

    return replacing(whole, turned)


def _bands_in_the_order_of_the_whole() -> AbstractContextManager[Any]:
    """Boxes of one tensor are taken to lie in it in the order in which they lie in the whole."""
    whole = declarations.in_boxes

    def ordered(local: Any, of: Any, boxes: Any) -> Any:
        found = list(boxes)
        lengths = {tuple(offsets): where.stop - where.start for where, offsets in found}
        at, made = 0, []
        for offsets in sorted(lengths):
            made.append((slice(at, at + lengths[offsets]), offsets))
            at += lengths[offsets]
        return whole(local, of, made)

    return replacing(whole, ordered)


def _flat_from_the_other_end() -> AbstractContextManager[Any]:
    """A flat partition is taken to be counted from the tensor's end."""
    whole = declarations.flat_range

    def turned(length: int, of: Any, begin: int) -> Any:
        return whole(length, of, int(np.prod(of, dtype=np.int64)) - begin - length)

    return replacing(whole, turned)


def _without_dropped(held: Any, found: Any) -> Any:
    """All that is written but the last part of a box that several ranks share."""
    several = np.flatnonzero((found.shape != held.shape[found.holding]).any(axis=1))
    kept = np.ones(len(found), bool)
    kept[several[-1:]] = False
    return replace(
        found,
        holding=found.holding[kept],
        offsets=found.offsets[kept],
        shape=found.shape[kept],
        rank=found.rank[kept],
    )


def _replica_dropped() -> AbstractContextManager[Any]:
    """One rank's share of a box that several hold is written by nobody."""
    whole = write_plan.assign

    def dropped(held: Any, **how: Any) -> Any:
        return _without_dropped(held, whole(held, **how))

    return replacing(whole, dropped)


@contextmanager
def _replica_dropped_unproved() -> Iterator[None]:
    """The same, and coverage is not proved before the save."""
    with _replica_dropped(), replacing(coverage.check_coverage, lambda boxes: None):
        yield


def _replicas_from_the_start() -> AbstractContextManager[Any]:
    """Of a box that several ranks share, each writes its own number of rows, but the first ones."""
    from tenuto.engine.group import planning

    whole = planning._taken

    def first(source: Any, piece: Any) -> Any:
        if piece.cut is None:
            return source
        cut = tuple(slice(0, one.stop - one.start) for one in piece.cut)
        return whole(source, replace(piece, cut=cut))

    return replacing(whole, first)


def _own_of_the_first() -> AbstractContextManager[Any]:
    """What belongs to each rank comes back from the first one's."""
    whole = choose.match

    def first(repo: Any, manifest: Any, prepare: Any, **how: Any) -> Any:
        return whole(repo, manifest, prepare, **{**how, "rank": 0})

    return replacing(whole, first)


def _leaves_by_order() -> AbstractContextManager[Any]:
    """Each rank's leaves are numbered as they come, not by their paths: stages hold each other's."""
    whole = merge_trees.unite

    def counted(trees: Any, digests: Any = None) -> Any:
        found = whole(trees, digests)
        return replace(found, numbers=[np.arange(len(one)) for one in found.numbers])

    return replacing(whole, counted)


def _expert_of_the_next() -> AbstractContextManager[Any]:
    """A tensor without the whole's first dimension lies one further along it, from the last one back to the first."""
    whole = declarations.at_offsets

    def next_one(local: Any, of: Any, offsets: Any) -> Any:
        if len(tuple(of)) > len(tuple(local)):
            offsets = ((offsets[0] + 1) % of[0], *offsets[1:])
        return whole(local, of, offsets)

    return replacing(whole, next_one)


BUGS: Final = (
    Bug("read one further", "where a part begins in what was saved", _moved("saved_offsets", 1)),
    Bug("read one before", "where a part begins in what was saved", _moved("saved_offsets", -1)),
    Bug("put one further", "where a part begins in what is wanted", _moved("wanted_offsets", 1)),
    Bug("dimensions swapped", "where a part begins in what was saved", _dimensions_swapped),
    Bug("strides transposed", "how a box is read", _strides_transposed),
    Bug("pitch of the part", "how a box is read", _pitch_of_the_part),
    Bug("strided as plain", "FSDP around tensor parallelism", _strides_of_fsdp_ignored, processes=True),
    Bug("mesh from right to left", "two cuts of one dimension", _mesh_read_from_right_to_left, processes=True),
    Bug("chunks as numpy cuts", "uneven shards", _chunks_rounded_down, processes=True),
    Bug("fused in another order", "fused parameters", _fused_in_another_order),
    Bug("bands sorted", "several boxes in one tensor", _bands_in_the_order_of_the_whole),
    Bug("flat from the end", "flat partitions", _flat_from_the_other_end),
    Bug("replica's share dropped", "who writes what", _replica_dropped),
    Bug("replica's share dropped, unproved", "who writes what, and the proof", _replica_dropped_unproved),
    Bug("replicas from the start", "the share of a replica", _replicas_from_the_start),
    Bug("the first one's own", "what belongs to each rank", _own_of_the_first),
    Bug("leaves by order", "whose leaf is which", _leaves_by_order),
    Bug("the next one's expert", "a stack's items", _expert_of_the_next),
)
BY_NAME: Final[Mapping[str, Bug]] = {bug.name: bug for bug in BUGS}


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Within the block the product has this bug; none for an empty name."""
    if not name:
        yield
        return
    with BY_NAME[name].patch():
        yield
