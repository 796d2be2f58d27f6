"""What each of many ranks holds: boxes of matrices over a mesh, and what all of them hold alike.

Items are numbered, so that each rank knows what belongs where without the whole ever being made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tenuto.state.declarations import shard

ALIKE: Final = 3
"""Small arrays that all ranks hold, and nothing declares to be the same."""
_STRIDE: Final = 1_000_003


@dataclass(frozen=True, slots=True)
class Mesh:
    """Matrices of `shape`, `leaves` of them, over `ranks` in rows and `columns`; each box on `copies` of them."""

    ranks: int
    leaves: int
    shape: tuple[int, int]
    columns: int = 1
    copies: int = 1

    @property
    def entries(self) -> int:
        """Boxes that ranks hold, all ranks together."""
        return self.ranks * (self.leaves + ALIKE)

    @property
    def written(self) -> int:
        """Boxes that are put down: of equal ones one."""
        return self.ranks // self.copies * self.leaves + ALIKE

    def box(self, rank: int) -> tuple[slice, slice]:
        """Which part of each matrix a rank holds."""
        across = min(self.columns, self.ranks)
        down = self.ranks // self.copies // across
        row, column = rank // across % down, rank % across
        rows, width = self.shape
        return (
            slice(row * rows // down, (row + 1) * rows // down),
            slice(column * width // across, (column + 1) * width // across),
        )

    def part(self, leaf: int, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The items of a rank's box."""
        rows, columns = self.box(rank)
        down, across = np.arange(rows.start, rows.stop), np.arange(columns.start, columns.stop)
        return leaf * _STRIDE + down[:, None] * self.shape[1] + across

    def state(self, rank: int, step: int = 0, *, empty: bool = False) -> dict[str, Any]:
        """A rank's training state. empty: of the same form, to be restored into."""
        rows, columns = self.box(rank)
        extent = rows.stop - rows.start, columns.stop - columns.start
        offsets = rows.start, columns.start
        parts = {
            f"layers.{leaf}.weight": shard(
                np.zeros(extent, np.int64) if empty else self.part(leaf, rank) + step,
                whole=self.shape,
                offsets=offsets,
            )
            for leaf in range(self.leaves)
        }
        alike = {f"norms.{number}": np.full(4, 0 if empty else number + step) for number in range(ALIKE)}
        return {"model": {**parts, **alike}, "step": 0 if empty else step}

    def differs(self, state: Any, rank: int, step: int) -> str | None:
        """The first entry of a restored state that is not what belongs there."""
        model = state["model"]
        for leaf in range(self.leaves):
            found = model[f"layers.{leaf}.weight"]
            if not np.array_equal(getattr(found, "value", found), self.part(leaf, rank) + step):
                return f"layers.{leaf}.weight"
        wrong = (f"norms.{number}" for number in range(ALIKE) if (model[f"norms.{number}"] != number + step).any())
        return next(wrong, None if state["step"] == step else "step")
