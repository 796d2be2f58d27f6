"""The training of `campaigns.kills.supervised`: `python -m campaigns.kills.supervised_training PLACE KIND RUN STEPS`.

It is a command of its own, as a user's script is: everything is imported anew at each start.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from tenuto import Checkpointer, every, keep, on
from tenuto.engine.staging import slots
from tenuto.telemetry import JsonLines

COUNTER: Final = struct.Struct("qq")
"""The process and its completed steps, for whoever kills it."""
SAVE_EVERY: Final = 7
STEP_S: Final = 0.008
"""A pause in each step of the small training: what a kill strikes is then a step as often as a save."""


def counter(path: Path) -> Callable[[int], None]:
    """Returns what counts completed steps in a file that others read."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, COUNTER.size)
    memory = mmap.mmap(descriptor, COUNTER.size)
    os.close(descriptor)

    def count(step: int) -> None:
        COUNTER.pack_into(memory, 0, os.getpid(), step)

    count(0)
    return count


def numpy_training(where: str, run: str, steps: int, done: Callable[[int], None], **options: Any) -> None:
    """Trains two layers with momentum and dropout, on batches that a generator draws."""
    source = np.random.default_rng(1)
    inputs, targets = source.normal(size=(512, 32)), source.normal(size=(512, 1))
    generator = np.random.default_rng(2)
    weights = {"first": source.normal(size=(32, 64)) / 8, "second": source.normal(size=(64, 1)) / 8}
    momentum = {name: np.zeros_like(one) for name, one in weights.items()}
    state = {"weights": weights, "momentum": momentum, "generator": generator}
    with Checkpointer(where, state, run=run, **options) as ckpt:
        for step in ckpt.steps(steps):
            chosen = generator.integers(len(inputs), size=32)
            batch, kept = inputs[chosen], generator.random((32, 64)) < 0.9
            hidden = np.tanh(batch @ weights["first"]) * kept
            error = hidden @ weights["second"] - targets[chosen]
            slopes = {
                "second": hidden.T @ error / 32,
                "first": batch.T @ ((error @ weights["second"].T) * (kept - hidden**2)) / 32,
            }
            for name, slope in slopes.items():
                momentum[name] *= 0.9
                momentum[name] += slope
                weights[name] -= 0.01 * momentum[name]
            ckpt.log(loss=float((error**2).mean()))
            time.sleep(STEP_S)
            done(step + 1)


def torch_training(where: str, run: str, steps: int, done: Callable[[int], None], **options: Any) -> None:
    """Trains the demo's GPT, in a small size."""
    import torch

    from campaigns.kills.rounds import SIZES
    from tenuto.demo import train_gpt

    torch.set_num_threads(1)
    for name, value in SIZES.items():
        setattr(train_gpt, name, value)
    options.pop("save"), options.pop("keep")
    train_gpt.train(
        where, run=run, steps=steps, save_every=SAVE_EVERY, on_step=lambda step, loss: done(step), **options
    )


def main() -> None:
    place, kind, run, steps = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    shared = place / "memory"
    if shared.exists():  # of its own: it displaces nobody else's states
        slots.SHARED_MEMORY = str(shared.resolve())  # type: ignore[misc]
    random.seed(0)  # neither training draws from these; a comparison looks at their state too
    np.random.seed(0)
    train = torch_training if kind == "torch" else numpy_training
    options: dict[str, Any] = {
        "memory": every(steps=1),
        "save": every(steps=SAVE_EVERY) | on.end() | on.signal(),
        "keep": keep.latest(3),
        "sinks": [JsonLines(place / f"{run}.events")],
    }
    train(str(place / kind), run, int(steps), counter(place / f"{run}.counter"), **options)


if __name__ == "__main__":
    main()
