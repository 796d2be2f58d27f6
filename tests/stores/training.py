"""A training on numpy state in a process of its own: `python training.py WHERE STEPS`. It prints each step that its
store has committed, and says what its state is at a step."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import tenuto
from tenuto.events import Committed

FLOATS = 400_000


def state_at(step: int) -> np.ndarray[Any, Any]:
    """Returns what the training's array is after so many steps."""
    w = np.arange(FLOATS, dtype=np.float64)
    for done in range(step):
        train(w, done)
    return w


def train(w: np.ndarray[Any, Any], step: int) -> None:
    w *= 1 + 1 / (step + 10)


def main(where: str, steps: int) -> None:
    state = {"w": state_at(0)}

    def said(event: object) -> None:
        if isinstance(event, Committed):
            print(f"committed {event.id.step}", flush=True)

    options = {"save": tenuto.every(steps=1), "keep": tenuto.keep.all(), "sinks": [said]}
    with tenuto.Checkpointer(where, state, **options) as ckpt:  # type: ignore[arg-type]
        for step in ckpt.steps(steps):
            train(state["w"], step)
            ckpt.wait()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
