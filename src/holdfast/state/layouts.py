"""Where the elements of a local tensor lie in a global one: which cut of it is which box."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Literal

from holdfast.errors import UsageError

Span = tuple[int, int]
"""Begin and end of a run of indices."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One box of the whole. `cut` are the spans of the local tensor's leading dimensions that hold it (none: all of the
    tensor), in the same row-major order."""

    cut: tuple[Span, ...]
    offsets: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class Layout:
    """How a local tensor of shape `local` lies in a global one of shape `whole`.

    No parts: this rank holds nothing of it. `placement` is "replicated" where every rank that holds anything holds all
    of it.
    """

    whole: Shape
    local: Shape
    parts: tuple[Part, ...]
    placement: Literal["box", "replicated"] = "box"


def taken(tensor: Any, part: Part) -> Any:
    """The view of a local tensor that is `part`, in the local tensor's own number of dimensions."""
    return tensor[tuple(slice(start, stop) for start, stop in part.cut)] if part.cut else tensor


def everywhere(shape: Sequence[int]) -> Layout:
    """The whole tensor, on every rank."""
    return Layout(tuple(shape), tuple(shape), (_all_of(shape),), "replicated")


def nowhere(shape: Sequence[int]) -> Layout:
    """A tensor that other ranks hold: its local copy does not count."""
    return Layout(tuple(shape), tuple(shape), (), "replicated")


def nothing(whole: Shape, local: Shape, placement: Literal["box", "replicated"] = "box") -> Layout:
    """A local tensor without elements. One of a tensor that has none at all is that tensor: somebody must hold it."""
    return Layout(whole, local, () if prod(whole) else (_all_of(whole),), placement)


def _all_of(shape: Sequence[int]) -> Part:
    return Part((), (0,) * len(shape), tuple(shape))


def at_offsets(local: Sequence[int], whole: Sequence[int], offsets: Sequence[int]) -> Layout:
    """A local tensor that is one box. `whole` may have more dimensions than it: the box is 1 wide in the first ones."""
    local, whole, offsets = tuple(local), tuple(whole), tuple(offsets)
    more = len(whole) - len(local)
    if more < 0:
        raise UsageError(f"a tensor of shape {list(local)} is no part of one of shape {list(whole)}", hint="whole=")
    layout = checked(Layout(whole, local, (Part((), offsets, (1,) * more + local),)))
    return layout if prod(local) else nothing(whole, local)


def in_boxes(
    local: Sequence[int], whole: Sequence[int], boxes: Iterable[tuple[slice | tuple[slice, ...], Sequence[int]]]
) -> Layout:
    """A local tensor that is several boxes: for each the slice (or slices, from the first dimension on) of the local
    tensor, and where in the whole that begins."""
    local, whole = tuple(local), tuple(whole)
    parts = []
    for where, offsets in boxes:
        slices = (where,) if isinstance(where, slice) else tuple(where)
        if len(slices) > len(local) or any(one.step not in (None, 1) for one in slices):
            raise UsageError(f"{where!r} does not cut a tensor of shape {list(local)}", hint="slices without a step")
        cut = tuple(one.indices(length)[:2] for one, length in zip(slices, local, strict=False))
        shape = tuple(max(stop - start, 0) for start, stop in cut) + local[len(cut) :]
        parts.append(Part(cut, tuple(offsets), (1,) * (len(whole) - len(shape)) + shape))
    found = checked(Layout(whole, local, tuple(part for part in parts if prod(part.shape))))
    return found if found.parts else nothing(whole, local)


def fused_along(local: Sequence[int], sizes: Sequence[int] | None, dim: int, rank: int, of: int) -> Layout:
    """The share of rank `rank` of `of` in parameters of `sizes` along `dim` that lie behind one another: of each of
    them an equal part. Without `sizes` there is one of them."""
    local = tuple(local)
    if not -len(local) <= dim < len(local) or not 0 <= rank < of:
        raise UsageError(f"rank {rank} of {of} along dimension {dim} of a tensor of shape {list(local)} is none")
    dim %= len(local)
    sizes = (local[dim] * of,) if sizes is None else tuple(sizes)
    if any(size % of for size in sizes) or sum(sizes) != local[dim] * of:
        raise UsageError(
            f"sizes {list(sizes)} over {of} ranks are no tensor of shape {list(local)} along dimension {dim}",
            hint="sizes= are those of the whole parameters, and each is cut into equal parts; else shard(…, boxes=)",
        )
    whole = (*local[:dim], sum(sizes), *local[dim + 1 :])
    spans: list[Span] = []
    begin = 0
    for size in sizes:
        width = size // of
        spans.append((begin + rank * width, begin + (rank + 1) * width))
        begin += size
    return crossed(whole, {dim: spans})


def flat_range(length: int, whole: Sequence[int], begin: int) -> Layout:
    """Elements `begin..begin+length-1` of a row-major tensor of shape `whole`, as a local tensor of one dimension."""
    whole = tuple(whole)
    if begin < 0 or begin + length > prod(whole):
        raise UsageError(
            f"elements {begin} to {begin + length} are not in a tensor of shape {list(whole)}", hint="begin= and whole="
        )
    parts: list[Part] = []
    at = begin
    while at < begin + length:
        offsets, shape = _largest_box(at, begin + length, whole)
        parts.append(Part(((at - begin, at - begin + prod(shape)),), offsets, shape))
        at += prod(shape)
    return Layout(whole, (length,), tuple(parts)) if parts else nothing(whole, (length,))


def _largest_box(at: int, end: int, whole: Shape) -> tuple[Shape, Shape]:
    """Offsets and shape of the largest box that is a run of elements from `at` on, before `end`."""
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


def crossed(whole: Shape, spans: dict[int, list[Span]], *, placement: Literal["box", "replicated"] = "box") -> Layout:
    """The layout of a local tensor that holds, along each dimension in `spans`, these spans of the whole one behind
    another, and all of every other dimension."""
    every = [joined(spans[dim]) if dim in spans else [(0, length)] for dim, length in enumerate(whole)]
    local = tuple(sum(stop - start for start, stop in found) for found in every)
    if 0 in local:
        return nothing(whole, local, placement)
    if all(len(found) == 1 for found in every):
        return Layout(whole, local, (Part((), tuple(found[0][0] for found in every), local),), placement)
    last = max(dim for dim, found in enumerate(every) if len(found) > 1)
    parts = []
    for chosen in product(*(list(zip(found, _behind(found), strict=True)) for found in every)):
        cut = tuple(here for _, here in chosen[: last + 1])
        shape = tuple(stop - start for (start, stop), _ in chosen)
        parts.append(Part(cut, tuple(span[0] for span, _ in chosen), shape))
    return Layout(whole, local, tuple(parts), placement)


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same indices in the same order, in as few spans as there can be."""
    found: list[Span] = []
    for start, stop in spans:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _behind(spans: Sequence[Span]) -> list[Span]:
    """Where each lies when they lie behind one another."""
    found: list[Span] = []
    at = 0
    for start, stop in spans:
        found.append((at, at + stop - start))
        at += stop - start
    return found


def checked(layout: Layout) -> Layout:
    """The layout itself; UsageError where its parts do not lie in the whole, or do not make up the local tensor."""
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
    held = sum(prod(part.shape) for part in layout.parts)
    if held != prod(layout.local) or _overlap([_spans(part.cut, layout.local) for part in layout.parts]):
        raise UsageError(
            f"the boxes are {held} elements of a local tensor of shape {list(layout.local)}, or overlap in it",
            hint="every element of the local tensor lies in exactly one of the boxes",
        )
    if _overlap([_spans_at(part) for part in layout.parts]):
        raise UsageError("two of the boxes overlap in the whole tensor", hint="each begins where no other lies")
    return layout


def _spans(cut: tuple[Span, ...], local: Shape) -> list[Span]:
    return [*cut, *((0, length) for length in local[len(cut) :])]


def _spans_at(part: Part) -> list[Span]:
    return [(begin, begin + length) for begin, length in zip(part.offsets, part.shape, strict=True)]


def _overlap(boxes: Sequence[Sequence[Span]]) -> bool:
    return any(
        all(one[0] < other[1] and other[0] < one[1] for one, other in zip(first, second, strict=True))
        for number, first in enumerate(boxes)
        for second in boxes[:number]
    )
