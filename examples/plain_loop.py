"""A plain training loop. Stop it with Ctrl-C, or kill it, and start it again: it goes on, bit for bit.

python plain_loop.py checkpoints
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tenuto
from tenuto import every, keep, on


def train(where: str, steps: int = 60) -> float:
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loss = torch.tensor(0.0)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    when, what = every(steps=20) | on.end() | on.signal(), keep.latest(2) | keep.best(1, "loss")
    with tenuto.Checkpointer(where, state, run="plain", data=loader, save=when, keep=what) as ckpt:
        for _ in ckpt.steps(steps):
            x, y = next(ckpt.batches)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.log(loss=loss)
        print(f"step {ckpt.step}: loss {loss.item():.6f}")
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a small network; kill it and start it again.")
    parser.add_argument("where", nargs="?", default="checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    train(given.where, given.steps)
