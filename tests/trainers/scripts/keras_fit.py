"""A Keras training as its owner wrote it, with one callback: dropout, batch normalisation, an average of the weights, a
plateau schedule, early stopping, validation. In the protocol of `TrainerSuite`; KERAS_BACKEND says on what it runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
from pathlib import Path

if os.environ.get("TRAINERS_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import tenuto.keras
from tenuto import keep

draw = np.random.default_rng(3)
INPUTS = draw.normal(size=(60, 6)).astype("float32")
TARGETS = np.sin(INPUTS.sum(1, keepdims=True)).astype("float32")


class Dataset(keras.utils.PyDataset):
    @property
    def num_batches(self):
        return 8

    def __getitem__(self, index):
        return INPUTS[index * 8 : index * 8 + 8], TARGETS[index * 8 : index * 8 + 8]


class Steps(keras.callbacks.Callback):
    """Prints the protocol's line for each step that is done."""

    def on_train_batch_end(self, batch, logs=None):
        print(f"step {int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))}", flush=True)


class Seen(keras.callbacks.Callback):
    """A callback of the user's own that says its state."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))

    def state_dict(self):
        return {"losses": list(self.losses)}

    def load_state_dict(self, state):
        self.losses = list(state["losses"])


def parsed(words=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume-from", type=int)
    parser.add_argument("--every-step", action="store_true")
    parser.add_argument("--steps-at-once", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--source", default="arrays", choices=["arrays", "dataset", "workers", "loader"])
    return parser.parse_args(words)


def digest(value) -> str:
    content = value if isinstance(value, bytes) else np.ascontiguousarray(keras.ops.convert_to_numpy(value)).tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def train(arguments):
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(0.02, use_ema=True, ema_momentum=0.9),
        loss="mse",
        metrics=["mae"],
        jit_compile=False,
        steps_per_execution=arguments.steps_at_once,
    )
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.05, cooldown=1)
    early = keras.callbacks.EarlyStopping(monitor="loss", patience=3, restore_best_weights=True)
    seen = Seen()
    callbacks = [plateau, early, Steps(), seen]
    if arguments.source == "arrays":
        data = tenuto.keras.resumable(INPUTS, TARGETS, batch_size=8, seed=11)
    elif arguments.source == "loader":
        from torch.utils.data import DataLoader

        data = tenuto.keras.resumable(DataLoader([*zip(INPUTS, TARGETS, strict=True)], 8, shuffle=True), seed=11)
    else:
        data = tenuto.keras.resumable(Dataset(workers=2 if arguments.source == "workers" else 1), seed=11)

    if not arguments.where:
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: data.begin(epoch, 0)))
    else:
        saving = {"save_freq": 1, "keep": keep.all()} if arguments.every_step else {"save_freq": 5}
        start = "latest" if arguments.resume_from is None else arguments.resume_from
        # First of all, on purpose: it goes behind the others by itself.
        callbacks.insert(0, tenuto.keras.TenutoCheckpoint(arguments.where, data=data, resume_from=start, **saving))

    history = model.fit(
        data,
        epochs=arguments.epochs,
        validation_data=(INPUTS[:16], TARGETS[:16]),
        callbacks=callbacks,
        verbose=0,
    )
    digests = {one.path: digest(one) for one in [*model.variables, *model.optimizer.variables]}
    digests["python"] = digest(repr(random.getstate()).encode())
    digests["numpy"] = digest(repr(np.random.get_state()[1].tolist()).encode())
    if keras.backend.backend() == "torch":
        import torch

        digests["torch"] = digest(bytes(torch.get_rng_state().tolist()))
    stopping = {name: getattr(early, name) for name in ("wait", "best", "best_epoch", "stopped_epoch")}
    schedule = {name: getattr(plateau, name) for name in ("wait", "best", "cooldown_counter")}
    found = {"digest": digests, "history": [history.history, history.epoch, stopping, schedule, seen.losses]}
    text = json.dumps(found, default=float, indent=1)
    Path(arguments.out).write_text(text)
    return json.loads(text)


if __name__ == "__main__":
    train(parsed())
