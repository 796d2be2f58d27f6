"""What a training script does, made of a case's parts."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tenuto
from campaigns.exact_resume.cases import SAVE_EVERY, Case, End
from campaigns.exact_resume.parts import GENERATORS, OPTIMIZERS, SCHEDULERS, draw
from tenuto import every, keep, on
from tenuto.training.preemption import Preempted


class Trail:
    """A digest over every batch and every loss so far: the way there is compared, not its end alone."""

    def __init__(self) -> None:
        self.digest = ""

    def add(self, batch: Any, loss: torch.Tensor) -> None:
        hashed = hashlib.sha256(self.digest.encode())
        for tensor in (*batch, loss.detach().float()):
            hashed.update(tensor.contiguous().numpy().tobytes())
        self.digest = hashed.hexdigest()

    def state_dict(self) -> dict[str, str]:
        return {"digest": self.digest}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.digest = state["digest"]


class Training:
    """Everything that one training holds, seeded as a script seeds it."""

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        self.case = case
        self.model = case.model()
        self.optimizer = OPTIMIZERS[case.optimizer](one for one in self.model.parameters() if one.requires_grad)
        self.scheduler = SCHEDULERS[case.scheduler](self.optimizer)
        # Its first scales overflow half precision on purpose: steps are left out and the scale moves both ways.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3) if case.scaler else None
        self.average = case.average(self.model) if case.average is not None else None
        self.generator = GENERATORS[case.generator]() if case.generator is not None else None
        self.trail = Trail()
        self.loss = torch.zeros(())

    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "average", "generator", "trail")
        found = {name: getattr(self, name) for name in names if name not in self.case.left_out}
        return {name: value for name, value in found.items() if value is not None}

    def learn(self, batch: Any) -> None:
        if self.case.optimizer == "LBFGS":
            self.loss = torch.tensor(float(self.optimizer.step(lambda: float(self._gradients(batch)))))
        else:
            self.loss = self._gradients(batch)
        self.trail.add(batch, self.loss)

    def _gradients(self, batch: Any) -> torch.Tensor:
        if self.case.optimizer == "LBFGS":
            self.optimizer.zero_grad()
        points, sums = batch
        if self.generator is not None:
            points = points * draw(self.generator)
        dtype = next(self.model.parameters()).dtype
        with torch.autocast("cpu", torch.float16, enabled=self.scaler is not None):
            guess = self.model(points.to(dtype)).squeeze(1)
            error = (guess.float() - sums).square().mean()
            if self.average is not None:
                with torch.no_grad():
                    smooth = self.average(points).squeeze(1)
                error = error + (guess - smooth).float().square().mean()
        loss = error * (1 + random.random()) * (1 + float(np.random.rand()))
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        found: torch.Tensor = loss.detach()
        return found

    def update(self) -> None:
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.case.optimizer != "LBFGS":
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)
        if self.case.scheduler == "on a plateau":
            self.scheduler.step(float(self.loss))
        else:
            self.scheduler.step()


def train(case: Case, where: Path, run: str, end: End | None) -> None:
    """Trains to the end, or to `end` of this process."""
    training, loader = Training(case), case.loader()
    when = every(steps=SAVE_EVERY) | on.end() | on.signal()
    data = None if "data" in case.left_out else loader
    with tenuto.Checkpointer(where, training.state(), run=run, data=data, save=when, keep=keep.latest(2)) as ckpt:
        if case.epochs:
            _epochs(case, training, ckpt, end)
        else:
            _steps(case, training, ckpt, loader if data is None else None, end)


def _steps(case: Case, training: Training, ckpt: tenuto.Checkpointer, own: Any, end: End | None) -> None:
    batches: Iterator[Any] = (batch for _ in range(case.steps) for batch in own or ())
    for step in ckpt.steps(case.steps):
        for _ in range(case.micro_batches):
            training.learn(next(ckpt.batches) if own is None else next(batches))
        _leave(ckpt, end, step)
        if not (case.keeps_gradients and step % 2 == 0):
            training.update()
        ckpt.log(loss=training.loss)


def _epochs(case: Case, training: Training, ckpt: tenuto.Checkpointer, end: End | None) -> None:
    for _ in ckpt.epochs(case.epochs, accumulate=case.accumulate):
        rest = len(ckpt.batches)
        for number, batch in enumerate(ckpt.batches, 1):
            training.learn(batch)
            ckpt.log(loss=training.loss)
            if number % case.accumulate == 0 or number == rest:
                _leave(ckpt, end, ckpt.step)
                training.update()


def _leave(ckpt: tenuto.Checkpointer, end: End | None, done: int) -> None:
    """Between the gradients of a step and what is done with them; `done` steps are completed. A kill waits for the save
    in flight, so that the step that the next process goes on from is known."""
    if end is None:
        return
    if end.how == "stopped" and done + 1 == end.step:
        ckpt.stop()
    elif end.how != "stopped" and done == end.step:
        ckpt.wait()
        os.kill(os.getpid(), signal.SIGKILL if end.how == "killed" else signal.SIGTERM)


def piece(case: Case, where: Path, run: str, end: End | None) -> int:
    """One process's part; its exit status, where it lives to tell it."""
    try:
        train(case, where, run, end)
    except Preempted as left:
        return int(str(left.code))
    return 0
