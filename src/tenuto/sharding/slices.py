"""Basic slices of a leaf: the bytes that an index selects, and the blocks in which to read them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from math import prod
from typing import Any

from tenuto.errors import BadIndex
from tenuto.record import record


@record
class Region:
    """The items that an index selects.

    first: number of the first item.
    counts: number of items along each axis of the leaf.
    strides: distance between neighbours along each axis, in items.
    flipped: whether the order along each axis is reversed.
    shape: shape of the result, without axes indexed by an integer.
    """

    first: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    flipped: tuple[bool, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.counts)

    @property
    def is_run(self) -> bool:
        """Returns whether the items are contiguous and in order."""
        step = 1
        for count, stride in zip(reversed(self.counts), reversed(self.strides), strict=True):
            if count != 1 and stride != step:
                return False
            step *= count
        return not any(flip and count > 1 for flip, count in zip(self.flipped, self.counts, strict=True))


@record
class Block:
    """Bytes `start..stop-1` of a leaf, read at once.

    where: position of the items in the region.
    counts: number of items along each axis.
    """

    start: int
    stop: int
    where: tuple[slice, ...]
    counts: tuple[int, ...]


def region(shape: tuple[int, ...], key: Any, path: str) -> Region:
    """Returns the region that `key` (ints, slices, Ellipsis, or a tuple of them) selects; raises BadIndex otherwise."""
    keys = _expanded(shape, key if isinstance(key, tuple) else (key,), path)
    first, pace = 0, prod(shape)
    counts, strides, flipped, result = [], [], [], []
    for axis, (length, one) in enumerate(zip(shape, keys, strict=True)):
        pace = pace // length if length else 0
        if isinstance(one, slice):
            try:
                start, stop, step = one.indices(length)
            except (TypeError, ValueError) as error:
                raise BadIndex(f"{path}: {one} is not a slice of whole numbers: {error}", subject=path) from None
            chosen = range(start, stop, step)
            count = len(chosen)
            low = min(chosen[0], chosen[-1]) if count else 0
            result.append(count)
        else:
            chosen, count, low, step = range(1), 1, _place(one, length, axis, path), 1
        first += low * pace
        counts.append(count)
        strides.append(abs(step) * pace)
        flipped.append(step < 0)
    return Region(first, tuple(counts), tuple(strides), tuple(flipped), tuple(result))


def box_region(shape: tuple[int, ...], offsets: tuple[int, ...], counts: tuple[int, ...]) -> Region:
    """Returns the region of the box of `counts` items at `offsets`, which must lie in a leaf of this shape."""
    pace, first, strides = 1, 0, []
    for length, offset in zip(reversed(shape), reversed(offsets), strict=True):
        strides.append(pace)
        first += offset * pace
        pace *= length
    return Region(first, counts, tuple(reversed(strides)), (False,) * len(shape), counts)


def _expanded(shape: tuple[int, ...], keys: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    """Returns one key for each axis."""
    for one in keys:
        if not isinstance(one, slice) and one is not Ellipsis and (isinstance(one, bool) or not _is_integer(one)):
            raise BadIndex(
                f"{path}: {type(one).__name__} is not an index of a leaf that has not been read",
                subject=path,
                hint="use whole numbers, slices and ...; read the leaf with [...] and index what comes back",
            )
    dots = sum(one is Ellipsis for one in keys)
    given = len(keys) - dots
    if dots > 1 or given > len(shape):
        raise BadIndex(f"{path}: {given} indexes for {len(shape)} dimensions", subject=path)
    at = next((place for place, one in enumerate(keys) if one is Ellipsis), len(keys))
    return (*keys[:at], *[slice(None)] * (len(shape) - given), *keys[at + 1 :])


def _is_integer(one: Any) -> bool:
    try:
        operator.index(one)
    except TypeError:
        return False
    return True


def _place(one: Any, length: int, axis: int, path: str) -> int:
    place = operator.index(one)
    if not -length <= place < length:
        raise BadIndex(f"{path}: index {place} is out of range: dimension {axis} has {length}", subject=path)
    return place + length if place < 0 else place


def blocks(found: Region, itemsize: int, *, block_bytes: int, gap_bytes: int) -> Iterator[Block]:
    """Yields the blocks in which to read a region.

    A block has at most `block_bytes` bytes, unless one row is longer, and spans no unwanted gap of `gap_bytes` or more.
    An empty region has no blocks.
    """
    if found.size and itemsize:
        yield from _Cutter(found, itemsize, block_bytes, gap_bytes).cut(0, found.first * itemsize, ())


class _Cutter:
    def __init__(self, found: Region, itemsize: int, block_bytes: int, gap_bytes: int) -> None:
        self.counts = found.counts
        self.paces = [stride * itemsize for stride in found.strides]
        self.block_bytes = block_bytes
        axes = len(self.counts)
        self.spans = [itemsize] * (axes + 1)
        """Bytes from the first to the last that axis i and later axes select."""
        self.dense = [True] * (axes + 1)
        """Whether items of axis i and later axes have no wide gap between them."""
        for axis in range(axes - 1, -1, -1):
            inner, pace, count = self.spans[axis + 1], self.paces[axis], self.counts[axis]
            self.spans[axis] = inner + (count - 1) * pace
            self.dense[axis] = self.dense[axis + 1] and (count == 1 or pace - inner < gap_bytes)

    def cut(self, axis: int, start: int, where: tuple[slice, ...]) -> Iterator[Block]:
        if axis == len(self.counts) or (self.dense[axis] and self.spans[axis] <= self.block_bytes):
            whole = tuple(slice(0, count) for count in self.counts[axis:])
            counts = (*(part.stop - part.start for part in where), *self.counts[axis:])
            yield Block(start, start + self.spans[axis], (*where, *whole), counts)
            return
        count, pace, inner = self.counts[axis], self.paces[axis], self.spans[axis + 1]
        if not self.dense[axis] or inner > self.block_bytes:
            for number in range(count):
                yield from self.cut(axis + 1, start + number * pace, (*where, slice(number, number + 1)))
            return
        rows = max((self.block_bytes - inner) // pace + 1, 1)
        whole = tuple(slice(0, one) for one in self.counts[axis + 1 :])
        before = tuple(part.stop - part.start for part in where)
        for low in range(0, count, rows):
            high = min(low + rows, count)
            begin = start + low * pace
            counts = (*before, high - low, *self.counts[axis + 1 :])
            yield Block(begin, begin + inner + (high - low - 1) * pace, (*where, slice(low, high), *whole), counts)
