"""Tensor parallelism inside, FSDP2 around it: matrices cut over pairs of ranks, what is left over the pairs.

python examples/ranks_tp_fsdp2.py
torchrun --nproc-per-node 4 examples/ranks_tp_fsdp2.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tenuto
from tenuto import every, keep, on


def parallel(model: nn.Sequential, world: int) -> int:
    """Cuts the model over all ranks; how many of them see different data."""
    tensor = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("data", "tensor"))
    for block in model:
        if tensor > 1:
            parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return world // tensor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", default="checkpoints-tp-fsdp2")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
    groups = parallel(model, world) if several else 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    state = {"model": model, "optimizer": optimizer}
    loss: torch.Tensor | None = None
    with tenuto.Checkpointer(
        options.where, state, save=every(steps=10) | on.end() | on.signal(), keep=keep.latest(2)
    ) as ckpt:
        for step in ckpt.steps(options.steps):
            batch = torch.randn(24, 64, generator=torch.Generator().manual_seed(step))
            part = batch.tensor_split(groups)[rank * groups // world]
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
