"""Where a rank's part of a leaf lies, said by a mark: drawn at random, cut out of the whole by torch.

Nothing of it needs a process group, so it serves processes and simulated ranks alike.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, Final

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from campaigns.layouts.truth import Leaf
from tenuto.state.declarations import flat, fused, replicated, shard

ANYWHERE: Final = ("plain", "replicated", "stage")


@dataclass(frozen=True, slots=True)
class Place:
    """How one leaf lies over the ranks: the kind of mark, and what it is made with."""

    kind: str
    how: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LocalPart:
    """What one rank has of a leaf: what its state holds, and the tensor in it."""

    value: Any
    local: Any


def kinds_for(leaf: Leaf, world: int) -> list[str]:
    """Which kinds of places such a leaf can have."""
    shape = leaf.shape
    found = [*ANYWHERE, "flat"]
    if shape:
        found += ["rows", "rows", "mesh", "mesh"]
        # One process by itself saves no leaf that lies in it in several pieces: it says so, and how.
        found += ["bands"] * (world > 1)
        if any(length % world == 0 and length for length in shape):
            found += ["fused", "fused"]
    if len(shape) > 1:
        found.append("grid")
        if 0 < shape[0] <= world:
            found += ["expert", "expert"]
    return found


def draw_place(chance: random.Random, leaf: Leaf, world: int, kind: str | None = None) -> Place:
    kind = kind or chance.choice(kinds_for(leaf, world))
    return Place(kind, _DRAWN[kind](chance, leaf.shape, world) if kind in _DRAWN else {})


def hold(place: Place, leaf: Leaf, whole: torch.Tensor, rank: int, world: int) -> LocalPart | None:
    """What `rank` holds of `whole`; None where its state does not have the leaf. Memory of its own."""
    kind, how = place.kind, place.how
    if kind in ANYWHERE:
        if kind == "stage" and rank not in how["owners"]:
            return None
        local = whole.clone()
        return LocalPart(replicated(local) if kind == "replicated" else local, local)
    made: LocalPart | None = _MADE[kind](whole, rank, world, **how)
    return made


# -- drawn ---------------------------------------------------------------------------------------------------------


def _edges(chance: random.Random, length: int, parts: int) -> list[int]:
    """Where `parts` uneven parts begin and end; some may be empty."""
    return [0, *sorted(chance.randint(0, length) for _ in range(parts - 1)), length]


def _draw_rows(chance: random.Random, shape: Sequence[int], world: int) -> dict[str, Any]:
    dim = chance.randrange(len(shape))
    return {"dim": dim, "edges": _edges(chance, shape[dim], world)}


def _draw_grid(chance: random.Random, shape: Sequence[int], world: int) -> dict[str, Any]:
    one, other = chance.sample(range(len(shape)), 2)
    rows = chance.choice([size for size in range(1, world + 1) if world % size == 0])
    return {
        "dims": (one, other),
        "edges": (_edges(chance, shape[one], rows), _edges(chance, shape[other], world // rows)),
        "ranks": tuple(chance.sample(range(world), world)),
    }


def _draw_bands(chance: random.Random, shape: Sequence[int], world: int) -> dict[str, Any]:
    """Bands along the first dimension, several to a rank, in an order of their own."""
    edges = sorted({0, shape[0], *(chance.randint(0, shape[0]) for _ in range(2 * world))})
    bands = list(pairwise(edges))
    chance.shuffle(bands)
    return {"bands": tuple((low, high, chance.randrange(world)) for low, high in bands)}


def _draw_fused(chance: random.Random, shape: Sequence[int], world: int) -> dict[str, Any]:
    dim = chance.choice([one for one, length in enumerate(shape) if length and length % world == 0])
    units = shape[dim] // world
    cuts = sorted(chance.sample(range(1, units), min(chance.randint(0, 2), units - 1)))
    return {"dim": dim, "sizes": tuple((high - low) * world for low, high in pairwise([0, *cuts, units]))}


def _draw_mesh(chance: random.Random, shape: Sequence[int], world: int) -> dict[str, Any]:
    sizes = draw_mesh(chance, world)
    dims = tuple(chance.choice((-1, *range(len(shape)), *range(len(shape)))) for _ in sizes)
    return {"sizes": sizes, "dims": dims, "ranks": tuple(chance.sample(range(world), world))}


def draw_mesh(chance: random.Random, world: int) -> tuple[int, ...]:
    """The sizes of a mesh of one to three dimensions."""
    sizes = []
    for _ in range(chance.choice((0, 1, 1, 2))):
        size = chance.choice([one for one in range(1, world + 1) if world % one == 0])
        sizes.append(size)
        world //= size
    return (*sizes, world)


def _draw_flat(chance: random.Random, shape: Sequence[int], world: int) -> dict[str, Any]:
    return {"edges": _edges(chance, prod(shape), world)}


def _draw_expert(chance: random.Random, shape: Sequence[int], world: int) -> dict[str, Any]:
    return {"ranks": tuple(chance.sample(range(world), shape[0]))}


def _draw_stage(chance: random.Random, shape: Sequence[int], world: int) -> dict[str, Any]:
    return {"owners": tuple(sorted(chance.sample(range(world), chance.choice((1, 1, chance.randint(1, world))))))}


_DRAWN: Final = {
    "rows": _draw_rows,
    "grid": _draw_grid,
    "bands": _draw_bands,
    "fused": _draw_fused,
    "mesh": _draw_mesh,
    "flat": _draw_flat,
    "expert": _draw_expert,
    "stage": _draw_stage,
}


# -- cut out -------------------------------------------------------------------------------------------------------


def _at(whole: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> LocalPart:
    local = whole
    for dim, (begin, length) in enumerate(zip(offsets, shape, strict=True)):
        local = local.narrow(dim, begin, length)
    local = local.clone(memory_format=torch.contiguous_format)
    return LocalPart(shard(local, whole=tuple(whole.shape), offsets=offsets), local)


def _rows(whole: torch.Tensor, rank: int, world: int, *, dim: int, edges: Sequence[int]) -> LocalPart:
    offsets, shape = [0] * whole.ndim, list(whole.shape)
    offsets[dim], shape[dim] = edges[rank], edges[rank + 1] - edges[rank]
    return _at(whole, offsets, shape)


def _grid(
    whole: torch.Tensor,
    rank: int,
    world: int,
    *,
    dims: Sequence[int],
    edges: Sequence[Sequence[int]],
    ranks: Sequence[int],
) -> LocalPart:
    offsets, shape = [0] * whole.ndim, list(whole.shape)
    at = divmod(ranks[rank], len(edges[1]) - 1)
    for dim, cuts, number in zip(dims, edges, at, strict=True):
        offsets[dim], shape[dim] = cuts[number], cuts[number + 1] - cuts[number]
    return _at(whole, offsets, shape)


def _bands(whole: torch.Tensor, rank: int, world: int, *, bands: Sequence[tuple[int, int, int]]) -> LocalPart:
    mine = [(low, high) for low, high, owner in bands if owner == rank]
    local = torch.cat([whole[low:high] for low, high in mine]) if mine else whole[:0].clone()
    boxes, begin = [], 0
    for low, high in mine:
        boxes.append((slice(begin, begin + high - low), (low, *(0,) * (whole.ndim - 1))))
        begin += high - low
    return LocalPart(shard(local, whole=tuple(whole.shape), boxes=boxes), local)


def _fused(whole: torch.Tensor, rank: int, world: int, *, dim: int, sizes: Sequence[int]) -> LocalPart:
    local = torch.cat([one.chunk(world, dim)[rank] for one in torch.split(whole, list(sizes), dim)], dim)
    return LocalPart(fused(local, sizes=sizes, rank=rank, of=world, dim=dim), local)


def _mesh(
    whole: torch.Tensor, rank: int, world: int, *, sizes: Sequence[int], dims: Sequence[int], ranks: Sequence[int]
) -> LocalPart:
    """As a DTensor on such a mesh would lie; -1 stands for Replicate."""
    placements = [Replicate() if dim < 0 else Shard(dim) for dim in dims]
    here = torch.unravel_index(torch.tensor(ranks[rank]), tuple(sizes))
    at = [int(one) for one in here]
    shape, offsets = _compute_local_shape_and_global_offset(tuple(whole.shape), tuple(sizes), at, placements)
    return _at(whole, [min(one, end) for one, end in zip(offsets, whole.shape, strict=True)], shape)


def _flat(whole: torch.Tensor, rank: int, world: int, *, edges: Sequence[int]) -> LocalPart:
    local = whole.reshape(-1)[edges[rank] : edges[rank + 1]].clone()
    return LocalPart(flat(local, whole=tuple(whole.shape), begin=edges[rank]), local)


def _expert(whole: torch.Tensor, rank: int, world: int, *, ranks: Sequence[int]) -> LocalPart | None:
    """One item of a stack, without its first dimension."""
    if rank not in ranks:
        return None
    number = ranks.index(rank)
    local = whole[number].clone()
    return LocalPart(shard(local, whole=tuple(whole.shape), offsets=(number, *(0,) * local.ndim)), local)


_MADE: Final[Mapping[str, Any]] = {
    "rows": _rows,
    "grid": _grid,
    "bands": _bands,
    "fused": _fused,
    "mesh": _mesh,
    "flat": _flat,
    "expert": _expert,
}
