"""DTensors over meshes of the processes there are: the same meshes are made on all of them, in one order, and kept."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from campaigns.layouts.places import LocalPart, Place, draw_mesh
from campaigns.layouts.truth import Leaf

DTENSOR: Final = ("dtensor", "strided")
Key = tuple[tuple[int, ...], tuple[int, ...]]
"""The sizes of a mesh, and its ranks in row-major order."""


class Meshes:
    """Every process asks for the same ones in the same order: making one is the business of all."""

    def __init__(self) -> None:
        self._made: dict[Key, Any] = {}

    def get(self, sizes: Sequence[int], ranks: Sequence[int]) -> Any:
        key = tuple(sizes), tuple(ranks)
        if key not in self._made:
            names = ("one", "two", "three")[: len(sizes)]
            self._made[key] = DeviceMesh("cpu", torch.tensor(ranks).reshape(tuple(sizes)), mesh_dim_names=names)
        return self._made[key]


def dtensor_kinds(leaf: Leaf, world: int) -> list[str]:
    if not leaf.shape:
        return ["dtensor"]
    strided = world == 4 and any(length and length % 8 == 0 for length in leaf.shape)
    return ["dtensor"] * 4 + ["strided"] * 3 * strided


def draw_dtensor(chance: random.Random, leaf: Leaf, world: int, kind: str) -> Place:
    shape = leaf.shape
    ranks = tuple(chance.sample(range(world), world)) if chance.random() < 0.4 else tuple(range(world))
    if kind == "strided":
        dim = chance.choice([one for one, length in enumerate(shape) if length and length % 8 == 0])
        behind = chance.choice((dim, dim, -1))
        return Place(kind, {"sizes": (2, 2), "ranks": ranks, "dim": dim, "behind": behind, "factor": 2})
    sizes = draw_mesh(chance, world)
    dims = tuple(chance.choice((-1, *range(len(shape)), *range(len(shape)))) for _ in sizes)
    return Place(kind, {"sizes": sizes, "ranks": ranks, "dims": dims})


def meshes_of(places: Mapping[str, Place]) -> list[Key]:
    return [(place.how["sizes"], place.how["ranks"]) for place in places.values() if place.kind in DTENSOR]


def hold_dtensor(place: Place, whole: torch.Tensor, meshes: Meshes) -> LocalPart:
    """Cut by torch itself, on this process alone."""
    how = place.how
    mesh = meshes.get(how["sizes"], how["ranks"])
    if place.kind == "strided":
        behind = Replicate() if how["behind"] < 0 else Shard(how["behind"])
        placements = [_StridedShard(how["dim"], split_factor=how["factor"]), behind]
    else:
        placements = [Replicate() if dim < 0 else Shard(dim) for dim in how["dims"]]
    made: Any = distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
    local = made._local_tensor
    if local.numel() and local.untyped_storage().nbytes() != local.numel() * local.itemsize:
        local = local.clone(memory_format=torch.contiguous_format)
        around: Any = DTensor
        made = around(local, made._spec, requires_grad=False)
    return LocalPart(made, local)
