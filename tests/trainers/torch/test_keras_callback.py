"""`tenuto.keras.TenutoCheckpoint`: what its arguments mean, and what it says where it cannot be exact."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import pytest

import tenuto
import tenuto.keras
from tenuto import keep
from tenuto.errors import PolicyConflict, StateMismatch, TenutoWarning, UsageError

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from keras_sweep import differences

X = np.random.default_rng(1).normal(size=(24, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def made(width=5, optimizer="adam"):
    keras.utils.clear_session()
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


class Scripted(keras.callbacks.Callback):
    """Gives a metric the values of a list, epoch by epoch; ends the process's part of the training at a batch."""

    def __init__(self, values=(), stop=None):
        super().__init__()
        self.values, self.stop, self.batches = values, stop, 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == self.stop:
            raise KeyboardInterrupt

    def on_epoch_end(self, epoch, logs=None):
        if self.values:
            logs["score"] = self.values[epoch]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def steps(where):
    return [one.step for one in sorted(tenuto.Repository(where).checkpoints())]


@pytest.mark.parametrize("words", [["--source", "workers"], ["--source", "loader"]])
def test_resumed_inside_an_epoch_and_at_its_end(tmp_path, words):
    assert not differences(tmp_path, [3, 8, 13], *words, "--epochs", "2")


def test_the_best_epochs_alone_are_saved_and_its_weights_come_back(tmp_path):
    model, kept = made(), []
    values = [5.0, 3.0, 4.0, 2.0, 9.0]
    callback = tenuto.keras.TenutoCheckpoint(
        tmp_path, monitor="score", mode="min", save_best_only=True, initial_value_threshold=4.5, keep=keep.all()
    )
    spy = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(model.get_weights()))
    model.fit(X, Y, batch_size=8, epochs=5, verbose=0, callbacks=[Scripted(values), spy, callback])
    assert steps(tmp_path) == [6, 12, 15]  # below the threshold and better, and the last
    other = made()
    tenuto.load(tmp_path, into={"weights": tenuto.keras.weights(other)}, step="best:score:min")
    assert all(np.array_equal(a, b) for a, b in zip(other.get_weights(), kept[3], strict=True))


def test_what_is_kept_and_removed(tmp_path):
    made().fit(X, Y, epochs=5, verbose=0, callbacks=[tenuto.keras.TenutoCheckpoint(tmp_path / "a")])
    assert steps(tmp_path / "a") == [3, 4, 5]
    made().fit(
        X, Y, epochs=2, verbose=0, callbacks=[tenuto.keras.TenutoCheckpoint(tmp_path / "b", delete_checkpoint=True)]
    )
    assert steps(tmp_path / "b") == []
    model = made()
    again = model.fit(X, Y, epochs=7, verbose=0, callbacks=[tenuto.keras.TenutoCheckpoint(tmp_path / "a")])
    assert again.epoch == [*range(7)]
    assert model._initial_epoch is None, "the next fit begins where it is told"


def test_a_second_fit_of_as_many_epochs_says_that_nothing_is_left(tmp_path, caplog):
    caplog.set_level("INFO", logger="tenuto")
    model, callback = made(), tenuto.keras.TenutoCheckpoint(tmp_path)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[callback])
    assert "nothing is left to train" not in caplog.text
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[callback])
    assert "fit(epochs=2) was over when the checkpoint was saved: nothing is left to train" in caplog.text
    assert model.fit(X, Y, epochs=3, verbose=0, callbacks=[callback]).epoch == [0, 1, 2]


def test_without_data_it_goes_on_at_the_epochs_beginning_and_says_so(tmp_path):
    callback = tenuto.keras.TenutoCheckpoint(tmp_path, save_freq=1)
    with pytest.raises(KeyboardInterrupt):
        made().fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[Scripted(stop=6), callback])
    callback.checkpointer.wait()
    with tenuto.open(tmp_path) as opened:
        assert opened.step == 5
        assert "inside an epoch" in opened.certificate["reasons"][0]
    count = Scripted()
    with pytest.warns(TenutoWarning, match="at the beginning of epoch 2, of which 2 batches are done"):
        made().fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[count, tenuto.keras.TenutoCheckpoint(tmp_path)])
    assert count.batches == 6


def test_a_callback_with_a_state_of_its_own_is_named(tmp_path):
    class Counting(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = 0

    with pytest.warns(TenutoWarning, match="state of Counting is not saved"):
        made().fit(X, Y, verbose=0, callbacks=[Counting(), tenuto.keras.TenutoCheckpoint(tmp_path)])
    with tenuto.open(tmp_path) as opened:
        assert any("Counting" in one for one in opened.certificate["caveats"])


def test_weights_alone(tmp_path):
    made().fit(X, Y, verbose=0, callbacks=[tenuto.keras.TenutoCheckpoint(tmp_path, save_weights_only=True)])
    with tenuto.open(tmp_path) as opened:
        assert opened.certificate["verdict"] == "not exact"
        assert not any(path.startswith("optimizer") for path in opened)


def test_another_model_and_other_data_are_refused_by_name(tmp_path):
    data = tenuto.keras.resumable(X, Y, batch_size=8)
    made().fit(data, verbose=0, callbacks=[tenuto.keras.TenutoCheckpoint(tmp_path, data=data)])
    with pytest.raises(StateMismatch, match=r"sequential/dense/kernel has the shape \[4, 5\] in the checkpoint"):
        made(6).fit(X, Y, verbose=0, callbacks=[tenuto.keras.TenutoCheckpoint(tmp_path)])
    other = tenuto.keras.resumable(X, Y, batch_size=6)
    with pytest.raises(StateMismatch, match="batches=3 when it was saved, and has batches=4"):
        made().fit(other, epochs=2, verbose=0, callbacks=[tenuto.keras.TenutoCheckpoint(tmp_path, data=other)])


def test_arguments_that_make_no_sense(tmp_path):
    with pytest.raises(PolicyConflict, match="no effect without save_best_only"):
        tenuto.keras.TenutoCheckpoint(tmp_path, monitor="loss", initial_value_threshold=1.0)
    with pytest.raises(UsageError, match="whether more or less is better"):
        tenuto.keras.TenutoCheckpoint(tmp_path, monitor="quality")
    with pytest.raises(UsageError, match="save_freq='often'"):
        tenuto.keras.TenutoCheckpoint(tmp_path, save_freq="often")
    with pytest.raises(UsageError, match="does not say where it is"):
        tenuto.keras.TenutoCheckpoint(tmp_path, data=[1])
    with pytest.raises(UsageError, match="no batches by number"):
        tenuto.keras.resumable(iter([1]))
    with pytest.raises(UsageError, match="2 steps in an epoch, and its data= 3"):
        data = tenuto.keras.resumable(X, Y, batch_size=8)
        made().fit(data, steps_per_epoch=2, verbose=0, callbacks=[tenuto.keras.TenutoCheckpoint(tmp_path, data=data)])
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    with pytest.raises(UsageError, match="not built"):
        callback = tenuto.keras.TenutoCheckpoint(tmp_path)
        callback.set_model(unbuilt)
        callback.set_params({"epochs": 1, "steps": 1})
        callback.on_train_begin()


def test_data_without_the_callback_changes_its_order_each_epoch():
    data = tenuto.keras.resumable(X, Y, batch_size=24, seed=1)
    seen = []
    for _ in range(2):
        data.on_epoch_begin()
        seen.append(next(iter(data.get_numpy_iterator()))[0])
        data.on_epoch_end()
    assert not np.array_equal(*seen)
    assert np.array_equal(np.sort(seen[0], 0), np.sort(seen[1], 0))
