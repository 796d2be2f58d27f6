"""The kinds of models, optimizers, schedulers, averages and generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

WIDTH: Final = 8
Parameters = Iterable[nn.Parameter]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.GELU(), nn.BatchNorm1d(16), nn.Linear(16, 1))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Dropout1d(0.2),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, 1),
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(1, 6, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(6, 1)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.cells(points.unsqueeze(2))
        found: torch.Tensor = self.head(hidden[:, -1])
        return found


class Transformer(nn.Module):
    """Tied weights: one matrix puts points in and takes the answer out."""

    def __init__(self) -> None:
        super().__init__()
        self.put_in = nn.Linear(1, WIDTH, bias=False)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True, norm_first=True)
        self.take_out = nn.Linear(1, WIDTH, bias=False)
        self.take_out.weight = self.put_in.weight

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.put_in(points.unsqueeze(2))).mean(1)
        return torch.nn.functional.linear(hidden, self.take_out.weight.T)


def spectral() -> nn.Module:
    """Spectral norm iterates on buffers of its own in every forward pass."""
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 16)), nn.ReLU(), nn.Linear(16, 1))


def half_frozen() -> nn.Module:
    model = perceptron()
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(False)
    return model


def in_bfloat16() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 1)).to(torch.bfloat16)


def sparse() -> nn.Module:
    """Its embedding's gradients are sparse."""

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 1, sparse=True)

        def forward(self, points: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.table((points.abs() * 8).long().clamp(0, 15)).sum(1)
            return found

    return Embedded()


def two_groups(parameters: Parameters) -> optim.Optimizer:
    first, *rest = parameters
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.02, "weight_decay": 0.0}, {"params": rest}]
    return optim.AdamW(groups, lr=0.01)


OPTIMIZERS: Final[dict[str, Callable[[Parameters], optim.Optimizer]]] = {
    "SGD": lambda all: optim.SGD(all, lr=0.05),
    "SGD, Nesterov": lambda all: optim.SGD(all, lr=0.02, momentum=0.9, nesterov=True),
    "Adam, amsgrad": lambda all: optim.Adam(all, lr=0.01, amsgrad=True),
    "AdamW": lambda all: optim.AdamW(all, lr=0.01),
    "AdamW, fused": lambda all: optim.AdamW(all, lr=0.01, fused=True),
    "AdamW, for each": lambda all: optim.AdamW(all, lr=0.01, foreach=True),
    "AdamW, lr a tensor": lambda all: optim.AdamW(all, lr=torch.tensor(0.01), foreach=False),
    "AdamW, two groups": two_groups,
    "NAdam": lambda all: optim.NAdam(all, lr=0.01),
    "RAdam": lambda all: optim.RAdam(all, lr=0.01),
    "Adamax": lambda all: optim.Adamax(all, lr=0.01),
    "Adadelta": lambda all: optim.Adadelta(all, lr=0.5),
    "Adagrad": lambda all: optim.Adagrad(all, lr=0.05),
    "Adafactor": lambda all: optim.Adafactor(all, lr=0.01),
    "RMSprop, centered": lambda all: optim.RMSprop(all, lr=0.005, centered=True, momentum=0.5),
    "Rprop": lambda all: optim.Rprop(all, lr=0.005),
    "ASGD": lambda all: optim.ASGD(all, lr=0.02),
    "LBFGS": lambda all: optim.LBFGS(all, lr=0.05, max_iter=3, history_size=4),
    "SparseAdam": lambda all: optim.SparseAdam(all, lr=0.01),
}

SCHEDULERS: Final[dict[str, Callable[[Any], Any]]] = {
    "cosine": lambda of: lr_scheduler.CosineAnnealingLR(of, 20),
    "steps": lambda of: lr_scheduler.StepLR(of, 4),
    "milestones": lambda of: lr_scheduler.MultiStepLR(of, [3, 8, 11], 0.5),
    "exponential": lambda of: lr_scheduler.ExponentialLR(of, 0.9),
    "polynomial": lambda of: lr_scheduler.PolynomialLR(of, 15, 2.0),
    "own function": lambda of: lr_scheduler.LambdaLR(of, lambda step: 1 / (1 + step)),
    "one cycle": lambda of: lr_scheduler.OneCycleLR(of, 0.05, total_steps=60),
    "cyclic": lambda of: lr_scheduler.CyclicLR(of, 0.001, 0.02, step_size_up=3, cycle_momentum=False),
    "warm restarts": lambda of: lr_scheduler.CosineAnnealingWarmRestarts(of, 4, 2),
    "on a plateau": lambda of: lr_scheduler.ReduceLROnPlateau(of, patience=1, cooldown=1),
    "warm-up, then cosine": lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.LinearLR(of, 0.1, total_iters=6), lr_scheduler.CosineAnnealingLR(of, 14)], [6]
    ),
    "chained": lambda of: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(of, 0.5, 5), lr_scheduler.ExponentialLR(of, 0.9)], of
    ),
}

GENERATORS: Final[dict[str, Callable[[], Any]]] = {
    "random.Random": lambda: random.Random(1),
    "numpy, PCG64": lambda: np.random.default_rng(1),
    "numpy, Philox": lambda: np.random.Generator(np.random.Philox(1)),
    "numpy, SFC64": lambda: np.random.Generator(np.random.SFC64(1)),
    "numpy, MT19937": lambda: np.random.Generator(np.random.MT19937(1)),
    "numpy, RandomState": lambda: np.random.RandomState(1),
    "torch.Generator": lambda: torch.Generator().manual_seed(1),
}


def draw(generator: Any) -> torch.Tensor:
    """One number from a generator of any kind. A normal one: numpy and Python keep half of a pair for the next draw."""
    if isinstance(generator, torch.Generator):
        return torch.randn((), generator=generator)
    normal = generator.gauss if isinstance(generator, random.Random) else generator.normal
    return torch.tensor(normal(0.0, 1.0), dtype=torch.float32)


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model)


def moving_average(model: nn.Module) -> AveragedModel:
    mean = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    return AveragedModel(model, multi_avg_fn=mean, use_buffers=True)
