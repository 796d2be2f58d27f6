"""What a user says about how a value relates to the ranks: a part of a global tensor, a replica, a rank's own.

A mark stands in the state in place of the value. It is no part of the checkpoint's tree: what is saved under a mark
loads into a target without one, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.errors import UsageError
from holdfast.state import layouts
from holdfast.state.layouts import Layout


@dataclass(eq=False)
class Shard:
    """A local tensor or array, and where it lies in the global one. Made by `shard`, `fused` and `flat`."""

    value: Any
    layout: Layout


@dataclass(eq=False)
class Replicated:
    """A value that is the same on every rank that has it. Made by `replicated`."""

    value: Any


@dataclass(eq=False)
class PerRank:
    """A value that belongs to this rank alone. Made by `per_rank`."""

    value: Any


MARKS: Final = frozenset({Shard, Replicated, PerRank})


def shard(
    tensor: Any,
    *,
    whole: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    boxes: Iterable[tuple[slice | tuple[slice, ...], Sequence[int]]] | None = None,
    dim: int | None = None,
    rank: int | None = None,
    of: int | None = None,
) -> Shard:
    """Declares that `tensor` (of torch or numpy) is this rank's part of a global tensor.

    Say it in one of three ways. `whole=` and `offsets=`: the global shape, and where in it the tensor begins; `whole`
    may have more dimensions than the tensor, which then is 1 wide in the first ones (an expert of a stack). `dim=`,
    `rank=` and `of=`: equal parts along a dimension, this one the `rank`-th. `whole=` and `boxes=`: several boxes, each
    as a slice of the tensor (or a tuple of slices, from the first dimension on) and its offsets in the whole.

    Put what this returns into the state in place of the tensor, or give it to `declare`. Raises UsageError for boxes
    that do not lie in the whole or do not make up the tensor.
    """
    local = _shape(tensor)
    if boxes is not None and whole is not None and offsets is None and dim is None:
        return Shard(tensor, layouts.in_boxes(local, whole, boxes))
    if offsets is not None and whole is not None and dim is None:
        return Shard(tensor, layouts.at_offsets(local, whole, offsets))
    if dim is not None and rank is not None and of is not None and whole is None:
        return Shard(tensor, layouts.fused_along(local, None, dim, rank, of))
    raise UsageError(
        "a shard needs whole= and offsets=, or whole= and boxes=, or dim=, rank= and of=",
        hint="shard(tensor, whole=(vocabulary, width), offsets=(first_row, 0))",
    )


def fused(tensor: Any, *, sizes: Sequence[int], rank: int, of: int, dim: int = 0) -> Shard:
    """Declares this rank's part of parameters that are fused into one tensor, as query, key and value or gate and up.

    `sizes` are the whole parameters' lengths along `dim`, in order. Each of them is cut into `of` equal parts, and
    `tensor` holds the `rank`-th of each, one behind another. The checkpoint has the whole parameters, fused, so that it
    loads at any other degree of tensor parallelism. Raises UsageError where the sizes do not fit.
    """
    return Shard(tensor, layouts.fused_along(_shape(tensor), sizes, dim, rank, of))


def flat(tensor: Any, *, whole: Sequence[int], begin: int) -> Shard:
    """Declares that `tensor`, of one dimension, is elements `begin` and following of a flattened (row-major) tensor of
    shape `whole`: a partition as ZeRO makes them. Raises UsageError where they do not lie in it."""
    shape = _shape(tensor)
    if len(shape) != 1:
        raise UsageError(f"a flat partition has one dimension, not the shape {list(shape)}", hint="tensor.view(-1)")
    return Shard(tensor, layouts.flat_range(shape[0], whole, begin))


def replicated(value: Any) -> Replicated:
    """Declares that a value, with everything in it, is the same on every rank that has it.

    Replicas are compared at the first save and every 50th; what nothing declares is compared at every save.
    """
    return Replicated(value)


def per_rank(value: Any) -> PerRank:
    """Declares that a value, with everything in it, belongs to this rank alone: each rank saves its own."""
    return PerRank(value)


# -- what is declared of a tensor itself -------------------------------------------------------------------------------

_ATTRIBUTE: Final = "_holdfast_layout"
"""Where a tensor carries what was declared of it: with it as long as it lives, and no weak reference to it, because a
tensor to which something holds one cannot be given memory on load."""

_counted = [0]


def declarations() -> int:
    """A number that changes when anything is declared."""
    return _counted[0]


def attach(tensor: Any, layout: Layout) -> None:
    """Declares the layout of a tensor, wherever it is met."""
    _counted[0] += 1
    setattr(tensor, _ATTRIBUTE, layout)


def attached(tensor: Any) -> Layout | None:
    """What was declared of a tensor itself."""
    return getattr(tensor, _ATTRIBUTE, None) if _counted[0] else None


def _shape(tensor: Any) -> tuple[int, ...]:
    shape = getattr(tensor, "shape", None)
    if shape is None:
        raise UsageError(f"a {type(tensor).__name__} is no tensor", hint="declare a tensor of torch or an array")
    return tuple(int(length) for length in shape)
