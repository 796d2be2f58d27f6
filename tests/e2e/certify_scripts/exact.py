"""Resumes exactly: everything that it depends on is in `state`, or in a generator that is covered."""

import sys

import numpy as np

import holdfast

np.random.seed(0)
state = {"weights": np.random.rand(4), "momentum": np.zeros(4), "rate": 0.1}
data = [np.full(4, number) for number in range(7)]
with holdfast.Checkpointer(sys.argv[1], state, data=data) as ckpt:
    for _ in ckpt.steps(1000):
        gradient = (state["weights"] - next(ckpt.batches)) * np.random.rand(4)
        state["momentum"] = 0.9 * state["momentum"] + gradient
        state["weights"] = state["weights"] - state["rate"] * state["momentum"]
        state["rate"] *= 0.99
