"""One component alone, restored into a process that trains: a leaf, an optimizer, a position in the data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tenuto
from tenuto.torch import resumable


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        data = TensorDataset(torch.arange(80.0).reshape(20, 4))
        self.loader = resumable(DataLoader(data, batch_size=2, shuffle=True))
        self.state = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).pow(2).mean().backward()
        self.optimizer.step()


BEFORE = 4
"""Batches that were trained on when it was saved."""


@pytest.fixture
def where(tmp_path: Path) -> Path:
    training = Training()
    batches = iter(training.loader)
    for _ in range(BEFORE):
        training.step(next(batches)[0])
    tenuto.save(training.state, tmp_path / "ckpts")
    return tmp_path / "ckpts"


def trained_on() -> Training:
    """A process that has trained beyond what was saved."""
    training = Training()
    for batch in training.loader:
        training.step(batch[0])
    return training


def test_one_leaf(where: Path) -> None:
    saved, training = tenuto.open(where), trained_on()
    bias = training.model.bias.detach().clone()
    report = tenuto.load(where, {"model": training.model}, include="model/weight").report
    assert report.restored == ("model/weight",)
    assert torch.equal(training.model.weight, saved["model/weight"].torch())
    assert torch.equal(training.model.bias, bias)


def test_an_optimizer_and_nothing_of_its_model(where: Path) -> None:
    training = trained_on()
    weights = [one.detach().clone() for one in training.model.parameters()]
    into = {"model": training.model, "optimizer": training.optimizer}
    tenuto.load(where, into, include="optimizer")
    assert [int(one["step"]) for one in training.optimizer.state.values()] == [BEFORE, BEFORE]
    assert all(map(torch.equal, weights, training.model.parameters()))


def test_a_position_in_the_data(where: Path) -> None:
    whole = [batch[0] for batch in Training().loader]
    training = trained_on()
    weights = [one.detach().clone() for one in training.model.parameters()]
    tenuto.load(where, {"loader": training.loader})
    rest = [batch[0] for batch in training.loader]
    assert len(rest) == len(whole) - BEFORE and all(map(torch.equal, rest, whole[BEFORE:]))
    assert all(map(torch.equal, weights, training.model.parameters()))
