"""Epochs over a DataLoader, several batches to an update; resumes inside an epoch, at the very next batch.

python epochs.py checkpoints
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tenuto
from tenuto import every, keep, on

GROUP = 2


def train(where: str, epochs: int = 3) -> float:
    torch.manual_seed(0)
    inputs = torch.randn(100, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.norm(dim=1, keepdim=True)), batch_size=10, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    val_loss = 0.0

    state = {"model": model, "optimizer": optimizer}
    when, what = every(epochs=1) | on.signal(), keep.latest(2) | keep.best(1, "val_loss")
    with tenuto.Checkpointer(where, state, run="epochs", data=loader, save=when, keep=what) as ckpt:
        for epoch in ckpt.epochs(epochs, accumulate=GROUP):
            for number, (x, y) in enumerate(ckpt.batches):  # the rest of this epoch
                loss = nn.functional.mse_loss(model(x), y)
                (loss / GROUP).backward()
                ckpt.log(loss=loss)
                if number % GROUP == GROUP - 1:
                    optimizer.step()
                    optimizer.zero_grad()
            with torch.no_grad():
                val_loss = nn.functional.mse_loss(model(inputs), inputs.norm(dim=1, keepdim=True)).item()
            ckpt.log(val_loss=val_loss)  # noted with the checkpoint that the epoch ends in
            print(f"epoch {epoch}: val_loss {val_loss:.6f}")
    return val_loss


if __name__ == "__main__":
    train(*sys.argv[1:2] or ["checkpoints"])
