"""How the values of two equally shaped leaves differ: sums over blocks of their bytes."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tenuto.codec.statistics import dot, floats_of, kind_of
from tenuto.model.leaf import dtype

Array = np.ndarray[Any, Any]
STEP_BYTES: Final = 512 << 10
"""Bytes of each side that are compared at once: with what is computed from them they stay in a processor's cache."""


@dataclass(slots=True)
class Sums:
    """Sums over the elements of two leaves, a and b, added up by several threads.

    elements: how many; differing: of how many the bits differ (of two element types, the values). bad: how many are
    NaN or infinite in a, and in b; the other sums leave out those of either. alone: the squares of finite values of a
    and of b where the other has none.
    """

    elements: int = 0
    differing: int = 0
    bad: tuple[int, int] = (0, 0)
    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0
    dd: float = 0.0
    largest: float = 0.0
    alone: tuple[float, float] = (0.0, 0.0)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, other: Sums) -> None:
        with self._lock:
            self.elements += other.elements
            self.differing += other.differing
            self.bad = (self.bad[0] + other.bad[0], self.bad[1] + other.bad[1])
            self.aa, self.bb, self.ab = self.aa + other.aa, self.bb + other.bb, self.ab + other.ab
            self.dd += other.dd
            self.alone = (self.alone[0] + other.alone[0], self.alone[1] + other.alone[1])
            self.largest = max(self.largest, other.largest)

    @property
    def norms(self) -> tuple[float, float]:
        """The norms of the finite values of a and of b."""
        return math.sqrt(self.aa + self.alone[0]), math.sqrt(self.bb + self.alone[1])

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between the two; None where one of them is nought."""
        if not self.aa or not self.bb:
            return None
        return max(-1.0, min(1.0, self.ab / math.sqrt(self.aa) / math.sqrt(self.bb)))


def add_block(into: Sums, a: Array, b: Array, names: tuple[str, str]) -> None:
    """Adds the elements of two blocks of bytes, of the dtypes `names`, which are as many."""
    sizes = dtype(names[0]).size, dtype(names[1]).size
    step = max(STEP_BYTES // max(sizes), 1)
    total = Sums()
    # Mapped anew for each step it would take longer than all that is computed in it.
    room = np.empty(min(step * max(sizes), len(a), len(b)), np.uint8)
    for at in range(0, len(a) // sizes[0], step):
        part = a[at * sizes[0] : (at + step) * sizes[0]], b[at * sizes[1] : (at + step) * sizes[1]]
        _add_step(total, *part, names, room)
    into.add(total)


def _add_step(total: Sums, a: Array, b: Array, names: tuple[str, str], room: Array) -> None:
    same_type = names[0] == names[1]
    size = dtype(names[0]).size
    count = len(a) // size
    total.elements += count
    if same_type:
        differing = _differing(a, b, size)
        total.differing += differing
    if kind_of(names[0]) is None or kind_of(names[1]) is None:
        return
    x, y = floats_of(a, names[0]).reshape(-1), floats_of(b, names[1]).reshape(-1)
    if x.dtype != y.dtype:
        x, y = x.astype(np.float64), y.astype(np.float64)
    if not same_type:
        differing = int(np.count_nonzero(x != y)) if len(x) == len(y) else count
        total.differing += differing
    if len(x) != len(y):
        return
    _add_values(total, x, y, differing, room)


def _differing(a: Array, b: Array, size: int) -> int:
    """Returns how many items have other bits."""
    if size in (1, 2, 4, 8):
        return int(np.count_nonzero(a.view(f"u{size}") != b.view(f"u{size}")))
    return int(np.count_nonzero((a != b).reshape(-1, size).any(axis=1)))


def _add_values(total: Sums, x: Array, y: Array, differing: int, room: Array) -> None:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        aa = dot(x, x)
        bb = dot(y, y) if differing else aa
    if not (math.isfinite(aa) and math.isfinite(bb)) or (0 < min(aa, bb) < 1e-30):
        x, y = x.astype(np.float64), y.astype(np.float64)
        bad = ~np.isfinite(x), ~np.isfinite(y)
        total.bad = total.bad[0] + int(np.count_nonzero(bad[0])), total.bad[1] + int(np.count_nonzero(bad[1]))
        alone = x[~bad[0] & bad[1]], y[bad[0] & ~bad[1]]
        total.alone = total.alone[0] + dot(alone[0], alone[0]), total.alone[1] + dot(alone[1], alone[1])
        both = ~(bad[0] | bad[1])
        x, y = np.where(both, x, 0), np.where(both, y, 0)
        with np.errstate(over="ignore"):
            aa, bb = dot(x, x), dot(y, y)
    total.aa += aa
    total.bb += bb
    if not differing:
        total.ab += aa
        return
    with np.errstate(over="ignore"):
        change = np.subtract(y, x, out=room[: x.nbytes].view(x.dtype) if x.nbytes <= len(room) else None)
        total.ab += dot(x, y)
        squares = dot(change, change)
        if squares < 1e-30 and change.dtype != np.float64:
            wide = change.astype(np.float64)
            squares = dot(wide, wide)
        total.dd += squares
    total.largest = max(total.largest, float(change.max()), -float(change.min()))
