"""A model's weights out of a checkpoint of training: into a model, the best of them, onto a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tenuto
from tenuto import every, keep, on
from tenuto.errors import CheckpointNotFound, LeafNotFound, MetricNotLogged, StateMismatch, UsageError


def trained(where: Path, losses: list[float], **options: object) -> list[torch.Tensor]:
    """Trains; returns the weight after each step."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = []
    state = {"model": model, "optimizer": optimizer, "note": "x"}
    with tenuto.Checkpointer(where, state, save=every(steps=1), keep=keep.all(), **options) as ckpt:  # type: ignore[arg-type]
        for step in ckpt.steps(len(losses)):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            weights.append(model.weight.detach().clone())
            ckpt.log(val_loss=losses[step])
    return weights


def test_a_model_takes_the_one_entry_that_fits_it(tmp_path: Path) -> None:
    weights = trained(tmp_path, [3.0, 1.0, 2.0])
    model = nn.Linear(3, 2).eval()
    restored = tenuto.load(tmp_path, into=model)
    assert restored.state is model and torch.equal(model.weight, weights[-1])
    assert not model.training, "eval mode is the user's"
    assert set(restored.report.restored) == {"model/weight", "model/bias"}
    assert set(restored.report.skipped) >= {"optimizer", "note"}
    assert (restored.step, restored.metrics) == (3, {"val_loss": 2.0})


def test_the_best_by_a_metric_is_loaded_opened_found_and_resumed_from(tmp_path: Path) -> None:
    weights = trained(tmp_path, [3.0, 1.0, 2.0])
    model = nn.Linear(3, 2)
    restored = tenuto.load(tmp_path, into=model, step="best:val_loss:min")
    assert restored.step == 2 and torch.equal(model.weight, weights[1])
    assert restored.metrics == restored.checkpoint.metrics == {"val_loss": 1.0}
    with tenuto.open(tmp_path, step="best:val_loss:max") as opened:
        assert (opened.step, opened.metrics) == (1, {"val_loss": 3.0})
    repository = tenuto.Repository(tmp_path)
    assert (
        repository.best("val_loss", mode="min") == repository.find(step="best:val_loss:min") == restored.checkpoint.id
    )
    assert repository.best("val_loss") == restored.checkpoint.id, "the name says that less is better"
    resumed = tenuto.Checkpointer(
        tmp_path,
        {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "note": ""},
        resume_from="best:val_loss:min",
    )
    found = resumed.restore()
    assert found is not None and found.step == 2
    resumed.close()


@pytest.mark.parametrize(
    "options", [{"keep": keep.best(3, "acc", mode="max")}, {"save": every(steps=1) | on.improve("acc", mode="max")}]
)
def test_the_direction_is_what_the_training_said(tmp_path: Path, options: dict[str, object]) -> None:
    weights = {"w": np.zeros(3)}
    with tenuto.Checkpointer(tmp_path, {"weights": weights}, **({"save": every(steps=1)} | options)) as ckpt:  # type: ignore[arg-type]
        for step in ckpt.steps(3):
            ckpt.log(acc=[0.1, 0.9, 0.5][step])
    assert tenuto.load(tmp_path, step="best:acc").step == 2


def test_metrics_that_are_logged_late_count_and_are_told(tmp_path: Path) -> None:
    with tenuto.Checkpointer(
        tmp_path, {"w": np.zeros(3)}, save=every(steps=1), keep=keep.best(2, "acc", mode="max")
    ) as ckpt:
        for step in ckpt.steps(2):
            ckpt.log(loss=float(step))
        ckpt.log(acc=0.5)
    restored = tenuto.load(tmp_path, step="best:acc")
    assert restored.metrics == {"loss": 1.0, "acc": 0.5}
    with tenuto.open(tmp_path) as opened:
        assert opened.metrics == {"loss": 1.0, "acc": 0.5}


def test_a_metric_that_nobody_logged_names_the_others(tmp_path: Path) -> None:
    trained(tmp_path, [1.0])
    with pytest.raises(MetricNotLogged, match="did you mean 'val_loss'"):
        tenuto.load(tmp_path, step="best:valloss")
    with pytest.raises(CheckpointNotFound, match="best:METRIC"):
        tenuto.load(tmp_path, step="best")
    with pytest.raises(UsageError, match="names no metric"):
        tenuto.Checkpointer(tmp_path, {}, resume_from="best:")


def test_of_two_entries_that_fit_the_error_names_both(tmp_path: Path) -> None:
    tenuto.save({"model": nn.Linear(3, 2), "ema": nn.Linear(3, 2), "head": nn.Linear(2, 2)}, tmp_path)
    with pytest.raises(StateMismatch, match="2 of them fit it: model, ema") as caught:
        tenuto.load(tmp_path, into=nn.Linear(3, 2))
    assert caught.value.hint == 'into={"model": …} names the entry'
    with pytest.raises(StateMismatch, match="none of them fits it"):
        tenuto.load(tmp_path, into=nn.Linear(5, 5))
    head = nn.Linear(2, 2)
    assert tenuto.load(tmp_path, into=head).report.restored == ("head/weight", "head/bias")


def test_where_none_fits_what_differs_is_named(tmp_path: Path) -> None:
    trained(tmp_path, [1.0])
    with pytest.raises(StateMismatch, match=r"model/weight: float32 \[2, 3\] in the checkpoint, float32 \[5, 3\]"):
        tenuto.load(tmp_path, into=nn.Linear(3, 5))
    tenuto.save({"note": "x", "n": 1}, tmp_path / "other")
    with pytest.raises(StateMismatch, match=r"has the entries note, n; .* none of them fits it"):
        tenuto.load(tmp_path / "other", into=nn.Linear(3, 5))


def test_state_dicts_that_were_saved_fit_too_and_so_does_a_meta_model(tmp_path: Path) -> None:
    saved = nn.Linear(3, 2)
    tenuto.save({"model": saved.state_dict(), "epoch": 3}, tmp_path)
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    tenuto.load(tmp_path, into=model)
    assert torch.equal(model.weight, saved.weight)


def test_the_model_is_moved_to_the_device_and_a_mapping_stays(tmp_path: Path) -> None:
    """There is no other device here but `meta`, which shows who was moved."""
    trained(tmp_path, [1.0])
    model = nn.Linear(3, 2)
    tenuto.load(tmp_path, into=model, device="meta")
    assert model.weight.device.type == "meta"
    stays = nn.Linear(3, 2)
    tenuto.load(tmp_path, into={"model": stays}, device="meta")
    assert stays.weight.device.type == "cpu"


def test_a_checkpointer_restores_what_fits_and_names_what_it_left(tmp_path: Path) -> None:
    tenuto.save({"model": nn.Linear(3, 2), "step": np.arange(3)}, tmp_path)
    state = {"model": nn.Sequential(nn.Linear(3, 2)), "step": np.zeros(3, int), "more": np.ones(2)}
    with pytest.raises(StateMismatch, match=r"ckpt\.restore\(strict=False\)"):
        tenuto.Checkpointer(tmp_path, state).restore()
    ckpt = tenuto.Checkpointer(tmp_path, state)
    restored = ckpt.restore(strict=False)
    assert restored is not None
    assert set(restored.left) == {"model/0.weight", "model/0.bias", "more"}
    assert np.array_equal(state["step"], np.arange(3)) and np.array_equal(state["more"], np.ones(2))  # type: ignore[arg-type]
    for _ in ckpt.steps(1):
        pass
    ckpt.close()


def test_nearest_names_stand_in_what_is_not_found(tmp_path: Path) -> None:
    tenuto.save({"model": nn.Linear(3, 2), "cfg": {"lr": 0.1}}, tmp_path)
    with tenuto.open(tmp_path) as opened:
        for path, near in (("weight", "model/weight"), ("model/wieght", "model/weight"), ("cfg/lrs", "cfg/lr")):
            with pytest.raises(LeafNotFound) as caught:
                opened[path]
            assert f"did you mean {near!r}" in (caught.value.hint or "")
    with pytest.raises(StateMismatch, match="did you mean 'model'"):
        tenuto.load(tmp_path, into={"modle": nn.Linear(3, 2)})
    with pytest.raises(StateMismatch, match="did you mean 'model'"):
        tenuto.load(tmp_path, include="modle/*")
