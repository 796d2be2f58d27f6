"""Saves beside trainers: what one holds training for, and what a step costs at which nothing is saved.

    build/trainers/torch/bin/python benchmarks/trainers.py --gib 0.2

In the environment of `make test-trainers TRAINERS=torch`. Targets: a step that saves nothing costs at most 50 us of the
training thread's processor time; a save holds training for at most half as long as the trainer's own checkpoint.

Each step is timed from where the model is called to where it is called next. A save holds training for what such a step
takes longer than the others of the same training; the first save of a training is not counted, and between two of them
training pauses until the one before is written. Steps without a save are compared in pairs of trainings, with Tenuto
and without, by the lower quartile of each training's steps: what else the machine does only ever adds to one.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import accelerate
import keras
import lightning.pytorch as pl
import torch
import transformers
from harness import Contender, Result, Target, arguments, compare, median_interval, note, report, workplace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tenuto
import tenuto.accelerate
import tenuto.keras
import tenuto.lightning
import tenuto.transformers

EVERY = 4
SAVES = 4
STEPS = EVERY * SAVES + 2
IDLE_STEPS = 600
LAST = tenuto.keep.latest(1)
SELDOM = tenuto.every(hours=24)
SOON = tenuto.every(steps=EVERY)


@dataclass
class Ticks:
    """The seconds from each call of the model to the next one."""

    clock: Callable[[], float] = time.perf_counter
    pause_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    _last: float | None = None

    def tick(self) -> None:
        now = self.clock()
        if self._last is not None:
            self.seconds.append(now - self._last)
        if self.pause_s and len(self.seconds) % EVERY == EVERY - 1:
            time.sleep(self.pause_s)
        self._last = self.clock()

    def stall_s(self) -> float:
        """What a save has added: the median of all but the first one."""
        saved = self.seconds[EVERY - 1 :: EVERY]
        others = [one for number, one in enumerate(self.seconds[EVERY:]) if (number + 1) % EVERY]
        return statistics.median(saved[1:]) - statistics.median(others)


ticks = Ticks()


class Wide(nn.Module):
    """One parameter of a given size, of which a step uses a corner."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        ticks.tick()
        return {"loss": (self.weight[:8] * x).sum()}


def batches(steps: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(steps, 8)), batch_size=1)


# -- the trainers: each trains so many steps, and saves as `how` says


def in_a_loop(elements: int, steps: int, place: Path, how: str) -> None:
    model = Wide(elements)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    ckpt = None
    if how in ("idle", "tenuto"):
        ckpt = tenuto.Checkpointer(place / "t", state, save=SELDOM if how == "idle" else SOON, keep=LAST, log="silent")
        ckpt.restore()
    for step, (x,) in enumerate(batches(steps), start=1):
        model(x)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if ckpt is not None:
            ckpt.step_done()
        elif how == "own" and step % EVERY == 0:
            torch.save({name: one.state_dict() for name, one in state.items()}, place / "own.pt")
    if ckpt is not None:
        ckpt.close(failed=InterruptedError("measured"))


class Net(pl.LightningModule):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.wide = Wide(elements)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.wide(batch[0])["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def by_lightning(elements: int, steps: int, place: Path, how: str) -> None:
    callbacks: list[Any] = [pl.Callback()]  # what Lightning calls at each step costs as much whatever a callback does
    if how in ("idle", "tenuto"):
        save = SELDOM if how == "idle" else SOON
        callbacks = [tenuto.lightning.TenutoCheckpoint(place / "t", save=save, keep=LAST, log="silent")]
    elif how in ("own", "async"):
        callbacks = [ModelCheckpoint(place / how, every_n_train_steps=EVERY, save_on_train_epoch_end=False)]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=how in ("idle", "tenuto", "own", "async"),
        callbacks=callbacks,
        plugins=[AsyncCheckpointIO()] if how == "async" else None,
    )
    trainer.fit(Net(elements), batches(steps))


def by_transformers(elements: int, steps: int, place: Path, how: str) -> None:
    saving = {"save_strategy": "steps", "save_steps": EVERY, "save_total_limit": 1} if how == "own" else {}
    options = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    rows = [{"x": torch.ones(8), "labels": torch.zeros(1)}] * (8 * steps)
    given = transformers.TrainingArguments(str(place / "out"), max_steps=steps, **{**options, **saving})
    trainer = transformers.Trainer(Wide(elements), given, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    if how in ("idle", "tenuto"):
        save = SELDOM if how == "idle" else SOON
        tenuto.transformers.attach(trainer, place / "t", save=save, keep=LAST, log="silent")
    trainer.train()


def by_accelerate(elements: int, steps: int, place: Path, how: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model: Any = Wide(elements)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches(steps))
    ckpt = None
    if how in ("idle", "tenuto"):
        save, state = SELDOM if how == "idle" else SOON, tenuto.accelerate.state(accelerator)
        ckpt = tenuto.Checkpointer(place / "t", state, data=loader, save=save, keep=LAST, log="silent")
        ckpt.restore()
    for step, (x,) in enumerate(loader, start=1):
        accelerator.backward(model(x)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if ckpt is not None:
            ckpt.step_done()
        elif how == "own" and step % EVERY == 0:
            accelerator.save_state(str(place / "own"))
    if ckpt is not None:
        ckpt.close(failed=InterruptedError("measured"))


class Layer(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.weight = self.add_weight(shape=(elements,), initializer="zeros")

    def call(self, x: Any) -> Any:
        if torch.is_tensor(x) and x.device.type != "meta":  # not where Keras looks at shapes
            ticks.tick()
        return x * self.weight[:8]


class Nothing(keras.callbacks.Callback):  # type: ignore[misc]
    """With any callback for batches, Keras makes numbers of its metrics at each one."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Does nothing."""


def by_keras(elements: int, steps: int, place: Path, how: str) -> None:
    model = keras.Sequential([keras.Input((8,)), Layer(elements)])
    model.compile(keras.optimizers.AdamW(), "mse")
    ticks.seconds.clear()
    ticks._last = None
    data = tenuto.keras.resumable(torch.ones(steps, 8).numpy(), torch.ones(steps, 8).numpy(), batch_size=1)
    callbacks: list[Any] = [Nothing()]
    if how in ("idle", "tenuto"):
        save = SELDOM if how == "idle" else SOON
        callbacks = [tenuto.keras.TenutoCheckpoint(place / "t", data=data, save=save, keep=LAST, log="silent")]
    elif how == "own":
        callbacks = [keras.callbacks.ModelCheckpoint(str(place / "own.keras"), save_freq=EVERY)]
    model.fit(data, verbose=0, callbacks=callbacks)


TRAINERS: dict[str, tuple[Callable[[int, int, Path, str], None], dict[str, str]]] = {
    "a loop": (in_a_loop, {"own": "torch.save"}),
    "Lightning": (by_lightning, {"own": "ModelCheckpoint", "async": "ModelCheckpoint, AsyncCheckpointIO"}),
    "Hugging Face": (by_transformers, {"own": "save_strategy"}),
    "Accelerate": (by_accelerate, {"own": "save_state"}),
    "Keras": (by_keras, {"own": "ModelCheckpoint"}),
}


def timed(train: Callable[..., None], elements: int, steps: int, place: Path, how: str, ticked: Ticks) -> Ticks:
    global ticks
    ticks = ticked
    place.mkdir()
    try:
        train(elements, steps, place, how)
    finally:
        shutil.rmtree(place)
    return ticked


def idle_step(name: str, place: Path, pairs: int) -> tuple[list[float], list[float]]:
    """The seconds of processor time of a step without Tenuto, and of one with it that saves nothing: the lower quartile
    of each training."""
    train, _ = TRAINERS[name]
    found: dict[str, list[float]] = {"plain": [], "idle": []}
    for number in range(pairs + 1):
        for how in ("plain", "idle") if number % 2 else ("idle", "plain"):
            ticked = timed(train, 8, IDLE_STEPS, place / "idle", how, Ticks(time.thread_time))
            if number:
                found[how].append(statistics.quantiles(ticked.seconds[50:], n=4)[0])
    return found["plain"], found["idle"]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=7, help="pairs of trainings that save nothing")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two saves")
    parser.add_argument("--trainers", nargs="*", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--noisy", action="store_true", help="say that others used the machine meanwhile")


def main() -> None:
    given = arguments(__doc__ or "", add=options, gib=0.2, rounds=3, leaves=1)
    for name in ("lightning.pytorch", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    elements = int(given.gib * 2**30 / 12)  # float32, and two moments of AdamW
    with workplace(given) as place:
        idle = {}
        for name in given.trainers:
            idle[name] = idle_step(name, place, given.pairs)
            note(f"{name}: {statistics.median(idle[name][1]) * 1e6 - statistics.median(idle[name][0]) * 1e6:.0f} us")
        contenders = []
        for name in given.trainers:
            train, own = TRAINERS[name]
            for how, words in {"tenuto": "tenuto", **own}.items():

                def measure(train: Callable[..., None] = train, how: str = how) -> float:
                    ticked = Ticks(pause_s=given.pause)
                    return timed(train, elements, STEPS, place / "saves", how, ticked).stall_s()

                contenders.append(Contender(f"{name}: {words}", measure))
        seconds = compare(contenders, rounds=given.rounds, own=contenders[0].name, note=note)
        result = Result("trainers", seconds, elements * 12, sized=True, speeds=False)
        for name, (plain, attached) in idle.items():
            result.seconds[f"{name}: step"], result.seconds[f"{name}: step, tenuto"] = plain, attached
            found = median_interval([(after - before) * 1e6 for before, after in zip(plain, attached, strict=True)])
            result.seconds[f"{name}: added to a step"] = [
                after - before for before, after in zip(plain, attached, strict=True)
            ]
            result.judge_value(f"{name}: a step that saves nothing <= 50 us", found, at_most=50.0, unit="us")
        for name in given.trainers:
            own = f"{name}: {TRAINERS[name][1]['own']}"
            result.judge(Target(f"{name}: held for <= 0.5 of its own", f"{name}: tenuto", own, at_most=0.5))
        result.facts["trainers"] = {one.__name__: one.__version__ for one in (pl, transformers, accelerate, keras)}
        result.facts["steps that save nothing"] = "processor time of the training thread"
        if given.noisy:
            result.facts["noise"] = "others used the processors and the disk meanwhile"
        report(result, given, place)


if __name__ == "__main__":
    main()
