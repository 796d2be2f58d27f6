"""What each rank runs: FSDP2 and AdamW with packs on the nodes' own disks, restored and then trained further.
`per_node_program.py PLACE NODE,… STEPS [ENCODING]`: the node of each rank, the step to train to, and how saves are
stored, at each step unless plain. Rank 0 writes to `PLACE/told.json` what all of them have seen."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tenuto
from tenuto.store.local.store import LocalStore

HIGH, WIDE = 1536, 512
"""A weight of 3 MiB: 12 chunks, which two ranks and three ranks cut between chunks."""


def built() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, HIGH), nn.GELU(), nn.LayerNorm(HIGH))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def digest(value: Any) -> str:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The digest of each whole parameter, and of each tensor that the optimizer has for it."""
    found = {name: digest(value) for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        found |= {f"{name} {key}": digest(one) for key, one in optimizer.state[value].items()}
    return found


def main() -> None:
    place, nodes, steps = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
    encoding = sys.argv[4] if len(sys.argv) > 4 else "plain"
    dist.init_process_group("gloo")
    node = nodes[dist.get_rank()]
    home = place / "home"
    put: list[tuple[str, int]] = []
    original = LocalStore.put_if_absent

    def watched(self: LocalStore, name: str, content: Any, *, token: str) -> Any:
        if Path(self.root) == home and (".safetensors" in name or ".pack" in name):
            put.append((name, content.length))
        return original(self, name, content, token=token)

    LocalStore.put_if_absent = watched  # type: ignore[method-assign]
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    where = tenuto.PerNode(place / node, home=home, node=node)
    with tenuto.Checkpointer(
        where,
        {"model": model, "optimizer": optimizer},
        save=tenuto.on.end() if encoding == "plain" else tenuto.every(steps=1),
        on_error="raise",
        encoding=encoding,
    ) as ckpt:
        restored = ckpt.restore()
        at_restart = list(put)
        began = held(model, optimizer) if restored is not None else {}
        for step in ckpt.steps(steps):
            batch = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        ended = held(model, optimizer)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {"at_restart": at_restart, "put": put})
    if dist.get_rank() == 0:
        step = None if restored is None else restored.step
        (place / "told.json").write_text(json.dumps({"step": step, "began": began, "ended": ended, "ranks": told}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
