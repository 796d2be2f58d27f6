"""The layout of a local tensor in a global one, and the marks with which a user declares it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Final, Literal

from tenuto.errors import UsageError
from tenuto.record import record

Span = tuple[int, int]
"""Begin and end of a run of indices."""
Shape = tuple[int, ...]


@record
class BoxPart:
    """One box of the global tensor. `cut`: the spans of the local tensor's leading dimensions that contain it, in
    row-major order (empty: the entire tensor)."""

    cut: tuple[Span, ...]
    offsets: Shape
    shape: Shape


@record
class ShardLayout:
    """The layout of a local tensor of shape `local` in a global one of shape `whole`.

    Without parts this rank has nothing of it. `placement` is "replicated" if every rank that has any of it has all of
    it.
    """

    whole: Shape
    local: Shape
    parts: tuple[BoxPart, ...]
    placement: Literal["box", "replicated"] = "box"


def part_view(tensor: Any, part: BoxPart) -> Any:
    """Returns the view of `part` in a local tensor, with the dimensions of the local tensor."""
    return tensor[tuple(slice(start, stop) for start, stop in part.cut)] if part.cut else tensor


def replicated_layout(shape: Sequence[int]) -> ShardLayout:
    """Returns the layout of a tensor that every rank has in full."""
    return ShardLayout(tuple(shape), tuple(shape), (_full_box(shape),), "replicated")


def absent_layout(shape: Sequence[int]) -> ShardLayout:
    """Returns the layout of a tensor that other ranks have: the local copy does not count."""
    return ShardLayout(tuple(shape), tuple(shape), (), "replicated")


def empty_layout(whole: Shape, local: Shape, placement: Literal["box", "replicated"] = "box") -> ShardLayout:
    """Returns the layout of an empty local tensor. If the global tensor is empty too, the layout covers it: some rank
    must."""
    return ShardLayout(whole, local, () if prod(whole) else (_full_box(whole),), placement)


def _full_box(shape: Sequence[int]) -> BoxPart:
    return BoxPart((), (0,) * len(shape), tuple(shape))


def at_offsets(local: Sequence[int], whole: Sequence[int], offsets: Sequence[int]) -> ShardLayout:
    """Returns the layout of a local tensor that is one box. In extra leading dimensions of `whole` the box is 1
    wide."""
    local, whole, offsets = tuple(local), tuple(whole), tuple(offsets)
    more = len(whole) - len(local)
    if more < 0:
        raise UsageError(f"a tensor of shape {list(local)} is not a part of one of shape {list(whole)}", hint="whole=")
    layout = checked(ShardLayout(whole, local, (BoxPart((), offsets, (1,) * more + local),)))
    return layout if prod(local) else empty_layout(whole, local)


def in_boxes(
    local: Sequence[int], whole: Sequence[int], boxes: Iterable[tuple[slice | tuple[slice, ...], Sequence[int]]]
) -> ShardLayout:
    """Returns the layout of a local tensor made of several boxes: each a slice (or slices, from the first dimension on)
    of the local tensor and its offsets in the global one."""
    local, whole = tuple(local), tuple(whole)
    parts = []
    for where, offsets in boxes:
        slices = (where,) if isinstance(where, slice) else tuple(where)
        if len(slices) > len(local) or any(one.step not in (None, 1) for one in slices):
            raise UsageError(f"{where!r} does not cut a tensor of shape {list(local)}", hint="slices without a step")
        cut = tuple(one.indices(length)[:2] for one, length in zip(slices, local, strict=False))
        shape = tuple(max(stop - start, 0) for start, stop in cut) + local[len(cut) :]
        parts.append(BoxPart(cut, tuple(offsets), (1,) * (len(whole) - len(shape)) + shape))
    found = checked(ShardLayout(whole, local, tuple(part for part in parts if prod(part.shape))))
    return found if found.parts else empty_layout(whole, local)


def fused_along(local: Sequence[int], sizes: Sequence[int] | None, dim: int, rank: int, of: int) -> ShardLayout:
    """Returns the layout of rank `rank` of `of` in parameters of `sizes` concatenated along `dim`: an equal part of
    each. Without `sizes` there is one parameter."""
    local = tuple(local)
    if not -len(local) <= dim < len(local) or not 0 <= rank < of:
        raise UsageError(f"a tensor of shape {list(local)} has no rank {rank} of {of} along dimension {dim}")
    dim %= len(local)
    sizes = (local[dim] * of,) if sizes is None else tuple(sizes)
    if any(size % of for size in sizes) or sum(sizes) != local[dim] * of:
        raise UsageError(
            f"sizes {list(sizes)} over {of} ranks do not make a tensor of shape {list(local)} along dimension {dim}",
            hint="sizes= are those of the whole parameters, and each is cut into equal parts; else shard(…, boxes=)",
        )
    whole = (*local[:dim], sum(sizes), *local[dim + 1 :])
    spans: list[Span] = []
    begin = 0
    for size in sizes:
        width = size // of
        spans.append((begin + rank * width, begin + (rank + 1) * width))
        begin += size
    return cross_layout(whole, {dim: spans})


def flat_range(length: int, whole: Sequence[int], begin: int) -> ShardLayout:
    """Returns the layout of a 1-D tensor that is elements `begin..begin+length-1` of a row-major tensor of shape
    `whole`."""
    whole = tuple(whole)
    if begin < 0 or begin + length > prod(whole):
        raise UsageError(
            f"elements {begin} to {begin + length} are not in a tensor of shape {list(whole)}", hint="begin= and whole="
        )
    parts: list[BoxPart] = []
    at = begin
    while at < begin + length:
        offsets, shape = _largest_box(at, begin + length, whole)
        parts.append(BoxPart(((at - begin, at - begin + prod(shape)),), offsets, shape))
        at += prod(shape)
    return ShardLayout(whole, (length,), tuple(parts)) if parts else empty_layout(whole, (length,))


def _largest_box(at: int, end: int, whole: Shape) -> tuple[Shape, Shape]:
    """Returns offsets and shape of the largest box that is a run of elements from `at`, before `end`."""
    offsets, rest = [], at
    for inner in (prod(whole[dim + 1 :]) for dim in range(len(whole))):
        offsets.append(rest // inner)
        rest %= inner
    for dim in range(len(whole)):
        inner = prod(whole[dim + 1 :])
        count = min((end - at) // inner, whole[dim] - offsets[dim])
        if count and not any(offsets[dim + 1 :]):
            return tuple(offsets), (1,) * dim + (count,) + whole[dim + 1 :]
    return tuple(offsets), (1,) * len(whole)


def cross_layout(
    whole: Shape, spans: dict[int, list[Span]], *, placement: Literal["box", "replicated"] = "box"
) -> ShardLayout:
    """Returns the layout of a local tensor that concatenates these spans along each dimension in `spans`, and has all
    of every other dimension."""
    every = [merge_spans(spans[dim]) if dim in spans else [(0, length)] for dim, length in enumerate(whole)]
    local = tuple(sum(stop - start for start, stop in found) for found in every)
    if 0 in local:
        return empty_layout(whole, local, placement)
    if all(len(found) == 1 for found in every):
        return ShardLayout(whole, local, (BoxPart((), tuple(found[0][0] for found in every), local),), placement)
    last = max(dim for dim, found in enumerate(every) if len(found) > 1)
    parts = []
    for chosen in product(*(list(zip(found, _consecutive(found), strict=True)) for found in every)):
        cut = tuple(here for _, here in chosen[: last + 1])
        shape = tuple(stop - start for (start, stop), _ in chosen)
        parts.append(BoxPart(cut, tuple(span[0] for span, _ in chosen), shape))
    return ShardLayout(whole, local, tuple(parts), placement)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Returns the same indices in the same order, in as few spans as possible."""
    found: list[Span] = []
    for start, stop in spans:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _consecutive(spans: Sequence[Span]) -> list[Span]:
    """Returns the spans shifted so that each begins where the previous one ends."""
    found: list[Span] = []
    at = 0
    for start, stop in spans:
        found.append((at, at + stop - start))
        at += stop - start
    return found


def checked(layout: ShardLayout) -> ShardLayout:
    """Returns `layout`. Raises UsageError if its parts exceed the global tensor or do not tile the local one."""
    for part in layout.parts:
        inside = len(part.offsets) == len(part.shape) == len(layout.whole) and all(
            begin >= 0 and begin + length <= size
            for begin, length, size in zip(part.offsets, part.shape, layout.whole, strict=True)
        )
        if not inside:
            raise UsageError(
                f"a box of shape {list(part.shape)} at {list(part.offsets)} does not lie in {list(layout.whole)}",
                hint="offsets= and whole= are those of the global tensor",
            )
    covered = sum(prod(part.shape) for part in layout.parts)
    if covered != prod(layout.local) or _overlap([_spans(part.cut, layout.local) for part in layout.parts]):
        raise UsageError(
            f"the boxes are {covered} elements of a local tensor of shape {list(layout.local)}, or overlap in it",
            hint="every element of the local tensor lies in exactly one of the boxes",
        )
    if _overlap([_spans_at(part) for part in layout.parts]):
        raise UsageError("two of the boxes overlap in the whole tensor", hint="each begins where no other lies")
    return layout


def _spans(cut: tuple[Span, ...], local: Shape) -> list[Span]:
    return [*cut, *((0, length) for length in local[len(cut) :])]


def _spans_at(part: BoxPart) -> list[Span]:
    return [(begin, begin + length) for begin, length in zip(part.offsets, part.shape, strict=True)]


def _overlap(boxes: Sequence[Sequence[Span]]) -> bool:
    return any(
        all(one[0] < other[1] and other[0] < one[1] for one, other in zip(first, second, strict=True))
        for number, first in enumerate(boxes)
        for second in boxes[:number]
    )


# -- marks: how a value relates to the ranks
# A mark replaces the value in the state and is not part of the checkpoint's tree: what is saved under a mark loads into
# a target without one, and vice versa.


@dataclass(eq=False)
class Shard:
    """A local tensor or array and its layout in the global one. Made by `shard`, `fused` and `flat`."""

    value: Any
    layout: ShardLayout


@dataclass(eq=False)
class Replicated:
    """A value that is equal on every rank that has it. Made by `replicated`."""

    value: Any


@dataclass(eq=False)
class PerRank:
    """A value that belongs to this rank alone. Made by `per_rank`."""

    value: Any


@dataclass(eq=False)
class FirstRank:
    """A value of which the first rank's counts. Made by `first_rank`."""

    value: Any


MARKS: Final = frozenset({Shard, Replicated, PerRank, FirstRank})


class Late:
    """Stands for an entry of the state that does not exist yet. Made by `late`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "tenuto.late()"


LATE: Final = Late()


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
    """Declares that `tensor` (of torch or numpy) is this rank's part of a global tensor, in one of three forms:

    - `whole=`, `offsets=`: the global shape and the position of the tensor in it. In extra leading dimensions of
      `whole` (the experts of a stack) the tensor is 1 wide.
    - `dim=`, `rank=`, `of=`: equal parts along a dimension, this one the `rank`-th.
    - `whole=`, `boxes=`: several boxes, each a slice of the tensor (or a tuple of slices, from the first dimension on)
      and its offsets in the global tensor.

    Put the result into the state in place of the tensor, or pass it to `declare`. Raises UsageError for boxes that
    exceed the global tensor or do not tile the local one.
    """
    local = _shape(tensor)
    if boxes is not None and whole is not None and offsets is None and dim is None:
        return Shard(tensor, in_boxes(local, whole, boxes))
    if offsets is not None and whole is not None and dim is None:
        return Shard(tensor, at_offsets(local, whole, offsets))
    if dim is not None and rank is not None and of is not None and whole is None:
        return Shard(tensor, fused_along(local, None, dim, rank, of))
    raise UsageError(
        "a shard needs whole= and offsets=, or whole= and boxes=, or dim=, rank= and of=",
        hint="shard(tensor, whole=(vocabulary, width), offsets=(first_row, 0))",
    )


def fused(tensor: Any, *, sizes: Sequence[int], rank: int, of: int, dim: int = 0) -> Shard:
    """Declares this rank's part of parameters fused into one tensor, such as query, key and value, or gate and up.

    `sizes` are the full lengths of the parameters along `dim`, in order. Each is cut into `of` equal parts, and
    `tensor` concatenates the `rank`-th of each. The checkpoint stores the full parameters, fused, so it loads at any
    degree of tensor parallelism. Raises UsageError where the sizes do not fit.
    """
    return Shard(tensor, fused_along(_shape(tensor), sizes, dim, rank, of))


def flat(tensor: Any, *, whole: Sequence[int], begin: int) -> Shard:
    """Declares that the 1-D `tensor` is the elements from `begin` on of a flattened (row-major) tensor of shape
    `whole`: a partition as ZeRO makes them. Raises UsageError if it exceeds that tensor."""
    shape = _shape(tensor)
    if len(shape) != 1:
        raise UsageError(f"a flat partition has one dimension, not the shape {list(shape)}", hint="tensor.view(-1)")
    return Shard(tensor, flat_range(shape[0], whole, begin))


def replicated(value: Any) -> Replicated:
    """Declares that a value, with everything in it, is equal on every rank that has it.

    Declared replicas are compared at the first save and every 50th; undeclared values at every save.
    """
    return Replicated(value)


def per_rank(value: Any) -> PerRank:
    """Declares that a value, with everything in it, belongs to this rank alone: each rank saves its own."""
    return PerRank(value)


def first_rank(value: Any) -> FirstRank:
    """Declares that of an entry the first rank's value counts: rank 0 saves it, and a restore gives it to every rank.

    For what ranks keep apart and only one of them decides, such as a trainer's own record of its progress. Its
    `state_dict`, if it has one, is called on every rank, since it may be a collective. An image in memory (`memory=`)
    has what its own rank has: with such an entry several ranks resume from the store.
    """
    return FirstRank(value)


def late() -> Any:
    """Returns the value of an entry of the state that does not exist yet, such as an optimizer that a trainer makes.

    `Checkpointer.restore` leaves it alone. Put the object into the state and call `restore` again: it is filled from
    the same checkpoint. An entry that is still late is not saved; where the checkpoint has it, a step or a save is
    refused until it is restored.
    """
    return LATE


# -- layouts declared on tensors

_ATTRIBUTE: Final = "_tenuto_layout"
"""The attribute of a tensor with its declared layout. No weak reference: a tensor with one cannot get new memory on
load."""

_counted = [0]


def declarations() -> int:
    """Returns a number that changes with every declaration."""
    return _counted[0]


def attach(tensor: Any, layout: ShardLayout) -> None:
    """Declares the layout of a tensor wherever it occurs."""
    _counted[0] += 1
    setattr(tensor, _ATTRIBUTE, layout)


def attached(tensor: Any) -> ShardLayout | None:
    """Returns the layout declared on a tensor, if any."""
    return getattr(tensor, _ATTRIBUTE, None) if _counted[0] else None


def _shape(tensor: Any) -> tuple[int, ...]:
    shape = getattr(tensor, "shape", None)
    if shape is None:
        raise UsageError(f"a {type(tensor).__name__} is not a tensor", hint="declare a tensor of torch or an array")
    return tuple(int(length) for length in shape)
