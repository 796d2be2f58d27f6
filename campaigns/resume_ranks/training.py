"""What each rank of a job does, and what it notes of every step."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from campaigns.exact_resume.cases import End
from campaigns.rank_kills.processes import Plan
from campaigns.resume_ranks import cases
from campaigns.resume_ranks.cases import SAMPLES, SAVE_EVERY, STEP_SAMPLES, Case
from tenuto.integrations.torch.data.sampler import ResumableSampler
from tenuto.policy import every, keep, on
from tenuto.state.position import rng
from tenuto.state.position.positions import OrderCursor
from tenuto.training.checkpointer import Checkpointer

WIDTH: Final = 9


class Points(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.sin(torch.arange(float(WIDTH)) * (index + 1)), index


class Training:
    """Everything that one rank holds."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.case = case
        plain = nn.Sequential(
            nn.Linear(WIDTH, 17), nn.Dropout(0.2 if case.dropout else 0.0), nn.GELU(), nn.Linear(17, 5), nn.Linear(5, 1)
        )
        self.model = _wrapped(plain, case.wrapper, world, rebuckets=case.wrong == cases.BUCKETS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4)
        random.seed(5)
        torch.manual_seed(100 + (rank if case.streams == "of each rank" else 0))
        np.random.seed(100 + (rank if case.streams == "of each rank" else 0))

    def state(self, *, complete: bool = True) -> dict[str, Any]:
        found = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return found if complete else {name: found[name] for name in ("model", "scheduler")}

    def learn(self, points: torch.Tensor) -> torch.Tensor:
        """Draws from a generator that is alike on all ranks, and (dropout) from one of this rank."""
        loss = (self.model(points).squeeze(1) - points.sum(1)).square().mean() * (1 + random.random())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        found: torch.Tensor = loss.detach()
        return found

    def digests(self) -> dict[str, str]:
        """Of every tensor as a whole, the optimizer's included. Every rank has to call it."""
        model: Any = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        found: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            held = {"": parameter.detach(), **self.optimizer.state[parameter]}
            for key, value in held.items():
                whole = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
                found[f"{name}/{key}"] = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()[:16]
        found["rate"] = repr(self.optimizer.param_groups[0]["lr"])
        return found


def _wrapped(plain: nn.Module, wrapper: str, world: int, *, rebuckets: bool) -> nn.Module:
    if world == 1:
        return plain
    if wrapper == "ddp":
        # Else torch lays the gradients into buckets anew after the first step of each process, and more than two ranks
        # then add up in another order than in that step.
        return DistributedDataParallel(plain, find_unused_parameters=not rebuckets)
    mesh = init_device_mesh("cpu", (world,))
    for layer in plain:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    return plain


def loader_of(case: Case, rank: int, world: int) -> Any:
    drop = case.loader == "the rest left out"
    order = ResumableSampler(
        Points(), seed=3, shuffle=case.loader != "in order", rank=rank, world_size=world, drop_last=drop
    )
    settings: dict[str, Any] = {"batch_size": STEP_SAMPLES // world, "sampler": order, "drop_last": drop}
    if case.loader == "stateful":
        return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader(Points(), **settings)
    return DataLoader(Points(), num_workers=case.loader == "workers", **settings)


def live(plan: Plan, rank: int) -> Mapping[str, Any]:
    """One life of one rank: `plan.more` has the case, how it ends (None: at the last step), and the number of the
    life."""
    case, end, life = plan.more["case"], plan.more["end"], plan.more["life"]
    dist.init_process_group("gloo", init_method=f"file://{plan.place}/group-{life}", rank=rank, world_size=plan.world)
    train(plan, rank, case, plan.place / f"trail-{rank}.jsonl", end=end, wrong=case.wrong if life else "")
    dist.destroy_process_group()
    return {}


def train(
    plan: Plan, rank: int, case: Case, trail: Path, *, end: End | None = None, wrong: str = "", **more: Any
) -> int:
    """Trains to the plan's last step, or to an earlier end, with what is `wrong` broken; returns the steps that are
    completed. `trail`: where what the rank holds is noted, after a restore and after every step. `more`: for the
    Checkpointer."""
    with ExitStack() as stack:
        if wrong == cases.CURSOR:
            stack.enter_context(mock.patch.object(OrderCursor, "of", _one_further(OrderCursor.of)))
        if wrong == cases.RANDOM:
            stack.enter_context(mock.patch("tenuto.state.position.training_position.apply", lambda state: ()))
        return _train(plan, rank, case, trail, end=end, wrong=wrong, **more)


def _train(plan: Plan, rank: int, case: Case, path: Path, *, end: End | None, wrong: str, **more: Any) -> int:
    training, loader = Training(case, rank, plan.world), loader_of(case, rank, plan.world)
    arguments: dict[str, Any] = {
        "save": every(steps=SAVE_EVERY) | on.end(),
        "keep": keep.latest(9),
        "resume_from": 2 if wrong == "another step than the last" else "latest",
        "on_error": "raise",
        "ranks": plan.ranks(rank) if plan.world > 1 else None,
        **more,
    }
    with (
        path.open("a") as trail,
        Checkpointer(
            plan.where,
            training.state(complete=wrong != cases.OPTIMIZER),
            data=None if wrong == cases.DATA else loader,
            **arguments,
        ) as ckpt,
    ):
        restored = ckpt.restore()
        if restored is not None:
            if wrong == cases.BIT:
                _flip(next(training.model.parameters()))
            told = {name: restored.certificate[name] for name in ("exact", "reasons", "caveats")}
            _note(trail, {"life": plan.world, "step": ckpt.step, "digests": training.digests(), "certificate": told,
                          "marks": rng.marks(rng.capture())})  # fmt: skip
        own = loader if wrong == cases.DATA else None
        for step, (points, indices) in _loop(ckpt, case, plan.steps, own):
            if end is not None and end.how == "killed" and step == end.step:
                ckpt.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            if end is not None and end.how == "stopped" and step + 1 == end.step:
                ckpt.stop()
            if step + 1 == plan.steps:
                ckpt.stop()
            loss = training.learn(points)
            _note(trail, {"step": step + 1, "indices": indices.tolist(), "loss": float(loss).hex(),
                          "digests": training.digests(), "marks": rng.marks(rng.capture())})  # fmt: skip
    return ckpt.step


def _loop(ckpt: Checkpointer, case: Case, steps: int, own: Any) -> Iterator[tuple[int, Any]]:
    """Completed steps before each body, and its batch. `own`: the data, where the Checkpointer has none."""
    if case.epochs and own is None:
        for _ in ckpt.epochs(steps):
            for batch in ckpt.batches:
                yield ckpt.step, batch
        return
    batches: Iterator[Any] = (batch for _ in range(steps) for batch in own or ())
    for step in ckpt.steps(steps):
        yield step, next(ckpt.batches) if own is None else next(batches)


def _one_further(of: Callable[..., OrderCursor]) -> Callable[..., OrderCursor]:
    def moved(record: Any, name: str) -> OrderCursor:
        found = of(record, name)
        return replace(found, used=min(found.used + 1, found.samples))

    return moved


def _flip(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def _note(trail: Any, line: Mapping[str, Any]) -> None:
    trail.write(json.dumps(line) + "\n")
    trail.flush()


def read_trails(place: Path, ranks: int) -> list[list[dict[str, Any]]]:
    """Of each rank what it has noted; a rank that has never been there has noted nothing."""
    paths = [place / f"trail-{rank}.jsonl" for rank in range(ranks)]
    return [[json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [] for path in paths]
