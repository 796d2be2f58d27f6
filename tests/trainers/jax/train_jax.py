"""Two trainings with JAX in the protocol of the suite for trainers, in a loop of one's own.

`--kind optax`: a jitted step that donates its state, Optax, a key split at each step, an iterator with a state of its
own. `--kind nnx`: a module of Flax's NNX with dropout and batch norm, its optimizer, metrics, and a list of batches.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tenuto
from tenuto.state.contract import Flattened
from tenuto.state.encode.flattener import flatten

STEPS = 24
BATCH = 8
DATA = np.random.default_rng(0).normal(size=(72, 4)).astype(np.float32)
"""9 batches make an epoch."""


class Shuffled:
    """Batches in an order of its own, endlessly; knows where it is."""

    def __init__(self) -> None:
        self.epoch = 0
        self.used = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            order = np.random.default_rng(self.epoch).permutation(len(DATA))
            while self.used < len(DATA):
                self.used += BATCH
                yield DATA[order[self.used - BATCH : self.used]]
            self.epoch, self.used = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.used = state["epoch"], state["used"]


class WithOptax:
    def __init__(self) -> None:
        first, second = jax.random.split(jax.random.key(1))
        params = {
            "in": {"kernel": jax.random.normal(first, (4, 16)), "bias": jnp.zeros(16)},
            "out": {"kernel": jax.random.normal(second, (16, 1)).astype(jnp.bfloat16)},
        }
        schedule = optax.cosine_decay_schedule(1e-2, STEPS)
        self._tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), 2)
        train = {"params": params, "opt": self._tx.init(params), "key": jax.random.key(7), "average": params}
        self.state: dict[str, Any] = {"train": jax.tree.map(jnp.copy, train), "history": []}
        self.data: Any = Shuffled()
        self._step = jax.jit(self._one, donate_argnums=0)

    def _one(self, train: Any, batch: Any) -> Any:
        key, now = jax.random.split(train["key"])

        def loss_of(params: Any) -> Any:
            hidden = jnp.tanh(batch @ params["in"]["kernel"] + params["in"]["bias"])
            hidden = hidden * jax.random.bernoulli(now, 0.8, hidden.shape)
            out = hidden @ params["out"]["kernel"].astype(jnp.float32)
            return jnp.mean((out[:, 0] - batch.sum(1)) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(train["params"])
        updates, opt = self._tx.update(grads, train["opt"], train["params"])
        params = optax.apply_updates(train["params"], updates)
        average = optax.incremental_update(params, train["average"], 0.1)
        return {"params": params, "opt": opt, "key": key, "average": average}, loss

    def step(self, batch: Any) -> float:
        self.state["train"], loss = self._step(self.state["train"], batch)
        self.state["history"].append(float(loss))
        return float(loss)


def with_nnx() -> Any:
    from nnx_training import WithNnx  # beside this script; takes seconds to import

    return WithNnx([DATA[at : at + BATCH] for at in range(0, len(DATA), BATCH)])


KINDS: dict[str, Any] = {"optax": WithOptax, "nnx": with_nnx}


def endless(data: Any) -> Iterator[Any]:
    while True:
        yield from data


def digests(state: dict[str, Any]) -> dict[str, str]:
    flat: Flattened = flatten(state)
    return {
        spec.path: hashlib.sha256(f"{spec.dtype} {spec.shape}".encode() + np.asarray(source).tobytes()).hexdigest()
        for spec, source in zip(flat.specs, flat.sources, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="optax")
    parser.add_argument("--where", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume-from", type=int)
    parser.add_argument("--every-step", action="store_true")
    given = parser.parse_args()
    training = KINDS[given.kind]()
    with contextlib.ExitStack() as stack:
        steps: Any = range(STEPS)
        batches = endless(training.data)
        if given.where:
            often = tenuto.every(steps=1) if given.every_step else tenuto.every(steps=5)
            ckpt = stack.enter_context(
                tenuto.Checkpointer(
                    given.where,
                    training.state,
                    data=training.data,
                    save=often | tenuto.on.end() | tenuto.on.signal(),
                    keep=tenuto.keep.all() if given.every_step else tenuto.keep.latest(2),
                    resume_from="latest" if given.resume_from is None else given.resume_from,
                )
            )
            steps, batches = ckpt.steps(STEPS), ckpt.batches
        for step in steps:
            loss = training.step(next(batches))
            if given.where:
                ckpt.log(loss=loss)
            print(f"step {step + 1}", flush=True)
    history = training.state["history"]
    given.out.write_text(json.dumps({"digest": digests({**training.state, "history": 0}), "history": history}))


if __name__ == "__main__":
    main()
