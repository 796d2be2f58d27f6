"""Any long computation, without torch: a random walk that goes on where it was, generator included.

python numpy_only.py checkpoints
"""

import sys

import numpy as np

import tenuto
from tenuto import every, keep, on


def walk(where: str, steps: int = 200) -> np.ndarray:
    state = {"place": np.zeros(1000), "generator": np.random.default_rng(0), "furthest": 0.0}
    with tenuto.Checkpointer(where, state, run="walk", save=every(steps=50) | on.signal(), keep=keep.latest(1)) as ckpt:
        for _ in ckpt.steps(steps):
            state["place"] += state["generator"].normal(size=1000)
            state["furthest"] = max(state["furthest"], float(abs(state["place"]).max()))
            ckpt.log(furthest=state["furthest"])
        print(f"step {ckpt.step}: furthest {state['furthest']:.6f}")
    return state["place"]


if __name__ == "__main__":
    walk(*sys.argv[1:2] or ["checkpoints"])
