"""Training that keeps its checkpoints in memory, on a disk and in S3. Kill it, delete the disk, start it again.

python tiers.py DISK BUCKET, such as: python tiers.py /nvme/ckpts s3://my-bucket/ckpts
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tenuto
from tenuto import Tier, Tiers, every, keep, on


def train(disk: str, bucket: str, steps: int = 2000) -> float:
    torch.manual_seed(0)
    inputs = torch.rand(4096, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.tensor(0.0)

    where = Tiers(
        Tier(disk, keep=keep.latest(2)),
        Tier(bucket, save=every(steps=500) | on.end(), keep=keep.latest(3)),
    )
    with tenuto.Checkpointer(
        where,
        {"model": model, "optimizer": optimizer},
        data=loader,
        memory=every(steps=1),
        save=every(steps=100) | on.end() | on.signal(),
    ) as ckpt:
        for step in ckpt.steps(steps):
            x, y = next(ckpt.batches)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % 100 == 0:
                print(f"step {step + 1:4d}   loss {loss.item():.8f}", flush=True)
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a small network; kill it and start it again.")
    parser.add_argument("disk", help="a directory of this machine")
    parser.add_argument("bucket", help="a place that outlives it, such as s3://my-bucket/ckpts")
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    train(given.disk, given.bucket, given.steps)
