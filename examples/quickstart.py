"""The quick start of the README: kill it whenever you like, and start it again with the same command."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tenuto
from tenuto import every, keep, on

torch.manual_seed(0)
inputs = torch.rand(4096, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with tenuto.Checkpointer(
    "checkpoints",
    {"model": model, "optimizer": optimizer},
    data=loader,
    save=every(steps=100) | on.end() | on.signal(),
    keep=keep.latest(3) | keep.best(1, "loss"),
) as ckpt:
    for step in ckpt.steps(3_000):
        x, y = next(ckpt.batches)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpt.log(loss=loss)
        if (step + 1) % 500 == 0:
            print(f"step {step + 1:4d}   loss {loss.item():.4f}", flush=True)
