"""Random layouts of leaves over ranks, and small arrays to try plans on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tenuto.model.leaf import Box
from tenuto.sharding.holdings import Holdings, gather, shards

Array = np.ndarray[Any, Any]
SIZES = {1: "uint8", 2: "int16", 4: "float32", 8: "float64"}


@dataclass(frozen=True)
class Layout:
    """`boxes[leaf]`: which ranks hold which box."""

    shapes: Sequence[tuple[int, ...]]
    sizes: Sequence[int]
    ranks: int
    boxes: Sequence[Sequence[tuple[Box, Sequence[int]]]]

    def holdings(self) -> Holdings:
        said = []
        for rank in range(self.ranks):
            rows = [(leaf, box) for leaf, placed in enumerate(self.boxes) for box, holders in placed if rank in holders]
            said.append(
                shards(
                    [leaf for leaf, _ in rows],
                    [box for _, box in rows],
                    [self.shapes[leaf] for leaf, _ in rows],
                    [(SIZES[self.sizes[leaf]], self.sizes[leaf]) for leaf, _ in rows],
                )
            )
        return gather(said, leaves=len(self.shapes), paths=[f"leaf/{number}" for number in range(len(self.shapes))])


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
leaf_lists = st.lists(st.tuples(shapes, st.sampled_from(sorted(SIZES))), min_size=1, max_size=4)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A grid with uneven, and empty, cells; a strip of it may be cut in another way, as fused tensors are."""
    marks = [
        sorted({0, length} | set(draw(st.lists(st.integers(0, length), max_size=3)))) if length else [0, 0]
        for length in shape
    ]
    cells = [
        Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for cell in product(*(pairwise(line) for line in marks))
    ]
    found: list[Box] = []
    for cell in cells:
        axis = draw(st.integers(0, len(shape) - 1)) if shape else -1
        if axis < 0 or cell.shape[axis] < 2 or draw(st.booleans()):
            found.append(cell)
            continue
        at = draw(st.integers(1, cell.shape[axis] - 1))
        head = tuple(at if one == axis else length for one, length in enumerate(cell.shape))
        tail = tuple(length - at if one == axis else length for one, length in enumerate(cell.shape))
        moved = tuple(offset + at * (one == axis) for one, offset in enumerate(cell.offsets))
        found += [Box(cell.offsets, head), Box(moved, tail)]
    return found


@st.composite
def layouts(draw: st.DrawFn, leaves: Sequence[tuple[tuple[int, ...], int]] | None = None) -> Layout:
    """Every item is held by one box, every box by one rank or several; some ranks hold boxes without items."""
    chosen = draw(leaf_lists) if leaves is None else leaves
    ranks = draw(st.integers(1, 5))
    holders = st.sets(st.integers(0, ranks - 1), min_size=1).map(sorted)
    placed = []
    for shape, _ in chosen:
        boxes = [(box, draw(holders)) for box in draw(tilings(shape))]
        if shape and draw(st.booleans()):
            boxes.append((Box(shape, (0,) * len(shape)), draw(holders)))
        placed.append(boxes)
    return Layout([shape for shape, _ in chosen], [size for _, size in chosen], ranks, placed)


def arrays(layout: Layout) -> list[Array]:
    """A different value for every item, as far as its bytes allow."""
    return [
        (np.arange(int(np.prod(shape))) + 7 * number).astype(SIZES[size]).reshape(shape)
        for number, (shape, size) in enumerate(zip(layout.shapes, layout.sizes, strict=True))
    ]


def counts(held: Holdings) -> list[Array]:
    """How often each item of each leaf is in a box."""
    found = [np.zeros(held.whole[leaf, : held.ndim[leaf]], np.int64) for leaf in range(held.leaves)]
    for at in range(len(held)):
        found[int(held.leaf[at])][held.box(at).slices] += 1
    return found
