"""One rank of a training cut by FSDP2, or replicated by DistributedDataParallel, that keeps every step in memory.

At step `kill` the last rank ends by SIGKILL, once all are known to have the step. At the end each rank writes the
digest of what it holds, and of the buffers that it had when it began.
"""

import argparse
import hashlib
import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tenuto
from tenuto import every, on


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("where", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill", type=int, default=-1)
    parser.add_argument("--capture", choices=["eager", "fenced"], default="eager")
    parser.add_argument("--replicated", action="store_true")
    parser.add_argument("--durable", type=int, default=5, help="steps between two saves to the store; 0: only the end")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = replicated() if options.replicated else cut(world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    save = every(steps=options.durable) | on.end() if options.durable else on.end()
    with tenuto.Checkpointer(options.where, state, save=save, memory=every(steps=1), capture=options.capture) as ckpt:
        found = ckpt.restore()
        began = {"step": ckpt.step, "source": found.source if found is not None else ""}
        began["buffers"] = digest(model.buffers())
        for step in ckpt.steps(options.steps):
            if step == options.kill:
                kill(ckpt, step, last=rank == world - 1)
            torch.rand(1 + rank)  # each rank's own generator goes its own way
            loss = nn.functional.mse_loss(model(torch.randn(8, 31)), torch.zeros(8, 31))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    held = [*model.parameters(), *(one["exp_avg_sq"] for one in optimizer.state.values()), *model.buffers()]
    fenced = ckpt.stats.fence_in_memory_s > 0
    told = {**began, "digest": digest(held), "random": torch.rand(1).item(), "fenced": fenced}
    Path(f"{options.where}-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def cut(world: int) -> nn.Module:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(31, 50), nn.GELU(), nn.Linear(50, 31)) for _ in range(2)))
    mesh = init_device_mesh("cpu", (world,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def replicated() -> nn.Module:
    model = nn.Sequential(nn.Linear(31, 50), nn.BatchNorm1d(50), nn.Linear(50, 31))
    return nn.parallel.DistributedDataParallel(model)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of what this rank has of them."""
    local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in local)).hexdigest()


def kill(ckpt: tenuto.Checkpointer, step: int, *, last: bool) -> None:
    memory = ckpt._training.saving.memory  # type: ignore[union-attr]
    memory._saver.join(60)
    assert memory.tier._common.step.settle(60) == step
    ckpt.wait()
    dist.barrier()
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


if __name__ == "__main__":
    main()
