"""Leaves, rows and element types.

A leaf is one tensor-like entry of the training state; a row is the part of it that one rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Final, Literal

# Element types by torch name. Values are stored as bytes, whatever the type.
#
# size: bytes per stored element; a packed sub-byte type counts the byte that torch allocates for one element.
# code: the safetensors dtype; None if safetensors 0.8 has none, and the leaf lies in the pack as U8.
# numpy: numpy's type string; None if numpy has no such type.


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
    def leaf_shape(self) -> tuple[int, ...]:
        """The shape of the full leaf."""
        return self.shape if self.whole is None else self.whole
