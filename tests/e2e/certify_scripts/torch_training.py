"""Trainings with torch that certify is to judge, by name. `python torch_training.py NAME WHERE`."""

import random
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import holdfast


class Augmented(Dataset):
    """Each worker process makes a generator of its own, which nobody seeds."""

    def __init__(self):
        self.own = None

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.own = self.own or random.Random()
        return torch.full((4,), float(index)) + self.own.random()


def train(where, loader, *, scheduled):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = {"model": model, "optimizer": optimizer, **({"scheduler": scheduler} if scheduled else {})}
    with holdfast.Checkpointer(where, state, data=loader) as ckpt:
        for _ in ckpt.steps(1000):
            loss = model(next(ckpt.batches)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()


def workers(where):
    train(where, DataLoader(Augmented(), batch_size=2, num_workers=1), scheduled=True)


def scheduler(where):
    train(where, DataLoader(torch.ones(12, 4), batch_size=2, shuffle=True), scheduled=False)


def exact(where):
    train(where, DataLoader(torch.rand(12, 4), batch_size=2, shuffle=True, num_workers=1), scheduled=True)


CASES = ("workers", "scheduler", "exact")

if __name__ == "__main__":
    name, place = sys.argv[1:]
    globals()[name](place)
