"""Trainings with torch that certify is to judge, by name. `python torch_training.py NAME WHERE`."""

import random
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import tenuto
import tenuto.torch


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
    with tenuto.Checkpointer(where, state, data=loader) as ckpt:
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


def epochs_end(where, samples=6, loader=DataLoader, *, accumulate=1, **more):
    """Saved with the last batch of an epoch, in the step before the epoch's end or in the one that it completes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = loader(torch.rand(samples, 4), batch_size=2, **(more or {"shuffle": True}))
    with tenuto.Checkpointer(where, {"model": model, "optimizer": optimizer}, data=data) as ckpt:
        for epoch in ckpt.epochs(100, accumulate=accumulate):
            if isinstance(data.sampler, tenuto.torch.ResumableSampler):
                data.sampler.set_epoch(epoch)
            for batch in ckpt.batches:
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def epochs_end_accumulated(where):
    """Five batches in three steps."""
    epochs_end(where, 10, accumulate=2)


def epochs_end_stateful(where):
    epochs_end(where, loader=StatefulDataLoader)


def epochs_end_stateful_order(where):
    order = tenuto.torch.ResumableSampler(range(6), seed=1)
    epochs_end(where, loader=StatefulDataLoader, sampler=order)


CASES = (
    *("workers", "scheduler", "exact", "epochs_end"),
    *("epochs_end_accumulated", "epochs_end_stateful", "epochs_end_stateful_order"),
)

if __name__ == "__main__":
    name, place = sys.argv[1:]
    globals()[name](place)
