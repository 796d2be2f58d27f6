"""Arrays and pytrees of JAX as what can be compared bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tenuto.integrations.jax import arrays


def raw(value: Any) -> bytes:
    """Returns an array's elements and everything that tells it from another."""
    if arrays.is_key(value):
        return f"{jax.random.key_impl(value)} ".encode() + raw(jax.random.key_data(value))
    about = (value.dtype, value.shape, value.weak_type, value.committed, value.sharding)
    return f"{about} ".encode() + np.asarray(value).tobytes()


def contents(tree: Any) -> list[Any]:
    """Returns the leaves of a pytree, arrays as bytes; functions are not compared."""
    leaves = [one for one in jax.tree.leaves(tree) if isinstance(one, jax.Array) or not callable(one)]
    return [raw(one) if isinstance(one, jax.Array) else (type(one), np.asarray(one).tobytes()) for one in leaves]
