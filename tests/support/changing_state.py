"""Trainings whose states change from step to step, each of which has to come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tenuto
from tenuto import every, keep
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

State = dict[str, Any]


def bits(state: State) -> dict[str, tuple[Any, ...]]:
    """Returns what has to be equal: of each entry the dtype, the shape and the bytes."""
    arrays = {name: np.asarray(value) for name, value in state.items()}
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


def train(
    where: Any, state: State, steps: int, change: Callable[[int], None], **settings: Any
) -> dict[int, dict[str, tuple[Any, ...]]]:
    """Returns what was saved at each step. `change` is called in each step, with the number of those before it."""
    seen = {}
    with tenuto.Checkpointer(
        where, state, **{"save": every(steps=1), "keep": keep.all(), "on_error": "raise", **settings}
    ) as ckpt:
        for step in ckpt.steps(steps):
            change(step)
            seen[step + 1] = bits(state)
    return seen


def all_come_back(where: Path, seen: dict[int, dict[str, tuple[Any, ...]]]) -> None:
    """Asserts that each of these steps restores what was saved, and that the repository is whole."""
    for step, expected in seen.items():
        assert bits(tenuto.load(where, step=step).state) == expected, f"step {step}"
    assert_whole(Repo.open(open_store(where)))


def noise(seed: int, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(count, np.float32)
