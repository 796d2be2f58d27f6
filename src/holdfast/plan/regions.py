"""What a region of a whole leaf takes from one part of it: which items there, and where they go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from holdfast.plan.slices import Region


@dataclass(frozen=True, slots=True)
class Taken:
    """`region` of the part fills `where` of the result, whose axes are the leaf's (a number leaves one of length 1)."""

    region: Region
    where: tuple[slice, ...]


def taken(found: Region, whole: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]) -> Taken | None:
    """The items of a region of a leaf of shape `whole` that lie in its part of `shape` at `offsets`; None for none."""
    if not found.size or not prod(shape):
        return None
    place, first = found.first, 0
    pace, part_pace = prod(whole), prod(shape)
    counts, strides, where = [], [], []
    for axis, (length, extent) in enumerate(zip(whole, shape, strict=True)):
        pace, part_pace = pace // length, part_pace // extent
        low, place = divmod(place, pace)
        # A single item has no step to speak of.
        step = max(found.strides[axis] // pace, 1) if found.counts[axis] > 1 else 1
        begin = max(-(-(offsets[axis] - low) // step), 0)
        end = min(-(-(offsets[axis] + extent - low) // step), found.counts[axis])
        if begin >= end:
            return None
        first += (low + begin * step - offsets[axis]) * part_pace
        counts.append(end - begin)
        strides.append(step * part_pace)
        last = found.counts[axis]
        where.append(slice(last - end, last - begin) if found.flipped[axis] else slice(begin, end))
    inside = Region(first, tuple(counts), tuple(strides), found.flipped, tuple(counts))
    return Taken(inside, tuple(where))


def bands(one: Taken, items: int) -> Iterator[Taken]:
    """The same in bands of about `items` items along the first axis of more than one, and at least one line each."""
    region = one.region
    axis = next((axis for axis, count in enumerate(region.counts) if count > 1), None)
    if axis is None or region.size <= items:
        yield one
        return
    count = region.counts[axis]
    step = max(items // (region.size // count), 1)
    for low in range(0, count, step):
        high = min(low + step, count)
        begin = count - high if region.flipped[axis] else low
        counts = (*region.counts[:axis], high - low, *region.counts[axis + 1 :])
        start = one.where[axis].start
        where = (*one.where[:axis], slice(start + low, start + high), *one.where[axis + 1 :])
        first = region.first + begin * region.strides[axis]
        yield Taken(Region(first, counts, region.strides, region.flipped, counts), where)
