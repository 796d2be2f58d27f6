"""Entries that only some ranks have: each takes its own of a checkpoint, and what none takes is a mismatch on all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tenuto
from support.rank_threads import together
from tenuto.errors import CorruptionError, RankFailed, StateMismatch
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks
from tenuto.repo.repository import Repo

LAYERS = 5


def stage(ranks: Any, value: float = 1.0, layers: int = LAYERS) -> dict[str, Any]:
    mine = range(ranks.rank, layers, ranks.world_size)
    return {"model": {f"layer{one}": np.full(3, one * value) for one in mine}, "lr": 0.5 * value}


@pytest.mark.parametrize("readers", [2, 3, 5, 7])
def test_stages_come_back_on_any_number_of_ranks(tmp_path: Path, readers: int) -> None:
    together(2, lambda ranks: tenuto.save(stage(ranks), tmp_path, ranks=ranks))
    found = together(readers, lambda ranks: tenuto.load(tmp_path, stage(ranks, 0.0), ranks=ranks).state)
    for rank, state in enumerate(found):
        assert state["lr"] == 0.5
        layers = {name: array.tolist() for name, array in state["model"].items()}
        assert layers == {f"layer{one}": [one] * 3 for one in range(rank, LAYERS, readers)}


def test_a_rank_without_experts_is_given_none(tmp_path: Path) -> None:
    def experts(ranks: Any, value: float, holders: int) -> dict[str, Any]:
        mine = np.full(2, value + ranks.rank)
        held = {"w": tenuto.shard(mine, whole=(holders, 2), offsets=(ranks.rank, 0))} if ranks.rank < holders else {}
        return {"experts": held, "scale": {} if value < 0 else {"by": 0.5}}

    together(2, lambda ranks: tenuto.save(experts(ranks, 1.0, 2), tmp_path, ranks=ranks))
    found = together(3, lambda ranks: tenuto.load(tmp_path, experts(ranks, -5.0, 2), ranks=ranks).state)
    assert [one["experts"]["w"].value.tolist() for one in found[:2]] == [[1.0, 1.0], [2.0, 2.0]]
    assert found[2]["experts"] == {}
    assert [one["scale"] for one in found] == [{"by": 0.5}] * 3, "plain values belong to all"


def test_what_no_rank_takes_is_a_mismatch_on_all_of_them(tmp_path: Path) -> None:
    together(2, lambda ranks: tenuto.save(stage(ranks), tmp_path, ranks=ranks))
    found = together(3, lambda ranks: tenuto.load(tmp_path, stage(ranks, 0.0, LAYERS - 1), ranks=ranks))
    for error in found:
        assert isinstance(error, StateMismatch), error
        assert error.subject == "model/layer4" and "in the checkpoint only" in str(error)
    lenient = together(3, lambda ranks: tenuto.load(tmp_path, stage(ranks, 0.0, LAYERS - 1), ranks=ranks, strict=False))
    assert [restored.step for restored in lenient] == [0, 0, 0]
    with pytest.raises(StateMismatch, match="in the checkpoint only"):
        tenuto.load(tmp_path, stage(ThreadRanks(0, 2, InProcessKVStore()), 0.0))


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
        tenuto.load(tmp_path, state, ranks=ranks)
        return [float(one["momentum_buffer"].mean()) for one in state["optimizer"].state.values()]

    together(2, lambda ranks: tenuto.save(training(ranks, 1.0 + ranks.rank), tmp_path, ranks=ranks))
    assert together(2, load) == [[1.0] * 4, [2.0] * 2]


def test_what_is_a_ranks_own_fills_what_is_empty(tmp_path: Path) -> None:
    def state(ranks: Any, own: dict[str, Any]) -> dict[str, Any]:
        return {"w": tenuto.replicated(np.ones(2)), "mine": tenuto.per_rank(own)}

    def saved(ranks: Any) -> dict[str, Any]:
        return state(ranks, {"keys": np.full(3, ranks.rank), "more": {"x": np.arange(2) + ranks.rank}})

    together(2, lambda ranks: tenuto.save(saved(ranks), tmp_path, ranks=ranks))
    found = together(2, lambda ranks: tenuto.load(tmp_path, state(ranks, {}), ranks=ranks).state["mine"].value)
    assert [own["keys"].tolist() for own in found] == [[0] * 3, [1] * 3]
    assert [own["more"]["x"].tolist() for own in found] == [[0, 1], [1, 2]]


def test_what_one_rank_does_not_name_and_the_others_leave_over_is_a_mismatch(tmp_path: Path) -> None:
    together(2, lambda ranks: tenuto.save(stage(ranks), tmp_path, ranks=ranks))

    def target(ranks: Any) -> dict[str, Any]:
        two = ThreadRanks(ranks.rank, 2, InProcessKVStore())
        return stage(two, 0.0, LAYERS - 1) if ranks.rank < 2 else {"lr": 0.0}

    for error in together(3, lambda ranks: tenuto.load(tmp_path, target(ranks), ranks=ranks)):
        assert isinstance(error, StateMismatch) and error.subject == "model/layer4", error
    found = together(3, lambda ranks: tenuto.load(tmp_path, {"lr": 0.0}, ranks=ranks).state)
    assert found == [{"lr": 0.5}] * 3, "what no rank names is left aside"


def test_what_one_rank_excludes_and_the_others_leave_over_is_a_mismatch(tmp_path: Path) -> None:
    together(2, lambda ranks: tenuto.save(stage(ranks), tmp_path, ranks=ranks))

    def load(ranks: Any, excluding: int) -> Any:
        exclude = "*/layer4" if ranks.rank < excluding else None
        return tenuto.load(tmp_path, stage(ranks, 0.0, LAYERS - 1), ranks=ranks, exclude=exclude).step

    for error in together(2, lambda ranks: load(ranks, 1)):
        assert isinstance(error, StateMismatch) and error.subject == "model/layer4", error
    assert together(2, lambda ranks: load(ranks, 2)) == [0, 0]


@pytest.mark.parametrize("rename", [{"model": "net/inner"}, {"model/layer0": "first"}])
def test_what_no_rank_takes_is_named_as_the_target_calls_it(tmp_path: Path, rename: dict[str, str]) -> None:
    together(2, lambda ranks: tenuto.save(stage(ranks), tmp_path, ranks=ranks))

    def load(ranks: Any, layers: int) -> Any:
        state = stage(ranks, 0.0, layers)
        if "model" in rename:
            state["net"] = {"inner": state.pop("model")}
        elif ranks.rank == 0:
            state["first"] = state["model"].pop("layer0")
        return tenuto.load(tmp_path, state, ranks=ranks, rename=rename).step

    left = "net/inner/layer4" if "model" in rename else "model/layer4"
    for error in together(2, lambda ranks: load(ranks, LAYERS - 1)):
        assert isinstance(error, StateMismatch) and error.subject == left, error
        assert error.message.count("in the checkpoint only") == 1
    assert together(2, lambda ranks: load(ranks, LAYERS)) == [0, 0]


def unlike(rank: int, layers: int = LAYERS) -> dict[str, Any]:
    """Targets of two ranks, filled with what is in no checkpoint."""
    mine = range(rank, layers, 2)
    return {"model": {f"layer{one}": np.full(3, -1.0) for one in mine}, "all": np.full(4, -1.0), "lr": -1.0}


@pytest.mark.parametrize("what", ["a leaf that nobody takes", "another shape on rank 1"])
def test_a_restore_that_is_refused_has_changed_no_target(tmp_path: Path, what: str) -> None:
    def saved(ranks: Any) -> dict[str, Any]:
        return stage(ranks) | {"all": np.arange(4.0)}

    layers = LAYERS - 1 if what == "a leaf that nobody takes" else LAYERS
    targets = [unlike(0, layers), unlike(1, layers)]
    if layers == LAYERS:
        targets[1]["model"]["layer3"] = np.full(5, -1.0)
    together(2, lambda ranks: tenuto.save(saved(ranks), tmp_path, ranks=ranks))
    found = together(2, lambda ranks: tenuto.load(tmp_path, targets[ranks.rank], ranks=ranks))
    assert isinstance(found[1], StateMismatch), found
    assert isinstance(found[0], StateMismatch if layers < LAYERS else RankFailed), found
    for target in targets:
        for array in [*target["model"].values(), target["all"]]:
            assert (array == -1.0).all()
        assert target["lr"] == -1.0


def test_a_refused_restore_of_a_checkpointer_leaves_no_rank_waiting(tmp_path: Path) -> None:
    together(2, lambda ranks: tenuto.save(stage(ranks), tmp_path, ranks=ranks))

    def restored(ranks: Any) -> Any:
        state = unlike(ranks.rank, LAYERS - 1)
        with tenuto.Checkpointer(tmp_path, state, ranks=ranks, ranks_timeout=60.0, resume_from=0) as ckpt:
            return ckpt.restore()

    found = together(2, restored)
    assert [type(error) for error in found] == [StateMismatch] * 2, found


@pytest.mark.parametrize("damaged", [0, 1])
def test_damage_that_one_rank_meets_while_it_matches_moves_all_to_the_one_before(tmp_path: Path, damaged: int) -> None:
    first, last = (
        together(2, lambda ranks, by=by: tenuto.save(stage(ranks, by), tmp_path, ranks=ranks))[0] for by in (1.0, 2.0)
    )
    original = Repo.boxes

    def boxes(self: Repo, manifest: Any, leaves: int) -> Any:
        if manifest.id == last.id and threading.current_thread().name == f"rank {damaged}":
            raise CorruptionError("the table of parts is damaged", subject=str(last.id))
        return original(self, manifest, leaves)

    def load(ranks: Any) -> Any:
        threading.current_thread().name = f"rank {ranks.rank}"
        return tenuto.load(tmp_path, stage(ranks, 0.0), ranks=ranks)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Repo, "boxes", boxes)
        found = together(2, load)
    assert [restored.checkpoint.id for restored in found] == [first.id] * 2, found
    for rank, restored in enumerate(found):
        assert restored.state["model"][f"layer{rank + 2}"].tolist() == [rank + 2.0] * 3


def test_a_group_without_parameters_on_one_stage_takes_the_options_that_are_left(tmp_path: Path) -> None:
    def training(ranks: Any, rates: list[float]) -> dict[str, Any]:
        model = torch.nn.ModuleDict({f"layer{ranks.rank}": torch.nn.Linear(2, 1)})
        layer = model[f"layer{ranks.rank}"]
        held = [[], [layer.weight, layer.bias]] if ranks.rank else [[layer.weight], [layer.bias]]
        groups = [{"params": one, "lr": lr} for one, lr in zip(held, rates, strict=True)]
        return {"model": model, "optimizer": torch.optim.SGD(groups)}

    def load(ranks: Any) -> list[float]:
        state = training(ranks, [0.0, 0.0])
        tenuto.load(tmp_path, state, ranks=ranks)
        return [group["lr"] for group in state["optimizer"].param_groups]

    together(2, lambda ranks: tenuto.save(training(ranks, [0.5, 0.25]), tmp_path, ranks=ranks))
    assert together(2, load) == [[0.5, 0.25]] * 2
