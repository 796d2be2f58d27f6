"""Small trainings with Lightning, one for each thing that a resume has to bring back.

`python lightning_train.py --case NAME --where DIR --out OUT.json`; without `--where` it trains without Tenuto.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import os
import random
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

warnings.filterwarnings("ignore", category=UserWarning, module="(pytorch_)?lightning")
warnings.filterwarnings("ignore", message=".*LeafSpec.*|.*treespec.*")

PACKAGE = importlib.import_module(os.environ.get("LIGHTNING_PACKAGE", "lightning.pytorch"))
for _name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(_name).setLevel(logging.ERROR)
CALLBACKS = importlib.import_module(f"{PACKAGE.__name__}.callbacks")
LOGGERS = importlib.import_module(f"{PACKAGE.__name__}.loggers.logger")


DEVICE = os.environ.get("TRAINERS_DEVICE", "cpu")
"""`cuda` trains on the GPU of the machine, by kernels that do the same twice."""
if DEVICE != "cpu":
    torch.use_deterministic_algorithms(True)


class Samples(Dataset[Any]):
    """Pictures of 1 x 6 x 6 with random noise, which every reading draws anew from the global generator."""

    def __init__(self, count: int = 40, seed: int = 7, noise: float = 0.1) -> None:
        made = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 1, 6, 6, generator=made)
        self.y = torch.randint(0, 3, (count,), generator=made)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + self.noise * torch.randn(1, 6, 6), self.y[index]


class Stream(IterableDataset[Any]):
    """The same without a length, with a position of its own."""

    def __init__(self, count: int = 40) -> None:
        self.samples, self.at = Samples(count, noise=0.0), 0

    def __iter__(self) -> Any:
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class History(LOGGERS.Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    @property
    def name(self) -> str:
        return "history"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append([step, {name: repr(value) for name, value in sorted(metrics.items())}])


class Net(PACKAGE.LightningModule):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.save_hyperparameters({"width": 5, **({"activation": nn.ReLU} if case == "hparams" else {})})
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
        )
        if case == "module_ema":
            self.register_buffer("average", torch.zeros(3, 64))
        if case == "metrics":
            import torchmetrics

            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.automatic_optimization = case != "two_optimizers"

    def loss(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.case == "two_optimizers":
            first, second = self.optimizers()
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(loss)
            first.step()
            if batch_idx % 2:
                second.step()
        if self.case == "metrics":
            self.accuracy(self.net(batch[0]), batch[1])
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) + 0.01 * torch.rand(()), batch_size=len(batch[0]))

    def on_train_batch_end(self, *args: Any) -> None:
        if self.case == "module_ema":  # as many models keep their average: behind every callback
            self.average.lerp_(self.net[5].weight.detach(), 0.1)

    def on_train_start(self) -> None:
        torch.rand(3)  # a draw that an uninterrupted run makes once

    def on_train_epoch_start(self) -> None:
        torch.rand(2)

    def configure_optimizers(self) -> Any:
        if self.case == "two_optimizers":
            halves = list(self.net[:2].parameters()), list(self.net[2:].parameters())
            return [torch.optim.Adam(half, lr=0.01) for half in halves]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if self.case in ("plateau", "rare_validation"):
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
            config = {"scheduler": plateau, "monitor": "val_loss", "strict": False}
            config |= {"interval": "step", "frequency": 4} if self.case == "plateau" else {}
            return {"optimizer": optimizer, "lr_scheduler": config}
        if self.case in ("ema", "swa"):
            return optimizer
        interval = "step" if self.case in ("accumulate", "max_steps") else "epoch"
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    def train_dataloader(self) -> Any:
        if self.case == "stream":
            return DataLoader(Stream(), batch_size=8)
        own = torch.Generator().manual_seed(3) if self.case == "own_generator" else None
        first = DataLoader(Samples(), batch_size=8, shuffle=True, generator=own)
        return first

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(16, seed=8), batch_size=8)


class Pair(Net):
    """Two loaders of different lengths."""

    def train_dataloader(self) -> Any:
        return {
            "long": DataLoader(Samples(), batch_size=8, shuffle=True),
            "short": DataLoader(Samples(24, seed=5), batch_size=8, shuffle=True),
        }

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch["long"]) + self.loss(batch["short"])
        self.log("train_loss", loss, on_epoch=True, batch_size=8)
        return loss


class Sharded(Net):
    """Parameters cut over the ranks of a ModelParallelStrategy."""

    def __init__(self, case: str) -> None:
        super().__init__(case)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 3))

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[1], self.net[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)


class Steps(CALLBACKS.Callback):
    """Says each step that is over, and records what it did."""

    def __init__(self, history: History) -> None:
        self.seen: list[Any] = []
        self.history = history

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "rows": self.history.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.history.rows = state["seen"], state["rows"]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"].item() if outputs else 0.0
        lrs = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        epoch, step = trainer.current_epoch, trainer.global_step
        self.seen.append([step, epoch, trainer.fit_loop.epoch_loop._batches_that_stepped, repr(loss), lrs])
        if trainer.is_global_zero:
            print(f"step {step}", flush=True)


class Ask(CALLBACKS.Callback):
    """Asks this process to leave, once, in one phase of step `at`."""

    def __init__(self, phase: str, at: int, number: int = signal.SIGTERM) -> None:
        self.phase, self.at, self.number = phase, at, number

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("on_") or name != super().__getattribute__("phase"):
            return found

        def hook(trainer: Any, *args: Any) -> None:
            if trainer.global_step >= self.at and not trainer.sanity_checking:
                self.at = 10**9
                os.kill(os.getpid(), self.number)

        return hook


CASES: dict[str, dict[str, Any]] = {
    "mnist": {"max_epochs": 3},
    "plateau": {"max_epochs": 3, "val_check_interval": 2},
    "rare_validation": {"max_epochs": 4, "check_val_every_n_epoch": 2},
    "two_optimizers": {"max_epochs": 3},
    "ema": {"max_epochs": 3, "val_check_interval": 3},
    "swa": {"max_epochs": 4},
    "accumulate": {"max_epochs": 3, "accumulate_grad_batches": 2},
    "module_ema": {"max_epochs": 2},
    "metrics": {"max_epochs": 2},
    "max_steps": {"max_epochs": -1, "max_steps": 12},
    "limits": {"max_epochs": 3, "limit_train_batches": 3, "limit_val_batches": 1},
    "stopping": {"max_epochs": 6, "min_epochs": 2, "val_check_interval": 2},
    "own_generator": {"max_epochs": 3},
    "pair": {"max_epochs": 2},
    "stream": {"max_epochs": 2},
    "hparams": {"max_epochs": 1},
    "sharded": {"max_epochs": 3},
    "ddp": {"max_epochs": 3},
    "no_validation": {"max_epochs": 3, "limit_val_batches": 0},
}


def callbacks(case: str) -> list[Any]:
    if case == "ema":
        return [CALLBACKS.EMAWeightAveraging(decay=0.9)]
    if case == "swa":
        return [CALLBACKS.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)]
    if case == "stopping":
        return [CALLBACKS.EarlyStopping("train_loss", patience=1, min_delta=10.0)]
    if case == "mnist":
        return [CALLBACKS.EarlyStopping("train_loss_epoch", patience=5)]
    return []


def digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        value = (
            value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
    return hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()[:16]


def seed() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def train(
    case: str,
    where: str = "",
    *,
    every_step: bool = False,
    resume_from: int | None = None,
    ckpt_path: str | None = None,
    more_model: Any = None,
    weights_only: bool | None = None,
    **more: Any,
) -> tuple[dict[str, Any], Any]:
    """Trains, and returns what an interrupted run has to end with as well."""
    seed()
    history = History()
    steps = Steps(history)
    ours: list[Any] = []
    if where:
        import tenuto
        import tenuto.lightning

        options: dict[str, Any] = {"save": tenuto.every(steps=1)} if every_step else {"save": tenuto.every(steps=4)}
        options["save"] |= tenuto.on.end() | tenuto.on.signal()
        options["keep"] = tenuto.keep.all()
        if resume_from is not None:
            options["resume_from"] = resume_from
        options.update(more.pop("options", {}))
        ours = [tenuto.lightning.TenutoCheckpoint(where, **options)]
    extra = more.pop("callbacks", [])
    trainer = PACKAGE.Trainer(
        accelerator=DEVICE,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=history,
        log_every_n_steps=1,
        callbacks=[steps, *callbacks(case), *extra, *ours],
        **{"devices": 1, "enable_checkpointing": bool(ours), **CASES[case], **more},
    )
    model = (more_model or (Pair if case == "pair" else Sharded if case == "sharded" else Net))(case)
    trainer.fit(model, ckpt_path=ckpt_path, **({} if weights_only is None else {"weights_only": weights_only}))
    tensors = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    for number, optimizer in enumerate(trainer.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{number}/{index}/{name}": digest(one) for name, one in state.items()}
    tensors["torch"] = digest(torch.get_rng_state())
    if DEVICE != "cpu":
        tensors["device"] = digest(torch.cuda.get_rng_state())
    early = {
        name: [repr(value) for value in (one.best_score.item(), one.wait_count, one.stopped_epoch)]
        for name, one in ((type(one).__name__, one) for one in trainer.callbacks)
        if name == "EarlyStopping"
    }
    counters = [trainer.global_step, trainer.current_epoch, trainer.fit_loop.state_dict()]
    counters[2]["state_dict"].pop("combined_loader", None)
    metrics = {name: repr(value.item()) for name, value in sorted(trainer.callback_metrics.items())}
    found = {
        "digest": tensors,
        "history": {
            "steps": steps.seen,
            "rows": history.rows,
            "counters": counters,
            "early": early,
            "metrics": metrics,
        },
    }
    return found, trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="mnist", choices=CASES)
    parser.add_argument("--where", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume-from", type=int)
    parser.add_argument("--every-step", action="store_true")
    given = parser.parse_args()
    more: dict[str, Any] = {}
    if given.case == "ddp":
        more = {"strategy": "ddp", "devices": 2}
    elif given.case == "sharded":
        strategies = importlib.import_module(f"{PACKAGE.__name__}.strategies")
        strategy = strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        more = {"strategy": strategy, "devices": 2}
    found, trainer = train(given.case, given.where, every_step=given.every_step, resume_from=given.resume_from, **more)
    if given.out is not None and trainer.is_global_zero:
        given.out.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
