"""The training with Flax's NNX of `train_jax.py`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


@nnx.jit
def nnx_step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> Any:
    def loss_of(one: Any) -> Any:
        return jnp.mean((one(batch)[:, 0] - batch.sum(1)) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    metrics.update(values=loss)
    return loss


class WithNnx:
    def __init__(self, batches: list[Any]) -> None:
        self.model = Net(nnx.Rngs(params=1, dropout=2))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(1e-2), wrt=nnx.Param)
        self.metrics = nnx.metrics.Average()
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "metrics": self.metrics,
            "history": [],
        }
        self.data: Any = batches

    def step(self, batch: Any) -> float:
        loss = float(nnx_step(self.model, self.optimizer, self.metrics, batch))
        self.state["history"].append(loss)
        return loss
