"""A metric of a step without a checkpoint belongs to the next one; names that everybody reads as "more is better"."""

import logging

import numpy as np
import pytest

import tenuto
from tenuto import every, keep, on

ACCURACY = (0.1, 0.9, 0.3, 0.5, 0.2, 0.4)
"""Of each epoch of five steps."""


def train(place, **more):
    """Six epochs of five steps, a checkpoint every four steps, a metric at the end of each epoch."""
    with tenuto.Checkpointer(place, {"w": np.zeros(3)}, **more) as ckpt:
        for step in ckpt.steps(len(ACCURACY) * 5):
            if step % 5 == 4:
                ckpt.log(val_acc=ACCURACY[step // 5])


def metrics_of(place):
    repository = tenuto.Repository(place)
    return {row.id.step: repository.metrics(row.id).get("val_acc") for row in repository.query("attempt > 0")}


def test_a_metric_of_a_step_without_a_checkpoint_belongs_to_the_next(tmp_path):
    train(tmp_path, save=every(steps=4), keep=keep.all())
    assert metrics_of(tmp_path) == {4: None, 8: 0.1, 12: 0.9, 16: 0.3, 20: 0.5, 24: None, 28: 0.2}


def test_the_newest_value_of_a_name_counts(tmp_path):
    train(tmp_path, save=every(steps=11), keep=keep.all())
    assert metrics_of(tmp_path) == {11: 0.9, 22: 0.5}


def test_keep_best_works_with_metrics_once_per_epoch(tmp_path):
    train(tmp_path, save=every(steps=4), keep=keep.latest(2) | keep.best(2, "val_acc"))
    assert sorted(metrics_of(tmp_path)) == [12, 20, 24, 28], "the highest two, and the newest two"


def test_what_no_checkpoint_has_is_told_once(tmp_path, caplog):
    train(tmp_path, save=every(steps=4), keep=keep.latest(2) | keep.best(2, "val_acc"))
    lost = [line for line in caplog.messages if "are lost" in line]
    assert lost == ["val_acc logged since the last checkpoint (step 28) belong to none, and are lost"]
    caplog.clear()
    train(tmp_path / "ended", save=every(steps=4) | on.end(), keep=keep.best(2, "val_acc"))
    assert "are lost" not in caplog.text


def test_metrics_of_a_save_that_fails_belong_to_the_next(tmp_path, monkeypatch):
    from tenuto.engine.save import save_writer
    from tenuto.errors import SaveFailed, StoreError

    def fails(*_, **__):
        raise StoreError("the disk is gone for a moment")

    with tenuto.Checkpointer(tmp_path, {"w": np.zeros(3)}, save=every(steps=2), keep=keep.all()) as ckpt:
        for step in ckpt.steps(4):
            if step == 1:
                ckpt.log(val_acc=0.7)
                monkeypatch.setattr(save_writer, "put_index", fails)
            if step == 2:
                with pytest.raises(SaveFailed):
                    ckpt.wait()
                monkeypatch.undo()
    assert metrics_of(tmp_path) == {4: 0.7}


def test_more_is_better_by_the_name_is_said_once_and_recorded(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    kept = keep.latest(1) | keep.best(1, "val_acc")
    train(tmp_path, save=every(steps=5) | on.improve("val_acc"), keep=kept)
    said = [line for line in caplog.messages if "the highest is the best" in line]
    assert said == ['val_acc: the highest is the best, as its name says; mode="min" where the lowest is']
    assert repr(kept) == "keep.latest(1) | keep.best(1, 'val_acc', mode='max')"
    repository = tenuto.Repository(tmp_path)
    assert repository.certificate(repository.latest())["modes"] == {"val_acc": "max"}
    assert repository.best("val_acc").step == 10
    assert tenuto.load(tmp_path, step="best:val_acc").step == 10


def test_a_mode_that_is_given_counts_and_is_not_said(tmp_path, caplog):
    train(tmp_path, save=every(steps=5), keep=keep.latest(1) | keep.best(1, "val_acc", mode="min"))
    assert tenuto.Repository(tmp_path).best("val_acc").step == 5
    assert "the highest is the best" not in caplog.text


def test_best_goes_by_the_name_where_nothing_is_recorded(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train(tmp_path, save=every(steps=5), keep=keep.all())
    assert tenuto.load(tmp_path, step="best:val_acc").step == 10
    assert "best:val_acc: the highest, as its name says" in caplog.text


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("val_acc", "max"),
        ("valAccuracy", "max"),
        ("eval/f1", "max"),
        ("mAP50", "max"),
        ("test-mIoU", "max"),
        ("roc_auc", "max"),
        ("rougeL", "max"),
        ("r2", "max"),
        ("mean_reward", "max"),
        ("val_loss", "min"),
        ("dice_loss", "min"),
        ("reward/mse", "min"),
        ("capacity", None),
        ("mapping", None),
        ("score", None),
    ],
)
def test_directions_by_the_words_of_a_name(name, direction):
    policy = keep.best(1, name)
    assert f"mode={direction or 'min'!r}" in repr(policy)
    assert f"mode={direction or 'min'!r}" in repr(on.improve(name))
