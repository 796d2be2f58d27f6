"""A model cut over the ranks by FSDP2: each saves what it holds, and any number of ranks goes on from it.

python examples/ranks_fsdp2.py
torchrun --nproc-per-node 2 examples/ranks_fsdp2.py
torchrun --nproc-per-node 2 examples/ranks_fsdp2.py --memory   # killed, it goes on from where it was
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tenuto
from tenuto import every, keep, on


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", default="checkpoints-fsdp2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--memory", action="store_true", help="keep every step in memory, too")
    options = parser.parse_args()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 250), nn.GELU(), nn.Linear(250, 64)) for _ in range(3)))
    if several:
        mesh = init_device_mesh("cpu", (world,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    memory = every(steps=1) if options.memory else None
    when = every(steps=10) | on.end() | on.signal()
    loss: torch.Tensor | None = None
    with tenuto.Checkpointer(options.where, state, save=when, keep=keep.latest(2), memory=memory) as ckpt:
        for step in ckpt.steps(options.steps):
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
