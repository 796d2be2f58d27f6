"""What people keep their training in: Flax's TrainState and FrozenDict, NNX, Optax, Equinox, classes of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import tenuto
from tenuto.errors import StateMismatch, Unserialisable
from trainers.jax.bits import contents


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Averages:
    slow: Any
    decay: float = dataclasses.field(default=0.9, metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Pair:
    """Registered without names for its children, with a function outside of them."""

    def __init__(self, first: Any, second: Any, join: Any) -> None:
        self.first, self.second, self.join = first, second, join

    def tree_flatten(self) -> Any:
        return (self.first, self.second), self.join

    @classmethod
    def tree_unflatten(cls, join: Any, children: Any) -> Pair:
        return cls(*children, join)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, fill: float) -> None:
        self.first = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.more = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.tied = self.first
        self.bare = nnx.data(jnp.full(3, fill))
        self.scale = fill

    def __call__(self, x: Any) -> Any:
        return self.drop(self.norm(self.first(x)))


def trained(seed: int) -> TrainState:
    tx = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adamw)(learning_rate=0.1 * seed))
    made = TrainState.create(apply_fn=len, params={"w": jnp.full((2,), seed, jnp.float32)}, tx=tx)
    for _ in range(seed):
        made = made.apply_gradients(grads={"w": jnp.ones(2)})
    return made


def multi(seed: int) -> Any:
    params = {"a": jnp.full((2,), seed, jnp.float32), "b": jnp.zeros(3)}
    tx = optax.multi_transform({"x": optax.adam(0.1), "y": optax.set_to_zero()}, {"a": "x", "b": "y"})
    tx = optax.MultiSteps(tx, every_k_schedule=3)
    state = tx.init(params)
    for _ in range(seed):
        state = tx.update(params, state, params)[1]
    return state


def norm(seed: int) -> Any:
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="batch", mode="ema")
    for _ in range(seed):
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        state = batched(jnp.arange(6.0).reshape(2, 3) * seed, state)[1]
    return state


MAKE: dict[str, Any] = {
    "TrainState": trained,
    "Optax": multi,
    "FrozenDict": lambda seed: flax.core.FrozenDict({"layer": {"kernel": jnp.full((2,), float(seed))}}),
    "Equinox": lambda seed: eqx.nn.MLP(2, 2, 3, 2, key=jax.random.key(seed)),
    "Equinox state": norm,
    "dataclass": lambda seed: Averages({"w": jnp.full(2, float(seed))}),
    "no names": lambda seed: Pair(jnp.full(2, float(seed)), [seed, None, jnp.ones(1)], max),
    "within each other": lambda seed: {"all": (Averages([Pair(jnp.full(2, float(seed)), seed, min)]), trained(seed))},
    "NNX state": lambda seed: nnx.state(Net(nnx.Rngs(seed), seed), nnx.Param),
    "NNX pure": lambda seed: nnx.as_pure(nnx.state(Net(nnx.Rngs(seed), seed))),
    "numbers": lambda seed: {"loss": np.float32(seed), "best": float(seed), "at": np.arange(seed + 3)[:3] * seed},
}


@pytest.mark.parametrize("kind", MAKE)
def test_it_comes_back_into_a_target_of_its_kind(kind: str) -> None:
    saved, target = {"train": MAKE[kind](1)}, {"train": MAKE[kind](2)}
    structure = jax.tree.structure(target)
    assert contents(saved) != contents(target)
    tenuto.save(saved, f"memory://{kind}")
    tenuto.load(f"memory://{kind}", target)
    assert contents(saved) == contents(target)
    assert type(target["train"]) is type(saved["train"])
    assert jax.tree.structure(target) == structure, "functions are the target's own"


def test_nnx_objects_are_filled_in_place_and_keep_what_they_share() -> None:
    model, other = Net(nnx.Rngs(1), 1.0), Net(nnx.Rngs(2), 2.0)
    for _ in range(2):
        model(jnp.ones((4, 2)))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda one: one(jnp.ones((4, 2))).sum())(model))
    tenuto.save({"model": model, "optimizer": optimizer}, "memory://nnx")
    into = nnx.Optimizer(other, optax.adam(1e-3), wrt=nnx.Param)
    target = {"model": other, "optimizer": into}
    kernel = other.first.kernel
    tenuto.load("memory://nnx", target)
    assert target["model"] is other and target["optimizer"] is into
    assert other.first.kernel is kernel and other.tied is other.first
    assert contents(nnx.state(other)) == contents(nnx.state(model))
    assert contents(nnx.state(into)) == contents(nnx.state(optimizer))
    assert other.scale == 2.0, "an attribute that is no array is the target's"
    assert contents(other(jnp.ones((4, 2)))) == contents(model(jnp.ones((4, 2)))), "dropout draws the same"
    with tenuto.open("memory://nnx") as found:
        paths = list(found)
    assert "model/first/kernel" in paths and "model/more/0/kernel" in paths and "model/drop/rngs/key" in paths
    assert not any(path.startswith("model/tied") for path in paths), "it is saved once"


def test_a_train_state_comes_back_as_entries_where_nothing_offers_its_class() -> None:
    tenuto.save({"train": trained(2)}, "memory://entries")
    found = tenuto.load("memory://entries").state["train"]
    assert found.type_name == "flax.training.train_state.TrainState"
    assert found.value["step"] == 2 and isinstance(found.value["params"]["w"], jax.Array)
    params = {"w": jnp.zeros(2)}
    tenuto.load("memory://entries", {"params": params}, rename={"train/params": "params"}, include="params/*")
    assert contents(params) == contents(trained(2).params)


def test_what_a_pytree_lacks_or_has_too_much_is_named() -> None:
    tenuto.save({"train": Averages({"w": jnp.ones(2)})}, "memory://differ")
    with pytest.raises(StateMismatch, match="train/slow/v: not in the checkpoint"):
        tenuto.load("memory://differ", {"train": Averages({"v": jnp.ones(2)})})
    with pytest.raises(StateMismatch, match=r"train: a dataclass .*Averages.* in the checkpoint, float32 \[2\]"):
        tenuto.load("memory://differ", {"train": jnp.ones(2)})
    with pytest.raises(StateMismatch, match="train/params: not in the checkpoint"):
        tenuto.load("memory://differ", {"train": trained(1)})


def test_a_type_that_is_registered_with_tenuto_too_keeps_its_form_there() -> None:
    @jax.tree_util.register_pytree_node_class
    class Cell(Pair):
        pass

    tenuto.register(Cell, lambda cell: [cell.first, cell.second], lambda pair: Cell(*pair, max), name="cell")
    tenuto.save({"cell": Cell(jnp.ones(2), 3, max)}, "memory://registered")
    assert tenuto.load("memory://registered").state["cell"].second == 3


def test_a_function_in_a_plain_container_is_still_refused() -> None:
    with pytest.raises(Unserialisable, match=r"train/slow/0: a builtins\.builtin_function"):
        tenuto.save({"train": Averages([max])}, "memory://code")
