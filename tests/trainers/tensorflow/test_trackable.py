"""`tenuto.tensorflow`: objects of `tf.train.Checkpoint`, and the manager."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

import tenuto
import tenuto.tensorflow
from tenuto.errors import StateMismatch, TenutoWarning


class Training(tf.Module):
    """Two networks, momentum, a generator of its own, a step in a tf.function."""

    def __init__(self, width=3, seed=1):
        super().__init__()
        self.dice = tf.random.Generator.from_seed(seed)
        self.first = tf.Variable(self.dice.normal((4, width)))
        self.second = tf.Variable(self.dice.normal((width,)))
        self.speed = [tf.Variable(tf.zeros_like(one)) for one in (self.first, self.second)]
        self.step = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def train(self):
        inputs = self.dice.normal((8, 4))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(tf.tanh(inputs @ self.first), self.second) - 1.0) ** 2)
        variables = (self.first, self.second)
        for one, speed, gradient in zip(variables, self.speed, tape.gradient(loss, variables), strict=True):
            speed.assign(0.9 * speed + gradient)
            one.assign_sub(0.05 * speed)
        self.step.assign_add(1)

    def values(self):
        return [one.numpy().tobytes() for one in (self.first, self.second, *self.speed, self.step, self.dice.state)]


def test_resumed_from_each_step_the_training_comes_to_the_same(tmp_path):
    whole, saved = Training(), tmp_path / "saved"
    with tenuto.tensorflow.CheckpointManager(tf.train.Checkpoint(training=whole), saved, max_to_keep=None) as manager:
        assert manager.restore_or_initialize() is None
        for _ in range(6):
            whole.train()
            manager.save()
    for step in range(1, 7):
        resumed = Training(seed=9)
        entry = tenuto.tensorflow.trackable(tf.train.Checkpoint(training=resumed))
        tenuto.load(saved, into={"checkpoint": entry}, step=step)
        assert (entry.missing, entry.unused) == ((), ())
        for _ in range(6 - step):
            resumed.train()
        assert resumed.values() == whole.values(), step


def test_the_manager_keeps_names_and_initialises(tmp_path):
    called = []
    training = Training()
    with tenuto.tensorflow.CheckpointManager(
        training, tmp_path, max_to_keep=2, init_fn=lambda: called.append(1)
    ) as manager:
        assert manager.restore_or_initialize() is None
        assert called == [1]
        assert [manager.save(), manager.save(checkpoint_number=5), manager.save()] == [1, 5, 6]
    assert manager.latest_checkpoint == "main/a0001/6"
    assert manager.checkpoints == ["main/a0001/5", "main/a0001/6"]
    with tenuto.tensorflow.CheckpointManager(training, tmp_path) as manager:
        assert manager.restore_or_initialize() == "main/a0001/6"
        assert manager.save() == 7


def test_names_and_shapes_that_differ_are_named_and_nothing_is_assigned(tmp_path):
    first = Training()
    tenuto.save({"t": tenuto.tensorflow.trackable(first)}, tmp_path)
    other = tf.Module()
    other.first = tf.Variable(tf.zeros((4, 3)))
    other.more = tf.Variable(1.0)
    with pytest.raises(StateMismatch, match=r"more is not in the checkpoint.*second is in the checkpoint alone"):
        tenuto.load(tmp_path, into={"t": tenuto.tensorflow.trackable(other)})
    assert not other.first.numpy().any()
    entry = tenuto.tensorflow.trackable(other, partial=True)
    with pytest.warns(TenutoWarning, match="restored in part"):
        tenuto.load(tmp_path, into={"t": entry})
    assert np.array_equal(other.first.numpy(), first.first.numpy())
    assert entry.missing == ("more",)
    assert "second" in entry.unused
    with pytest.raises(StateMismatch, match=r"shape \[4, 3\] in the checkpoint, not \[4, 2\]"):
        tenuto.load(tmp_path, into={"t": tenuto.tensorflow.trackable(Training(width=2), partial=True)})


def test_an_iterator_is_told_not_to_be_saved():
    root = tf.train.Checkpoint(batches=iter(tf.data.Dataset.range(3)), weight=tf.Variable(1.0))
    with pytest.warns(TenutoWarning, match="tf.data iterators is not saved"):
        tenuto.tensorflow.trackable(root)


def test_a_table_is_told_not_to_be_saved():
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    with pytest.warns(TenutoWarning, match=r"not the state of table \(a MutableHashTable\)"):
        tenuto.tensorflow.trackable(tf.train.Checkpoint(table=table, weight=tf.Variable(1.0)))


def network(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def steps_of(model, optimizer, count):
    for _ in range(count):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones((2, 3)), training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return [one.numpy().tobytes() for one in (*model.variables, *optimizer.variables)]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="variables of another backend are not TensorFlow's")
def test_keras_models_and_optimizers_resume_with_the_seeds_of_their_layers(tmp_path):
    model, optimizer = network(1)
    with tenuto.tensorflow.CheckpointManager(
        tf.train.Checkpoint(model=model, optimizer=optimizer), tmp_path
    ) as manager:
        manager.restore_or_initialize()
        steps_of(model, optimizer, 2)
        manager.save()
    whole = steps_of(model, optimizer, 2)
    model, optimizer = network(2)
    with tenuto.tensorflow.CheckpointManager(
        tf.train.Checkpoint(model=model, optimizer=optimizer), tmp_path
    ) as manager:
        assert manager.restore_or_initialize() == "main/a0001/1"
        assert steps_of(model, optimizer, 2) == whole


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
import tensorflow as tf, tenuto.tensorflow
from test_trackable import Training
training = Training()
with tenuto.tensorflow.CheckpointManager(training, sys.argv[1]) as manager:
    manager.restore_or_initialize()
    while int(training.step) < 400:
        training.train()
        manager.save()
        print("step", int(training.step), flush=True)
"""


def test_killed_in_the_middle_it_goes_on(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        for line in first.stdout:
            if line.strip() == "step 25":
                first.kill()
                break
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
    whole, resumed = Training(), Training()
    for _ in range(400):
        whole.train()
    tenuto.load(tmp_path, into={"checkpoint": tenuto.tensorflow.trackable(resumed)})
    assert resumed.values() == whole.values()
