"""What ranks train in these recordings, and what of it a checkpoint has to hold."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tenuto.state.contract import Flattened
from tenuto.state.declarations import per_rank, shard
from tenuto.state.encode.flattener import Flattener
from tenuto.testing.expectations import Saved

ROWS, WIDTH = 26, 50
OWN: Final = "#private/per_rank/own/order"


def whole_at(seed: int, attempt: int, step: int) -> dict[str, Any]:
    """Some training state that no other attempt or step has."""
    source = np.random.default_rng([seed, attempt, step])
    return {
        "rows": source.random((ROWS, WIDTH), np.float32),
        "both": source.random((18, 64), np.float32),
        "rate": float(source.random()),
        "step": step,
    }


def rank_state(whole: dict[str, Any], rank: int, world: int) -> Flattened:
    """What one rank holds of it: uneven rows of one tensor, all of the rest, and an order of its own."""
    edges = np.linspace(0, ROWS, world + 1).astype(int) + np.array([0, *[2] * (world - 1), 0])
    begin, end = edges[rank : rank + 2].tolist()
    state = {
        "rows": shard(whole["rows"][begin:end].copy(), whole=(ROWS, WIDTH), offsets=(begin, 0)),
        "both": whole["both"].copy(),
        "rate": whole["rate"],
        "step": whole["step"],
        "own": per_rank({"order": order(whole, rank)}),
    }
    return Flattener(state).flatten()


def order(whole: dict[str, Any], rank: int) -> np.ndarray[Any, Any]:
    """What this rank alone has."""
    return np.random.default_rng([whole["step"], rank]).permutation(600 + 100 * rank)


def saved(whole: dict[str, Any], world: int) -> Saved:
    """What a checkpoint of these ranks holds: wholes by path, and each rank's own as `<path>@<rank>`."""
    leaves = {name: whole[name].tobytes() for name in ("rows", "both")}
    for rank in range(world):
        leaves[f"{OWN}@{rank}"] = order(whole, rank).tobytes()
    return Saved(rank_state(whole, 0, world).tree, leaves)
