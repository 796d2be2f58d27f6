"""A box: the part of a leaf that one rank holds, writes or wants."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tenuto.errors import UsageError


@dataclass(frozen=True, slots=True)
class Box:
    """The items `offsets[i] .. offsets[i] + shape[i] - 1` along each axis i of a leaf.

    An empty box (a shape with a 0) still has a position: two empty boxes at different offsets are not equal.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises UsageError if offsets and shape differ in length or contain a negative number."""
        if len(self.offsets) != len(self.shape):
            raise UsageError(f"a box with {len(self.offsets)} offsets and {len(self.shape)} lengths")
        if min((*self.offsets, *self.shape), default=0) < 0:
            raise UsageError(f"a box at {self.offsets} of shape {self.shape}: both are whole numbers from 0 on")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Returns the box that covers a leaf of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """The number of items: 1 without axes."""
        return prod(self.shape)

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    @property
    def ends(self) -> tuple[int, ...]:
        """The first position after the box along each axis."""
        return tuple(offset + length for offset, length in zip(self.offsets, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects this box in the full leaf's array."""
        return tuple(map(slice, self.offsets, self.ends))

    def intersection(self, other: Box) -> Box | None:
        """Returns the common items; None if there are none."""
        self._same_axes(other)
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(map(min, self.ends, other.ends))
        shape = tuple(stop - start for start, stop in zip(low, high, strict=True))
        return Box(low, shape) if min(shape, default=1) > 0 else None

    def contains(self, other: Box) -> bool:
        """Returns whether every item of `other` lies in this box; True if it has none."""
        self._same_axes(other)
        return other.empty or self.intersection(other) == other

    def relative_to(self, other: Box) -> Box:
        """Returns this box in coordinates of `other`, which contains it: its place in an array of just the other's
        items."""
        self._same_axes(other)
        offsets = tuple(mine - theirs for mine, theirs in zip(self.offsets, other.offsets, strict=True))
        if min(offsets, default=0) < 0 or any(map(int.__gt__, self.ends, other.ends)):
            raise UsageError(f"{self} does not lie in {other}")
        return Box(offsets, self.shape)

    def __str__(self) -> str:
        """Formats the box as an index: `[0:4, 8:16]`."""
        return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(self.offsets, self.ends, strict=True))}]"

    def _same_axes(self, other: Box) -> None:
        if len(self.shape) != len(other.shape):
            raise UsageError(f"a box of {len(self.shape)} axes and one of {len(other.shape)}: of one leaf they are not")
