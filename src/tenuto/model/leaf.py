"""Leaves: their paths, the boxes that ranks hold of them, rows and element types.

A leaf is one tensor-like entry of the training state; a row is the part of it that one rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from math import prod
from typing import Final, Literal

from tenuto.errors import Unserialisable, UsageError
from tenuto.record import record

# --------------------------------------------------------------------------------------------------
# Paths: RFC 6901 pointers with two more escapes and typed keys.
#
# A path is segments joined by `/`. In a segment `~0` is `~`, `~1` is `/`, `~2` is `@` (which marks a part of a leaf in
# pack names), `~3` a leading `#` of a string key. A segment that starts with `#` is a non-string key (`#i:3`: the int
# 3) or one of Tenuto's own names, so that the two never collide.

METADATA: Final = "__metadata__"


def escape(key: str) -> str:
    """Returns a string key as a path segment."""
    if not key.isascii():
        try:
            key.encode("utf-8")
        except UnicodeEncodeError:
            raise Unserialisable(
                f"the key {key!r} holds a lone surrogate, which no file format can name", subject=ascii(key)
            ) from None
    elif "~" not in key and "/" not in key and "@" not in key and key[:1] != "#":
        return key
    out = key.replace("~", "~0").replace("/", "~1").replace("@", "~2")
    return "~3" + out[1:] if out.startswith("#") else out


def unescape(segment: str) -> str:
    """Returns the string key of a segment made by `escape`."""
    if segment.startswith("~3"):
        segment = "#" + segment[2:]
    return segment.replace("~2", "@").replace("~1", "/").replace("~0", "~")


def join(parent: str, segment: str) -> str:
    """Appends the escaped `segment` to `parent`; the root is the empty path."""
    return f"{parent}/{segment}" if parent else segment


def lineage(path: str) -> Iterator[str]:
    """Yields the path and all its ancestors except the root."""
    yield path
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


# --------------------------------------------------------------------------------------------------
# Boxes: the parts of a leaf that ranks hold, write or want.


@record
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


# --------------------------------------------------------------------------------------------------
# Element types by torch name. Values are stored as bytes, whatever the type.
#
# size: bytes per stored element; a packed sub-byte type counts the byte that torch allocates for one element.
# code: the safetensors dtype; None if safetensors 0.8 has none, and the leaf lies in the pack as U8.
# numpy: numpy's type string; None if numpy has no such type.


@record
class DType:
    name: str
    size: int
    code: str | None
    numpy: str | None


def _table(*rows: tuple[str, int, str | None, str | None]) -> dict[str, DType]:
    return {row[0]: DType(*row) for row in rows}


DTYPES: Final[dict[str, DType]] = _table(
    ("float64", 8, "F64", "<f8"),
    ("float32", 4, "F32", "<f4"),
    ("float16", 2, "F16", "<f2"),
    ("bfloat16", 2, "BF16", None),
    ("float8_e4m3fn", 1, "F8_E4M3", None),
    ("float8_e5m2", 1, "F8_E5M2", None),
    ("float8_e8m0fnu", 1, "F8_E8M0", None),
    ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", None),
    ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", None),
    ("float4_e2m1fn_x2", 1, None, None),
    ("int64", 8, "I64", "<i8"),
    ("int32", 4, "I32", "<i4"),
    ("int16", 2, "I16", "<i2"),
    ("int8", 1, "I8", "|i1"),
    ("uint64", 8, "U64", "<u8"),
    ("uint32", 4, "U32", "<u4"),
    ("uint16", 2, "U16", "<u2"),
    ("uint8", 1, "U8", "|u1"),
    ("bool", 1, "BOOL", "|b1"),
    ("complex128", 16, None, "<c16"),
    ("complex64", 8, "C64", "<c8"),
    ("complex32", 4, None, None),
    *((f"{sign}int{bits}", 1, None, None) for sign in ("", "u") for bits in range(1, 8)),
    ("bits8", 1, None, None),
    ("bits16", 2, None, None),
    ("bits1x8", 1, None, None),
    ("bits2x4", 1, None, None),
    ("bits4x2", 1, None, None),
)


def dtype(name: str) -> DType:
    """Returns the dtype called `name`; numpy types without a torch name are spelled `numpy:<f16` and the like."""
    found = DTYPES.get(name)
    if found is not None:
        return found
    if name.startswith("numpy:"):
        import numpy as np

        array_type = np.dtype(name[6:])
        if array_type.hasobject:
            raise KeyError(name)
        return DType(name, array_type.itemsize, None, array_type.str)
    raise KeyError(name)


Placement = Literal["whole", "replicated", "box", "per_rank"]
"""How a leaf relates to the ranks.

whole: undeclared, and taken to be the same on all ranks.
replicated: declared to be the same on all ranks that hold it.
box: each rank holds its part of a global tensor.
per_rank: private to each rank.
"""


@record
class LeafSpec:
    """The description of a row, without its bytes.

    path: the leaf's path.
    dtype: the dtype's name.
    shape: the row's shape; its bytes are row-major.
    private: whether the row belongs to one rank.
    offsets: where the row begins in the leaf; None if the row is the full leaf.
    whole: the leaf's global shape; None if the row is the full leaf.
    placement: how the leaf relates to the ranks; ignored in comparisons.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    private: bool = False
    offsets: tuple[int, ...] | None = None
    whole: tuple[int, ...] | None = None
    placement: Placement = field(default="whole", compare=False, kw_only=True)

    @property
    def nbytes(self) -> int:
        return dtype(self.dtype).size * prod(self.shape)

    @property
    def itemsize(self) -> int:
        return dtype(self.dtype).size

    @property
    def box(self) -> Box:
        """The part of the leaf that the row is."""
        return Box.whole(self.shape) if self.offsets is None else Box(self.offsets, self.shape)

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """The shape of the full leaf."""
        return self.shape if self.whole is None else self.whole
