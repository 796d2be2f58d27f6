"""A model on every rank, each with its own part of the data: the same script for one process and for many.

    python examples/ranks_ddp.py
    torchrun --nproc-per-node 2 examples/ranks_ddp.py

Kill it and start it again, on as many ranks as you like: it goes on from the last checkpoint.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tenuto
from tenuto import every, keep, on


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", default="checkpoints-ddp")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    torch.manual_seed(0)
    plain: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model = DistributedDataParallel(plain) if several else plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    loss: torch.Tensor | None = None
    with tenuto.Checkpointer(
        options.where, state, save=every(steps=10) | on.end() | on.signal(), keep=keep.latest(2)
    ) as ckpt:
        for step in ckpt.steps(options.steps):
            # What a step sees depends on the step alone, so that any number of ranks trains on the same data.
            batch = torch.randn(24, 64, generator=torch.Generator().manual_seed(step))
            part = batch.tensor_split(world)[rank]
            loss = nn.functional.mse_loss(model(part), part)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.log(loss=loss.item())
        if rank == 0:
            trained = "there was nothing left to do" if loss is None else f"loss {loss.item():.4f}"
            print(f"step {ckpt.step} on {world} ranks, {trained}")
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
