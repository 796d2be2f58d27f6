"""What each rank runs: the same training with eager and with fenced saves, wrapped by DistributedDataParallel and by
fully_shard, left in peace and meddled with. `fenced_program.py PLACE`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tenuto
from support.fenced_training import holding
from tenuto.policy import every

STEPS, WIDTH = 8, 384
MEDDLED = 4
"""In the body of the step after this many, parameters are changed behind the optimizer's back while they are still to
be copied."""


def built(kind: str, world: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world,))
    for block in (model[0], model[2]):  # type: ignore[index]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def meddle(model: nn.Module, kind: str, rank: int) -> None:
    """In place, in a weight that the sample of this save is no part of. Under FSDP it is a DTensor, of which every rank
    has a part of its own, and one alone is meddled with; replicas stay equal."""
    if kind == "ddp" or rank == 1:
        *_, weight, _ = model.parameters()
        with torch.no_grad():
            weight.mul_(0.5)


def train(where: Path, kind: str, capture: Any, meddled: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = built(kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    options: dict[str, Any] = {"save": every(steps=1), "keep": tenuto.keep.latest(99), "in_flight": 2}
    with holding() as copy, tenuto.Checkpointer(where, state, capture=capture, **options) as ckpt:
        for step in ckpt.steps(STEPS):
            if meddled and step == MEDDLED:
                meddle(model, kind, rank)
                copy.let_go()
            batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = nn.functional.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meddled and step == MEDDLED - 1:
                copy.hold()


def main() -> None:
    warnings.simplefilter("ignore")
    place = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for kind in ("ddp", "fsdp2"):
        for meddled in (False, True):
            for capture in ("eager", "fenced"):
                train(place / f"{kind}-{capture}{'-meddled' * meddled}", kind, capture, meddled)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
