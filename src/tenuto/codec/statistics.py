"""Statistics of the values in raw bytes: how many are not finite, their norm, the smallest and the largest.

Every function works on bytes as they are stored, a block of at most BLOCK_BYTES at a time, so that they come out of
memory once. Types that numpy lacks are read by integer views: a float of 16 or 8 bits is sign and magnitude, so integer
maxima find its extremes and whether anything is NaN or infinite, and shifting it into the upper half of a word makes
it a float32. All loops over elements are numpy's and BLAS's, which release the interpreter's lock.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from tenuto.model.leaf import dtype as dtype_of
from tenuto.record import record

Array = np.ndarray[Any, Any]
BLOCK_BYTES: Final = 1 << 20
"""Bytes that are looked at at once: with as many of scratch they fit into a processor's second cache."""
_ROW: Final = 8192
_TINY: Final = 1e-30
"""A sum of squares in float32 below this may have lost squares that are no normal numbers."""


class Block(NamedTuple):
    """Statistics of one block. `square`: the sum of squares. `low`, `high`: inf and -inf where nothing has extremes."""

    nonfinite: int = 0
    nan: int = 0
    square: float = 0.0
    low: float = math.inf
    high: float = -math.inf


def dot(x: Array, y: Array) -> float:
    """Returns the sum of the products of two arrays of one float type. BLAS takes several threads for more than 10,000
    elements, which training needs; so it gets no more than _ROW at a time, and sums stay exact to six digits."""
    cut = len(x) // _ROW * _ROW
    if not cut:
        return float(np.dot(x, y))
    rows = (x, y) if cut == len(x) else (x[:cut], y[:cut])
    # A sum of Python's: that of a short array takes longer than the product of a row.
    found = float(sum(np.vecdot(*(one.reshape(-1, _ROW) for one in rows)).tolist()))
    return found if cut == len(x) else found + float(np.dot(x[cut:], y[cut:]))


Examine = Callable[[Array, bool], Block]
"""Takes the bytes of a block, and whether more than the count of what is not finite is wanted."""


@lru_cache(256)
def examiner_of(name: str) -> Examine | None:
    """Returns how a block of this dtype is looked at; None for a dtype without numbers."""
    if name in ("float32", "float64"):
        return _native(np.dtype(dtype_of(name).numpy))
    if name in _SMALL_FLOATS:
        return _SmallFloat(*_SMALL_FLOATS[name])
    kind = kind_of(name)
    if kind is None:
        return None
    numpy_type = np.dtype(dtype_of(name).numpy or "V1")
    if kind == "number":
        return _whole_numbers(numpy_type)
    if name in ("complex64", "complex128"):
        return _complex(_native(np.dtype(f"<f{numpy_type.itemsize // 2}")), name)
    return lambda block, _: exact(floats_of(block, name), extremes=kind != "complex")


@lru_cache(256)
def kind_of(name: str) -> Literal["float", "complex", "number"] | None:
    """Returns what elements of this dtype are: "number" for whole numbers and truth values; None where no numbers."""
    if name.startswith("complex"):
        return "complex"
    if name.startswith(("float", "bfloat")):
        return "float"
    try:
        letter = np.dtype(dtype_of(name).numpy or "V1").kind
    except TypeError:
        return None
    if letter == "V":
        return None
    found: dict[str, Literal["float", "complex", "number"]] = {"f": "float", "c": "complex"}
    return found.get(letter) or ("number" if letter in "iub" else None)


def exact(values: Array, *, extremes: bool = True) -> Block:
    """Returns the statistics of an array of floats, whatever is in it. Complex elements are pairs, last axis."""
    finite = np.isfinite(values)
    whole = finite if values.ndim == 1 else finite.all(axis=-1)
    bad = whole.size - int(np.count_nonzero(whole))
    nan = np.isnan(values)
    nans = int(np.count_nonzero(nan if values.ndim == 1 else nan.any(axis=-1))) if bad else 0
    good = np.where(finite, values, 0).astype(np.float64) if bad else values.astype(np.float64)
    flat = good.reshape(-1)
    with np.errstate(over="ignore"):
        square = dot(flat, flat)
    if not extremes or not flat.size or bad == whole.size:
        return Block(bad, nans, square)
    if not bad:
        return Block(0, 0, square, float(flat.min()), float(flat.max()))
    low, high = np.min(flat, where=finite, initial=math.inf), np.max(flat, where=finite, initial=-math.inf)
    return Block(bad, nans, square, float(low), float(high))


def many(values: Array, starts: Array, *, full: bool = True) -> tuple[Array, ...]:
    """Returns the statistics of many short leaves, one after the other in `values`, as columns: nonfinite, nan, and if
    `full` square, low and high. `starts`: int64, where each begins; none is empty."""
    flat, count = values.reshape(-1), len(starts)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        clean = math.isfinite(dot(flat, flat))
    bad, nan = np.zeros(count, np.int64), np.zeros(count, np.int64)
    good = values
    if not clean:
        finite: Array = np.isfinite(values)
        nans: Array = np.isnan(values)
        good = np.where(finite, values, 0)
        if values.ndim > 1:
            finite, nans = np.all(finite, axis=-1), np.any(nans, axis=-1)
        bad = np.add.reduceat((~finite).astype(np.int64), starts)
        nan = np.add.reduceat(nans.astype(np.int64), starts)
    if not full:
        return bad, nan
    wide = good.astype(np.float64)
    with np.errstate(over="ignore"):
        np.multiply(wide, wide, out=wide)
    square = np.add.reduceat(wide if values.ndim == 1 else wide.sum(axis=-1), starts)
    if values.ndim > 1:
        return bad, nan, square, np.full(count, math.inf), np.full(count, -math.inf)
    low = np.minimum.reduceat(values if clean else np.where(finite, values, math.inf), starts)
    high = np.maximum.reduceat(values if clean else np.where(finite, values, -math.inf), starts)
    return bad, nan, square, low, high


# -- float32 and float64: a sum of squares that is finite proves that all values are ----------------------------


def _native(kind: np.dtype[Any]) -> Examine:
    def examine(block: Array, full: bool) -> Block:
        values = block.view(kind)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            square = dot(values, values)
        if not math.isfinite(square):
            return exact(values)  # or the squares alone were too large
        if not full:
            return Block()
        low, high = float(values.min()), float(values.max())
        if square < _TINY and (low or high):
            return exact(values)
        return Block(0, 0, square, low, high)

    return examine


def _complex(parts: Examine, name: str) -> Examine:
    def examine(block: Array, full: bool) -> Block:
        found = parts(block, full)
        if found.nonfinite:
            return exact(floats_of(block, name), extremes=False)
        return Block(square=found.square)

    return examine


def _whole_numbers(kind: np.dtype[Any]) -> Examine:
    as_float = np.float32 if kind.itemsize <= 2 else np.float64

    def examine(block: Array, full: bool) -> Block:
        if not full:
            return Block()
        numbers = block.view(np.uint8 if kind.kind == "b" else kind)
        values = numbers.astype(as_float)
        return Block(0, 0, dot(values, values), float(numbers.min()), float(numbers.max()))

    return examine


# -- floats of 16 and 8 bits -----------------------------------------------------------------------------------------


@record
class _SmallFloat:
    """How blocks of floats of `bits` bits are looked at, whose magnitude from `special` on is NaN or infinite.

    exponent: bits of the exponent; bias: of it.
    """

    name: str
    bits: int
    exponent: int
    bias: int
    special: int

    def __call__(self, block: Array, full: bool) -> Block:
        unsigned, signed = block.view(f"<u{self.bits // 8}"), block.view(f"<i{self.bits // 8}")
        if not block.size:
            return Block()
        sign = 1 << (self.bits - 1)
        most, least = int(signed.max()), int(unsigned.max())  # the largest positive, the most negative there is
        if most >= self.special or least >= sign + self.special:
            return exact(floats_of(block, self.name))
        if not full:
            return Block()
        nearest = int(unsigned.min()) if most < 0 or least < sign else 0  # to nought, where all have one sign
        high, low = (most if most >= 0 else nearest), (least if least >= sign else nearest)
        extremes = floats_of(np.array([low, high], unsigned.dtype).view(np.uint8), self.name)
        return Block(0, 0, self._square(block), float(extremes[0]), float(extremes[1]))

    def _square(self, block: Array) -> float:
        """Returns the sum of squares. Each word of 32 bits is shifted until one element of it is its upper part, which
        is a float32 but for its exponent's bias."""
        cut = len(block) // 4 * 4
        words = block[:cut].view("<u4")
        scratch = _scratch(len(words))
        shift, scale = 8 - self.exponent, np.float32(2.0 ** (127 - self.bias))
        mask = np.uint32(((1 << self.bits) - 1) << (32 - self.bits))
        if shift:
            mask = np.uint32(int(mask) >> shift | 0x80000000) & np.uint32(~(0x7F800000 << (8 - shift)) & 0xFFFFFFFF)
        values, total = scratch.view("<f4"), 0.0
        for lane in range(32 // self.bits):
            above = 32 - self.bits * (lane + 1)  # bits above this element, which move out
            if above:
                np.left_shift(words, np.uint32(above), out=scratch)
            source = scratch if above else words
            if shift:
                np.right_shift(source.view("<i4"), shift, out=scratch.view("<i4"))
                np.bitwise_and(scratch, mask, out=scratch)
            elif lane:  # else nothing is below it
                np.bitwise_and(source, mask, out=scratch)
            if self.bias != 127:
                np.multiply(values, scale, out=values)
            with np.errstate(over="ignore", under="ignore"):
                square = dot(values, values)
            if not math.isfinite(square) or square < _TINY:
                square = exact(values).square
            total += square
        return total + (exact(floats_of(block[cut:], self.name)).square if cut < len(block) else 0.0)


_memory = threading.local()


def _scratch(words: int) -> Array:
    """Returns memory of this thread: taken anew for each block, it would cost more than what is done in it."""
    held: Array | None = getattr(_memory, "words", None)
    if held is None or len(held) < words:
        held = _memory.words = np.empty(max(words, BLOCK_BYTES // 4), "<u4")
    return held[:words]


_SMALL_FLOATS: Final[dict[str, tuple[str, int, int, int, int]]] = {
    "bfloat16": ("bfloat16", 16, 8, 127, 0x7F80),
    "float16": ("float16", 16, 5, 15, 0x7C00),
    "float8_e5m2": ("float8_e5m2", 8, 5, 15, 0x7C),
    "float8_e4m3fn": ("float8_e4m3fn", 8, 4, 7, 0x7F),
}


# -- any type as floats, exactly -------------------------------------------------------------------------------------


def floats_of(block: Array, name: str) -> Array:
    """Returns the elements as float32 or float64; of complex ones pairs. `name`: of a dtype with numbers."""
    if name == "bfloat16":
        return (block.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if name == "complex32":
        return block.view("<f2").astype(np.float32).reshape(-1, 2)
    if name.startswith(("float8", "float4")):
        found: Array = np.take(_table(name), block, axis=0).reshape(-1)
        return found
    values = block.view(np.dtype(dtype_of(name).numpy or "V1"))
    if values.dtype.kind == "c":
        return values.view(values.real.dtype).reshape(-1, 2)
    if values.dtype.kind == "f":
        return values if values.dtype.itemsize >= 4 else values.astype(np.float32)
    return values.astype(np.float64)


@lru_cache(16)
def _table(name: str) -> Array:
    """Returns the value of each byte, float32 [256], of float4 pairs [256, 2]."""
    if name.startswith("float4"):  # two of a sign, two bits of exponent and one of mantissa; the lower bits come first
        values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        both = np.array([*values, *(-value for value in values)], np.float32)
        return np.stack([np.tile(both, 16), np.repeat(both, 16)], axis=1)
    if name == "float8_e8m0fnu":
        return np.array([2.0 ** (byte - 127) for byte in range(255)] + [math.nan], np.float32)
    layout = _LAYOUTS[name]
    return np.array([_decoded(byte, *layout) for byte in range(256)], np.float32)


_LAYOUTS: Final[dict[str, tuple[int, int, str]]] = {
    "float8_e5m2": (2, 15, "ieee"),
    "float8_e4m3fn": (3, 7, "fn"),
    "float8_e5m2fnuz": (2, 16, "fnuz"),
    "float8_e4m3fnuz": (3, 8, "fnuz"),
}
"""Bits of the mantissa, the exponent's bias, and what is not finite: as in IEEE 754, NaN alone with all bits set, or
NaN alone in the place of minus nought."""


def _decoded(byte: int, mantissa: int, bias: int, special: str) -> float:
    exponent, rest = (byte & 0x7F) >> mantissa, byte & ((1 << mantissa) - 1)
    if special == "fnuz" and byte == 0x80:
        return math.nan
    if special == "fn" and byte & 0x7F == 0x7F:
        return math.nan
    if special == "ieee" and exponent == 31:
        return math.nan if rest else math.copysign(math.inf, -1 if byte >> 7 else 1)
    magnitude = math.ldexp(rest + (1 << mantissa if exponent else 0), max(exponent, 1) - bias - mantissa)
    return -magnitude if byte >> 7 else magnitude
