"""One rank that saves, or loads, a model cut by FSDP2 with `torch.distributed.checkpoint` in a Tenuto repository.

Rank 0 writes what the state is as a whole: a digest of each full tensor, and the values. With `--until` it saves each
step up to that one, and writes what each is. `--kill` ends rank `--rank` by SIGKILL: at a named crash point of its
third save, or so many seconds after its first.
"""

import argparse
import hashlib
import json
import os
import signal
import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tenuto.torch
from tenuto.crashpoints import NAMES, armed
from tenuto.ranks.detection import find_ranks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("where")
    parser.add_argument("what", choices=["save", "async", "load", "refused", "partial"])
    parser.add_argument("--out")
    parser.add_argument("--step", type=int)
    parser.add_argument("--until", type=int, default=0)
    parser.add_argument("--theirs", help="with DCP's own files beside")
    parser.add_argument("--kill", default="")
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1 if options.what == "load" else 0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 6), nn.LayerNorm(6))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    writer = tenuto.torch.StorageWriter(options.where, ranks_timeout=20.0)

    def train(step: int) -> None:
        torch.manual_seed(step)
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        heads: list[Any] = [1, {"w": next(iter(weights.values())), "b": torch.arange(3.0) + step}]
        values = {
            "epoch": step,
            "betas": (0.9, 0.99),
            "names": ["a", "b"],
            "numpy": np.random.RandomState(step).get_state(),
        }
        return {"model": weights, "optim": moments, "heads": heads, **values}

    if options.what == "load":
        found = state(0)
        dcp.load(found, storage_reader=tenuto.torch.StorageReader(options.where, step=options.step or "latest"))
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
        report(state(0) | {name: found[name] for name in ("heads", "epoch", "betas", "names", "numpy")}, options.out)
    elif options.what == "refused":
        refused: dict[str, Any] = {"model": state(1)["model"], "loss": nn.functional.mse_loss}
        try:
            dcp.save(refused, storage_writer=writer)
        except CheckpointException as error:
            print(error, flush=True)
    elif options.what == "partial":
        half = dist.new_group([0])
        try:
            if rank == 0:
                alone = tenuto.torch.StorageWriter(options.where, ranks=find_ranks())
                dcp.save({"w": torch.ones(3)}, storage_writer=alone, process_group=half)
        except CheckpointException as error:
            print(error, flush=True)
    else:
        mine, killing = options.rank == rank and options.kill, ExitStack()
        for step in range(1, options.until + 1) if options.until else [options.step or 3]:
            train(step)
            if mine in NAMES and step == 3:
                killing.enter_context(armed(mine, killed))
            elif mine and mine not in NAMES and step == 2:
                threading.Timer(float(mine), killed).start()
            if options.what == "async":
                dcp.async_save(state(step), storage_writer=writer, checkpoint_id=f"step-{step}").result()
            else:
                dcp.save(state(step), storage_writer=writer, checkpoint_id=f"step-{step}")
            assert writer.checkpoint is not None and writer.checkpoint.step == step
            print(f"step {step}", flush=True)
            if options.until and options.out:
                report(state(step), f"{options.out}-{step}")
        if options.theirs:
            dcp.save(state(step), checkpoint_id=options.theirs)
        if options.out:
            report(state(step), options.out)
    dist.barrier()
    dist.destroy_process_group()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def report(state: Any, out: str) -> None:
    found: dict[str, str] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, dict):
            for key, one in value.items():
                walk(one, f"{path}/{key}")
        elif isinstance(value, list):
            for number, one in enumerate(value):
                walk(one, f"{path}/{number}")
        elif isinstance(value, torch.Tensor):
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[path] = f"{value.dtype} {list(value.shape)} {hashlib.sha256(data).hexdigest()}"
        else:
            found[path] = f"{type(value).__name__} {value!r}"

    walk(state, "")
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(found, file)


main()
