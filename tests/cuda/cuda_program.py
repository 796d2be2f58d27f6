"""The trainings that tests/cuda/test_cuda.py runs as processes of their own.

python cuda_program.py PLACE OUT train|memory CAPTURE RUN STEPS KILL_AT
python cuda_program.py PLACE OUT ranks CAPTURE fsdp2|ddp|dtensor

RANK and WORLD_SIZE make the last one of several, which share the device and talk by gloo: NCCL wants a device for each.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tenuto
from tenuto import every, keep, on

WIDTH = 256


def tensors_in(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return {path: local.detach().cpu().clone()}
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {name: one for key, child in pairs for name, one in tensors_in(child, f"{path}/{key}").items()}


def snapshot(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return tensors_in({name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in state.items()})


def digests(state: dict[str, Any]) -> dict[str, str]:
    return {
        path: hashlib.sha256(one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for path, one in snapshot(state).items()
    }


def training(place: Path, out: Path, kind: str, capture: Any, run: str, steps: int, kill_at: int) -> None:
    """Dropout, noise from the device's generator, a shuffled loader. Ended without warning in the middle of a step."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    noise = torch.Generator("cuda").manual_seed(5)
    samples = torch.randn(90, WIDTH, generator=torch.Generator().manual_seed(2))
    loader = DataLoader(TensorDataset(samples), batch_size=16, shuffle=True)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "noise": noise}
    more: dict[str, Any] = {"save": every(steps=4) | on.end(), "keep": keep.all(), "capture": capture}
    if kind == "memory":
        more |= {"save": on.end(), "memory": every(steps=1)}
    losses: list[float] = []
    with tenuto.Checkpointer(place / run, state, data=loader, **more) as ckpt:
        found = ckpt.restore()
        began = ckpt.step
        for step in ckpt.steps(steps):
            (batch,) = next(ckpt.batches)
            batch = batch.cuda(non_blocking=True)
            shaken = batch + 0.1 * torch.randn(batch.shape, device="cuda", generator=noise)
            shaken = shaken + 0.1 * torch.randn_like(shaken)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(shaken), batch)
            loss.backward()
            if step == kill_at:
                if kind == "train":
                    ckpt.wait()
                os._exit(9)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    certificate: Any = tenuto.load(place / run).certificate
    result = {
        "began": began,
        "source": found.source if found is not None else "",
        "losses": losses,
        "digests": digests(state),
        "certificate": {"exact": certificate["exact"], "reasons": list(certificate["reasons"])},
    }
    out.write_text(json.dumps(result))


def ranks(place: Path, out: Path, capture: Any, kind: str) -> None:
    """A rank: what the job has saved is in every bit what it had, and comes back into another model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard

    from tenuto.engine.fence import fence
    from tenuto.engine.save import fenced_capture

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(0)
    backend = "nccl" if world == 1 else "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, init_method=f"file://{place / 'meeting'}", rank=rank, world_size=world)
    mesh = init_device_mesh("cuda", (world,))
    late: set[str] = set()

    class Watched(fence.Fence):
        def __init__(self, flattened: Any, choice: Any, *others: Any, **more: Any) -> None:
            late.update(flattened.specs[span.leaf].path for span in choice.late)
            super().__init__(flattened, choice, *others, **more)

    fenced_capture.Fence = Watched  # type: ignore[misc]

    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model: Any = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).cuda()
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        elif kind == "fsdp2":
            for block in model:
                if isinstance(block, nn.Linear):
                    fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
        if kind == "dtensor":
            own = torch.randn(64, 32, device="cuda") + rank
            state["cut"] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        return state

    def step(state: dict[str, Any]) -> None:
        batch = torch.randn(32, WIDTH, device="cuda")
        if kind != "dtensor":  # whose model nobody keeps the same on all ranks
            batch += rank
        state["optimizer"].zero_grad()
        nn.functional.mse_loss(state["model"](batch), batch).backward()
        state["optimizer"].step()
        if "cut" in state:
            state["cut"].mul_(1.25)

    state, steps = made(1), 9
    wanted: dict[int, dict[str, torch.Tensor]] = {}
    more: dict[str, Any] = {"save": every(steps=1), "keep": keep.all(), "capture": capture}
    with tenuto.Checkpointer(place / kind, state, **more) as ckpt:
        for number in ckpt.steps(steps):
            step(state)
            wanted[number + 1] = snapshot(state)
    again = made(2)
    step(again)
    differing = []
    for number, known in wanted.items():
        tenuto.load(place / kind, into=again, step=number)
        found = snapshot(again)
        if found.keys() != known.keys():
            differing.append(f"{number}: {sorted(found.keys() ^ known.keys())}")
        differing += [
            f"{number}{path}" for path in known.keys() & found.keys() if not torch.equal(known[path], found[path])
        ]
    third = made(3)
    with tenuto.Checkpointer(place / kind, third) as ckpt:
        restored = ckpt.restore() is not None and ckpt.step == steps
    found = snapshot(third)
    restored = restored and all(torch.equal(found[path], one) for path, one in wanted[steps].items())
    committed = sorted(id.step for id in tenuto.Repository(place / kind).checkpoints("main"))
    cut = {path: one.tolist() for path, one in wanted[steps].items() if path.startswith("/cut")}
    result = {"differing": differing, "steps": sorted(wanted), "committed": committed, "restored": restored}
    out.write_text(json.dumps(result | {"late": sorted(late), "cut": cut}))
    dist.destroy_process_group()


def main() -> None:
    place, out, kind, capture, *rest = sys.argv[1:]
    if kind == "ranks":
        ranks(Path(place), Path(out), capture, *rest)
    else:
        training(Path(place), Path(out), kind, capture, rest[0], int(rest[1]), int(rest[2]))


if __name__ == "__main__":
    main()
