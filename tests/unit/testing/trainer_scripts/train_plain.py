"""A trainer that owns its loop, as somebody else would have written it, and an adapter for it: a training script of
`TrainerSuite`. `--broken` leaves one thing out of the adapter."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tenuto
from tenuto import every, keep, on
from tenuto.torch import resumable

EPOCHS, BATCHES = 4, 5


# -- the trainer, which knows nothing of Tenuto


class EarlyStopping:
    """Stops when the validation loss has not improved twice in a row."""

    def __init__(self) -> None:
        self.best, self.wait, self.history = float("inf"), 0, []

    def update(self, value: float) -> bool:
        self.wait = 0 if value < self.best else self.wait + 1
        self.best = min(self.best, value)
        self.history.append((value, self.wait))
        return self.wait >= 2


class Momentum:
    """Gradient descent with momentum. torch's optimizers take seconds to import, in each of a test's processes."""

    def __init__(self, parameters: list[torch.Tensor], rate: float) -> None:
        self.parameters, self.rate = parameters, rate
        self.moved = [torch.zeros_like(one) for one in parameters]

    def step(self) -> None:
        with torch.no_grad():
            for parameter, moved in zip(self.parameters, self.moved, strict=True):
                moved.mul_(0.9).add_(parameter.grad)
                parameter.sub_(moved, alpha=self.rate)
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate, "moved": self.moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate, self.moved = state["rate"], [one.clone() for one in state["moved"]]


class Plateau:
    """Halves the rate where the validation loss has not improved."""

    def __init__(self, optimizer: Momentum) -> None:
        self.optimizer, self.best = optimizer, float("inf")

    def step(self, value: float) -> None:
        if value >= self.best:
            self.optimizer.rate /= 2
        self.best = min(self.best, value)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class Trainer:
    def __init__(self, loader: DataLoader[Any], callbacks: list[Any]) -> None:
        self.loader, self.callbacks = loader, callbacks
        self.global_step = self.epoch = 0
        self.losses: list[float] = []
        self.stopping = EarlyStopping()
        self.done = False

    def fit(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = Momentum(list(model.parameters()), rate=1e-2)
        self.scheduler = Plateau(self.optimizer)
        self.call("on_fit_start")
        self.model(torch.rand(2, 4))  # a sanity check, which draws
        self.call("on_train_start")
        while self.epoch < EPOCHS and not self.done:
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.global_step += 1
                self.losses.append(loss.item())
                self.call("on_step_end", loss.item())
            value = self.validate()
            self.scheduler.step(value)
            self.done = self.stopping.update(value)
            self.epoch += 1
            self.call("on_epoch_end", value)

    def validate(self) -> float:
        with torch.no_grad():
            noise = torch.rand(8, 4)
            return nn.functional.mse_loss(self.model(noise), noise.sum(1, keepdim=True)).item()

    def call(self, name: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self, *arguments)


# -- the adapter


class Progress:
    """The trainer's own counters, and those of its callbacks."""

    def __init__(self, trainer: Trainer, broken: str) -> None:
        self._trainer, self._broken = trainer, broken

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        found: dict[str, Any] = {"epoch": trainer.epoch, "losses": list(trainer.losses), "done": trainer.done}
        return found if self._broken == "callback" else found | {"stopping": vars(trainer.stopping).copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.epoch, trainer.losses, trainer.done = state["epoch"], list(state["losses"]), state["done"]
        if "stopping" in state:
            vars(trainer.stopping).update(state["stopping"])


class Adapter:
    def __init__(self, where: str, loader: DataLoader[Any], broken: str, **options: Any) -> None:
        self._broken = broken
        self._state: dict[str, Any] = {"model": tenuto.late(), "optimizer": tenuto.late()}
        self._state |= {"scheduler": tenuto.late(), "progress": tenuto.late()}
        data = None if broken == "position" else loader
        self._ckpt = tenuto.Checkpointer(where, self._state, data=data, **options)

    def on_fit_start(self, trainer: Trainer) -> None:
        self._state["model"], self._state["optimizer"] = trainer.model, trainer.optimizer
        self._state["scheduler"], self._state["progress"] = trainer.scheduler, Progress(trainer, self._broken)
        self._ckpt.restore()
        trainer.global_step = self._ckpt.step

    def on_train_start(self, trainer: Trainer) -> None:
        if self._broken != "random":
            self._ckpt.restore_random_state()

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        if trainer.global_step % BATCHES:  # the last step of an epoch is over when the scheduler has stepped
            self._step_done(trainer, loss=loss)

    def on_epoch_end(self, trainer: Trainer, value: float) -> None:
        self._step_done(trainer, epoch_ended=True, val_loss=value)

    def _step_done(self, trainer: Trainer, epoch_ended: bool = False, **metrics: float) -> None:
        self._ckpt.step_done(trainer.global_step, epoch_ended=epoch_ended, **metrics)
        print(f"step {trainer.global_step}", flush=True)

    def close(self) -> None:
        self._ckpt.close()


class Printer:
    """What tells the steps where there is no adapter."""

    def on_fit_start(self, trainer: Trainer) -> None: ...

    def on_train_start(self, trainer: Trainer) -> None: ...

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        print(f"step {trainer.global_step}", flush=True)

    def on_epoch_end(self, trainer: Trainer, value: float) -> None: ...

    def close(self) -> None: ...


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume-from", type=int)
    parser.add_argument("--every-step", action="store_true")
    parser.add_argument("--broken", default="")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    inputs = torch.rand(BATCHES * 4, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    callback: Any = Printer()
    if arguments.where:
        loader = resumable(loader)
        options: dict[str, Any] = {"save": every(steps=3) | on.signal() | on.end()}
        if arguments.every_step:
            options = {"save": every(steps=1) | on.signal(), "keep": keep.all()}
        if arguments.resume_from is not None:
            options["resume_from"] = arguments.resume_from
        callback = Adapter(arguments.where, loader, arguments.broken, **options)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    trainer = Trainer(loader, [callback])
    trainer.fit(model)
    callback.close()
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"optimizer/{number}": value for number, value in enumerate(trainer.optimizer.moved)}
    found = {name: digest(value) for name, value in tensors.items()} | {"random": digest(torch.get_rng_state())}
    history = {
        "losses": trainer.losses,
        "steps": trainer.global_step,
        "epochs": trainer.epoch,
        "stopping": vars(trainer.stopping),
        "rate": trainer.optimizer.rate,
    }
    arguments.out.write_text(json.dumps({"digest": found, "history": history}))


if __name__ == "__main__":
    main()
