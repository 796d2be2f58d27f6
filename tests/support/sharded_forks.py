"""How FSDP around tensor parallelism cuts rows, on every rank of a world of six that only seems to be there.

`python sharded_forks.py WIDTH …` prints for each width the rows of each rank: offsets, and the values of the first
column. Every rank is a fork of its own, because torch remembers meshes for longer than their process group lives.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tenuto.state.encode.flattener import flatten

WORLD = 6


def rows_of(rank: int, width: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(float(width)).view(width, 1).repeat(1, 4)
    model = nn.Sequential(nn.Linear(4, width, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    local = model[0].weight.to_local()
    with torch.no_grad():
        local.copy_(full[: len(local)] if rank % 2 == 0 else full[width - len(local) :])
    fully_shard(model, mesh=mesh["dp"])
    found = flatten({"model": model})
    return [
        [spec.offsets[0] if spec.offsets is not None else 0, source[:, 0].tolist()]
        for spec, source in zip(found.specs, found.sources, strict=True)
    ]


def main() -> None:
    widths = [int(one) for one in sys.argv[1:]]
    found = []
    for rank in range(WORLD):
        read, write = os.pipe()
        if os.fork() == 0:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
            with os.fdopen(write, "w") as out:
                json.dump([rows_of(rank, width) for width in widths], out)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            found.append(json.load(answer))
        os.wait()
    print(json.dumps([[ranks[number] for ranks in found] for number in range(len(widths))]))


if __name__ == "__main__":
    main()
