"""Reads the layout of a DTensor's local tensor from its mesh and placements, without communication.

The classes are looked up, not imported: there is no DTensor unless something has imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import torch

from tenuto.errors import StateError
from tenuto.state.declarations import (
    Shape,
    ShardLayout,
    Span,
    cross_layout,
    empty_layout,
    merge_spans,
    replicated_layout,
)
from tenuto.state.tree import ROOT


def is_dtensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this process's part of a tensor: a DTensor's local tensor, or the tensor itself."""
    return local_part(tensor) if is_dtensor(tensor) else tensor


def local_part(tensor: Any) -> torch.Tensor:
    """Returns a DTensor's local tensor after pending collectives."""
    local: torch.Tensor = tensor._local_tensor
    if type(local) is not torch.Tensor and type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()  # type: ignore[attr-defined]
    return local


def on_one_rank(tensor: Any) -> bool:
    """Returns whether a DTensor's mesh has only this rank."""
    return bool(tensor._spec.mesh.size() == 1)


def layout_of(tensor: Any, path: str) -> ShardLayout:
    """Returns the layout of a DTensor on this rank.

    Raises StateError with the path for a pending sum, an unknown placement, and a local tensor that does not fit them.
    """
    spec, local = tensor._spec, local_of(tensor).shape
    placements = spec.placements
    # By type too: in some versions a strided shard equals a plain one.
    form = (id(spec.mesh), placements, *map(type, placements), tensor.shape, local, getattr(spec, "shard_order", None))
    known = _known.get(form)
    if known is not None and known[0] is spec.mesh:
        return known[1]
    layout = _read_layout(tensor, spec, path or ROOT)
    if len(_known) >= _KNOWN_MOST:
        _known.clear()
    _known[form] = (spec.mesh, layout)
    return layout


_known: Final[dict[Any, tuple[Any, ShardLayout]]] = {}
"""By mesh, placements and shapes: the mesh and the layout. States have many tensors of few forms."""


def _read_layout(tensor: Any, spec: Any, where: str) -> ShardLayout:
    whole, mesh, placements = tuple(tensor.shape), spec.mesh, tuple(spec.placements)
    sizes, at = tuple(mesh.shape), mesh.get_coordinate()
    for size, placement in zip(sizes, placements, strict=True):
        _check(placement, size, where)
    sharded = _by_dimension(placements, sizes)
    if at is None:
        return ShardLayout(whole, whole, (), "box" if sharded else "replicated")
    if not sharded:
        return replicated_layout(whole)
    cuts = {
        dim: tuple(
            (sizes[one], at[one], getattr(placements[one], "split_factor", 1)) for one in _ordered(spec, dim, along)
        )
        for dim, along in sharded.items()
    }
    return _cut_layout(whole, tuple(local_of(tensor).shape), cuts, where)


_Cuts = tuple[tuple[int, int, int], ...]
_KNOWN_MOST: Final = 4096


def _cut_layout(whole: Shape, local: Shape, cuts: dict[int, _Cuts], where: str) -> ShardLayout:
    """Returns the layout of a tensor whose dimensions have these cuts."""
    layout = cross_layout(whole, {dim: _spans(whole[dim], local[dim], each, where) for dim, each in cuts.items()})
    if 0 in layout.local and 0 in local:
        return empty_layout(whole, local)  # an empty part of FSDP's may be empty in other dimensions too
    if layout.local != local:
        raise _unexplained(where, local, layout.local)
    return layout


def _check(placement: Any, size: int, where: str) -> None:
    if placement.is_partial() and size > 1:
        raise StateError(
            f"{where}: a Partial DTensor holds a part of a sum on each rank, and no values to save",
            subject=where,
            hint="redistribute it to Shard or Replicate first",
        )
    if not (placement.is_replicate() or placement.is_partial() or _is_shard(placement)):
        raise StateError(
            f"{where}: the placement {placement} of a DTensor is not known", subject=where, hint="tenuto.shard(…)"
        )


def _is_shard(placement: Any) -> bool:
    # In some versions is_shard() is False for _StridedShard.
    return bool(placement.is_shard() or type(placement).__name__ == "_StridedShard")


def _by_dimension(placements: Sequence[Any], sizes: Sequence[int]) -> dict[int, list[int]]:
    """Returns dimension of the tensor -> the mesh dimensions (of several ranks) that it is cut along."""
    found: dict[int, list[int]] = {}
    for number, (placement, size) in enumerate(zip(placements, sizes, strict=True)):
        if _is_shard(placement) and size > 1:
            found.setdefault(placement.dim, []).append(number)
    return found


def _ordered(spec: Any, dim: int, along: list[int]) -> list[int]:
    """Returns the mesh dimensions in the order in which they cut: from left to right unless the spec says otherwise."""
    for entry in getattr(spec, "shard_order", None) or ():
        if entry.tensor_dim == dim:
            return [number for number in entry.mesh_dims if number in along]
    return along


def _spans(length: int, local_length: int, cuts: Sequence[tuple[int, int, int]], where: str) -> list[Span]:
    """Returns the spans of one dimension on this rank, `held` indices in all.

    `cuts`, in the order of cutting: number of ranks, position of this rank, and number of pieces that are cut
    separately. FSDP cuts what tensor parallelism has already cut, and marks that by a strided shard in front; read from
    left to right this gives other cuts where lengths do not divide. So both readings are tried, and the local length
    decides.
    """
    left_to_right = inner_first = [(0, length)]
    for ranks, at, pieces in cuts:
        left_to_right = _cut(left_to_right, ranks, at, pieces)
    if all(pieces == 1 for _, _, pieces in cuts[:-1]):
        return left_to_right
    for ranks, at, _ in reversed(cuts):
        inner_first = _cut(inner_first, ranks, at, 1)
    fitting = [one for one in (merge_spans(left_to_right), merge_spans(inner_first)) if _length(one) == local_length]
    if len(fitting) == 2 and fitting[0] != fitting[1]:
        raise StateError(
            f"{where}: {local_length} of {length} indices of a strided DTensor could be either of two parts",
            subject=where,
            hint="shard lengths that divide evenly, or declare the local tensor: tenuto.shard(…)",
        )
    return fitting[0] if fitting else left_to_right


def _length(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _cut(spans: Sequence[Span], ranks: int, at: int, pieces: int) -> list[Span]:
    """Returns part `at` of `ranks` of each of `pieces` pieces, as torch.chunk cuts both: the last ones may be
    shorter."""
    found: list[Span] = []
    length = _length(spans)
    for piece in range(pieces):
        start, stop = _chunk(length, pieces, piece)
        low, high = _chunk(stop - start, ranks, at)
        found += _between(spans, start + low, start + high)
    return found


def _chunk(length: int, count: int, number: int) -> Span:
    step = -(-length // count)
    return min(number * step, length), min((number + 1) * step, length)


def _between(spans: Sequence[Span], low: int, high: int) -> list[Span]:
    """Returns indices `low..high-1` of the concatenated spans."""
    found: list[Span] = []
    at = 0
    for start, stop in spans:
        first, last = max(low - at, 0), min(high - at, stop - start)
        if first < last:
            found.append((start + first, start + last))
        at += stop - start
    return found


def _unexplained(where: str, local: Sequence[int], expected: Sequence[int]) -> StateError:
    return StateError(
        f"{where}: a DTensor whose local tensor has the shape {list(local)} where its placements make {list(expected)}",
        subject=where,
        hint="declare the local tensor: tenuto.shard(…)",
    )
