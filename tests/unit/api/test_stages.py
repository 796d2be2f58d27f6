"""Entries that only some ranks have: each takes its own of a checkpoint, and what none takes is a mismatch on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import StateMismatch
from holdfast.ranks.memory import MemoryBoard, ThreadRanks
from joint_ranks import together

LAYERS = 5


def stage(ranks: Any, value: float = 1.0, layers: int = LAYERS) -> dict[str, Any]:
    mine = range(ranks.rank, layers, ranks.world_size)
    return {"model": {f"layer{one}": np.full(3, one * value) for one in mine}, "lr": 0.5 * value}


@pytest.mark.parametrize("readers", [2, 3, 5, 7])
def test_stages_come_back_on_any_number_of_ranks(tmp_path: Path, readers: int) -> None:
    together(2, lambda ranks: holdfast.save(stage(ranks), tmp_path, ranks=ranks))
    found = together(readers, lambda ranks: holdfast.load(tmp_path, stage(ranks, 0.0), ranks=ranks).state)
    for rank, state in enumerate(found):
        assert state["lr"] == 0.5
        layers = {name: array.tolist() for name, array in state["model"].items()}
        assert layers == {f"layer{one}": [one] * 3 for one in range(rank, LAYERS, readers)}


def test_a_rank_without_experts_is_given_none(tmp_path: Path) -> None:
    def experts(ranks: Any, value: float, holders: int) -> dict[str, Any]:
        mine = np.full(2, value + ranks.rank)
        held = {"w": holdfast.shard(mine, whole=(holders, 2), offsets=(ranks.rank, 0))} if ranks.rank < holders else {}
        return {"experts": held, "scale": {} if value < 0 else {"by": 0.5}}

    together(2, lambda ranks: holdfast.save(experts(ranks, 1.0, 2), tmp_path, ranks=ranks))
    found = together(3, lambda ranks: holdfast.load(tmp_path, experts(ranks, -5.0, 2), ranks=ranks).state)
    assert [one["experts"]["w"].value.tolist() for one in found[:2]] == [[1.0, 1.0], [2.0, 2.0]]
    assert found[2]["experts"] == {}
    assert [one["scale"] for one in found] == [{"by": 0.5}] * 3, "plain values belong to all"


def test_what_no_rank_takes_is_a_mismatch_on_all_of_them(tmp_path: Path) -> None:
    together(2, lambda ranks: holdfast.save(stage(ranks), tmp_path, ranks=ranks))
    found = together(3, lambda ranks: holdfast.load(tmp_path, stage(ranks, 0.0, LAYERS - 1), ranks=ranks))
    for error in found:
        assert isinstance(error, StateMismatch), error
        assert error.subject == "model/layer4" and "in the checkpoint only" in str(error)
    lenient = together(
        3, lambda ranks: holdfast.load(tmp_path, stage(ranks, 0.0, LAYERS - 1), ranks=ranks, strict=False)
    )
    assert [restored.step for restored in lenient] == [0, 0, 0]
    with pytest.raises(StateMismatch, match="in the checkpoint only"):
        holdfast.load(tmp_path, stage(ThreadRanks(0, 2, MemoryBoard()), 0.0))


def test_an_optimizer_of_one_stage_takes_its_part_of_the_groups(tmp_path: Path) -> None:
    def training(ranks: Any, value: float) -> dict[str, Any]:
        model = torch.nn.ModuleDict({f"layer{one}": torch.nn.Linear(2, 1) for one in range(ranks.rank, 3, 2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def load(ranks: Any) -> list[float]:
        state = training(ranks, 5.0)
        holdfast.load(tmp_path, state, ranks=ranks)
        return [float(one["momentum_buffer"].mean()) for one in state["optimizer"].state.values()]

    together(2, lambda ranks: holdfast.save(training(ranks, 1.0 + ranks.rank), tmp_path, ranks=ranks))
    assert together(2, load) == [[1.0] * 4, [2.0] * 2]


def test_what_is_a_ranks_own_fills_what_is_empty(tmp_path: Path) -> None:
    def state(ranks: Any, own: dict[str, Any]) -> dict[str, Any]:
        return {"w": holdfast.replicated(np.ones(2)), "mine": holdfast.per_rank(own)}

    def saved(ranks: Any) -> dict[str, Any]:
        return state(ranks, {"keys": np.full(3, ranks.rank), "more": {"x": np.arange(2) + ranks.rank}})

    together(2, lambda ranks: holdfast.save(saved(ranks), tmp_path, ranks=ranks))
    found = together(2, lambda ranks: holdfast.load(tmp_path, state(ranks, {}), ranks=ranks).state["mine"].value)
    assert [own["keys"].tolist() for own in found] == [[0] * 3, [1] * 3]
    assert [own["more"]["x"].tolist() for own in found] == [[0, 1], [1, 2]]
