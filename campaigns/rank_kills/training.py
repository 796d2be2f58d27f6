"""A training of several ranks whose every number depends on the step alone, however many ranks there are."""

from __future__ import annotations

from typing import Any

import numpy as np

from tenuto.state.declarations import replicated, shard

ROWS, WIDTH = 60, 48
Array = np.ndarray[Any, np.dtype[np.float64]]


class Numbers:
    """What one rank holds: its rows of a matrix that is cut, and all of one that is on each rank."""

    def __init__(self, rank: int, world: int) -> None:
        edges = np.linspace(0, ROWS, world + 1).astype(int)
        self.rows = slice(int(edges[rank]), int(edges[rank + 1]))
        start = _noise(0)
        self.cut, self.whole = start[self.rows].copy(), start.copy()

    def state(self) -> dict[str, Any]:
        cut = shard(self.cut, whole=(ROWS, WIDTH), offsets=(self.rows.start, 0))
        return {"cut": cut, "whole": replicated(self.whole)}

    def step(self, number: int) -> None:
        noise = _noise(number)
        self.cut *= 0.75
        self.cut += noise[self.rows]
        self.whole *= 0.5
        self.whole -= noise


def untouched(steps: int) -> dict[str, Array]:
    """What `steps` steps of training without any interruption come to, on one process."""
    numbers = Numbers(0, 1)
    for number in range(1, steps + 1):
        numbers.step(number)
    return {"cut": numbers.cut, "whole": numbers.whole}


def _noise(number: int) -> Array:
    return np.random.default_rng(number).standard_normal((ROWS, WIDTH))
