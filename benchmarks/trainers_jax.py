"""How long a save holds a training with JAX: Orbax's asynchronous save and ours in turn, on one device of the host.

    python benchmarks/trainers_jax.py --gib 0.2

Prints JSON: the medians in milliseconds with the fastest and slowest round, one copy of the state in memory beside
them, and the microseconds that a step takes more when nothing is saved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import tenuto

LAYERS = 24
IDLE_STEPS = 2000


def make_state(gib: float) -> dict[str, Any]:
    """Returns weights and two moments, as AdamW has them, of `LAYERS` layers."""
    items = int(gib * 2**30 / 4 / 3 / LAYERS)
    parts = ("params", "mu", "nu")
    return {part: {f"layer{n}": jnp.full((items,), n, jnp.float32) for n in range(LAYERS)} for part in parts}


@jax.jit
def advance(train: Any) -> Any:
    return jax.tree.map(lambda one: one * 0.999 + 0.001, train)


def tenuto_stall(place: Path, state: dict[str, Any], closing: contextlib.ExitStack) -> Callable[[], float]:
    kept = {"train": state}
    ckpt = closing.enter_context(tenuto.Checkpointer(place / "tenuto", kept, keep=tenuto.keep.latest(1)))
    ckpt.restore()

    def measure() -> float:
        kept["train"] = jax.block_until_ready(advance(kept["train"]))
        ckpt.step_done()
        began = time.perf_counter()
        save = ckpt.save()
        stall = time.perf_counter() - began
        save.wait()
        ckpt.wait()
        return stall

    return measure


def orbax_stall(place: Path, state: dict[str, Any]) -> Callable[[], float]:
    saver = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    kept = {"train": state}

    def measure() -> float:
        kept["train"] = jax.block_until_ready(advance(kept["train"]))
        began = time.perf_counter()
        saver.save(place / "orbax", args=ocp.args.StandardSave(kept["train"]), force=True)
        stall = time.perf_counter() - began
        saver.wait_until_finished()
        return stall

    return measure


def copy_stall(state: dict[str, Any]) -> Callable[[], float]:
    leaves = [np.asarray(one) for one in jax.tree.leaves(state)]
    into = [one.copy() for one in leaves]

    def measure() -> float:
        began = time.perf_counter()
        for place, one in zip(into, leaves, strict=True):
            np.copyto(place, one)
        return time.perf_counter() - began

    return measure


def idle_step(place: Path, state: dict[str, Any]) -> list[float]:
    """Returns the microseconds of steps in which nothing is saved."""
    found = []
    with tenuto.Checkpointer(place / "idle", {"train": state}, save=tenuto.every(steps=10**9)) as ckpt:
        for _ in ckpt.steps(IDLE_STEPS):
            began = time.perf_counter()
            ckpt.log(loss=0.5)
            found.append((time.perf_counter() - began) * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--place", type=Path)
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="trainers-jax-", dir=given.place))
    with contextlib.ExitStack() as closing:
        closing.callback(shutil.rmtree, place)
        state = jax.block_until_ready(make_state(given.gib))
        contenders = {
            "tenuto save()": tenuto_stall(place, state, closing),
            "orbax AsyncCheckpointer.save()": orbax_stall(place, state),
            "one copy by one thread": copy_stall(state),
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(given.rounds + 2):
            for name, measure in contenders.items():
                taken = measure() * 1e3
                if number >= 2:  # the first two take memory
                    times[name].append(taken)
        idle = idle_step(place, {"w": jnp.ones(4)})
    found = {
        name: [round(one, 2) for one in (statistics.median(all), min(all), max(all))] for name, all in times.items()
    }
    about = {"gib": given.gib, "jax": jax.__version__, "orbax": ocp.__version__, "cores": len(os.sched_getaffinity(0))}
    print(json.dumps({**about, "ms": found, "log_us": round(statistics.median(idle), 2)}, indent=1))


if __name__ == "__main__":
    main()
