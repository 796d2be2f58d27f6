"""What Lightning's training waits for a checkpoint, and what the callback costs a step that saves nothing.

    build/trainers/torch/bin/python benchmarks/trainers_lightning.py --gib 0.2 --rounds 3

Targets: at most 50 us a step; a save holds training for less than ModelCheckpoint's and AsyncCheckpointIO's.

The wait is the time from the end of one batch to the beginning of the next, where a save falls between them, less the
same time where none does. Contenders take turns in each round.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

import tenuto
import tenuto.lightning
from tenuto.integrations.lightning.loops import FitLoop

EVERY = 4
STEPS = 16


class Net(pl.LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Gaps(Callback):
    """The time between two batches, by whether a save fell there."""

    def __init__(self) -> None:
        self.with_save: list[float] = []
        self.without: list[float] = []
        self._ended_s = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            found = self.with_save if batch_idx % EVERY == 0 else self.without
            found.append(time.perf_counter() - self._ended_s)

    def on_train_batch_end(self, *args: Any) -> None:
        self._ended_s = time.perf_counter()


def fit(net: Net, steps: int, *callbacks: Any, plugins: Any = None) -> None:
    data = DataLoader(TensorDataset(torch.randn(steps, net.layers[0].in_features)), batch_size=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(not isinstance(one, Gaps) for one in callbacks),
        callbacks=list(callbacks),
        plugins=plugins,
    )
    trainer.fit(net, data)


def overhead_us(place: Path, steps: int) -> float:
    """Returns the median processor time a step spends in the callback where nothing is saved."""
    spent: list[float] = []
    counted = FitLoop._batch_done

    def timed(self: FitLoop, inner: Callable[[Any], None], fetcher: Any) -> None:
        inside = 0.0

        def measured(fetcher: Any) -> None:
            nonlocal inside
            began = time.thread_time()
            inner(fetcher)
            inside = time.thread_time() - began

        began = time.thread_time()
        counted(self, measured, fetcher)
        spent.append(time.thread_time() - began - inside)

    FitLoop._batch_done = timed  # type: ignore[method-assign]
    try:
        fit(Net(8, 2), steps, tenuto.lightning.TenutoCheckpoint(place, save=tenuto.every(steps=10**6)))
    finally:
        FitLoop._batch_done = counted  # type: ignore[method-assign]
    return statistics.median(spent[10:]) * 1e6


def contenders(place: Path) -> dict[str, Callable[[], tuple[list[Any], Any]]]:
    def own() -> Any:
        return ModelCheckpoint(place / "own", every_n_train_steps=EVERY, save_top_k=1, save_on_train_epoch_end=False)

    return {
        "TenutoCheckpoint": lambda: (
            [tenuto.lightning.TenutoCheckpoint(place / "ours", save=tenuto.every(steps=EVERY), resume_from=None)],
            None,
        ),
        "ModelCheckpoint": lambda: ([own()], None),
        "ModelCheckpoint, AsyncCheckpointIO": lambda: ([own()], [AsyncCheckpointIO()]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    width = 1024
    layers = max(1, round(given.gib * 2**30 / 12 / width**2))
    found: dict[str, list[float]] = {}
    place = Path(tempfile.mkdtemp(prefix="trainers-lightning-"))
    try:
        spent_us = overhead_us(place / "idle", given.steps)
        print(f"a step that saves nothing: {spent_us:.1f} us of processor time in the callback", flush=True)
        for _ in range(given.rounds):
            for name, make in contenders(place).items():
                gaps = Gaps()
                callbacks, plugins = make()
                fit(Net(width, layers), STEPS, gaps, *callbacks, plugins=plugins)
                rest = statistics.median(gaps.without)
                found.setdefault(name, []).extend(one - rest for one in gaps.with_save)
                shutil.rmtree(place / "own", ignore_errors=True)
        for name, waits in found.items():
            row = {"median_ms": statistics.median(waits) * 1e3, "max_ms": max(waits) * 1e3, "saves": len(waits)}
            print(f"{name}: {json.dumps({key: round(value, 1) for key, value in row.items()})}")
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
