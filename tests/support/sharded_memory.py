"""One rank of a training cut by FSDP2, or replicated by DistributedDataParallel, that keeps every step in memory.

At step `kill` the last rank ends by SIGKILL, once all are known to have the step. At the end each rank writes the
digest of what it holds, and of the buffers that it had when it began.
"""

import argparse
import hashlib
import json
import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import tenuto.torch
from tenuto import every, on


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("where", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill", type=int, default=-1)
    parser.add_argument("--capture", choices=["eager", "fenced"], default="eager")
    parser.add_argument("--replicated", action="store_true")
    parser.add_argument("--ordered", action="store_true", help="replicated, over data whose order the ranks share")
    parser.add_argument("--durable", type=int, default=5, help="steps between two saves to the store; 0: only the end")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    random.seed(rank)
    np.random.seed(0)
    loader = ordered(rank, world) if options.ordered else None
    model = replicated(not options.ordered) if options.replicated or options.ordered else cut(world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    save = every(steps=options.durable) | on.end() if options.durable else on.end()
    how = {"save": save, "memory": every(steps=1), "capture": options.capture, "data": loader}
    with tenuto.Checkpointer(options.where, state, **how) as ckpt:
        found = ckpt.restore()
        began = {"step": ckpt.step, "source": found.source if found is not None else ""}
        began["buffers"] = digest(model.buffers())
        for step in ckpt.steps(options.steps):
            if step == options.kill:
                kill(ckpt, step, last=rank == world - 1)
            if loader is None:
                torch.rand(1 + rank)  # each rank's own generator goes its own way
                batch = torch.randn(8, 31)
            else:
                (batch,) = next(ckpt.batches)
            loss = nn.functional.mse_loss(model(batch), torch.zeros(8, 31))
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


def replicated(buffers: bool) -> nn.Module:
    between = nn.BatchNorm1d(50) if buffers else nn.GELU()
    model = nn.Sequential(nn.Linear(31, 50), between, nn.Linear(50, 31))
    return nn.parallel.DistributedDataParallel(model)


def ordered(rank: int, world: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    samples = TensorDataset(torch.arange(100.0 * 31).reshape(100, 31).sin())
    order = tenuto.torch.ResumableSampler(samples, seed=3, rank=rank, world_size=world)
    return DataLoader(samples, batch_size=8, sampler=order, drop_last=True)


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
