"""Comparisons, and pins, holds, notes and metrics that are added later."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tenuto.errors import CheckpointNotFound, MetricNotLogged, RemovalRefused, UsageError
from tenuto.maintenance import remove, retention
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.repo.notes import add_note
from tenuto.repo.refs import list_refs
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store


def at(attempt, step, run="main"):
    return CheckpointId(run, attempt, step)


def state(rate, **more):
    return lambda step: {
        "model": {"w": np.zeros(4, np.float32)},
        "optimizer": {"param_groups": [{"lr": rate, "betas": (0.9, 0.99)}]},
        "step": step,
        **more,
    }


def test_metrics_sizes_and_the_settings_that_differ(repository, train):
    train([1, 2], state=state(0.1), modes={"loss": "min"})
    train([3], state=state(0.2, note="x"))
    found = repository.compare([1, 2, 3, 2])
    assert [one.id for one in found.checkpoints] == [at(1, 1), at(1, 2), at(2, 3)]
    assert found.differing == ("optimizer/param_groups/0/lr", "step", "note")
    assert [one.best for one in found.checkpoints] == [(), (), ("loss",)]
    rows = found.rows()
    assert [row["settings.optimizer/param_groups/0/lr"] for row in rows] == [0.1, 0.1, 0.2]
    assert [row["settings.note"] for row in rows] == [None, None, "x"]
    assert [row["metrics.loss"] for row in rows] == [1, 0.5, 1 / 3]
    assert found.checkpoints[0].settings["versions/numpy"] == "2"


def test_settings_of_one_value_and_another_type_differ(repository, train):
    train([1], state=state(1))
    train([2], state=state(1.0))
    assert "optimizer/param_groups/0/lr" in repository.compare([1, 2]).differing


def test_what_an_optimizer_keeps_for_each_parameter_is_no_setting(where, repository):
    torch = pytest.importorskip("torch")
    import tenuto

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] /= 2
        tenuto.save({"model": model, "optimizer": optimizer}, where, step=step)
    assert repository.compare([0, 1]).differing == ("optimizer/param_groups/0/lr",)


def test_several_runs_by_their_latest_or_their_best(repository, train):
    train([1, 2], "small", loss=lambda step: step, modes={"loss": "min"})
    train([1, 2], "large", loss=lambda step: 3 - step, modes={"loss": "min"})
    latest = repository.compare(runs=["small", "large"])
    assert [one.id for one in latest.checkpoints] == [at(1, 2, "small"), at(1, 2, "large")]
    best = repository.compare(runs=["small", "large"], metric="loss", mode="max")
    assert [one.id for one in best.checkpoints] == [at(1, 2, "small"), at(1, 1, "large")]
    assert len(repository.compare().checkpoints) == 3, "every run"
    for steps, runs in (((), ["small"]), ([1], [])):
        with pytest.raises(MetricNotLogged):
            repository.compare(steps, run="small", runs=runs, metric="los")
    with pytest.raises(CheckpointNotFound):
        repository.compare([7], run="small")


def test_without_a_direction_none_is_marked_and_the_name_says_which_is_asked_for(repository, train):
    train([1, 2])
    found = repository.compare([1, 2], metric="loss")
    assert (found.metrics, [one.best for one in found.checkpoints]) == (("loss",), [(), ()])
    assert [one.best for one in repository.compare([1, 2], metric="loss", mode="min").checkpoints] == [(), ("loss",)]
    assert [one.id for one in repository.compare(runs=["main"], metric="loss").checkpoints] == [at(1, 2)]
    add_note(repository.repo, at(1, 1), "metric", {"score": 1.0})
    with pytest.raises(UsageError, match="lowest score"):
        repository.compare(runs=["main"], metric="score")


def test_nan_is_never_best_and_compares(repository, train):
    train([1, 2], loss=lambda step: math.nan if step == 2 else 1.0, modes={"loss": "min"})
    assert [one.best for one in repository.compare([1, 2]).checkpoints] == [("loss",), ()]


@pytest.mark.parametrize("kind", ["pin", "hold"])
def test_neither_rm_by_force_nor_retention_removes_what_is_kept(repository, train, kind):
    train([1, 2, 3])
    getattr(repository, kind)(1, reason="the audit")
    plan = remove.plan_remove(repository.repo, [at(1, 1)], force=True)
    with pytest.raises(RemovalRefused, match="the audit") as caught:
        remove.execute(repository.repo, plan)
    assert "tenuto pin" in caught.value.hint and ("--hold" in caught.value.hint) == (kind == "hold")
    retention.retain(repository.repo, "main", keep.latest(1), grace="none")
    assert repository.checkpoints() == [at(1, 3), at(1, 1)]
    other = repository.unpin if kind == "hold" else repository.release
    with pytest.raises(CheckpointNotFound, match="a0001/1 is not"):
        other(1)
    (ended,) = (repository.release if kind == "hold" else repository.unpin)(1)
    assert ended.reason == "the audit"
    remove.execute(repository.repo, remove.plan_remove(repository.repo, [at(1, 1)]))
    assert repository.checkpoints() == [at(1, 3)]


def test_a_pin_of_the_longest_run_name(repository, train):
    run = "r" * 100
    train([1], run)
    assert repository.pin(1, run=run).id == at(1, 1, run)
    assert len(repository.unpin(1, run=run)) == 1


def test_pinned_again_it_has_the_newer_reason_and_is_one_pin(repository, train):
    train([1])
    repository.pin(reason="old")
    repository.pin(reason="new")
    assert [ref.reason for ref in repository.unpin(1)] == ["new"]
    with pytest.raises(CheckpointNotFound):
        repository.pin(9)


def test_metrics_added_later_count_for_the_best(repository, train):
    train([1, 2, 3])
    for step, value in ((1, 3.0), (2, 1.0), (3, 2.0), (3, 0.5), (3, 1.5)):
        repository.add_metrics(step, {"val_loss": value})
    assert repository.best("val_loss", mode="min") == at(1, 2)
    assert repository.add_metrics(3, {"accuracy": math.inf}) == {"loss": 1 / 3, "val_loss": 1.5, "accuracy": math.inf}
    for wrong in ({}, {"x": "much"}, {"": 1.0}, {3: 1.0}):
        with pytest.raises(UsageError):
            repository.add_metrics(1, wrong)


def test_notes_are_texts_in_their_order(repository, train):
    train([1])
    for text in ("first", "second, ünïcode"):
        repository.note(1, text)
    assert repository.log().points[0].texts == ("first", "second, ünïcode")
    for wrong in ("", "  ", 3, "x" * 10_001):
        with pytest.raises(UsageError):
            repository.note(1, wrong)


def test_a_copy_elsewhere_keeps_what_is_kept_here(repository, train, tmp_path):
    train([1, 2, 3])
    repository.hold(1, reason="the audit")
    repository.pin(2)
    repository.replicate(tmp_path / "copy")
    repository.release(1)
    repository.unpin(2)
    remove.execute(repository.repo, remove.plan_remove(repository.repo, [at(1, 1), at(1, 2)]))
    copy = Repo.open(open_store(tmp_path / "copy"))
    assert [(ref.kind, ref.reason) for ref in list_refs(copy)] == [("hold", "the audit"), ("pin", "")]
    repository.replicate(tmp_path / "copy", prune=True)
    assert list_refs(copy) == []
